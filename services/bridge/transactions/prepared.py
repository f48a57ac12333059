"""Two-phase transactions: staged at PREPARE, published at COMMIT PREPARED. Pure.

    message             state     effect
    Begin Prepare       outside   inside the block of its xid
    change              inside    kept raw, after the descriptions that it relies on
    Prepare             inside    outside; staged: its frames go to <prefix>.prepared
    Stream Prepare      outside   staged, with the frames that Streams has kept
    Commit Prepared     outside   Begin, the changes, Commit -> Assembler; the staging is removed
    Rollback Prepared   outside   the staging is removed

Staging and the progress past the PREPARE are one Kafka transaction, so that a decision finds its
changes in Kafka after a crash, on another machine, or on a promoted standby. While they wait, the
frames are kept in the spool too; at start it is filled from Kafka.
Source: PostgreSQL documentation 47.10 "Two-phase Commit Support for Logical Decoding";
src/backend/replication/logical/reorderbuffer.c, ReorderBufferFinishPrepared.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from schemas.errors import OperatorNeeded
from schemas.events import PreparedRecord
from services.bridge.events.event import Event, size_of
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.errors import misplaced
from services.bridge.pgoutput.messages import (
    AnyMessage,
    BeginPrepare,
    CommitPrepared,
    Frame,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamPrepare,
)
from services.bridge.progress.errors import RECOVER_ANYWAY
from services.bridge.transactions.assembler import Assembler, EventBatch
from services.bridge.transactions.replay import Decision, replay, surviving
from services.bridge.transactions.staged_descriptions import StagedDescriptions
from services.bridge.transactions.staging import staged_header, staged_parts, tombstones
from services.bridge.transactions.streams import FrameStore, Streams

_CHANGES: Final = frozenset(b"IUDTM")
_DESCRIPTIONS: Final = frozenset(b"RY")


class Prepared:
    """Stages and publishes a connection's prepared transactions; `staged`: Kafka's, by gid."""

    def __init__(
        self,
        spool: FrameStore,
        streams: Streams,
        assembler: Assembler,
        decoder: Decoder,
        *,
        topic: str,
        slot: str,
        staged: Iterable[PreparedRecord] = (),
    ) -> None:
        self._spool = spool
        self._streams = streams
        self._assembler = assembler
        self._decoder = decoder
        self._topic = topic
        self._slot = slot
        self.staged = {record.gid: record for record in staged}
        self._aborted: dict[str, frozenset[int]] = {}
        self._begin: BeginPrepare | None = None
        self._descriptions = StagedDescriptions(decoder, assembler.sent, assembler.tables)

    @property
    def inside(self) -> bool:
        """Whether a block is open: what comes belongs to it, up to its Prepare."""
        return self._begin is not None

    def hold(self, payload: bytes, lsn: int) -> None:
        """Keep one message of the open block. Raise DecodeError for one that can't be in it."""
        if self._begin is None:
            raise misplaced(f"message {payload[:1]!r} outside of a prepared transaction", lsn)
        kind = payload[0]
        if kind in _DESCRIPTIONS:
            message = self._decoder.decode(payload, lsn)
            self._descriptions.expire()
            if isinstance(message, Relation):
                self._assembler.sent.take(message)
        elif kind in _CHANGES:
            xid = self._begin.xid
            for description in self._descriptions.before(payload, lsn):
                self._spool.append(xid, Frame(xid, lsn, description))
            self._spool.append(xid, Frame(xid, lsn, payload))
        elif kind != b"O"[0]:
            raise misplaced(f"message {payload[:1]!r} in a prepared transaction", lsn)

    def feed(self, message: AnyMessage, lsn: int, now_us: int) -> Iterator[EventBatch | None]:
        """Take a message of PREPARED_MESSAGES that came at `lsn`; yields batches.

        None now and then: the caller's chance to keep its connection alive. Raise OperatorNeeded
        for the commit of a transaction that Kafka does not have.
        """
        match message:
            case BeginPrepare() if self._begin is None and not self._assembler.inside:
                self._begin = message
                self._descriptions.begin()
            case Prepare() if self._begin == (*message,):
                self._begin = None
                yield from self._stage(message, frozenset(), streamed=False)
            case StreamPrepare() if self._begin is None:
                aborted = self._streams.release(message.xid, lsn)
                yield from self._stage(message, aborted, streamed=True)
            case CommitPrepared() if self._begin is None:
                yield from self._commit(message, lsn, now_us)
            case RollbackPrepared() if self._begin is None:
                yield from self._roll_back(message)
            case _:
                raise misplaced(type(message).__name__, lsn)

    def _stage(
        self, prepare: Prepare | StreamPrepare, aborted: frozenset[int], *, streamed: bool
    ) -> Iterator[EventBatch | None]:
        """Yield batches that stage a prepared transaction in Kafka until it is decided."""
        known = self.staged.get(prepare.gid)
        if known is not None:
            _same(known, prepare)
            self._spool.drop(prepare.xid)
            return
        record = PreparedRecord(
            slot=self._slot,
            gid=prepare.gid,
            xid=prepare.xid,
            prepare_lsn=prepare.prepare_lsn,
            end_lsn=prepare.end_lsn,
            prepare_ts_ms=prepare.prepare_time_us // 1000,
            streamed=streamed,
            parts=0,
            changes=0,
        )
        if prepare.end_lsn > self._assembler.position.end_lsn:
            frames = _Counted(surviving(self._spool.replay(prepare.xid), aborted))
            parts = 0
            for part in staged_parts(self._topic, self._slot, prepare.gid, frames):
                parts += part is not None
                yield self._batch([part]) if part is not None else None
            record = record.model_copy(update={"parts": parts, "changes": frames.changes})
            self._assembler.advance(prepare.end_lsn)
            yield self._batch([staged_header(self._topic, record)])
        # Else its decision comes next, or once more: it was prepared before two-phase decoding
        # began, or Kafka has it all. The server sends both again after a crash: nothing to stage.
        self._spool.rename(prepare.xid, waiting_place(prepare.xid))
        self._aborted[record.gid] = aborted
        self.staged[record.gid] = record

    def _commit(self, commit: CommitPrepared, lsn: int, now_us: int) -> Iterator[EventBatch | None]:
        """Yield the batches of a prepared transaction; the last removes its staged records.

        Raise OperatorNeeded where it is not staged and Kafka does not have it.
        """
        record = self.staged.get(commit.gid)
        if record is None and commit.end_lsn <= self._assembler.position.end_lsn:
            return
        if record is None or record.xid != commit.xid:
            raise OperatorNeeded(
                f"the prepared transaction {commit.gid!r} was committed, but its changes are not "
                f"in {self._topic}",
                operation="commit a prepared transaction",
                subject=f"slot {self._slot}, xid {commit.xid}",
                lsn=commit.commit_lsn,
                hint=f"Kafka lost staged records: restore the topic, or {RECOVER_ANYWAY}",
            )
        aborted = self._aborted.get(record.gid, frozenset())
        with self._assembler.sent.aside():
            last = yield from replay(
                surviving(self._spool.replay(waiting_place(record.xid)), aborted),
                Decision(commit.xid, commit.commit_lsn, commit.end_lsn, commit.commit_time_us),
                decoder=Decoder(streamed=record.streamed),
                assembler=self._assembler,
                lsn=lsn,
                now_us=now_us,
            )
        removal = self._remove(record, commit.end_lsn)
        if last is None:
            yield removal
        else:
            yield last._replace(staging=removal.staging)

    def _roll_back(self, rollback: RollbackPrepared) -> Iterator[EventBatch | None]:
        """Remove the staging of a transaction that was rolled back; move the position.

        A transaction that is not staged was prepared before two-phase decoding began.
        """
        record = self.staged.get(rollback.gid)
        self._assembler.advance(rollback.end_lsn)
        if record is not None and record.xid == rollback.xid:
            yield self._remove(record, rollback.end_lsn)
        else:
            yield self._batch([])

    def _remove(self, record: PreparedRecord, decided_at: int) -> EventBatch:
        self._spool.drop(waiting_place(record.xid))
        self._aborted.pop(record.gid, None)
        del self.staged[record.gid]
        return self._batch(tombstones(self._topic, record, decided_at))

    def _batch(self, staging: list[Event]) -> EventBatch:
        return EventBatch([], self._assembler.position, size_of(staging), 0, staging=staging)


class _Counted:
    """Iterates frames and counts the changes among them."""

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._frames = frames
        self.changes = 0

    def __iter__(self) -> Iterator[Frame]:
        for frame in self._frames:
            self.changes += frame.payload[0] in _CHANGES
            yield frame


def waiting_place(xid: int) -> int:
    """Return the spool's key of a staged transaction, apart from later changes of the same xid."""
    return -xid


def _same(staged: PreparedRecord, prepare: Prepare | StreamPrepare) -> None:
    if (staged.xid, staged.prepare_lsn) != (prepare.xid, prepare.prepare_lsn):
        raise OperatorNeeded(
            f"another transaction {prepare.gid!r} (xid {staged.xid}) is staged and undecided",
            operation="stage a prepared transaction",
            subject=f"slot {staged.slot}, xid {prepare.xid}",
            lsn=prepare.prepare_lsn,
            hint="the slot has missed the decision of the other transaction, and other changes; "
            f"{RECOVER_ANYWAY}",
        )
