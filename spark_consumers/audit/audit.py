"""Compares the tables with their sources while all goes on, exactly, as of one LSN.

1. snapshot   of the source, with its LSN                        source_snapshot
2. cut        the epoch of exactly what commits before it        cut
3. hash       by bucket, at the source and in the Iceberg table  source_scan, table_rows
4. compare    rows of buckets that differ, by value              verify.comparison
"""

import contextlib
import dataclasses
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psycopg
import structlog
from pyspark.sql import SparkSession

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SettingsError, SlotbridgeError
from schemas.naming import Naming, schema_and_table
from schemas.settings import Settings, require
from spark_consumers.audit.audited_table import (
    PARKED,
    AuditedTable,
    audited,
    never_judged,
    not_now,
)
from spark_consumers.audit.cut import Cuts
from spark_consumers.audit.report import TableAudit
from spark_consumers.audit.source_scan import NotJudgedError, SourceScan
from spark_consumers.audit.source_snapshot import OPERATION, SourceSnapshot, source_snapshot
from spark_consumers.audit.table_rows import TableRows, differing_rows
from spark_consumers.epochs.ledger import EpochRecord, Ledger, require_snapshot
from spark_consumers.epochs.small_topics import expect_noted_ids
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.holds import held
from spark_consumers.iceberg.sums import is_sums
from spark_consumers.iceberg.tables import State, Tables
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.shapes import ShapeLog
from spark_consumers.kafka.snapshots import Snapshots, read_snapshots
from spark_consumers.session import session_beside
from spark_consumers.verify import hashes, postgres
from spark_consumers.verify.comparison import KINDS, compared, failure_text, groups_of
from spark_consumers.verify.exported_rows import source_rows
from spark_consumers.verify.forms import Layer

log = structlog.get_logger()
ATTEMPTS: Final = 6
"""Snapshots that are taken until `run` sees in time where to end an epoch."""
BUCKETS_AT_ONCE: Final = 256
ROWS_NAMED_MAX: Final = 20
_NO_TABLE: Final = "it has no Iceberg table"
Progress = Callable[[str, int, int], None]
"""Takes a table, its pages that are read and all its pages."""
_WHOLE = """
    SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate
    FROM pg_publication WHERE pubname = %s
"""


