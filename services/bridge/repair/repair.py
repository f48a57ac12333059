"""Makes the topics of a prefix equal to the tables again, in one Kafka transaction.

    fence      no other bridge of this slot can write any more; what hangs in Kafka is ended
    fold       each table's topic, into a file
    note       a progress record says that the slot is about to be made anew (`repairing`)
    baseline   the WAL is beyond all that Kafka has; the slot is made anew; the rows of each table
               exactly where it begins are compared with the fold
    secure     the standbys have the WAL up to there: no failover takes back what was read
    publish    in one Kafka transaction: the differences, the progress record of the new slot, a
               RecoveryRecord, and what else spoke of the old slot (staging, snapshot)
    origin     is moved to the new slot's beginning

Killed before the Kafka transaction is committed, it has changed nothing that consumers see: the
bridge refuses to start as before, or because of that note, and the repair begins anew. Without it,
the new slot's position would be taken for a proof of what Kafka has.
"""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from schemas.errors import BadInput, ExitCode, Retryable, SetupError
from schemas.events import ProgressRecord, recovery_topic, snapshot_topic
from schemas.recovery import RecoveryRecord, TableRepair
from schemas.settings import Settings, require
from services.bridge.events.event import Event, Stamp
from services.bridge.events.relations import Relations
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.values.encoders import Encoders
from services.bridge.failpoints import reach
from services.bridge.progress.consistency import Witnesses, reached
from services.bridge.progress.ledger import Position
from services.bridge.recovery.accept_divergence import lost_staging
from services.bridge.recovery.hanging_transactions import require_told, shown
from services.bridge.recovery.republish import settle_all
from services.bridge.recovery.resume_record import Records
from services.bridge.recovery.start_check import StartCheck
from services.bridge.repair.baseline import Baseline
from services.bridge.repair.diagnosis import OPERATION, Diagnosis, Unjudged
from services.bridge.repair.fold import Fold
from services.bridge.repair.repair_events import RepairEvents
from services.bridge.repair.row_store import RowStore
from services.bridge.repair.scope import Scope, require_all_published, scope_of
from services.bridge.sink.dead_letters import OneOrigin, Origin, RefusalLearned, Refused
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.snapshot.progress import (
    Owner,
    Place,
    TableProgress,
    progress_event,
    told_progress,
)
from services.bridge.snapshot.reader import NotNow, SnapshotReader
from services.bridge.snapshot.tables import TableShape
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Heartbeat

logger = structlog.get_logger(__name__)

SLOT_DEADLINE_S: Final = 600.0
"""How long the new slot may wait for transactions that are open."""
STANDBYS_DEADLINE_S: Final = 300.0
KAFKA_DEADLINE_MS: Final = 600_000
"""How long the Kafka transaction with the differences may take."""
_SEND_EVENTS: Final = 2_000
_XIDS: Final = 2**32


@dataclass(slots=True)
class Compared:
    """A table, its rows on disk, and what came of it. `whole`: Kafka has its first events too."""

    shape: TableShape
    store: RowStore
    whole: bool = True
    rows: int = 0
    counts: dict[str, int] = field(default_factory=lambda: {"c": 0, "u": 0, "d": 0})


