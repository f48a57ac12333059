"""Puts tables as of an LSN into a PostgreSQL database, and compares what is there afterwards.

All tables are read at the snapshots that one epoch names: they agree with each other. The target
takes them in one transaction, which commits only once each table there is equal to its snapshot,
after all of them were filled and the triggers that wait for the commit have fired.
"""

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from sys import maxsize

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from schemas.errors import OperatorNeeded, SettingsError, SlotbridgeError
from schemas.lsn import format_lsn
from schemas.naming import Naming, schema_and_table
from schemas.settings import Settings, require
from spark_consumers.epochs.ledger import EpochRecord, Ledger, epoch_of, require_snapshot
from spark_consumers.epochs.small_topics import expect_noted_ids
from spark_consumers.events.shape import Shape
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.holds import held
from spark_consumers.iceberg.layout import Layout, rule_of
from spark_consumers.iceberg.rules import layout_as_of
from spark_consumers.iceberg.sums import is_sums
from spark_consumers.iceberg.table_note import NEVER, note_of
from spark_consumers.iceberg.tables import State, Tables
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.shapes import ShapeLog
from spark_consumers.restore.target import OPERATION, Target, opened
from spark_consumers.restore.values import form_sql
from spark_consumers.sql import quoted
from spark_consumers.verify.comparison import compared
from spark_consumers.verify.exported_rows import source_rows

Progress = Callable[[str, int, int], None]
"""Called with a table, the rows that are copied, and about how many it has."""
_ROWS_BETWEEN = 1000


@dataclass(frozen=True, slots=True)
class Restored:
    """A table that was restored.

    `rows` is an estimate after a dry run. `columns`: name and type; `as_text`: those that are text
    because the target lacks their type. `lacks_events`: the table was incomplete by then.
    `within_snapshot`: a snapshot may have brought rows after the epoch. `left_out`: columns that
    the table's rule leaves out; `masked`: those that have masks instead of the source's values;
    `large`: those whose large values are cut or stored elsewhere.
    """

    table: str
    rows: int
    columns: dict[str, str]
    as_text: list[str]
    lacks_events: bool
    within_snapshot: bool
    left_out: list[str]
    masked: list[str]
    large: list[str] = field(default_factory=list)
    filtered: bool = False
    """Whether shaping.filters leaves rows of the source out."""

    def line(self) -> str:
        """Return the table as a line of text."""
        notes = [f"text instead of its own type: {', '.join(self.as_text)}"] if self.as_text else []
        if self.lacks_events:
            notes.append("not judged whether these are the source's rows: the table is incomplete")
        if self.within_snapshot:
            notes.append("a snapshot brought rows later, which may be missing: restore a later LSN")
        if self.left_out:
            notes.append(f"left out by the table's rule: {', '.join(self.left_out)}")
        if self.masked:
            notes.append(f"masked, not the source's values: {', '.join(self.masked)}")
        if self.filtered:
            notes.append("without the source's rows that shaping.filters leaves out")
        if self.large:
            notes.append(
                "large values are cut or references, as shaping.large_values says: "
                + ", ".join(self.large)
            )
        return "; ".join((f"{self.table}: {self.rows} rows", *notes))


@dataclass(frozen=True, slots=True)
class Restoration:
    """The restored tables, as of the epoch that was asked for, or the last one before."""

    epoch: int
    commit_lsn: int
    commit_ts_ms: int
    asked_lsn: int
    last_lsn: int
    tables: tuple[Restored, ...]
    dry_run: bool

    @property
    def note(self) -> str:
        """Say which transactions are not in the tables, "" where the LSN is an epoch's."""
        asked, found = format_lsn(self.asked_lsn), format_lsn(self.commit_lsn)
        if self.asked_lsn == self.commit_lsn:
            return ""
        if self.commit_lsn == self.last_lsn:
            return f"the tables have not reached {asked}: these are of the last epoch, {found}"
        return f"no epoch is of {asked}: these are of the last one before, {found}"

    def lines(self) -> Iterator[str]:
        """Yield the restoration as lines of text."""
        done = "would restore" if self.dry_run else "restored"
        time = datetime.fromtimestamp(self.commit_ts_ms / 1000, UTC).isoformat()
        yield f"{done} epoch {self.epoch}, {format_lsn(self.commit_lsn)}, committed up to {time}"
        if self.note:
            yield self.note
        for table in self.tables:
            yield table.line()
        if not self.dry_run:
            yield "sequences are not advanced: run setval for columns that take values from one"

    def documents(self) -> Iterator[dict[str, object]]:
        """Yield the restoration as JSON documents: of the epoch, then of each table."""
        yield {
            "epoch": self.epoch,
            "commit_lsn": format_lsn(self.commit_lsn),
            "commit_ts_ms": self.commit_ts_ms,
            "asked_lsn": format_lsn(self.asked_lsn),
            "note": self.note,
            "dry_run": self.dry_run,
        }
        yield from map(asdict, self.tables)


