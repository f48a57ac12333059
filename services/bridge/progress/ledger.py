"""The positions of a session, and the check that all witnesses agree on them. Pure.

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

from typing import NamedTuple

from schemas.lsn import format_lsn
from schemas.progress import ProgressRecord
from services.bridge.progress.consistency import Witnesses, check_server, invalidated
from services.bridge.progress.errors import RECOVER, disagreement
from services.postgres.slots import Slot
from services.postgres.witness_sequences import SCHEMA, sequence_name


class Position(NamedTuple):
    """A resume point, with the fields that a ProgressRecord has."""

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
        """Note that the server has sent everything up to `lsn`."""
        self.received = max(self.received, lsn)

    def publish(self, position: Position) -> None:
        """Note that everything up to `position` is in the open Kafka transaction, or in Kafka."""
        assert position >= self.published or position.end_lsn >= self.published.end_lsn
        self.receive(position.end_lsn)
        self.published = position

    def commit(self, ahead: int = 0) -> None:
        """Note that the open Kafka transaction has committed.

        Its record allows the slot to be confirmed up to `ahead`, if nothing up to there has events.
        """
        assert self.published.end_lsn >= self.durable.end_lsn
        self.durable = self.published
        self._recorded_lsn = self.durable.end_lsn
        self.ahead = ahead

    def report(self, *, follow: bool = False) -> int:
        """Return the LSN that may be confirmed to the slot; it is never past what Kafka has.

        With `follow`, the caller says that what was published since has no events: the slot may
        then be confirmed beyond Kafka's position too, as far as the record in Kafka allows
        (`ahead`).
        """
        followed = min(self.published.end_lsn, self.ahead) if follow else 0
        self.flushed = max(self.flushed, self.durable.end_lsn, followed)
        return self.flushed

    def mark_origin(self) -> int:
        """Return the LSN to store in the replication origin: the position that Kafka has."""
        self.origin = max(self.origin, self._recorded_lsn)
        return self.origin

    @property
    def outstanding(self) -> bool:
        """Whether something is published that Kafka has not committed."""
        return self.published != self.durable


def resume_at(record: ProgressRecord, slot: Slot | None) -> Position:
    """Return the resume point of a progress record; a later one where the slot is confirmed ahead.

    What lies between has no events, and the server does not send it again. Without this step the
    next record could name a position before the slot's, which announces nothing.
    """
    confirmed = (slot.confirmed_flush_lsn if slot is not None else None) or 0
    return Position(
        record.position.commit_lsn, max(record.position.end_lsn, confirmed), record.position.seq
    )


def check_witnesses(record: ProgressRecord, seen: Witnesses, slot: str) -> None:
    """Check that the session may go on from `record`, the last one that Kafka has.

    Raise what check_server raises, and OperatorNeeded (WITNESSES_DISAGREE).
    """
    check_server(record, seen, slot)
    if seen.noted_lsn is not None and seen.noted_lsn > record.position.end_lsn:
        by_hand = ", or somebody has set the sequence" if "sequence" in seen.noted_by else ""
        raise disagreement(
            f"the {seen.noted_by} has {format_lsn(seen.noted_lsn)}, Kafka only "
            f"{format_lsn(record.position.end_lsn)}: Kafka lost committed data{by_hand}",
            slot,
            record.position.end_lsn,
            f"restore the topics, or {RECOVER}",
        )
    confirmed = seen.slot.confirmed_flush_lsn if seen.slot is not None else None
    if confirmed is not None and confirmed > max(
        record.position.end_lsn, record.position.ahead_lsn
    ):
        raise disagreement(
            f"the slot is confirmed up to {format_lsn(confirmed)}, Kafka has "
            f"{format_lsn(record.position.end_lsn)}: the changes between can't be decoded again",
            slot,
            record.position.end_lsn,
            f"someone else advanced or recreated the slot: {RECOVER}",
        )


def check_beginning(seen: Witnesses, slot: str) -> None:
    """Check that a first start is the first: the server has no trace of an earlier one."""
    if seen.noted_lsn is not None:
        raise disagreement(
            f"the {seen.noted_by} has {format_lsn(seen.noted_lsn)}, but Kafka has no progress "
            "record",
            slot,
            seen.noted_lsn,
            "check kafka.bootstrap_servers and kafka.topic_prefix; if the topics are lost, "
            f"{RECOVER}{_of_dump(seen, slot)}",
        )
    if seen.slot is not None and seen.slot.invalidation_reason is not None:
        raise invalidated(seen.slot, slot)


def _of_dump(seen: Witnesses, slot: str) -> str:
    """Return what to do where the sequence was copied: unlike an origin, it is in a dump."""
    if seen.witness != "sequence" or seen.origin_lsn is None:
        return ""
    name = f"{SCHEMA}.{sequence_name(slot)}"
    return f"; if the database was restored from a dump: SELECT setval('{name}', 1, false)"
