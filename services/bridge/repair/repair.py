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
from typing import Final

import structlog

from schemas.acceptance import Everything
from schemas.errors import ExitCode, Retryable, SetupError
from schemas.events import recovery_topic, snapshot_topic
from schemas.progress import ProgressPosition, ProgressRecord
from schemas.recovery import RecoveryRecord
from schemas.settings import Settings, require
from services.bridge.events.event import Event
from services.bridge.events.shaping.tables import Shaping
from services.bridge.failpoints import reach
from services.bridge.hanging import settle_all
from services.bridge.progress.consistency import Witnesses, reached
from services.bridge.progress.ledger import Position
from services.bridge.recovery.accept_divergence import lost_staging
from services.bridge.recovery.last_events import last_positions
from services.bridge.recovery.resume_record import Records
from services.bridge.recovery.start_check import StartCheck
from services.bridge.repair.baseline import Baseline
from services.bridge.repair.compared_tables import ComparedTables
from services.bridge.repair.diagnosis import OPERATION, Diagnosis, Unjudged
from services.bridge.repair.encoding import Encoding
from services.bridge.repair.scope import Scope, require_all_published, scope_of
from services.bridge.sink.claim_checks import open_claim_checks
from services.bridge.sink.dead_letters import OneOrigin, Origin, RefusalLearned, Refused
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.snapshot.reader import SnapshotReader
from services.bridge.snapshot.row_reader import NotNow
from services.bridge.snapshot.slot_creation import beginning_event
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Heartbeat

logger = structlog.get_logger(__name__)

SLOT_DEADLINE_S: Final = 600.0
"""How long the new slot may wait for transactions that are open."""
STANDBYS_DEADLINE_S: Final = 300.0
KAFKA_DEADLINE_MS: Final = 600_000
"""How long the Kafka transaction with the differences may take."""
_SEND_EVENTS: Final = 2_000


