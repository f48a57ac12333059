"""The Iceberg tables of one namespace: made, changed, and known by what each has.

    source table     Iceberg table                    properties
    public.t         slotbridge.<namespace>.t         slotbridge.source       schema.table
    s.t              slotbridge.<namespace>.s__t      slotbridge.kind, .key, .shape
                                                      slotbridge.epoch, .commit_lsn: what it has

A snapshot's summary has the epoch and the commit LSN that it brought the table to, so that a table
which has an epoch is told from one that still needs it, wherever the process was killed.
"""

import json
import threading
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from schemas.errors import OperatorNeeded
from schemas.settings import KafkaSettings
from schemas.tables import TablesSettings
from spark_consumers.events.shape import Position, Shape
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.evolution import evolve
from spark_consumers.iceberg.layout import Layout, create_sql, layout_of, sort_sql
from spark_consumers.session import CATALOG
from spark_consumers.sql import quoted

COPIED_BYTES_MAX = 16 * 2**20
COPIED_ROWS_MAX = 100_000
"""Up to both a table is written anew by each merge, which leaves few files and fast reads; a larger
one gets deletion vectors instead, until maintenance puts files together."""
NEVER = -1
"""The commit LSN of a table that has nothing."""


@dataclass(frozen=True, slots=True)
class State:
    """What an Iceberg table has: everything up to `commit_lsn`; `rebuild`: it is to be made anew.
    `replaced`: from there on it is another source table, which has not come to it yet.

    `shape` is what its columns follow; None in a table of another version of slottables. `large`:
    it is not written anew for some rows. `lacks`: an event of it was left out, so that a row that
    is inserted may have its key already.
    """

    source: str
    identifier: str
    epoch: int
    commit_lsn: int
    rebuild: bool
    replaced: Position | None
    shape: Shape | None
    uuid: str
    large: bool
    lacks: bool = False


@dataclass(frozen=True, slots=True)
class OpenTable:
    """A table whose columns fit its layout. `rebuild`: its rows are to be replaced as a whole;
    `replaced`: those of before this position are. `large`, `lacks`: as in State."""

    identifier: str
    layout: Layout
    commit_lsn: int
    rebuild: bool = False
    replaced: Position | None = None
    large: bool = False
    lacks: bool = False


class Tables:
    """Makes, changes and seals the tables of one namespace, as their only writer."""

    def __init__(self, kafka: KafkaSettings, settings: TablesSettings) -> None:
        self.namespace = catalog.namespace(kafka, settings)
        self._settings = settings
        self._creating = threading.Lock()

    def place(self) -> str:
        """The quoted name of the namespace."""
        return f"{CATALOG}.{quoted(self.namespace)}"

    def identifier(self, schema: str, table: str) -> str:
        """The quoted name of the Iceberg table of a source table."""
        return catalog.identifier(self.namespace, catalog.table_name(schema, table))

    def make_namespace(self, spark: SparkSession) -> None:
        """Make the namespace where there is none."""
        spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {self.place()}")

    def states(self, spark: SparkSession) -> dict[str, State]:
        """source table (`schema.table`) -> what its Iceberg table has."""
        if not spark.catalog.databaseExists(self.place()):
            return {}
        names = [row.tableName for row in spark.sql(f"SHOW TABLES IN {self.place()}").collect()]
        found = {}
        for name in sorted(names):
            identifier = catalog.identifier(self.namespace, name)
            state = _state(identifier, catalog.load(spark, identifier))
            if state is not None:
                found[state.source] = state
        return found

    def open(self, spark: SparkSession, shapes: list[Shape], state: State | None) -> OpenTable:
        """The table of the last of `shapes`, made or changed where it must be.

        Raises SetupError for a change that is not taken over, SettingsError for a rule that does
        not fit, OperatorNeeded when the Iceberg table belongs to another source table.
        """
        last = shapes[-1]
        layout = layout_of(self._settings, last)
        identifier = self.identifier(last.schema, last.table)
        if state is None:
            with self._creating:
                if spark.catalog.tableExists(identifier):
                    raise _taken(spark, identifier, last)
                spark.sql(create_sql(identifier, layout, _properties(layout)))
                if layout.rule.sort:
                    spark.sql(sort_sql(identifier, layout.rule.sort))
            return OpenTable(identifier, layout, NEVER)
        replaced = state.replaced
        later = [s for s in shapes if state.shape is None or s.since > state.shape.since]
        if state.shape is not None and later:
            given = [state.shape, *later]
            replaced = evolve(spark, identifier, self._settings, given) or replaced
        commit_lsn = NEVER if state.rebuild else state.commit_lsn
        return OpenTable(
            *(identifier, layout, commit_lsn, state.rebuild, replaced, state.large),
            lacks=state.lacks,
        )


def _properties(layout: Layout) -> dict[str, str]:
    shape = layout.shape
    return {
        catalog.SOURCE: shape.name,
        catalog.KIND: layout.kind,
        catalog.KEY: json.dumps(shape.key),
        catalog.SHAPE: json.dumps(shape.document()),
    }


def _state(identifier: str, table: Any) -> State | None:
    found = catalog.properties(table)
    source = found.get(catalog.SOURCE)
    if source is None:
        return None
    shape = found.get(catalog.SHAPE)
    return State(
        source,
        identifier,
        *catalog.reached(table),
        catalog.REBUILD in found,
        Position(*json.loads(found[catalog.REPLACED])) if catalog.REPLACED in found else None,
        Shape.from_document(source, json.loads(shape)) if shape else None,
        str(table.uuid()),
        is_large(table),
        catalog.LACKS in found,
    )


def _taken(spark: SparkSession, identifier: str, shape: Shape) -> OperatorNeeded:
    owner = catalog.properties(catalog.load(spark, identifier)).get(catalog.SOURCE)
    return OperatorNeeded(
        f"the table belongs to {owner or 'someone else'}, not to {shape.name}",
        operation="open Iceberg table",
        subject=identifier,
        hint="set another tables.namespace, or rename one of the source tables",
    )


def is_large(table: Any) -> bool:
    """Whether the table is too large to be written anew for some rows."""
    found = catalog.summary(table)
    size, rows = (int(found.get(f"total-{what}", 0)) for what in ("files-size", "records"))
    return size > COPIED_BYTES_MAX or rows > COPIED_ROWS_MAX


def merge_mode(*, large: bool) -> dict[str, str]:
    """How merges are to write."""
    return {"write.merge.mode": "merge-on-read" if large else "copy-on-write"}
