"""The values that rows have in a column which was added after them. Pure.

ALTER TABLE … ADD COLUMN … DEFAULT does not write a constant into the rows that are there: the
catalog has it for them (pg_attribute.attmissingval), and the WAL has nothing. The catalog says what
it is today, which may be long after the change that is being decoded. What is certain:

    not touched since the transaction   the catalog's value; NULL, if it has none and the table has
    being decoded, and added after      the file of then
    the last schema event, while the
    publication sent all columns
    otherwise (dropped, rewritten or    nothing: the column is `unsent`
    changed meanwhile; a default that
    PostgreSQL did write into the rows)

A column of another type is `unsent` where the table was rewritten: USING may have changed values.
Columns are told apart by their numbers in pg_attribute (schemas.column_identity), of which the same
is certain: a column that was touched since has none, unless the last schema event has it by that
name.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from schemas.column_identity import NumberedColumn, survivors
from schemas.schema_events import Column, SchemaEvent
from services.postgres.stored_columns import StoredColumn, StoredColumns

Encode = Callable[[str, bytes], str | None]
"""(column, text form) -> JSON text as a row's event has it, None where it can't be told."""
_XIDS: Final = 2**32


class MissingValues(NamedTuple):
    """The fields of a SchemaEvent that tell of rows that were there.

    `attnums`: of the columns now, `attnum_max` of pg_attribute, `relfilenode`: 0 where not known.
    `publication`: by which rows of the catalogs it sent all columns; empty where that is not known,
    or it did not.
    """

    missing: dict[str, Any]
    unsent: list[str]
    attnums: list[int]
    attnum_max: int
    relfilenode: int
    publication: str


NOTHING: Final = MissingValues({}, [], [], 0, 0, "")


def missing_values(
    before: SchemaEvent | None,
    after: Sequence[Column],
    served: Collection[str],
    found: StoredColumns | None,
    xid: int,
    encode: Encode,
) -> MissingValues:
    """Return what is certain of the rows that were there before the columns are `after`.

    `before`: the table's last schema event, None for none or of another table; `served`: all
    columns that the server sends; `found`: the catalog's answer, None for a table that is gone;
    `xid`: the transaction being decoded.
    """
    stored = {column.name: column for column in found.columns} if found else {}
    places = {new.name for _, new in _in_places(before, after)}
    if found is None:
        added, retyped, _ = _changes(before, after, [0] * len(after), stored)
        return MissingValues({}, [*added, *retyped], [], 0, 0, "")

    def since(changed_by: int) -> bool:
        return _since(found, xid, changed_by)

    def untouched(column: StoredColumn) -> bool:
        return not any(map(since, column.changed_by))

    attnums = certain_attnums(before, after, found, xid)
    added, retyped, mixed_up = _changes(before, after, attnums, stored)
    whole = not found.publication.listed and not any(map(since, found.publication.changed_by))
    publication = ""
    if whole:
        publication = f"{found.publication.oid}:{','.join(map(str, found.publication.changed_by))}"
    publication_same = before is not None and publication == before.publication != ""
    same_file = before is not None and 0 < before.relfilenode == found.relfilenode
    rewritten = found.rewritten and not same_file
    numbered = before is not None and 0 not in [*before.attnums, *attnums] and before.attnums != []
    missing: dict[str, Any] = {}
    unsent = [*mixed_up, *(name for name in retyped if rewritten and name not in mixed_up)]
    for name in added:
        column = stored.get(name)
        new = column is not None and _is_new(column, before) and publication_same
        if column is None or not new or column.mixed or not untouched(column):
            unsent.append(name)
        elif column.missing is None:
            # In the place of another, or by its name, it would be taken for that one.
            taken = not numbered and (name in places or name in _names(before))
            unsent += [name] if rewritten or taken else []
        else:
            text = encode(name, column.missing.encode())
            if text is None:
                unsent.append(name)
            else:
                missing[name] = json.loads(text)
    numbers = [c.attnum for c in found.columns if c.name in served or untouched(c)]
    relfilenode = 0 if since(found.table_changed_by) else found.relfilenode
    highest = max(numbers, default=0)
    return MissingValues(missing, unsent, attnums, highest, relfilenode, publication)


def certain_attnums(
    before: SchemaEvent | None, after: Sequence[Column], found: StoredColumns, xid: int
) -> list[int]:
    """Return the columns' numbers in pg_attribute, 0 where one is not certain to be of then.

    Arguments as of `missing_values`.
    """
    known = dict(zip(_names(before), before.attnums, strict=False)) if before else {}
    stored = {column.name: column for column in found.columns}

    def number(name: str) -> int:
        column = stored.get(name)
        if column is None:
            return 0
        touched = any(_since(found, xid, changed_by) for changed_by in column.changed_by)
        return 0 if touched and known.get(name) != column.attnum else column.attnum

    return [number(column.name) for column in after]


def renumbered(before: SchemaEvent, found: StoredColumns | None, xid: int) -> bool:
    """Tell whether a column is another one than before, with the same name and type."""
    if found is None:
        return False
    numbers = certain_attnums(before, before.after, found, xid)
    return any(
        old and new and old != new for old, new in zip(before.attnums, numbers, strict=False)
    )


def _since(found: StoredColumns, xid: int, changed_by: int) -> bool:
    """Tell whether a transaction of the catalog's rows came after the transaction `xid`."""
    return 0 < (changed_by - xid) % _XIDS < (found.next_xid - xid) % _XIDS


