"""Which columns of a table are the same before and after a change of its shape. Pure.

pg_attribute.attnum is a column's identity: it outlives renames, and no later column gets it. Where
it is not known, names decide, and then places: a column is taken for renamed where all others are
the same, in the same places, and its type is.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

Type = tuple[str | int, int]
"""Name or oid, and typmod."""


class NumberedColumn(NamedTuple):
    """A column; its number is 0 where that is not certain."""

    name: str
    type: Type
    attnum: int

    def may_be(self, other: "NumberedColumn") -> bool:
        """Tell whether the two have no numbers that differ."""
        return not (self.attnum and other.attnum) or self.attnum == other.attnum


def numbered(columns: Iterable[tuple[str, Type]], attnums: Sequence[int]) -> list[NumberedColumn]:
    """Return columns, given as (name, type), with these numbers; without, if there are others."""
    columns = [*columns]
    numbers = attnums if len(attnums) == len(columns) else [0] * len(columns)
    return [NumberedColumn(*column, at) for column, at in zip(columns, numbers, strict=True)]


def survivors(
    before: Sequence[NumberedColumn],
    after: Sequence[NumberedColumn],
    *,
    added: Collection[str] = (),
    not_renamed: Collection[str] = (),
) -> dict[str, str]:
    """Return the columns of `before` that are there after it: name -> name after.

    `added`: columns of `after` that were not there before, though one of the name may have been;
    `not_renamed`: those that are not to be taken for renamed by their places.
    """
    by_number = {column.attnum: column.name for column in after if column.attnum}
    found = {c.name: by_number[c.attnum] for c in before if c.attnum in by_number}
    names = {column.name: column for column in after}
    taken = {*found.values(), *added}
    for column in before:
        same = names.get(column.name)
        free = column.name not in found and column.name not in taken
        if same is not None and free and column.may_be(same):
            found[column.name] = column.name
    return found | _by_places(before, after, found, {*added, *not_renamed})


def _by_places(
    before: Sequence[NumberedColumn],
    after: Sequence[NumberedColumn],
    renames: dict[str, str],
    not_renamed: Collection[str],
) -> dict[str, str]:
    """Return the columns that are renamed by their places; there are none where one disagrees."""
    if len(before) != len(after):
        return {}
    here, taken = {column.name for column in before}, {*renames.values()}
    renamed = {}
    for old, new in zip(before, after, strict=True):
        if renames.get(old.name) == new.name:
            continue
        known = old.name in renames or new.name in taken or new.name in here
        if known or old.type != new.type or not old.may_be(new) or new.name in not_renamed:
            return {}
        renamed[old.name] = new.name
    return renamed
