"""Brings an Iceberg table from one shape to the next, in one commit, before its epoch is written.

Iceberg has one schema for all branches of a table, so that readers see new columns, names and types
without their values until the epoch is published. Only a drop, which would take values away from
them, waits for the commit that brings the epoch (iceberg/staging): until then the column is a kept
one, which DROPS names.

at the source           in the Iceberg table
column added            added; rows that were there get the value that the source gave them
                        (iceberg/fills.py), else NULL
column dropped          kept, NULL in new rows; or dropped (tables.on_dropped_column)
column renamed          renamed
type widened            widened: int -> bigint, float -> double, decimal with more digits
type changed otherwise  refused, or the old one becomes `column__old<n>` (on_changed_type)
key changed             refused
another table           its rows replace all that were there; columns as above
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import structlog
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from schemas.errors import ExitCode, SetupError
from schemas.tables import TablesSettings
from spark_consumers.events.shape import CommitPosition, Shape, survivors_of
from spark_consumers.failures import FOREIGN, text_of
from spark_consumers.iceberg import catalog, fills, rules
from spark_consumers.iceberg.fills import Fill
from spark_consumers.iceberg.layout import Field, Layout, layout_of

log = structlog.get_logger()
_REFUSAL = re.compile(
    r"\b(?:ValidationException: |IllegalArgumentException: (?=Cannot |Invalid ))([^\n]*)"
)
"""What Iceberg raises of columns; an IllegalArgumentException may also be of other things."""


class Changes(NamedTuple):
    """The changes of a table's columns; each pair is (name, new name or Spark type).

    `drops`: by their new names, as they are dropped last.
    """

    renames: tuple[tuple[str, str], ...]
    drops: tuple[str, ...]
    adds: tuple[tuple[str, str], ...]
    widened: tuple[tuple[str, str], ...]


class Evolved(NamedTuple):
    """The changes that a table has yet to get after its columns were changed.

    `replaced`: the position since which it is another source table, if so. `kept`: columns that
    nothing fills any more. `fills`: added columns -> the value for older rows. `drops`: the kept
    columns that the next epoch drops.
    """

    replaced: CommitPosition | None
    kept: tuple[str, ...]
    fills: Mapping[str, Fill]
    drops: tuple[str, ...] = ()


def needed(
    settings: TablesSettings, old: Layout, new: Layout, existing: Iterable[str], *, replaced: bool
) -> Changes:
    """Return the changes from one layout to the next; `existing`: all columns of the Iceberg table.

    Raise SetupError for a change that the settings don't allow. Pure.
    """
    there = frozenset(existing)
    names = set(there)
    renames: dict[str, str] = {}
    drops, adds, widened = [], [], []
    kept = survivors_of(old.shape, new.shape)
    of_old = {kept.get(name): field for name, field in _by_column(old).items()}
    of_new = _by_column(new)
    for name, field in _by_column(old).items():
        column = kept.get(name)
        after = None if column is None else of_new.get(column)
        if after is None:
            if settings.on_dropped_column == "drop" or replaced:
                drops.append(field.name)
        elif not _widens(field.type, after.type):
            if not replaced:
                _allow(settings, old.shape, name, field.type, after.type)
            renames[field.name] = _set_aside(field.name, names)
            adds.append((after.name, after.type.simpleString()))
        else:
            if field.name != after.name:
                renames[field.name] = after.name
            if field.type != after.type:
                widened.append((after.name, after.type.simpleString()))
    adds += [
        (field.name, field.type.simpleString())
        for column, field in of_new.items()
        if column not in of_old
    ]
    for name in [*renames.values(), *dict(adds)]:
        if name in there and name not in renames:
            renames[name] = _set_aside(name, names)
    last = (renames.get(name, name) for name in drops)
    return Changes(tuple(renames.items()), tuple(last), tuple(adds), tuple(widened))


def _by_column(layout: Layout) -> dict[str, Field]:
    return {layout.shape.names[field.source_index]: field for field in layout.fields}


def _set_aside(name: str, names: set[str]) -> str:
    """Return another name for a column, and add it to `names`, all those of the Iceberg table."""
    found = next(f"{name}__old{n}" for n in range(1, 10_000) if f"{name}__old{n}" not in names)
    names.add(found)
    return found


def evolve(
    spark: SparkSession,
    identifier: str,
    settings: TablesSettings,
    layout: Layout,
    later: list[Shape],
    remaining: Evolved,
    sealed: tuple[int, int],
) -> Evolved:
    """Change a table from `layout` to the last of `later`; `remaining`: what it has yet to get.

    The shape, the rule by its names, and what the table is to get are written into the table's
    properties in the same commit. Raise Retryable where the table has another epoch than `sealed`:
    another writer may have changed it already.
    """
    replaced, kept, pending, drops = remaining
    old, rule = layout, layout_of(settings, later[-1]).rule
    for place, after in enumerate(later):
        table = catalog.load(spark, identifier)
        catalog.require_known(table, identifier, sealed)
        before, existing = old.shape, [str(column.name()) for column in table.schema().columns()]
        another = before.another_table(after)
        new = Layout(after, rules.agreeing_rule(rule, later[place:], old))
        if key_changed(before, after):
            raise other_key(before, after)
        changes = needed(settings, old, new, existing, replaced=another)
        kept = unfilled(old, new, changes, kept)
        found = fills.wanted(settings, after.name, fills.fills_for(old, new))
        names = dict(changes.renames)
        left = {names.get(name, name): fill for name, fill in pending.items()}
        pending = {n: fill for n, fill in left.items() if n not in changes.drops} | {**found}
        drops = (*(names.get(name, name) for name in drops), *changes.drops)
        to_get = Evolved(None, kept, pending, drops)
        with refusing(after):
            _commit(spark, table, changes, new, to_get, another=another)
        changed = [*dict(changes.adds), *dict(changes.widened), *retyped(old, new)]
        fills.warn_unsent(before, after, changed)
        replaced = after.since if another else replaced
        log.info(
            "table changed",
            table=after.name,
            another_table=another,
            added=[name for name, _ in changes.adds],
            filled=[*found],
            renamed=[f"{a} -> {b}" for a, b in changes.renames],
            to_be_dropped=list(changes.drops),
            widened=[name for name, _ in changes.widened],
        )
        old = new
    return Evolved(replaced, kept, pending, drops)


def retyped(old: Layout, new: Layout) -> list[str]:
    """Return the columns whose type is another at the source, and the same in Iceberg. Pure."""
    kept, before, after = survivors_of(old.shape, new.shape), _by_column(old), _by_column(new)
    types = {column.name: (column.type, column.typmod) for column in old.shape.columns}
    now = {column.name: (column.type, column.typmod) for column in new.shape.columns}
    pairs = [(name, kept.get(name, "")) for name in before]
    return [
        after[name].name
        for was, name in pairs
        if name in after and types[was] != now[name] and before[was].type == after[name].type
    ]


def unfilled(old: Layout, new: Layout, changes: Changes, kept: Iterable[str]) -> tuple[str, ...]:
    """Return the columns that nothing fills after the changes; `kept`: those before. Pure."""
    names = dict(changes.renames)
    there = [*kept, *(field.name for field in old.fields)]
    after = (names.get(name, name) for name in there)
    return tuple(dict.fromkeys(name for name in after if name not in new.names))


def _commit(
    spark: SparkSession,
    table: Any,
    changes: Changes,
    layout: Layout,
    to_get: Evolved,
    *,
    another: bool,
) -> None:
    """Commit changes of columns together with the shape and rule that they are made for."""
    shape = layout.shape
    if changes.drops:  # what Iceberg refuses is refused here, not in the commit of all tables
        drop_columns(_changed(spark, table, changes), changes.drops)
    transaction = _changed(spark, table, changes)
    values = transaction.updateProperties()
    values.set(catalog.SHAPE, json.dumps(shape.document()))
    values.set(catalog.RULE, rules.document(layout.rule))
    values.set(catalog.KEPT, json.dumps(to_get.kept))
    if to_get.fills:
        values.set(catalog.FILLS, json.dumps(to_get.fills))
    else:
        values.remove(catalog.FILLS)
    if to_get.drops:
        values.set(catalog.DROPS, json.dumps(to_get.drops))
    if another:
        values.set(catalog.REPLACED, json.dumps(shape.since))
    values.commit()
    transaction.commitTransaction()


def _changed(spark: SparkSession, table: Any, changes: Changes) -> Any:
    """Return a transaction that has changed the columns of a table, and has yet to be committed."""
    transaction = table.newTransaction()
    update = transaction.updateSchema()
    for name, new_name in changes.renames:
        update.renameColumn(name, new_name)
    update.commit()
    update = transaction.updateSchema()
    for name, kind in changes.widened:
        update.updateColumn(name, catalog.column_type(spark, kind))
    for name, kind in changes.adds:
        # With its parent, none: else a dot would part the name.
        update.addColumn(None, name, catalog.column_type(spark, kind))
    update.commit()
    return transaction


def drop_columns(transaction: Any, names: Iterable[str]) -> None:
    """Drop columns in a transaction of a table."""
    update = transaction.updateSchema()
    for name in names:
        update.deleteColumn(name)
    update.commit()


@contextlib.contextmanager
def refusing(shape: Shape) -> Iterator[None]:
    """Raise SetupError where Iceberg refuses the columns of a table: the others can go on."""
    try:
        yield
    except FOREIGN as error:
        # PySpark tells the class of an IllegalArgumentException by its own alone.
        found = _REFUSAL.search(f"{type(error).__name__}: {text_of(error)}")
        if found is None:
            raise
        raise _refused(
            shape,
            f"Iceberg refuses its columns: {found[1]}",
            "give the column another name (tables.rules: rename) or leave it out (exclude); if "
            "somebody has partitioned or sorted the table by it, end that",
        ) from error


def key_changed(before: Shape, after: Shape) -> bool:
    """Tell whether other columns identify the rows of the same table."""
    if before.another_table(after):
        return False
    kept = survivors_of(before, after)
    return after.key != tuple(kept.get(name) for name in before.key)


def other_key(before: Shape, after: Shape) -> SetupError:
    """Return the error of a table whose key has changed."""
    was, now = (", ".join(key) or "none" for key in (before.key, after.key))
    if was == now:
        what = f"the key {now} has another column of that name than before"
    else:
        what = f"the key was {was} and is {now}"
    return _refused(
        before,
        what,
        "events by the former key can't be folded by the new one: write the rows anew at the "
        "source, behind a TRUNCATE, then drop the Iceberg table: docs/guides/tables.md, "
        '"A changed key"',
    )


def _widens(old: T.DataType, new: T.DataType) -> bool:
    """Tell whether Iceberg can read values of the old type as the new one."""
    if old == new:
        return True
    if isinstance(old, T.DecimalType) and isinstance(new, T.DecimalType):
        return old.scale == new.scale and old.precision <= new.precision
    return (type(old), type(new)) in (
        (T.IntegerType, T.LongType),
        (T.FloatType, T.DoubleType),
    )


def _allow(
    settings: TablesSettings, shape: Shape, column: str, old: T.DataType, new: T.DataType
) -> None:
    """Raise where a changed type parks the table by the settings, or is of a key column."""
    if settings.on_changed_type == "park" or column in shape.key:
        raise _refused(
            shape,
            f"column {column} was {old.simpleString()} and is {new.simpleString()}",
            "tables.on_changed_type: new_column keeps the old values beside the new ones",
        )


def _refused(shape: Shape, what: str, hint: str) -> SetupError:
    return SetupError(
        f"the source table changed: {what}",
        operation="change an Iceberg table",
        subject=shape.name,
        hint=hint,
        exit_code=ExitCode.RECORD_REFUSED,
    )
