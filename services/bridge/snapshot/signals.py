"""Signals for a snapshot: rows of the signal table, and records of the signal topic.

A row comes in the stream, with the transaction of its insert. A record has no place in the stream:
it gets one by a mark of its own. Either is taken in the Kafka transaction that has this place: what
it asks, and for records the position behind them.
"""

from collections.abc import Iterable
from typing import Final

import structlog

from schemas.snapshot import SignalPosition, SnapshotRequest, SnapshotSettings
from services.bridge.events.event import Event, Stamp, size_of
from services.bridge.snapshot.progress import Owner
from services.bridge.snapshot.requests import (
    BadSignal,
    asked_by,
    position_event,
    request_event,
    requests,
    topic_signal,
)
from services.bridge.snapshot.signal_topic import SignalTopic, TopicSignal
from services.bridge.transactions.assembler import EventBatch

logger = structlog.get_logger(__name__)

_IGNORED: Final = "a signal is ignored"


class Signals:
    """The signals of one session. `requests`: all requests, in the order of their records."""

    def __init__(
        self,
        settings: SnapshotSettings,
        prefix: str,
        owner: Owner,
        asked: Iterable[SnapshotRequest],
    ) -> None:
        self._table = settings.signal_table or ""
        self._prefix = prefix
        self._owner = owner
        self.requests = [*asked]
        self.topic: SignalTopic | None = None

    def close(self) -> None:
        """End what reads the signal topic."""
        if self.topic is not None:
            self.topic.close()

    def poll(self, now: float) -> bool:
        """Look for records of the signal topic; whether any waits for a place in the stream."""
        if self.topic is None:
            return False
        self.topic.poll(now)
        return bool(self.topic.pending) or self.topic.moved

    def of_rows(self, batch: EventBatch) -> EventBatch | None:
        """Return the batch with the requests of its rows of the signal table, None without any."""
        if not self._table or not batch.events:
            return None
        slot, timeline = self._owner.slot, self._owner.timeline
        asked, ignored = asked_by(batch, self._table, slot, timeline)
        for id_, reason in ignored:
            logger.warning(_IGNORED, id=id_, reason=reason)
        return self._added(batch, asked, []) if asked else None

    def of_records(self, batch: EventBatch, stamp: Stamp) -> EventBatch:
        """Return the batch with the requests of the signal topic's pending records, at its mark."""
        topic = self.topic
        if topic is None:
            return batch
        asked: list[SnapshotRequest] = []
        for record in topic.take():
            asked += self._asked(topic.name, record, stamp, len(asked))
        position = SignalPosition(
            slot=self._owner.slot,
            topic=topic.name,
            topic_id=topic.id,
            offset=topic.next,
            ts_ms=stamp.encoded_us // 1000,
        )
        return self._added(batch, asked, [position_event(self._prefix, position)])

    def _asked(
        self, topic: str, record: TopicSignal, stamp: Stamp, seq: int
    ) -> list[SnapshotRequest]:
        """Return the requests of a record in the signal topic; log one that is not a signal."""
        slot, timeline = self._owner.slot, self._owner.timeline
        try:
            signal = topic_signal(record.key, record.value, self._prefix)
            return requests(signal, slot, timeline, stamp, seq, topic, record.offset)
        except BadSignal as reason:
            logger.warning(_IGNORED, topic=topic, offset=record.offset, reason=str(reason))
            return []

    def _added(
        self, batch: EventBatch, asked: list[SnapshotRequest], others: list[Event]
    ) -> EventBatch:
        """Note the requests, and return the batch with their records and `others`."""
        for one in asked:
            logger.info("received a signal", id=one.id, type=one.type, tables=one.tables)
        self.requests += asked
        records = [*(request_event(self._prefix, one) for one in asked), *others]
        staging, size = [*batch.staging, *records], batch.bytes + size_of(records)
        return batch._replace(staging=staging, bytes=size)
