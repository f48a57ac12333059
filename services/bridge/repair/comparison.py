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


def difference(key: bytes, topic_row: bytes | None, present: bytes | None) -> Difference | None:
    """Return the change that turns the topics' row (`topic_row`) into the table's (`present`).

    Both as JSON; None: there is none. Return None where both are the same.
    """
    if present is None:
        return None if topic_row is None else Difference("d", key, topic_row or None, None)
    if topic_row is None:
        return Difference("c", key, None, present)
    return (
        None if same_row(topic_row, present) else Difference("u", key, topic_row or None, present)
    )


def same_row(topic_row: bytes, present: bytes) -> bool:
    """Tell whether the row of the topics has the values of the table's row, whatever their order.

    A column that the table no longer has does not count, and null is as good as none.
    """
    if topic_row == present:
        return True
    if topic_row == UNKNOWN:
        return False
    values = _values(topic_row)
    return all(values.get(name) == value for name, value in _values(present).items())


def _values(row: bytes) -> dict[str, Any]:
    """Read numbers as such: as floats 1e400 and 1e401 are equal, and Python has 1 == True."""
    values: dict[str, Any] = json.loads(row, parse_float=_number, parse_int=_number)
    return values


def _number(text: str) -> tuple[Decimal]:
    return (Decimal(text),)