class Repair:
    """One run of `slotbridge recover`. `primary` owns the origin.

    `check` and `diagnosis` were made before it.
    """

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
                "transaction_timeout_ms": max(
                    KAFKA_DEADLINE_MS, settings.bridge.transaction_timeout_ms
                ),
            }
        )
        self.snapshot = settings.snapshot.in_effect(
            reads_rows=_reads_rows(diagnosis.record, topics)
        )
        """The snapshot's settings with the mode that is in effect."""
        self._primary = primary
        self._topics = topics
        self._check = check
        self._diagnosis = diagnosis
        self._without = without
        self._shaping = Shaping(settings.shaping, self._kafka.topic_prefix)
        self._baseline = Baseline(
            primary.conninfo,
            self._source,
            primary.server,
            topics.waiter,
            sql_deadline_ms=self._bridge.sql_deadline_ms,
        )
        self._resources = contextlib.ExitStack()
        self._claim_checks = open_claim_checks(
            settings.claim_check, settings.shaping, self._resources, topics.waiter
        )
        self._storage_id: str | None = None
        deposit = None
        if self._claim_checks is not None:
            deposit = self._claim_checks.deposit
        files = f"slotbridge-{self._kafka.topic_prefix}-{self._source.slot}"
        self._tables = ComparedTables(
            topics,
            self._shaping,
            Encoding(self._bridge, self._shaping, primary, topics, deposit),
            self._baseline,
            self._bridge.spool_folder / files,
        )
        self._refused = Refused()
        self._shown = (0, 0)
        """The position (commit_lsn, seq) of the last event in Kafka."""

    @property
    def scope(self) -> Scope:
        """The tables as they are now. Raise SlotbridgeError where one can't be compared."""
        require_all_published(self._source.publication, self._baseline.unpublished())
        return scope_of(self._baseline.published(), self._shaping, self._without)

    def close(self) -> None:
        """End the connections, and remove the files."""
        self._baseline.close()
        self._tables.close()
        self._resources.close()

    def run(self) -> RecoveryRecord:
        """Perform the repair; return what was done. Raise SlotbridgeError."""
        scope = self.scope
        self._baseline.require_none_prepared()
        producer = self._producer()
        try:
            last = self._fence(producer)
            self._storage_id = self._confirm_storage(last)
            self._baseline.move_beyond(self._known_lsn(self._tables.fold(scope), last))
            self._note(producer, last)
            self._make_slot()
            found = scope_of(self._baseline.shapes(), self._shaping, self._without)
            self._tables.compare(scope, found)
            self._secure()
            while True:
                try:
                    done = self._publish(producer, scope, last)
                except RefusalLearned as error:
                    logger.warning(
                        "Kafka refuses a record: sending the repair again, record by record",
                        reason=str(error),
                    )
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
            self._kafka,
            self._bridge,
            self._topics,
            self._source.slot,
            self._refused,
        )

    def _fence(self, producer: TransactionalProducer) -> ProgressRecord | None:
        """Fence other bridges and end what hangs; return the last record."""
        slot = self._source.slot
        producer.begin_session()
        reach("recover fenced")
        settle_all(self._topics, producer, self._primary, slot, Unjudged())
        last = self._topics.last_progress(slot)
        producer.follow(last, Everything())
        return last

    def _confirm_storage(self, last: ProgressRecord | None) -> str | None:
        """Return the id of the storage of large values; not known where Kafka has no record."""
        if self._claim_checks is None:
            return None if last is None else last.settings.storage_id
        noted = None if last is None else last.settings.storage_id
        return self._claim_checks.confirm(noted, self._check.accepted, first=False)

    def _known_lsn(self, folded_lsn: int, last: ProgressRecord | None) -> int:
        """Return a position that is beyond all events in Kafka, and beyond the origin."""
        recorded_lsn = 0 if last is None else reached(last)
        self._shown = max([one[:2] for one in last_positions(self._topics)], default=(0, 0))
        beyond_lsn = self._shown[0] + 1
        noted = max(self._primary.origin_lsn() or 0, self._primary.former_lsn() or 0)
        return max(folded_lsn, recorded_lsn, noted, beyond_lsn)

    def _part(self, last: ProgressRecord | None) -> ProgressPosition | None:
        """Return the last position if Kafka has but a part of its transaction, none behind it."""
        if last is None or not last.position.seq or not last.position.xid:
            return None
        position = last.position
        return position if self._shown <= (position.commit_lsn, position.seq) else None

    def _note(self, producer: TransactionalProducer, last: ProgressRecord | None) -> None:
        """Note the repair in Kafka, so that no bridge starts on the new slot before its end."""
        beginning = self._record(last, self._check.witnesses(), Position(0, 0, 0))
        noted = last or beginning
        position = noted.position.model_copy(update={"ahead_lsn": 0})
        update = {"repairing": True, "position": position, "ts_ms": beginning.ts_ms}
        producer.commit(noted.model_copy(update=update))

    def _make_slot(self) -> None:
        reach("recover dropping")
        self._baseline.make(
            two_phase=self._source.two_phase,
            wal_sender_timeout_ms=self._bridge.wal_sender_timeout_ms,
            deadline_s=SLOT_DEADLINE_S,
        )
        reach("recover slot made")

    def _secure(self) -> None:
        """Wait until no failover can take back what was read. Raise Retryable at the deadline."""
        reader = SnapshotReader(
            self._primary.conninfo,
            self._source.publication,
            self._source.slot,
            self._primary.server,
            deadline_ms=self._bridge.sql_deadline_ms,
        )
        with contextlib.closing(reader):
            until = time.monotonic() + STANDBYS_DEADLINE_S
            try:
                lsn = reader.mark("recover")
                while not reader.has_standbys_up_to(lsn) and time.monotonic() < until:
                    self._topics.waiter.pause(0.1)
                why = "" if reader.has_standbys_up_to(lsn) else "the standbys are behind"
            except NotNow as error:
                why = str(error)
        if why:
            raise Retryable(
                f"a failover could undo the rows that were read: {why}",
                operation=OPERATION,
                subject="synchronized_standby_slots",
                lsn=self._baseline.lsn,
                hint="start the standbys, or correct synchronized_standby_slots; then run "
                "`slotbridge recover` again",
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
            from_lsn=last.position.end_lsn if last is not None else 0,
            lsn=self._baseline.lsn,
            commit_lsn=self._baseline.commit_lsn,
            tables=self._tables.results(),
            left_out=dict(scope.left_out),
            ts_ms=now_ms,
        )
        topic = self._topics.prepare_late(recovery_topic)
        origins = OneOrigin(Origin(0, self._baseline.commit_lsn, self._baseline.lsn))
        waiting = [Event(topic, done.slot.encode(), done.model_dump_json().encode())]
        waiting += lost_staging(self._topics, self._source.slot, 0)
        if self.snapshot.mode != "never" or self._topics.there(snapshot_topic(self._topics.prefix)):
            self._topics.prepare_late(snapshot_topic, compacted=True)
            server = seen.server
            beginning = self._baseline.beginning(now_ms)
            waiting.append(beginning_event(self._topics.prefix, beginning))
            waiting += self._tables.snapshots_done(
                self._source.slot, server.timeline, seen.switch_points, now_ms
            )
        for event in self._tables.events(self._part(last)):
            waiting.append(event)
            if len(waiting) >= _SEND_EVENTS:
                producer.send(waiting, origins)
                waiting = []
        producer.send(waiting, origins)
        reach("recover sent")
        if self._claim_checks is not None:
            self._claim_checks.require_stored()
        producer.commit(
            self._record(last, seen, Position(self._baseline.commit_lsn, self._baseline.lsn, 0))
        )
        reach("recover committed")
        return done

    def _record(
        self, last: ProgressRecord | None, seen: Witnesses, position: Position
    ) -> ProgressRecord:
        """Make a record that tells how rows were placed until now: the next start compares."""
        heartbeat = Heartbeat(
            self._source.slot,
            interval_ms=self._bridge.heartbeat_interval_ms,
            patience_ms=self._bridge.connect_deadline_ms,
        )
        records = Records(
            self._source.slot,
            heartbeat,
            seen,
            None if last is None else last.settings.placement,
            self._storage_id,
            reads_rows=self.snapshot.reads_all,
        )
        return records.at(position, {})


def _reads_rows(record: ProgressRecord | None, topics: Topics) -> bool:
    """Tell whether the prefix began with a snapshot: if the record is lost, its topic tells."""
    if record is None:
        return topics.there(snapshot_topic(topics.prefix))
    return record.settings.reads_rows
