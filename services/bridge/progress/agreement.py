"""What Kafka has, and whether every witness agrees. Pure.

    received >= published >= durable >= origin      (positions in the WAL, bytes)
                published >= flushed

received   the server has sent it         durable   a Kafka transaction with it has committed
published  it is in the open Kafka        origin    the replication origin says so in the database
           transaction                    flushed   the slot has been told

A session may start where the slot is, ahead of the record in Kafka: durable is then that place
until its first commit, and the origin stays at the record.

flushed stays behind durable, except while commits wait for the bridge (synchronous_standby_names):
then it follows WAL without events as far as the last record in Kafka has announced, `ahead_lsn`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schemas.errors import ExitCode, OperatorNeeded, Retryable
from schemas.events import ProgressRecord, TransactionEvent
from schemas.lsn import format_lsn
from services.slots import Server, Slot


class Position(NamedTuple):
    """A place to resume: as in ProgressRecord."""

    commit_lsn: int
    end_lsn: int
    seq: int


class Ledger:
    """The bridge's positions; every one only moves forward, and never past the one before it.

    `recorded_lsn` and `ahead_lsn` are of the record in Kafka: `start` may be later (resume_at),
    the origin never is.
    """

    def __init__(self, start: Position, recorded_lsn: int, ahead_lsn: int = 0) -> None:
        self.received = start.end_lsn
        self.published = start
        self.durable = start
        self._recorded_lsn = recorded_lsn
        self.origin = 0
        self.flushed = 0
        self.ahead = ahead_lsn

    def receive(self, lsn: int) -> None:
        """The server has sent everything up to `lsn`."""
        self.received = max(self.received, lsn)

    def publish(self, position: Position) -> None:
        """Everything up to `position` is in the open Kafka transaction (or was there before)."""
        assert position >= self.published or position.end_lsn >= self.published.end_lsn
        self.receive(position.end_lsn)
        self.published = position

    def commit(self, ahead: int = 0) -> None:
        """The open Kafka transaction has committed; its record allows to follow up to `ahead`."""
        assert self.published.end_lsn >= self.durable.end_lsn
        self.durable = self.published
        self._recorded_lsn = self.durable.end_lsn
        self.ahead = ahead

    def report(self, *, follow: bool = False) -> int:
        """The LSN that the slot may be told; never past what Kafka has.

        With `follow`, the caller says that what was published since has no events: the slot may
        then be told of it too, as far as the record in Kafka allows.
        """
        followed = min(self.published.end_lsn, self.ahead) if follow else 0
        self.flushed = max(self.flushed, self.durable.end_lsn, followed)
        return self.flushed

    def mark_origin(self) -> int:
        """The LSN for the replication origin: what Kafka has."""
        self.origin = max(self.origin, self._recorded_lsn)
        return self.origin

    @property
    def outstanding(self) -> bool:
        """Whether something is published that Kafka has not committed."""
        return self.published != self.durable


@dataclass(frozen=True, slots=True)
class Beyond:
    """`listed`: the first of `count`, their ENDs; a BEGIN where Kafka has only a part.

    Transactions without events are not among them.
    """

    listed: Sequence[TransactionEvent]
    count: int


class Diverged(OperatorNeeded):
    """Kafka has what the server never had: changes of `timeline` in [switch_lsn, reached_lsn).

    `switch_lsn` is None where that timeline is none of the server's.
    """

    exit_code = ExitCode.TIMELINE

    def __init__(
        self,
        slot: str,
        timeline: int,
        server_timeline: int,
        switch_lsn: int | None,
        reached_lsn: int,
        transactions: str = "",
        beyond: Beyond | None = None,
    ) -> None:
        self.beyond = beyond
        self.slot = slot
        self.timeline = timeline
        self.server_timeline = server_timeline
        self.switch_lsn = switch_lsn
        self.reached_lsn = reached_lsn
        left = "never was on it" if switch_lsn is None else f"left it at {format_lsn(switch_lsn)}"
        super().__init__(
            f"Kafka has changes of timeline {timeline} up to {format_lsn(reached_lsn)}; this "
            f"server (timeline {server_timeline}) {left}: it never had the changes between"
            + (f", {transactions}" if transactions else ""),
            operation="compare witnesses",
            subject=f"slot {slot}",
            lsn=reached_lsn,
            hint="events after the switch point are in Kafka but not in the database: decide "
            "about them, then start over with a new slot and topic prefix, or accept them with "
            "bridge.on_divergence: continue; set synchronized_standby_slots on the primary to "
            "prevent it",
        )

    def naming(self, transactions: str, beyond: Beyond) -> "Diverged":
        """The same error, which also tells `transactions`, those of `beyond`."""
        return Diverged(
            self.slot,
            self.timeline,
            self.server_timeline,
            self.switch_lsn,
            self.reached_lsn,
            transactions,
            beyond,
        )


def resume_at(record: ProgressRecord, slot: Slot | None) -> Position:
    """The resume point of a progress record, or later, where the slot is confirmed ahead of it.

    What lies between has no events, and the server does not send it again: were it left out, the
    next record could be one of before the slot's position, which announces nothing.
    """
    confirmed = (slot.confirmed_flush_lsn if slot is not None else None) or 0
    return Position(record.commit_lsn, max(record.end_lsn, confirmed), record.seq)


@dataclass(frozen=True, slots=True)
class Witnesses:
    """What was seen at start: Kafka's record, the slot, the origin, the server, its history.

    `switch_points`: timeline -> the LSN at which the server's history left it.
    """

    record: ProgressRecord | None
    slot: Slot | None
    origin_lsn: int | None
    server: Server
    switch_points: dict[int, int]


def check_witnesses(seen: Witnesses, slot: str) -> None:
    """Return when it is right to go on from `seen.record`, or to begin anew where all are absent.

    Raises OperatorNeeded (WITNESSES_DISAGREE, WRONG_DATABASE, TIMELINE) or, for an older timeline,
    Retryable: the new primary may just not have been reachable.
    """
    record = seen.record
    if record is None:
        _check_beginning(seen, slot)
        return
    _check_identity(record, seen, slot)
    _check_timeline(record, seen, slot)
    if seen.origin_lsn is not None and seen.origin_lsn > record.end_lsn:
        raise _disagreement(
            f"the replication origin has {format_lsn(seen.origin_lsn)}, Kafka only "
            f"{format_lsn(record.end_lsn)}: Kafka lost committed data",
            slot,
            record.end_lsn,
            "restore the topics, or start over with a new slot and topic prefix",
        )
    if seen.slot is None:
        raise _disagreement(
            "the slot is gone, though Kafka has a progress record",
            slot,
            record.end_lsn,
            "changes after this LSN may be lost: restore the slot, or start over with a new slot "
            "and topic prefix; after a failover, the slot was not ready (slotfailover check)",
        )
    _check_slot(seen.slot, record, slot)


def _check_beginning(seen: Witnesses, slot: str) -> None:
    if seen.origin_lsn is not None:
        raise _disagreement(
            f"the replication origin has {format_lsn(seen.origin_lsn)}, but Kafka has no progress "
            "record",
            slot,
            seen.origin_lsn,
            "check kafka.bootstrap_servers and kafka.topic_prefix; if the topics are lost, start "
            "over with a new slot and topic prefix",
        )
    if seen.slot is not None and seen.slot.invalidation_reason is not None:
        raise _invalidated(seen.slot, slot)


def _check_identity(record: ProgressRecord, seen: Witnesses, slot: str) -> None:
    if record.system_identifier != seen.server.system_identifier:
        raise OperatorNeeded(
            f"this database is {seen.server.system_identifier}, Kafka's progress is of "
            f"{record.system_identifier}",
            operation="compare witnesses",
            subject=f"slot {slot}",
            hint="correct source.conninfo, or use another kafka.topic_prefix for this database",
            exit_code=ExitCode.WRONG_DATABASE,
        )


def _check_timeline(record: ProgressRecord, seen: Witnesses, slot: str) -> None:
    timeline = seen.server.timeline
    reached = max(record.end_lsn, record.commit_lsn + 1 if record.seq else 0)
    if record.timeline > timeline:
        raise Retryable(
            f"this server is on timeline {timeline}, Kafka's progress on {record.timeline}: it is "
            "an old primary",
            operation="compare witnesses",
            subject=f"slot {slot}",
            lsn=reached,
            hint="stop or rejoin the old primary; name the new one in source.conninfo",
            exit_code=ExitCode.TIMELINE,
        )
    if record.timeline == timeline:
        return
    switch = seen.switch_points.get(record.timeline)
    if switch is None or reached > switch:
        raise Diverged(slot, record.timeline, timeline, switch, reached)


def _check_slot(found: Slot, record: ProgressRecord, slot: str) -> None:
    if found.invalidation_reason is not None:
        raise _invalidated(found, slot)
    confirmed = found.confirmed_flush_lsn
    if confirmed is not None and confirmed > max(record.end_lsn, record.ahead_lsn):
        raise _disagreement(
            f"the slot is confirmed up to {format_lsn(confirmed)}, Kafka has "
            f"{format_lsn(record.end_lsn)}: the changes between can't be decoded again",
            slot,
            record.end_lsn,
            "someone else advanced or recreated the slot; start over with a new slot and prefix",
        )


def _invalidated(found: Slot, slot: str) -> OperatorNeeded:
    return _disagreement(
        f"the slot is invalidated ({found.invalidation_reason})",
        slot,
        found.confirmed_flush_lsn,
        "its WAL or catalog rows are gone: start over with a new slot and topic prefix; raise "
        "max_slot_wal_keep_size or idle_replication_slot_timeout",
    )


def _disagreement(message: str, slot: str, lsn: int | None, hint: str) -> OperatorNeeded:
    return OperatorNeeded(
        message, operation="compare witnesses", subject=f"slot {slot}", lsn=lsn, hint=hint
    )
