"""The progress record that a session goes on from, and those that it writes afterwards."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from schemas.progress import (
    ProgressKafka,
    ProgressPosition,
    ProgressRecord,
    ProgressServer,
    ProgressSettings,
    ProgressWitness,
)
from services.bridge.events.event import Event
from services.bridge.failpoints import reach
from services.bridge.progress.consistency import Witnesses
from services.bridge.progress.ledger import Position
from services.bridge.progress.wal_commit import NO_COMMIT, WalCommit
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
        placement: Mapping[str, str] | None,
        storage_id: str | None = "",
        *,
        reads_rows: bool = False,
    ) -> None:
        """`placement`: how rows are placed; None: not known."""
        self._slot = slot
        self._heartbeat = heartbeat
        self._kind = seen.witness
        # Made once: only `position` and `witness` differ from record to record of a session, and
        # `kafka`, which the producer puts in.
        self._kafka = ProgressKafka()
        self._server = ProgressServer(
            system_identifier=seen.server.system_identifier,
            timeline=seen.server.timeline,
            history=dict(seen.switch_points),
        )
        self._settings = ProgressSettings(
            publication=seen.selection.publication,
            publication_oid=seen.selection.oid,
            source_origin=seen.selection.origin,
            placement=None if placement is None else dict(placement),
            storage_id=storage_id,
            reads_rows=reads_rows,
        )

    @property
    def timeline(self) -> int:
        """The timeline of the server that this session streams from."""
        return self._server.timeline

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

    def at(
        self, position: Position, counts: Mapping[str, int], commit: WalCommit = NO_COMMIT
    ) -> ProgressRecord:
        """Make the record of `position`, where `commit` is in the WAL.

        `counts`: by table, of a transaction so far.
        """
        commit_lsn, end_lsn, seq = position
        return ProgressRecord(
            slot=self._slot,
            ts_ms=time.time_ns() // 1_000_000,
            position=ProgressPosition(
                commit_lsn=commit_lsn,
                end_lsn=end_lsn,
                seq=seq,
                counts=dict(counts) if seq else {},
                ahead_lsn=end_lsn + AHEAD_BYTES if self._heartbeat.commits_wait else 0,
                xid=commit.xid,
                commit_time_us=commit.time_us,
            ),
            server=self._server,
            witness=self._witness(),
            kafka=self._kafka,
            settings=self._settings,
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

        The new record also has what else identifies the server, if `record` lacks it, and the
        present ends of partitions. The origin in `record` is of that record's timeline and witness
        alone.
        """
        log_changed(record.settings.placement, self._settings.placement or {})
        if (record.server.timeline, record.witness.kind) == (self.timeline, self._kind):
            self._heartbeat.moved = Moved(record.witness.lsn, record.witness.wal_lsn)
        now = {"server": self._server, "witness": self._witness(), "settings": self._settings}
        known = all(getattr(record, name) == part for name, part in now.items())
        if known and not producer.tails.renewed:
            return record
        record = record.model_copy(update={**now, "ts_ms": time.time_ns() // 1_000_000})
        producer.commit(record)
        return record

    def _witness(self) -> ProgressWitness:
        lsn, wal_lsn = self._heartbeat.moved
        return ProgressWitness(kind=self._kind, lsn=lsn, wal_lsn=wal_lsn)