class Audit:
    """Audits of the tables of one namespace."""

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        *,
        stop: threading.Event,
        progress: Progress = lambda _table, _done, _pages: None,
    ) -> None:
        self._spark = session_beside(spark, require(settings.tables, "tables"))
        self._source = require(settings.source, "source")
        self._kafka = require(settings.kafka, "kafka")
        self._settings = require(settings.tables, "tables")
        self._shaping = settings.shaping
        self._whole = settings
        self._naming = Naming(self._kafka.topic_prefix, settings.shaping)
        self._tables = Tables(self._kafka, self._settings)
        self._ledger = Ledger(self._tables.namespace, self._settings)
        self._log = self._ledger.audits
        self._stop = stop
        self._progress = progress

    def run(self, names: Collection[str] = ()) -> list[TableAudit]:
        """Audit all tables, or those of `names`; record each result where `run` reads it.

        A result is recorded as soon as the table is judged: it stands, whatever becomes of the
        tables after it. Raise a SlotbridgeError where not a single table could be looked at:
        NOT_JUDGED for what passes by itself, WRONG_DATABASE for another server.
        """
        try:
            with contextlib.closing(
                Cuts(self._spark, self._whole, self._follows, self._stop)
            ) as cuts:
                found = self._run(cuts, names)
                if not names:
                    self._log.retain(self._spark, {n.table for n in found if not n.by_design})
        except FOREIGN as error:
            raise translated(error, OPERATION) from error
        except psycopg.Error as error:
            raise SlotbridgeError(
                f"the source refused a statement of the audit (SQLSTATE {error.sqlstate})",
                operation=OPERATION,
                hint="the source's log names the statement",
            ) from error
        return found

    def _run(self, cuts: Cuts, names: Collection[str]) -> list[TableAudit]:
        """Audit tables as of a source snapshot at which an epoch ends. Raise Retryable if none."""
        for attempt in range(1, ATTEMPTS + 1):
            progress = cuts.progress()
            with source_snapshot(
                self._source, progress, deadline_ms=self._settings.audit_deadline_ms
            ) as taken:
                epoch = self._cut(cuts, taken)
                if epoch is not None:
                    found = map(self._recorded, self._audit(taken, epoch, names))
                    return sorted(found, key=lambda one: one.table)
            log.info(
                "the tables went beyond the snapshot before they could be cut", attempt=attempt
            )
        raise Retryable(
            f"`slottables run` went beyond {ATTEMPTS} snapshots before it saw where to cut",
            operation=OPERATION,
            hint="audit again, or raise tables.trigger_interval_ms",
            exit_code=ExitCode.NOT_JUDGED,
        )

    def _recorded(self, audited: TableAudit) -> TableAudit:
        """Record the result of a table, except where no audit can ever judge the table."""
        if not audited.by_design:
            self._log.record(self._spark, {audited.table: audited.finding()})
        return audited

    def _cut(self, cuts: Cuts, taken: SourceSnapshot) -> EpochRecord | None:
        """Ask `run` for an epoch that ends at the snapshot; None if beyond. Raise SettingsError."""
        audit = uuid.uuid4().hex[:12]
        last = cuts.last_epoch()
        if last is None:
            raise SettingsError(
                "there is not an epoch yet",
                operation=OPERATION,
                subject=self._tables.namespace,
                hint="start `slottables run` with these settings first",
            )
        self._log.ask(self._spark, audit, taken.lsn, past_lsn=last.commit_lsn)
        try:
            return cuts.epoch_before(taken.lsn, taken.timeline)
        finally:
            self._log.forget(self._spark, audit)

    def _audit(
        self, taken: SourceSnapshot, epoch: EpochRecord, names: Collection[str]
    ) -> Iterator[TableAudit]:
        """Yield the audit of each chosen table, also of one that Iceberg does not have yet."""
        states = self._tables.states(self._spark)
        published = postgres.published(taken.connection, self._source.publication)
        row = taken.connection.execute(_WHOLE, [self._source.publication]).fetchone()
        whole = row is not None and bool(row[0])
        known = states.keys() | published.keys() | epoch.parked.keys()
        unknown = set(names) - known
        if unknown:
            raise SettingsError(
                f"there is neither an Iceberg table of {min(unknown)}, nor is it published",
                operation=OPERATION,
                subject=self._tables.namespace,
                hint=f"tables: {', '.join(sorted(known)) or 'none'}",
            )
        chosen = sorted(names or (n for n in known if is_sums(n) or self._follows(n)))
        wanted = [states[name] for name in chosen if name in states]
        topics = TopicOffsets(self._kafka)
        shapes = ShapeLog(self._kafka, topics, self._naming, self._follows)
        with contextlib.closing(shapes):
            expect_noted_ids(shapes.tail, self._ledger, self._spark)
            shapes.read()
            filling = read_snapshots(self._kafka, topics, self._source.slot)
            snapshots = {s.source: self._snapshot(epoch, s) for s in wanted}
            kept = {s.identifier: snapshots[s.source] for s in wanted if snapshots[s.source]}
            with held(self._spark, {name: n for name, n in kept.items() if n is not None}):
                for state in wanted:
                    yield self._one(
                        taken,
                        epoch,
                        state,
                        snapshots[state.source],
                        shapes,
                        filling,
                        published=published.get(state.source),
                        whole=whole,
                    )
        for name in chosen:
            if name not in states:
                yield self._without_table(taken, epoch, name, published.get(name))

    def _without_table(
        self,
        taken: SourceSnapshot,
        epoch: EpochRecord,
        name: str,
        published: postgres.PublishedColumns | None,
    ) -> TableAudit:
        """Judge a table that `run` follows and that has no Iceberg table: without rows, equal."""
        base = TableAudit(name, "", taken.lsn, taken.ts_ms)
        never = never_judged(self._settings, self._shaping, name, None)
        if never:
            return dataclasses.replace(base, reason=never, by_design=True)
        if name in epoch.parked or published is None:
            return dataclasses.replace(base, reason=PARKED)
        if name in epoch.tables:
            return dataclasses.replace(base, reason=_NO_TABLE)
        try:
            scan = self._scan(taken, name, published.row_filter)
            reason = f"{_NO_TABLE}, and the source has rows" if scan.has_rows() else ""
        except NotJudgedError as error:
            reason = str(error)
        return dataclasses.replace(base, reason=reason)

    def _one(
        self,
        taken: SourceSnapshot,
        epoch: EpochRecord,
        state: State,
        snapshot: int | None,
        shapes: ShapeLog,
        filling: Snapshots,
        *,
        published: postgres.PublishedColumns | None,
        whole: bool,
    ) -> TableAudit:
        """Audit one table; what it can't compare is in the result's `reason`.

        `published`: what the publication has of it; `whole`: it sends changes of all kinds.
        """
        iceberg = state.identifier.replace("`", "")
        base = TableAudit(state.source, iceberg, taken.lsn, taken.ts_ms)
        if state.note.incomplete is not None:
            base = dataclasses.replace(base, incomplete=state.note.incomplete.text())
        never = never_judged(self._settings, self._shaping, state.source, state)
        if never:
            return dataclasses.replace(base, reason=never, by_design=True)
        reason = not_now(state, taken.lsn)
        if filling.unfinished(state.source, taken.lsn):
            reason = "a snapshot of the bridge had not brought all its rows by then"
        if not self._follows(state.source):
            reason = "tables.tables or shaping leaves it out: `run` does not follow it"
        if reason or snapshot is None:
            reason = reason or "its snapshot of the epoch was removed"
            return dataclasses.replace(base, reason=reason)
        try:
            table, row_filter = self._compared(
                taken, epoch, state, shapes, published=published, whole=whole
            )
            scan = self._scan(taken, state.source, row_filter)
            unsent = filling.unsent(state.source, scan.oid, self._whole.snapshot, taken.progress)
            base = dataclasses.replace(base, unsent=unsent)
            return self._compare(taken, base, state, snapshot, table, scan)
        except NotJudgedError as error:
            return dataclasses.replace(base, reason=str(error))
        except (*FOREIGN, psycopg.DatabaseError) as error:  # the other tables may be fine
            return dataclasses.replace(base, reason=failure_text(error))

    def _snapshot(self, epoch: EpochRecord, state: State) -> int | None:
        """Return the Iceberg snapshot of the table as of the epoch, None if it is gone."""
        table = catalog.load(self._spark, state.identifier)
        try:
            snapshot = require_snapshot(
                table,
                epoch.tables.get(state.source),
                operation=OPERATION,
                subject=state.source,
                commit_lsn=epoch.commit_lsn,
            )
        except OperatorNeeded:
            return None
        return catalog.latest_of_epoch(table, snapshot, epoch.epoch)

    def _compared(
        self,
        taken: SourceSnapshot,
        epoch: EpochRecord,
        state: State,
        shapes: ShapeLog,
        *,
        published: postgres.PublishedColumns | None,
        whole: bool,
    ) -> tuple[AuditedTable, str | None]:
        """Return what is compared of a table, and the rows' condition at the source."""
        if published is None:
            raise NotJudgedError("the publication does not have it")
        if not whole:
            raise NotJudgedError("the publication leaves out operations")
        if self._source.origin == "none":
            raise NotJudgedError("source.origin is none: rows of replication are not published")
        known = shapes.upto(state.source, epoch.commit_lsn)
        if not known:
            raise NotJudgedError("Kafka does not have its columns as of the epoch")
        columns = postgres.source_columns(taken.connection, *schema_and_table(state.source))
        columns = tuple(c for c in columns if c.name in published.columns)
        table = audited(self._settings, self._naming, known[-1], columns)
        if isinstance(table, str):
            raise NotJudgedError(table)
        return table, published.row_filter

    def _compare(
        self,
        taken: SourceSnapshot,
        base: TableAudit,
        state: State,
        snapshot: int,
        table: AuditedTable,
        scan: SourceScan,
    ) -> TableAudit:
        """Compare a table by sums over buckets of rows, then the rows of unequal buckets."""
        kinds = postgres.column_layers(taken.connection, schema_and_table(state.source))
        layers = [kinds[column.name] for column in table.columns]
        buckets = hashes.buckets_of(scan.pages, layers, table.key)
        rows = TableRows(self._spark, state.identifier, snapshot, table, buckets)
        source = scan.buckets(table.columns, layers, buckets.places, buckets.number)
        there = rows.buckets()
        unequal = sorted(b for b in source.keys() | there.keys() if source.get(b) != there.get(b))
        base = dataclasses.replace(
            base,
            source_rows=sum(number for number, _ in source.values()),
            table_rows=sum(number for number, _ in there.values()),
            buckets=buckets.number,
            buckets_unequal=len(unequal),
            columns_left=table.left,
            busy_s=scan.busy_s,
        )
        return self._descend(base, scan, kinds, rows, table, buckets, unequal)

    def _scan(self, taken: SourceSnapshot, name: str, row_filter: str | None) -> SourceScan:
        """Return a paced scan of a source table, which reports its progress."""
        return SourceScan(
            taken.connection,
            schema_and_table(name),
            row_filter=row_filter,
            busy_percent=self._settings.audit_busy_percent,
            stop=self._stop,
            progress=lambda done, pages: self._progress(name, done, pages),
        )

    def _descend(
        self,
        base: TableAudit,
        scan: SourceScan,
        kinds: Mapping[str, Sequence[Layer]],
        rows: TableRows,
        table: AuditedTable,
        buckets: hashes.Buckets,
        unequal: list[int],
    ) -> TableAudit:
        """Compare rows of unequal buckets by value, some buckets at a time, until some differ.

        All are compared at once where a row may have another bucket in the table, and where rows
        may be missing, so that the source is not read again and again.
        """
        names = [field.name for field in table.fields]
        texts = hashes.source_texts(table.columns, [kinds[c.name] for c in table.columns])
        bucket = hashes.source_bucket([texts[n] for n in buckets.places], buckets.number)
        apart = buckets.alike and not base.unsent
        at_once = BUCKETS_AT_ONCE if apart else max(1, len(unequal))
        judged = [kind for kind in KINDS if kind != "missing" or not base.unsent]
        for first in range(0, len(unequal), at_once):
            some = unequal[first : first + at_once]
            right = rows.of(some)
            with contextlib.ExitStack() as stack:
                prefix = "slottables-audit-"
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
                scan.export(table.columns, kinds, bucket, some, folder)
                left = stack.enter_context(source_rows(self._spark, folder, table.columns))
                found = compared(base.table, base.iceberg, left, right, names, table.key, 0)
                if found.equal:
                    continue
                base = dataclasses.replace(
                    base,
                    **{kind: getattr(found, kind) for kind in judged},
                    missing_left=found.missing if base.unsent else 0,
                    buckets_left=len(unequal) - first - len(some),
                )
                if not base.differences:
                    base = dataclasses.replace(base, reason=base.absence)
                    break
                groups = groups_of(left, right, table.key)
                named = differing_rows(
                    groups, left, right, names, table.key, limit=ROWS_NAMED_MAX, kinds=judged
                )
                base = dataclasses.replace(base, rows=named)
                break
        return dataclasses.replace(base, busy_s=scan.busy_s)

    def _follows(self, name: str) -> bool:
        return self._settings.follows(name, self._naming)
