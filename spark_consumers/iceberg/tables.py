"""The Iceberg tables of one namespace: made, changed, and known by what each has.

    source table     Iceberg table                    properties
    public.t         slotbridge.<namespace>.t         slotbridge.source       schema.table
    s.t              slotbridge.<namespace>.s__t      slotbridge.shape
                                                      slotbridge.rule, .kept: made by which rule
                                                      slotbridge.epoch, .commit_lsn: what it has

A table's properties have the epoch and the commit LSN that it was last brought to, written in one
commit with the rows, so that a table which has an epoch is told from one that still needs it,
wherever the process was killed.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from pyspark.sql import SparkSession

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SetupError, SlotbridgeError
from schemas.naming import schema_and_table
from schemas.settings import KafkaSettings
from schemas.tables import TableRule, TablesSettings
from spark_consumers.events.shape import CommitPosition, Shape, last_replacement
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog, commits, rollback, rules
from spark_consumers.iceberg.evolution import Evolved, evolve, refusing
from spark_consumers.iceberg.fills import Fill, fills_from, wanted
from spark_consumers.iceberg.layout import Layout, create_sql, layout_of, sort_sql
from spark_consumers.iceberg.table_note import NEVER, Incomplete, TableNote, note_of
from spark_consumers.session import CATALOG
from spark_consumers.sql import quoted

log = structlog.get_logger()
COPIED_BYTES_MAX = 16 * 2**20
COPIED_ROWS_MAX = 100_000
"""Up to both a table is written anew by each merge, which leaves few files and fast reads; a larger
one gets deletion vectors instead, until maintenance puts files together."""
_OTHER_RULE_HINT = (
    "put tables.rules back, or the column; or stop `slottables run`, drop the Iceberg table, and "
    "start `run`, which fills it from Kafka by the new rule"
)


@dataclass(frozen=True, slots=True)
class State:
    """The state of an Iceberg table, which has all events up to `commit_lsn`.

    `note`: its state, and whether it is complete. `replaced`: from this position on
    the source is another table, of which this one has nothing yet. `shape`: the shape that the
    columns follow; None in a table of sums. `large`: a change of some rows does not rewrite it.
    `seen_lsn`: the key of an inserted row may be there already if it commits before this LSN, as a
    snapshot has seen it.
    """

    source: str
    identifier: str
    epoch: int
    commit_lsn: int
    note: TableNote
    replaced: CommitPosition | None
    shape: Shape | None
    uuid: str
    large: bool
    seen_lsn: int
    columns: tuple[str, ...]
    rule: TableRule | None
    """The rule that the table was made by; None in a table of sums."""
    kept: tuple[str, ...]
    """Columns that nothing fills any more."""
    sealed: tuple[int, int]
    """Epoch and commit LSN as the table itself tells them: those of the last epoch that brought it
    something. `epoch` and `commit_lsn` are also those of later epochs, which brought it nothing."""
    fills: Mapping[str, Fill] = field(default_factory=dict)
    """What the rows are to get in columns that were added."""
    drops: tuple[str, ...] = ()
    """Columns that the next epoch drops."""
    rolled_back: bool = False
    """Whether it lacks rows of an epoch that it had, when its state was read. Of a table of sums:
    whether it is to be computed anew."""
    tagged: int | None = None
    """The snapshot that has the tag of its last epoch, when its state was read."""
    definition: str = ""
    """Of a table of sums: the settings that its rows were computed by, "" if they are not known."""

    def at(self, epoch: int, commit_lsn: int) -> "State":
        """Return the state after an epoch that brings the table nothing."""
        return replace(self, epoch=epoch, commit_lsn=commit_lsn)


@dataclass(frozen=True, slots=True)
class OpenTable:
    """A table whose columns fit its layout.

    `rebuild`: its rows are to be replaced as a whole. `rebuilt`: its rows are those of the branch
    that a rebuild has filled up to `commit_lsn`. `replaced`: its rows from before this position are
    to be replaced. `incomplete`: what it lacks once it has the epoch. `large`, `seen_lsn`, `fills`,
    `drops`: as in State.
    """

    identifier: str
    layout: Layout
    commit_lsn: int
    rebuild: bool = False
    replaced: CommitPosition | None = None
    large: bool = False
    incomplete: Incomplete | None = None
    seen_lsn: int = NEVER
    fills: Mapping[str, Fill] = field(default_factory=dict)
    rebuilt: bool = False
    drops: tuple[str, ...] = ()

    @property
    def appends(self) -> bool:
        """Whether rows that come to be inserted are not in the table yet."""
        return self.incomplete is None and self.seen_lsn <= self.commit_lsn


class Tables:
    """Makes, changes and seals the tables of one namespace, as their only writer."""

    def __init__(self, kafka: KafkaSettings, settings: TablesSettings) -> None:
        self.namespace = catalog.namespace(kafka, settings)
        self._settings = settings
        self.unreadable: dict[str, SlotbridgeError] = {}
        """Iceberg tables that could not be loaded when `states` read them, with the errors."""
        self._creating = threading.Lock()

    def place(self) -> str:
        """Return the quoted name of the namespace."""
        return f"{CATALOG}.{quoted(self.namespace)}"

    def identifier(self, schema: str, table: str) -> str:
        """Return the quoted name of the Iceberg table of a source table."""
        return catalog.identifier(self.namespace, catalog.table_name(schema, table))

    def make_namespace(self, spark: SparkSession) -> None:
        """Make the namespace where there is none."""
        spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {self.place()}")

    def states(
        self, spark: SparkSession, progress: Callable[[], None] | None = None
    ) -> dict[str, State]:
        """Return source table (`schema.table`) -> the state of its Iceberg table.

        `progress` is called after each table. Tables that Iceberg can't load are left out.
        """
        self.unreadable = {}
        if not spark.catalog.databaseExists(self.place()):
            return {}
        names = [row.tableName for row in spark.sql(f"SHOW TABLES IN {self.place()}").collect()]
        found = {}
        for name in sorted(names):
            identifier = catalog.identifier(self.namespace, name)
            try:
                state = self.state(spark, identifier)
            except FOREIGN as error:
                failure = translated(error, "read an Iceberg table")
                if failure.exit_code != ExitCode.BUG:
                    raise failure from error
                self.unreadable[identifier.replace("`", "")] = failure
                continue
            if state is not None:
                found[state.source] = state
            if progress is not None:
                progress()
        return found

    def unreadable_of(self, names: Iterable[str]) -> dict[str, SlotbridgeError]:
        """Return those source tables whose Iceberg tables `states` could not load, with why."""
        places = {n: self.identifier(*schema_and_table(n)).replace("`", "") for n in names}
        return {n: self.unreadable[p] for n, p in places.items() if p in self.unreadable}

    def state(self, spark: SparkSession, identifier: str) -> State | None:
        """Return the state of an Iceberg table, None for one that follows no source table."""
        table = catalog.load(spark, identifier)
        properties = catalog.properties(table)
        if catalog.SOURCE not in properties:
            return None
        state = state_of(identifier, table, properties, large=is_large(catalog.summary(table)))
        tagged = catalog.ref_snapshot(table, catalog.tag_name(max(state.sealed[1], 0)))
        return replace(state, rolled_back=rollback.rolled_back(table, properties), tagged=tagged)

    def open(self, spark: SparkSession, shapes: list[Shape], state: State | None) -> OpenTable:
        """Open the table of the last of `shapes`; create or change it where needed.

        Raise SetupError for a change that is not taken over, and where the table was made by
        another rule; SettingsError for a rule that does not fit; OperatorNeeded when the Iceberg
        table belongs to another source table; Retryable when another writer has changed it.
        """
        last = shapes[-1]
        layout = layout_of(self._settings, last)
        identifier = self.identifier(last.schema, last.table)
        if state is None:
            with self._creating:
                if spark.catalog.tableExists(identifier):
                    raise _taken(spark, identifier, last)
                with refusing(last):
                    spark.sql(create_sql(identifier, layout, _properties(layout)))
                if layout.rule.sort:
                    spark.sql(sort_sql(identifier, layout.rule.sort))
            return OpenTable(identifier, layout, NEVER, replaced=last_replacement(shapes))
        replaced, fills = state.replaced, wanted(self._settings, state.source, state.fills)
        later = [s for s in shapes if state.shape is None or s.since > state.shape.since]
        had, drops = self._apply_rule(spark, state, layout, later), state.drops
        kept = had.kept
        if state.shape is not None and later:
            to_get = Evolved(replaced, kept, fills, drops)
            replaced, kept, fills, drops = evolve(
                spark, state.identifier, self._settings, had, later, to_get, state.sealed
            )
        layout = replace(layout, kept=kept)
        return OpenTable(
            identifier,
            layout,
            state.commit_lsn,
            False,
            replaced,
            state.large,
            incomplete=state.note.incomplete,
            seen_lsn=state.seen_lsn,
            fills=fills,
            drops=drops,
        )

    def _apply_rule(
        self, spark: SparkSession, state: State, layout: Layout, later: list[Shape]
    ) -> Layout:
        """Return the layout of a table as it is, by the present rule; note that rule on the table.

        `later`: shapes that the table does not have yet, whose names the rule may use. Raise
        SetupError where the table was made by a rule that does something else, or where somebody
        else has changed its columns.
        """
        now, shape, kept = layout.rule, state.shape or layout.shape, state.kept
        made_by = state.rule or now
        problem = rules.difference(shape, made_by, now)
        if problem and later:
            all_shapes, given = [shape, *later], now
            now = rules.agreeing_rule(given, all_shapes, Layout(shape, made_by))
            problem = rules.difference(shape, made_by, now)
            if problem:
                now = rules.rule_as_of(given, all_shapes, state.columns, _OTHER_RULE_HINT)
                problem = rules.difference(shape, made_by, now)
        had = Layout(shape, now, kept)
        problem = problem or rules.wrong_columns(had, state.columns)
        if problem:
            raise SetupError(
                f"the Iceberg table is not what its rule says: {problem}",
                operation="open Iceberg table",
                subject=state.source,
                hint=_OTHER_RULE_HINT,
                exit_code=ExitCode.RECORD_REFUSED,
            )
        document = rules.document(now)
        if rules.document(made_by) != document:
            values = {catalog.RULE: document, catalog.KEPT: json.dumps(kept)}
            commits.set_known(spark, state.identifier, state.sealed, values)
        return had


def _properties(layout: Layout) -> dict[str, str]:
    shape = layout.shape
    return {
        catalog.RULE: rules.document(layout.rule),
        catalog.KEPT: "[]",
        catalog.SOURCE: shape.name,
        catalog.SHAPE: json.dumps(shape.document()),
    }


def state_of(identifier: str, table: Any, properties: Mapping[str, str], *, large: bool) -> State:
    """Return the state of a table by its `properties`."""
    columns = catalog.column_names(table)
    return state_from(identifier, str(table.uuid()), columns, properties, large=large)


def state_from(
    identifier: str,
    uuid: str,
    columns: tuple[str, ...],
    properties: Mapping[str, str],
    *,
    large: bool,
) -> State:
    """Return the state of a table by its `properties`. Pure."""
    source, shape, rule = (
        properties[catalog.SOURCE],
        properties.get(catalog.SHAPE),
        properties.get(catalog.RULE),
    )
    sealed = catalog.reached(properties)
    note = note_of(properties).of_epoch(sealed[0])
    return State(
        source,
        identifier,
        *((note.parked.epoch, note.parked.commit_lsn) if note.parked else sealed),
        note,
        CommitPosition(*json.loads(properties[catalog.REPLACED]))
        if catalog.REPLACED in properties
        else None,
        Shape.from_document(source, json.loads(shape)) if shape else None,
        uuid,
        large,
        int(properties.get(catalog.SEEN_LSN, NEVER)),
        columns,
        rules.from_document(rule) if rule else None,
        tuple(json.loads(properties.get(catalog.KEPT, "[]"))),
        sealed,
        fills_from(properties.get(catalog.FILLS)),
        tuple(json.loads(properties.get(catalog.DROPS, "[]"))),
        definition=properties.get(catalog.SUMS, ""),
    )


def sealed_of(state: State | None) -> tuple[int, int]:
    """Return the epoch and commit LSN that a writer knows of a table; NEVER where it knows none."""
    return state.sealed if state else (NEVER, NEVER)


def _taken(spark: SparkSession, identifier: str, shape: Shape) -> OperatorNeeded | Retryable:
    """Return the error of an identifier that another source's table, or another writer, has."""
    owner = catalog.properties(catalog.load(spark, identifier)).get(catalog.SOURCE)
    if owner == shape.name:  # made by another writer since this one has looked
        return catalog.overtaken(identifier)
    return OperatorNeeded(
        f"the table belongs to {owner or 'someone else'}, not to {shape.name}",
        operation="open Iceberg table",
        subject=identifier,
        hint="set another tables.namespace, or rename one of the source tables",
    )


def is_large(summary: Mapping[str, str]) -> bool:
    """Tell whether a table with this last snapshot is too large to rewrite it for some rows."""
    size, rows = (int(summary.get(f"total-{what}", 0)) for what in ("files-size", "records"))
    return size > COPIED_BYTES_MAX or rows > COPIED_ROWS_MAX


def merge_mode(*, large: bool) -> dict[str, str]:
    """Return the property that says how merges are to write."""
    return {"write.merge.mode": "merge-on-read" if large else "copy-on-write"}
