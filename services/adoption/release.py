"""Gives the slot and the topics back to Debezium: an offset that it goes on from.

    fence      no bridge of this slot can write any more; what hangs in Kafka is ended
    compare    as a start does: Kafka, slot and server agree about where everything ends
    offset     is written where Kafka Connect looks for it
    forget     the progress record and the origin: no bridge goes on by mistake

Killed in between, it is run again.
"""

from typing import Final

import structlog

from schemas.errors import OperatorNeeded
from schemas.events import progress_topic
from schemas.lsn import format_lsn
from schemas.progress import ProgressRecord
from schemas.settings import Settings, require
from services.adoption.connect_offsets import ConnectOffsets
from services.adoption.offsets import released_offset
from services.bridge.failpoints import reach
from services.bridge.hanging import settle_all
from services.bridge.recovery.start_check import StartCheck
from services.bridge.recovery.visible_record import read_visible
from services.bridge.sink.dead_letters import Refused
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.snapshot.progress import Owner
from services.bridge.snapshot.unread_tables import unread_tables
from services.bridge.source.database import Primary
from services.kafka.delivery import deliver

logger = structlog.get_logger(__name__)

OPERATION: Final = "release"
_NAMED: Final = 5


class Release:
    """One run. `primary` and `topics` are prepared as for a start of the bridge."""

    def __init__(
        self,
        settings: Settings,
        primary: Primary,
        topics: Topics,
        check: StartCheck,
        offsets: ConnectOffsets,
    ) -> None:
        self._settings = settings
        self._source = require(settings.source, "source")
        self._kafka = require(settings.kafka, "kafka")
        self._bridge = settings.bridge
        self._primary = primary
        self._topics = topics
        self._check = check
        self._offsets = offsets

    def plan(self) -> int:
        """Return where Debezium is to begin, 0 where a broken-off release has only to be ended.

        Nothing is changed. Raise OperatorNeeded for what Debezium can't go on from.
        """
        # What a killed bridge has open is ended later: nobody waits for its time-out here.
        record = read_visible(self._topics, self._source.slot).record
        if record is None and self._primary.origin_lsn() is None:
            raise self._refused("no bridge has used this slot and prefix", "nothing is to be done")
        found = self._primary.slot()
        if found is not None and found.two_phase:
            raise self._refused(
                "the slot decodes at PREPARE, which Debezium does not understand",
                "this slot can't be given back: make another one for Debezium, with a snapshot",
            )
        if record is None:
            return 0
        self._require_rows(record)
        self._require_whole(record)
        return record.position.end_lsn

    def run(self) -> int:
        """Do it; return where Debezium begins. Raise SlotbridgeError."""
        lsn = self.plan()
        if lsn:
            record = self._last()
            lsn = record.position.end_lsn
            self._offsets.write(self._offsets.read().key, released_offset(lsn, record.committed_us))
            reach("release offset")
            self._forget_progress()
            reach("release forgotten")
        self._primary.forget_origin()
        logger.info("released: start the connector", slot=self._source.slot, lsn=format_lsn(lsn))
        return lsn

    def _last(self) -> ProgressRecord:
        """Fence, end what hangs, and return the last record. Raise OperatorNeeded without one."""
        self._check.before_fencing()
        slot = self._source.slot
        producer = TransactionalProducer(
            self._kafka,
            self._bridge,
            self._topics,
            slot,
            Refused(),
        )
        try:
            producer.begin_session()
            settle_all(self._topics, producer, self._primary, slot, self._check)
            record = self._topics.last_progress(slot)
            producer.follow(record, self._check.accepted)
            self._check.compare(record)
        finally:
            producer.abandon()
        if record is None:
            raise self._refused("Kafka has no progress of the slot", "nothing is to be given back")
        self._require_whole(record)
        return record

    def _require_rows(self, record: ProgressRecord) -> None:
        """Raise SlotbridgeError where a snapshot has rows left to read: Debezium reads none."""
        timeline, points = self._primary.server.timeline, self._check.switch_points
        owner = Owner(self._source.slot, timeline, record.position.end_lsn, points)
        snapshot = self._settings.snapshot.in_effect(reads_rows=record.settings.reads_rows)
        witnesses = (self._primary, self._topics, owner)
        unread = unread_tables(self._settings, snapshot, *witnesses, OPERATION)
        if unread:
            raise self._refused(
                f"the snapshot has not read all rows of {', '.join(unread[:_NAMED])}",
                "start the bridge until `slotbridge snapshot status` shows them done, stop the "
                "snapshot (`slotbridge snapshot stop`), or name them in snapshot.exclude",
            )

    def _require_whole(self, record: ProgressRecord) -> None:
        if record.position.seq:
            raise self._refused(
                "Kafka has a part of a large transaction, which Debezium would repeat",
                "start the bridge until the transaction is whole, stop it, and run this again",
            )

    def _forget_progress(self) -> None:
        topic, key = progress_topic(self._topics.prefix), self._source.slot.encode()
        hint = "run `slotbridge release` again"
        deliver(self._kafka, topic, {key: None}, operation=OPERATION, hint=hint)

    def _refused(self, message: str, hint: str) -> OperatorNeeded:
        return OperatorNeeded(
            message, operation=OPERATION, subject=f"slot {self._source.slot}", hint=hint
        )
