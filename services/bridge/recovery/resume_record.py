"""The progress record that a session goes on from, and those that it writes afterwards."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from schemas.events import ProgressRecord
from services.bridge.events.event import Event
from services.bridge.failpoints import reach
from services.bridge.progress.consistency import Witnesses
from services.bridge.progress.ledger import Position
from services.bridge.recovery.placement import log_changed
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Heartbeat, Moved

AHEAD_BYTES: Final = 16 * 2**20
"""How much WAL without events the slot may be confirmed ahead of Kafka's record."""


class NewSlot(NamedTuple):
    """Where a slot begins, and the events of that for Kafka with the first record."""

    lsn: int
    events: Sequence[Event] = ()


class Records:
    """Makes the progress records of one session, from the time its witnesses agreed (`seen`)."""

    def __init__(
        self,
        slot: str,
        heartbeat: Heartbeat,
        seen: Witnesses,
        placement: Mapping[str, str],
        storage_id: str | None = "",
        *,
        reads_rows: bool = False,
    ) -> None:
        self._placement = placement
        self._storage_id = storage_id
        self._slot = slot
        self._reads_rows = reads_rows
        self._heartbeat = heartbeat
        self._seen = seen

    @property
    def timeline(self) -> int:
        """The timeline of the server that this session streams from."""
        return self._seen.server.timeline

    def resume(
        self,
        record: ProgressRecord | None,
        primary: Primary,
        producer: TransactionalProducer,
        first_slot: Callable[[], NewSlot],
    ) -> ProgressRecord:
        """Return the record to go on from: `record` as this server has it, or the very first.

        `first_slot` tells of the slot at the very first start, and makes it where it is missing.
        """
        return (
            self._enter(record, producer) if record else self._begin(primary, producer, first_slot)
        )

    def at(self, position: Position, counts: Mapping[str, int]) -> ProgressRecord:
        """Make the record of `position`, with the counts by table of a transaction so far."""
        moved = self._heartbeat.moved
        return ProgressRecord(
            slot=self._slot,
            **self._identity(),
            commit_lsn=position.commit_lsn,
            end_lsn=position.end_lsn,
            seq=position.seq,
            counts=dict(counts) if position.seq else {},
            ts_ms=time.time_ns() // 1_000_000,
            reads_rows=self._reads_rows,
            ahead_lsn=position.end_lsn + AHEAD_BYTES if self._heartbeat.commits_wait else 0,
            origin_lsn=moved.origin_lsn,
            wal_lsn=moved.wal_lsn,
        )

    def _begin(
        self,
        primary: Primary,
        producer: TransactionalProducer,
        first_slot: Callable[[], NewSlot],
    ) -> ProgressRecord:
        """Store the position of the first slot in Kafka and the origin."""
        lsn, events = first_slot()
        if events:
            producer.send(events)
        record = self.at(Position(0, lsn, 0), {})
        producer.commit(record)
        reach("first record")
        wal_lsn = primary.move_origin(lsn)
        if wal_lsn is not None:
            self._heartbeat.moved = Moved(lsn, wal_lsn)
        return record

    def _enter(self, record: ProgressRecord, producer: TransactionalProducer) -> ProgressRecord:
        """Tell Kafka of a new timeline before its first change, so that no later start goes back.

        The record also tells whatever else identifies the server, where it lacked that, and the
        ends of partitions that hold instead of those noted before. What `record` tells of the
        origin was true on the record's own timeline, and of its own witness.
        """
        now = self._identity()
        log_changed(record.placement, self._placement)
        if (record.timeline, record.witness) == (self.timeline, self._seen.witness):
            self._heartbeat.moved = Moved(record.origin_lsn, record.wal_lsn)
        known = all(getattr(record, name) == value for name, value in now.items())
        if known and not producer.tails.renewed:
            return record
        moved = self._heartbeat.moved
        record = record.model_copy(
            update={
                **now,
                "ts_ms": time.time_ns() // 1_000_000,
                "origin_lsn": moved.origin_lsn,
                "wal_lsn": moved.wal_lsn,
            }
        )
        producer.commit(record)
        return record

    def _identity(self) -> dict[str, Any]:
        """Return the fields that identify the server and the storage of large values.

        They also tell how the server's events are placed.
        """
        selection = self._seen.selection
        return {
            "system_identifier": self._seen.server.system_identifier,
            "timeline": self.timeline,
            "history": dict(self._seen.switch_points),
            "witness": self._seen.witness,
            "publication": selection.publication,
            "publication_oid": selection.oid,
            "source_origin": selection.origin,
            "placement": dict(self._placement),
            "storage_id": self._storage_id,
        }
