"""The rows that differ between topics and tables. Pure.

    topics' row    table's row    difference
    none           there          c
    there          another        u    `before` as the topics tell it
    there          none           d    `before` as the topics tell it
    unknown        there          u    without `before`
    unknown        none           d    without `before`

A column that is null counts as one that is not there: rows from before a column was added are equal
to rows that have null in it. A column that the table no longer has does not count.
"""

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple

UNKNOWN: Final = b""
"""The row of a key that the topics tell, but not with all of its values."""


class Difference(NamedTuple):
    """A change that makes a topic's row equal to the table's. `before`, `after`: JSON objects."""

    op: Literal["c", "u", "d"]
    key: bytes
    before: bytes | None
    after: bytes | None


Rows = Iterable[tuple[bytes, bytes]]
"""(key, row), both as JSON; in the order of the keys' bytes, each key once."""


def differences(told: Rows, there: Rows) -> Iterator[Difference]:
    """Yield the changes that turn the topics' rows (`told`) into the table's (`there`)."""
    theirs, ours = iter(told), iter(there)
    one, other = next(theirs, None), next(ours, None)
    while one is not None or other is not None:
        if one is not None and (other is None or one[0] < other[0]):
            yield Difference("d", one[0], one[1] or None, None)
            one = next(theirs, None)
        elif other is not None and (one is None or other[0] < one[0]):
            yield Difference("c", other[0], None, other[1])
            other = next(ours, None)
        elif one is not None and other is not None:
            if not same_row(one[1], other[1]):
                yield Difference("u", one[0], one[1] or None, other[1])
            one, other = next(theirs, None), next(ours, None)


def same_row(told: bytes, there: bytes) -> bool:
    """Tell whether the row of the topics has the values of the table's row, whatever their order.

    A column that the table no longer has does not count, and null is as good as none.
    """
    if told == there:
        return True
    if told == UNKNOWN:
        return False
    values = _values(told)
    return all(values.get(name) == value for name, value in _values(there).items())


def _values(row: bytes) -> dict[str, Any]:
    """Read numbers as such: as floats 1e400 and 1e401 are equal, and Python has 1 == True."""
    values: dict[str, Any] = json.loads(row, parse_float=_number, parse_int=_number)
    return values


def _number(text: str) -> tuple[Decimal]:
    return (Decimal(text),)
