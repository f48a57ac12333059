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

from schemas.column_identity import NumberedColumn, numbered, survivors
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
    catalog: StoredColumns | None,
    xid: int,
    encode: Encode,
) -> MissingValues:
    """Return what is certain of the rows that were there before the columns are `after`.

    `before`: the table's last schema event, None for none or of another table; `served`: all
    columns that the server sends; `catalog`: the catalog's answer, None for a table that is gone;
    `xid`: the transaction being decoded.
    """
    if catalog is None:
        lost = _changes(before, after, (), {})
        return MissingValues({}, [*lost.added, *lost.retyped], [], 0, 0, "")
    stored = {column.name: column for column in catalog.columns}
    since = _since(catalog, xid)

    def untouched(column: StoredColumn) -> bool:
        return not any(map(since, column.changed_by))

    attnums = certain_attnums(before, after, catalog, xid)
    changes = _changes(before, after, attnums, stored)
    whole = not catalog.publication.listed and not any(map(since, catalog.publication.changed_by))
    publication = ""
    if whole:
        publication = (
            f"{catalog.publication.oid}:{','.join(map(str, catalog.publication.changed_by))}"
        )
    publication_same = before is not None and publication == before.publication != ""
    same_file = before is not None and 0 < before.relfilenode == catalog.relfilenode
    rewritten = catalog.rewritten and not same_file
    missing: dict[str, Any] = {}
    unsent = [*changes.uncertain]
    unsent += [name for name in changes.retyped if rewritten and name not in unsent]
    for name in changes.added:
        column = stored.get(name)
        new = column is not None and _is_new(column, before) and publication_same
        if column is None or not new or column.mixed or not untouched(column):
            unsent.append(name)
        elif column.missing is None:
            unsent += [name] if rewritten or name in changes.mistakable else []
        else:
            text = encode(name, column.missing.encode())
            if text is None:
                unsent.append(name)
            else:
                missing[name] = json.loads(text)
    numbers = [c.attnum for c in catalog.columns if c.name in served or untouched(c)]
    relfilenode = 0 if since(catalog.table_changed_by) else catalog.relfilenode
    highest = max(numbers, default=0)
    return MissingValues(missing, unsent, attnums, highest, relfilenode, publication)


def certain_attnums(
    before: SchemaEvent | None, after: Sequence[Column], catalog: StoredColumns, xid: int
) -> list[int]:
    """Return the columns' numbers in pg_attribute, 0 where one is not certain to be of then.

    Arguments as of `missing_values`.
    """
    names = [column.name for column in before.after] if before else []
    known = dict(zip(names, before.attnums, strict=False)) if before else {}
    stored = {column.name: column for column in catalog.columns}
    since = _since(catalog, xid)

    def number(name: str) -> int:
        column = stored.get(name)
        if column is None:
            return 0
        touched = any(map(since, column.changed_by))
        return 0 if touched and known.get(name) != column.attnum else column.attnum

    return [number(column.name) for column in after]


def renumbered(before: SchemaEvent, catalog: StoredColumns | None, xid: int) -> bool:
    """Tell whether a column is another one than before, with the same name and type."""
    if catalog is None:
        return False
    numbers = certain_attnums(before, before.after, catalog, xid)
    return any(
        old and new and old != new for old, new in zip(before.attnums, numbers, strict=False)
    )


def _since(catalog: StoredColumns, xid: int) -> Callable[[int], bool]:
    """Return a function that tells whether a transaction of the catalog came after `xid`."""
    return lambda changed_by: 0 < (changed_by - xid) % _XIDS < (catalog.next_xid - xid) % _XIDS


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


class _Changes(NamedTuple):
    """The changes of a table's columns, by their names now.

    `uncertain`: columns whose order has changed, which no ALTER TABLE does. `mistakable`: columns
    that `slottables` would take for former ones, unless the event names them.
    """

    added: Collection[str]
    retyped: Collection[str]
    uncertain: Collection[str]
    mistakable: Collection[str]


def _changes(
    before: SchemaEvent | None,
    after: Sequence[Column],
    attnums: Sequence[int],
    stored: Mapping[str, StoredColumn],
) -> _Changes:
    """Compare the columns of the last schema event with those now.

    Without numbers, columns in the places of others are renamed, unless the catalog has one that is
    new, or still has the other one.
    """
    if before is None:
        return _Changes((), (), (), ())
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
    mistakable = {*survivors(old, new).values()}.intersection(added)
    return _Changes(added, retyped, _out_of_order(old, new, kept), mistakable)


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
    return numbered(((c.name, (c.type_oid, c.typmod)) for c in columns), attnums)