@dataclass(frozen=True, slots=True)
class _Table:
    identifier: str
    snapshot: int
    layout: Layout
    rows_estimate: int
    lacks_events: bool
    within_snapshot: bool

    @property
    def name(self) -> str:
        return self.layout.shape.name


def restore(
    spark: SparkSession,
    settings: Settings,
    commit_lsn: int,
    into: str,
    *,
    tables: Collection[str] = (),
    dry_run: bool = False,
    progress: Progress = lambda table, rows, total: None,
) -> Restoration:
    """Restore tables (default: all but changelogs and sums) as of the last epoch up to an LSN.

    `into`: the target's conninfo. `dry_run`: do all but copy rows, and keep nothing of it. Raise
    SettingsError for an LSN before the epochs that are kept, a table that can't be restored, and a
    target with rows; OperatorNeeded for a table that lost the epoch's snapshot.
    """
    try:
        return _Restoring(spark, settings).run(commit_lsn, into, tables, dry_run, progress)
    except FOREIGN as error:
        raise translated(error, OPERATION) from error


class _Restoring:
    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark = spark
        self._kafka = require(settings.kafka, "kafka")
        self._settings = require(settings.tables, "tables")
        self._source = settings.source
        self._naming = Naming(self._kafka.topic_prefix, settings.shaping)
        self._tables = Tables(self._kafka, self._settings)
        self._ledger = Ledger(self._tables.namespace, self._settings)
        self._shapes: ShapeLog | None = None

    def run(
        self, commit_lsn: int, into: str, names: Collection[str], dry_run: bool, progress: Progress
    ) -> Restoration:
        """Restore tables as of the last epoch up to `commit_lsn` into the database `into`.

        Tables are filled, given keys, and compared in one transaction; with `dry_run`, none stay.
        """
        epochs = self._ledger.all(self._spark)
        epoch = epoch_of(epochs, commit_lsn)
        tables = self._chosen(epoch, names)
        snapshots = {table.identifier: table.snapshot for table in tables}
        with held(self._spark, snapshots), opened(into, keep=not dry_run) as target:
            if self._source is not None:
                target.require_another_database(self._source.publication)
            target.require_empty(schema_and_table(table.name) for table in tables)
            made = [target.make(table.layout) for table in tables]
            for table in tables:
                target.require_unpublished(*schema_and_table(table.name))
            counts = [table.rows_estimate for table in tables]
            if not dry_run:
                counts = [self._fill(target, table, progress) for table in tables]
                target.settle([table.layout for table in tables])
                for table in tables:
                    self._require_equal(target, table)
        return Restoration(
            epoch.epoch,
            epoch.commit_lsn,
            epoch.commit_ts_ms,
            commit_lsn,
            last_lsn=epochs[-1].commit_lsn,
            dry_run=dry_run,
            tables=tuple(
                Restored(
                    table.name,
                    rows,
                    columns,
                    as_text,
                    table.lacks_events,
                    table.within_snapshot,
                    *self._hidden(table.layout),
                    self._naming.filtered(*schema_and_table(table.name)),
                )
                for table, rows, (columns, as_text) in zip(tables, counts, made, strict=True)
            ),
        )

    def _chosen(self, epoch: EpochRecord, names: Collection[str]) -> list[_Table]:
        """Return the tables to restore. Raise for one that is unknown, parked, or a changelog."""
        states = self._tables.states(self._spark)
        unknown = set(names) - {name for name in epoch.tables if not is_sums(name)}
        if unknown:
            raise SettingsError(
                f"the epoch of {format_lsn(epoch.commit_lsn)} does not have the table",
                operation=OPERATION,
                subject=min(unknown),
                hint=f"tables: {', '.join(sorted(n for n in epoch.tables if not is_sums(n)))}",
            )
        for name, parked in sorted(epoch.parked.items()):
            if not names and not is_sums(name):
                raise OperatorNeeded(
                    "the table is parked: it does not have the epoch",
                    operation=OPERATION,
                    subject=name,
                    lsn=epoch.commit_lsn,
                    hint="choose the other tables with --table, or all of them as of "
                    f"{format_lsn(max(parked.parked.commit_lsn, 0))}",
                )
        found = []
        for name in sorted(names or epoch.tables):
            state = states.get(name)
            changelog = rule_of(self._settings, *schema_and_table(name)).kind == "changelog"
            if name in names and changelog:
                raise SettingsError(
                    "a changelog holds events, not rows that can be restored",
                    operation=OPERATION,
                    subject=name,
                    hint="leave it out of --table",
                )
            if not changelog and not is_sums(name):
                found.append(self._table(epoch, name, state))
        return found

    def _table(self, epoch: EpochRecord, name: str, state: State | None) -> _Table:
        """Return a table as of the epoch: snapshot, layout, row count, and what it lacks.

        Raise OperatorNeeded where the table or its snapshot is gone.
        """
        if state is None:
            raise OperatorNeeded(
                "the Iceberg table is not there",
                operation=OPERATION,
                subject=name,
                lsn=epoch.commit_lsn,
                hint="let `slottables run` fill it, or choose other tables with --table",
            )
        table = catalog.load(self._spark, state.identifier)
        snapshot = require_snapshot(
            table,
            epoch.tables[name],
            operation=OPERATION,
            subject=name,
            commit_lsn=epoch.commit_lsn,
        )
        rule = state.rule or rule_of(self._settings, *schema_and_table(name))
        columns = catalog.as_of(self._spark, state.identifier, snapshot).columns
        summary = catalog.summary_of(table.snapshot(snapshot))
        rows, gone = (int(summary.get(f"total-{k}", 0)) for k in ("records", "position-deletes"))
        found = catalog.properties(table)
        lacking, seen_lsn = note_of(found).incomplete, int(found.get(catalog.SEEN_LSN, NEVER))
        return _Table(
            state.identifier,
            snapshot,
            layout_as_of(rule, self._shapes_since(epoch, name, state), columns),
            max(0, rows - gone),
            lacking is not None and lacking.since_lsn <= epoch.commit_lsn,
            seen_lsn > epoch.commit_lsn,
        )

    def _hidden(self, layout: Layout) -> tuple[list[str], list[str], list[str]]:
        """Return the columns that the rule leaves out, that are masked, that have large values."""
        shape = layout.shape
        found = [shape.columns[field.source_index] for field in layout.fields]
        there = [column.name for column in found]
        left_out = [column.name for column in shape.columns if column.name not in there]
        naming, table = self._naming, (shape.schema, shape.table)
        masked = [c for c in there if naming.masks(*table, c)]
        large = [
            c.name for c in found if not c.key and naming.changes_values(*table, c.name, c.type)
        ]
        return left_out, masked, [c for c in large if c not in masked]

    def _shapes_since(self, epoch: EpochRecord, name: str, state: State) -> list[Shape]:
        """Return the table's shape as of the epoch, and later ones; Kafka tells them if any."""
        if state.shape is not None and state.shape.since.commit_lsn <= epoch.commit_lsn:
            return [state.shape]
        if self._shapes is None:
            topics = TopicOffsets(self._kafka)
            with contextlib.closing(
                ShapeLog(self._kafka, topics, self._naming, lambda _: True)
            ) as shapes:
                expect_noted_ids(shapes.tail, self._ledger, self._spark)
                shapes.read()
            self._shapes = shapes
        found, known = self._shapes.upto(name, epoch.commit_lsn), self._shapes.upto(name, maxsize)
        if not found:
            raise OperatorNeeded(
                f"{self._shapes.topic} does not tell the columns that the table had",
                operation=OPERATION,
                subject=name,
                lsn=epoch.commit_lsn,
                hint="choose a later epoch (slottables epochs)",
            )
        return [found[-1], *known[len(found) :]]

    def _fill(self, target: Target, table: _Table, progress: Progress) -> int:
        """Copy a table's rows; return how many they are."""
        rows = self._rows(table)
        forms = rows.selectExpr(*(form_sql(f.name, f.type) for f in table.layout.fields))
        count = 0
        for count in target.fill(table.layout, forms.toLocalIterator(prefetchPartitions=True)):
            if count % _ROWS_BETWEEN == 0:
                progress(table.name, count, max(count, table.rows_estimate))
        progress(table.name, count, count)
        return count

    def _rows(self, table: _Table) -> DataFrame:
        """Return the rows that a table had as of the epoch."""
        holding = "_valid_to IS NULL" if table.layout.kind == "history" else "true"
        return (
            catalog.as_of(self._spark, table.identifier, table.snapshot)
            .where(holding)
            .select(*(quoted(field.name) for field in table.layout.fields))
        )

    def _require_equal(self, target: Target, table: _Table) -> None:
        """Raise SlotbridgeError where the target's rows are not the table's."""
        layout, rows = table.layout, self._rows(table)
        names = [field.name for field in layout.fields]
        right = rows.select(*(F.col(quoted(n)).alias(f"c{i}") for i, n in enumerate(names)))
        key = [layout.fields.index(field) for field in layout.key]
        with tempfile.TemporaryDirectory(prefix="slottables-restore-") as folder:
            columns = target.export(layout, Path(folder))
            with source_rows(self._spark, Path(folder), columns) as left:
                found = compared(table.name, table.identifier, left, right, names, key, 0)
        if not found.equal:
            raise SlotbridgeError(
                f"the restored rows are not those of the Iceberg table: {found.line()}",
                operation=OPERATION,
                subject=table.name,
                hint="nothing was restored; this is a bug, please report it",
            )