class Repair:
    """One run. `primary` owns the origin; `check` and `diagnosis` are of before."""

    def __init__(
        self,
        settings: Settings,
        primary: Primary,
        topics: Topics,
        check: StartCheck,
        diagnosis: Diagnosis,
        without: tuple[str, ...],
    ) -> None:
        self._source = require(settings.source, "source")
        self._kafka = require(settings.kafka, "kafka")
        self._bridge = settings.bridge.model_copy(
            update={
                "on_lost_records": "continue",
                "transaction_timeout_ms": max(
                    KAFKA_DEADLINE_MS, settings.bridge.transaction_timeout_ms
                ),
            }
        )
        self._snapshots = settings.snapshot.mode != "never"
        self._primary = primary
        self._topics = topics
        self._check = check
        self._diagnosis = diagnosis
        self._without = without
        self._shaping = Shaping(settings.shaping, self._kafka.topic_prefix)
        self._encoders = Encoders(self._bridge, money_digits=primary.money_digits())
        self._baseline = Baseline(primary.conninfo, self._source, primary.server)
        self._tables: dict[str, Compared] = {}
        self._commit_lsn = 0
        self._refused = Refused()

    @property
    def scope(self) -> Scope:
        """The tables as they are now. Raise SlotbridgeError where one can't be compared."""
        require_all_published(self._source.publication, self._baseline.unpublished())
        return scope_of(self._baseline.published(), self._shaping, self._without)

    def close(self) -> None:
        """End the connections, and remove the files."""
        self._baseline.close()
        for table in self._tables.values():
            table.store.close()

    def run(self) -> RecoveryRecord:
        """Carry it out; return what was done. Raise SlotbridgeError."""
        scope = self.scope
        self._baseline.require_none_prepared()
        producer = self._producer()
        try:
            last = self._fence(producer)
            self._baseline.move_beyond(self._fold(scope, last))
            self._note(producer, last)
            self._compare(scope)
            self._secure()
            while True:
                try:
                    done = self._publish(producer, scope, last)
                except RefusalLearned as error:
                    logger.warning("sending again, record by record", reason=str(error))
                    producer.abandon()
                    producer = self._producer()
                    self._fence(producer)
                else:
                    break
        except sqlite3.Error as error:
            raise SetupError(
                f"the rows can't be kept on disk: {error}",
                operation=OPERATION,
                subject=f"bridge.spool_folder {self._bridge.spool_folder}",
                hint="make room there, or name another folder; then run this again",
                exit_code=ExitCode.DISK_FULL,
            ) from error
        finally:
            producer.abandon()
        self._primary.move_origin(self._baseline.lsn)
        logger.info("the topics are repaired: start the bridge", slot=self._source.slot)
        return done

    def _producer(self) -> TransactionalProducer:
        return TransactionalProducer(
            *(self._kafka, self._bridge, self._topics, self._source.slot, self._refused),
            on_disturbance=partial(require_told, self._topics, self._source.slot, lambda: None),
            former_ids=self._check.former_ids,
        )

    def _fence(self, producer: TransactionalProducer) -> ProgressRecord | None:
        """Fence other bridges and end what hangs; return the last record."""
        slot = self._source.slot
        producer.begin_session()
        reach("recover fenced")
        settle_all(
            *(self._topics, producer, self._primary, slot),
            lambda: None,
            Unjudged(),
        )
        last = self._topics.last_progress(slot)
        producer.follow(last)
        return last

    def _fold(self, scope: Scope, last: ProgressRecord | None) -> int:
        """Fold each table's topic; return a position that is beyond all events in Kafka."""
        known_lsn = 0 if last is None else reached(last)
        encoder = self._encoder(self._baseline.now_xmin() - 1)
        for number, shape in enumerate(scope.compared):
            topic = encoder.topic(shape.relation)
            table = Compared(shape, RowStore(self._file(number)))
            self._tables[shape.name] = table
            name = shape.relation.schema, shape.relation.table
            fold = Fold(
                *(self._topics, table.store, encoder.placeholders(shape.relation)),
                shared=self._shaping.naming.table(*name).routed,
            )
            table.whole = fold.read(topic, *name)
            known_lsn = max(known_lsn, fold.commit_lsn + 1)
            logger.info(
                "read the topic of a table",
                table=shape.name,
                events=fold.events,
                number=number + 1,
                tables=len(scope.compared),
                whole=table.whole,
            )
        known_lsn = max(known_lsn, self._primary.origin_lsn() or 0)
        return max([known_lsn, *(place.commit_lsn + 1 for place in shown(self._topics))])

    def _note(self, producer: TransactionalProducer, last: ProgressRecord | None) -> None:
        """Let no bridge start on the new slot before Kafka has what lies before it."""
        beginning = self._record(self._check.witnesses(), Position(0, 0, 0))
        noted = {"repairing": True, "ahead_lsn": 0, "ts_ms": beginning.ts_ms}
        producer.commit((last or beginning).model_copy(update=noted))

    def _compare(self, scope: Scope) -> None:
        baseline = self._baseline
        reach("recover dropping")
        baseline.make(
            two_phase=self._source.two_phase,
            wal_sender_timeout_ms=self._bridge.wal_sender_timeout_ms,
            deadline_s=SLOT_DEADLINE_S,
        )
        reach("recover slot made")
        self._commit_lsn = baseline.lsn - 1
        found = scope_of(baseline.shapes(), self._shaping, self._without)
        if [shape.name for shape in found.compared] != [shape.name for shape in scope.compared]:
            raise Retryable(
                "the published tables have changed meanwhile",
                operation=OPERATION,
                subject=f"publication {self._source.publication}",
                hint="run this again",
                exit_code=ExitCode.SERVER_UNREACHABLE,
            )
        encoder = self._encoder(baseline.xmin - 1)
        for shape in found.compared:
            table = self._tables[shape.name]
            table.shape = shape
            self._read(table, encoder)
            table.counts = table.store.compare(whole=table.whole)
            if table.store.deletes_other_keys():  # of columns by which no row can be deleted now
                table.whole = False
                table.counts = table.store.compare(whole=False)
            logger.info(
                "compared a table", table=shape.name, rows=table.rows, **_named(table.counts)
            )

    def _read(self, table: Compared, encoder: RepairEvents) -> None:
        relation = table.shape.relation
        for rows in self._baseline.rows(table.shape):
            encoded = [encoder.encoded(relation, row) for row in rows]
            table.rows += len(rows)
            if table.store.take_there((key or b"", row) for key, row in encoded) or any(
                key is None for key, _ in encoded
            ):
                raise BadInput(
                    "two rows have the same message key, or a row has none",
                    operation=OPERATION,
                    subject=f"table {table.shape.name}",
                    lsn=self._baseline.lsn,
                    hint="correct shaping.keys, or go on without the table by --without",
                    exit_code=ExitCode.RECORD_REFUSED,
                )

    def _secure(self) -> None:
        """Wait until no failover can take back what was read."""
        reader = SnapshotReader(
            *(self._primary.conninfo, self._source.publication, self._source.slot),
            self._primary.server,
            deadline_ms=self._bridge.sql_deadline_ms,
        )
        with contextlib.closing(reader):
            until = time.monotonic() + STANDBYS_DEADLINE_S
            try:
                lsn = reader.mark("recover")
                while not reader.has_standbys_up_to(lsn) and time.monotonic() < until:
                    time.sleep(0.1)
                why = "" if reader.has_standbys_up_to(lsn) else "they are behind"
            except NotNow as error:
                why = str(error)
        if why:
            raise Retryable(
                f"not known whether a failover would take back what was read: {why}",
                operation=OPERATION,
                subject="synchronized_standby_slots",
                lsn=self._baseline.lsn,
                hint="start the standbys, or correct synchronized_standby_slots; run this again",
                exit_code=ExitCode.SERVER_UNREACHABLE,
            )

    def _publish(
        self, producer: TransactionalProducer, scope: Scope, last: ProgressRecord | None
    ) -> RecoveryRecord:
        """Send everything in one Kafka transaction, and commit it."""
        seen = self._check.witnesses()
        now_ms = time.time_ns() // 1_000_000
        done = RecoveryRecord(
            slot=self._source.slot,
            system_identifier=seen.server.system_identifier,
            timeline=seen.server.timeline,
            reason=self._diagnosis.reason.message if self._diagnosis.reason else "--force",
            from_lsn=last.end_lsn if last is not None else 0,
            lsn=self._baseline.lsn,
            commit_lsn=self._commit_lsn,
            tables={
                name: TableRepair(rows=one.rows, emptied=not one.whole, **_named(one.counts))
                for name, one in self._tables.items()
            },
            left_out=dict(scope.left_out),
            ts_ms=now_ms,
        )
        topic = self._topics.prepare_late(recovery_topic)
        origins = OneOrigin(Origin(0, self._commit_lsn, self._baseline.lsn))
        waiting = [Event(topic, done.slot.encode(), done.model_dump_json().encode())]
        waiting += lost_staging(self._topics, self._source.slot, 0)
        waiting += self._snapshots_done(seen, now_ms)
        for event in self._events():
            waiting.append(event)
            if len(waiting) >= _SEND_EVENTS:
                producer.send(waiting, origins)
                waiting = []
        producer.send(waiting, origins)
        reach("recover sent")
        producer.commit(self._record(seen, Position(self._commit_lsn, self._baseline.lsn, 0)))
        reach("recover committed")
        return done

    def _events(self) -> Iterator[Event]:
        """Yield BEGIN, schema events, differences and END."""
        encoder, lsn, seq = self._encoder(self._baseline.xmin - 1), self._commit_lsn, 0
        yield from encoder.boundary("BEGIN")
        for table in self._tables.values():
            relation = table.shape.relation
            encoder.topic(relation)
            yield from encoder.take_shapes()
            if not table.whole:
                yield from encoder.emptied(relation, lsn, seq)
                seq += 1
            for found in table.store.differences():
                yield from encoder.change(relation, found, lsn, seq)
                seq += 1
        yield from encoder.boundary("END")

    def _snapshots_done(self, seen: Witnesses, now_ms: int) -> Iterator[Event]:
        """Yield, for a later snapshot, that all rows of each table are in Kafka."""
        if not self._snapshots:
            return
        self._topics.prepare_late(snapshot_topic, compacted=True)
        slot, timeline = self._source.slot, seen.server.timeline
        owner = Owner(slot, timeline, self._baseline.lsn, seen.switch_points)
        place = Place(self._commit_lsn, 0, self._baseline.lsn)
        for table in self._tables.values():
            if table.shape.key:
                progress = TableProgress(table.shape, rows=table.rows, chunks=1, done=True)
                told = told_progress(owner, progress, place, now_ms)
                yield progress_event(self._kafka.topic_prefix, told)

    def _record(self, seen: Witnesses, position: Position) -> ProgressRecord:
        heartbeat = Heartbeat(
            self._source.slot,
            interval_ms=self._bridge.heartbeat_interval_ms,
            patience_ms=self._bridge.connect_deadline_ms,
        )
        records = Records(self._source.slot, heartbeat)
        records.seen = seen
        return records.at(position, {})

    def _encoder(self, xid: int) -> RepairEvents:
        """Make what encodes as streaming does, for the transaction at `commit_lsn`."""
        prefix, now_us = self._kafka.topic_prefix, time.time_ns() // 1000
        relations = Relations(
            prefix, self._primary, self._topics.shapes(), self._shaping, self._encoders
        )
        encoder = RepairEvents(
            *(prefix, self._primary.server.database, self._primary.server.timeline),
            relations.describe,
            transaction_metadata=self._bridge.transaction_metadata,
            encoders=self._encoders,
        )
        encoder.begin_repair(
            Stamp(0, self._commit_lsn, now_us, 0, now_us),
            xid % _XIDS,
            tombstones=self._bridge.tombstones,
        )
        return encoder

    def _file(self, number: int) -> Path:
        name = f"slotbridge-{self._kafka.topic_prefix}-{self._source.slot}-{number}.recover"
        return self._bridge.spool_folder / name


def _named(counts: dict[str, int]) -> dict[str, int]:
    return {"created": counts["c"], "updated": counts["u"], "deleted": counts["d"]}
