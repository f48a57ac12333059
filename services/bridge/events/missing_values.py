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
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from schemas.schema_events import Column, SchemaEvent
from services.postgres.stored_columns import StoredColumn, StoredColumns

Encode = Callable[[str, bytes], str | None]
"""(column, text form) -> JSON text as a row's event has it, None where it can't be told."""
_XIDS: Final = 2**32


class MissingValues(NamedTuple):
    """The fields of a SchemaEvent that tell of rows that were there.

    `attnum_max` of pg_attribute, `relfilenode`: 0 where not known. `publication`: by which rows of
    the catalogs it sent all columns; empty where that is not known, or it did not.
    """

    missing: dict[str, Any]
    unsent: list[str]
    attnum_max: int
    relfilenode: int
    publication: str


NOTHING: Final = MissingValues({}, [], 0, 0, "")


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
    in_places = _in_places(before, after)
    places = {new.name for _, new in in_places}
    added, retyped = _changes(before, after, in_places, stored)
    if found is None:
        return MissingValues({}, [*added, *retyped], 0, 0, "")

    def since(changed_by: int) -> bool:
        return 0 < (changed_by - xid) % _XIDS < (found.next_xid - xid) % _XIDS

    def untouched(column: StoredColumn) -> bool:
        return not any(map(since, column.changed_by))

    whole = not found.publication.listed and not any(map(since, found.publication.changed_by))
    publication = ""
    if whole:
        publication = f"{found.publication.oid}:{','.join(map(str, found.publication.changed_by))}"
    publication_same = before is not None and publication == before.publication != ""
    same_file = before is not None and 0 < before.relfilenode == found.relfilenode
    rewritten = found.rewritten and not same_file
    missing: dict[str, Any] = {}
    unsent: list[str] = [name for name in retyped if rewritten]
    for name in added:
        column = stored.get(name)
        new = column is not None and _is_new(column, before) and publication_same
        if column is None or not new or column.mixed or not untouched(column):
            unsent.append(name)
        elif column.missing is None:
            # In the place of another it would be taken for renamed, if it were not named.
            unsent += [name] if rewritten or name in places else []
        else:
            text = encode(name, column.missing.encode())
            if text is None:
                unsent.append(name)
            else:
                missing[name] = json.loads(text)
    numbers = [c.attnum for c in found.columns if c.name in served or untouched(c)]
    relfilenode = 0 if since(found.table_changed_by) else found.relfilenode
    return MissingValues(missing, unsent, max(numbers, default=0), relfilenode, publication)


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
    in_places: Sequence[tuple[Column, Column]],
    stored: Mapping[str, StoredColumn],
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the columns that were added, and those that have another type.

    Columns in the places of others are renamed, unless the catalog has one that is new, or still
    has the other one. `slottables` takes them for renamed if none is told (its events/shape.py).
    """
    if before is None:
        return (), ()
    types = {column.name: (column.type_oid, column.typmod) for column in before.after}
    added = [column.name for column in after if column.name not in types]

    def was_there(name: str) -> bool:
        column = stored.get(name)
        return column is not None and 0 < column.attnum <= before.attnum_max

    def is_other(name: str) -> bool:
        column = stored.get(name)
        hidden = hidden_name(before.oid, name) in before.left_out
        return hidden or (column is not None and _is_new(column, before))

    if in_places and not any(was_there(old.name) or is_other(new.name) for old, new in in_places):
        added = []
    retyped = [
        column.name
        for column in after
        if types.get(column.name, ()) not in ((), (column.type_oid, column.typmod))
    ]
    return added, retyped