def _in_places(
    before: SchemaEvent | None, after: Sequence[Column]
) -> Sequence[tuple[Column, Column]]:
    """Return the columns that have other names than those in their places before, with these.

    There are none where a type differs, or where a name was there before.
    """
    if before is None or len(before.after) != len(after):
        return ()
    names = {column.name for column in before.after}
    pairs = zip(before.after, after, strict=True)
    other = [(old, new) for old, new in pairs if old.name != new.name]
    same = all((old.type_oid, old.typmod) == (new.type_oid, new.typmod) for old, new in other)
    return other if same and names.isdisjoint(new.name for _, new in other) else ()


def hidden_name(oid: int, name: str) -> str:
    """Return what the schema topic has instead of the name of a column that is left out."""
    return hashlib.sha256(f"{oid}.{name}".encode()).hexdigest()[:16]


def _is_new(column: StoredColumn, before: SchemaEvent | None) -> bool:
    """Tell whether a column is certain to have been added after the last schema event.

    One that settings left out has come in no row since it was added.
    """
    if before is None or hidden_name(before.oid, column.name) in before.left_out:
        return False
    return 0 < before.attnum_max < column.attnum


def _changes(
    before: SchemaEvent | None,
    after: Sequence[Column],
    attnums: Sequence[int],
    stored: Mapping[str, StoredColumn],
) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Return the columns that were added, those of another type, and those that are uncertain.

    Without numbers, columns in the places of others are renamed, unless the catalog has one that is
    new, or still has the other one. `slottables` takes them for renamed if none is told. Columns
    are uncertain if they have other places among the others than before, which none gets.
    """
    if before is None:
        return (), (), ()
    old, new = _numbered(before.after, before.attnums), _numbered(after, attnums)
    names = {column.name for column in before.after}

    def is_other(name: str) -> bool:
        column = stored.get(name)
        hidden = hidden_name(before.oid, name) in before.left_out
        return hidden or (column is not None and _is_new(column, before))

    def was_there(column: NumberedColumn) -> bool:
        found = stored.get(column.name)
        return found is not None and 0 < found.attnum <= before.attnum_max

    others = {c.name for c in new if c.attnum and is_other(c.name) and c.name in names}
    listed = any(map(was_there, (c for c in old if c.name not in {n.name for n in new})))
    not_renamed = {c.name for c in new if listed or is_other(c.name)}
    kept = survivors(old, new, added=others, not_renamed=not_renamed)
    types = {column.name: column.type for column in new}
    retyped = [kept[c.name] for c in old if c.name in kept and types[kept[c.name]] != c.type]
    added = [column.name for column in after if column.name not in kept.values()]
    return added, retyped, _out_of_order(old, new, kept)


def _out_of_order(
    old: Sequence[NumberedColumn], new: Sequence[NumberedColumn], kept: Mapping[str, str]
) -> Sequence[str]:
    """Return the columns, if any has another place among them, that their names alone tell."""
    names = [column.name for column in new]
    pairs = [(c, new[names.index(kept[c.name])]) for c in old if c.name in kept]
    places = [names.index(after.name) for _, after in pairs]
    unsure = [after.name for before, after in pairs if not (before.attnum and after.attnum)]
    return unsure if places != sorted(places) else ()


def _numbered(columns: Sequence[Column], attnums: Sequence[int]) -> list[NumberedColumn]:
    numbers = [*attnums] if len(attnums) == len(columns) else [0] * len(columns)
    return [
        NumberedColumn(column.name, (column.type_oid, column.typmod), number)
        for column, number in zip(columns, numbers, strict=True)
    ]


def _names(event: SchemaEvent | None) -> Sequence[str]:
    return [column.name for column in event.after] if event is not None else ()
