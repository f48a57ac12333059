"""Streamed transactions in progress: spooled by block, replayed whole at their commit. Pure.

    message         state     effect
    Stream Start    outside   inside the block of its xid
    change          inside    kept raw, under the block's xid, with its own (sub)xid
    Stream Stop     inside    outside
    Stream Abort    outside   of the whole: dropped; of a subtransaction: its changes are left out
    Stream Commit   outside   Begin, the changes that were not rolled back, Commit -> Assembler
    Stream Prepare  outside   handed over to services.bridge.transactions.prepared (`release`)

Blocks of several transactions interleave; commits come in commit order, between blocks.

Of logical messages pgoutput tells the top-level xid alone (pgoutput.c, pgoutput_message): whether
one belongs to a subtransaction that is rolled back can't be known here. The server knows when it
does not stream, so that MessageUnclear ends the session and the next one goes on without streaming.

The server describes a relation once in each streamed transaction, and at its commit takes it for
described outside too, unless something invalidated it since (pgoutput.c, cleanup_rel_sync_cache).
A rollback of any subtransaction makes it describe all anew: descriptions go with their
subtransaction, and those before its rollback are not learned.
Source: PostgreSQL documentation 49.9 "Streaming of Large Transactions for Logical Decoding".
"""

import struct
from collections.abc import Iterator
from typing import Final, Protocol

from schemas.errors import Retryable
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.errors import misplaced
from services.bridge.pgoutput.messages import (
    AnyMessage,
    Frame,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
)
from services.bridge.transactions.assembler import Assembler, EventBatch
from services.bridge.transactions.replay import Decision, replay, surviving

_KINDS_WITH_XID: Final = frozenset(b"RYIUDTM")
_XID = struct.Struct("!I")
_TRANSACTIONAL_AT: Final = 1 + _XID.size
_DESCRIPTIONS: Final = frozenset(b"RY")


class MessageUnclear(Retryable):
    """A message may have been rolled back: go on without streaming, so that the server decides."""


class FrameStore(Protocol):
    """Where frames wait; services.bridge.transactions.spool.Spool is the one."""

    def append(self, xid: int, frame: Frame) -> None: ...
    def replay(self, xid: int) -> Iterator[Frame]: ...
    def rename(self, xid: int, new: int) -> None: ...
    def drop(self, xid: int) -> None: ...


class Streams:
    """Keeps one connection's streamed transactions until their commit.

    The relations of a committed stream are those of later transactions too: `decoder` learns them,
    where it has not been told of a later shape.
    """

    def __init__(
        self,
        spool: FrameStore,
        assembler: Assembler,
        decoder: Decoder,
    ) -> None:
        self._spool = spool
        self._assembler = assembler
        self._decoder = decoder
        self._block: int | None = None
        self._aborted: dict[int, set[int]] = {}
        self._with_messages: set[int] = set()
        self._arrived: dict[int, dict[tuple[int, int], int]] = {}

    @property
    def inside(self) -> bool:
        """Whether a block is open: what comes belongs to it, up to its Stream Stop."""
        return self._block is not None

    @property
    def open_xids(self) -> set[int]:
        """The xids of transactions in progress."""
        return set(self._aborted)

    def hold(self, payload: bytes, lsn: int) -> None:
        """Keep one message of the open block. Raise DecodeError when it carries no xid."""
        if self._block is None:
            raise misplaced(f"message {payload[:1]!r} outside of a streamed block", lsn)
        if payload[:1] == b"O":
            return
        if len(payload) < 1 + _XID.size or payload[0] not in _KINDS_WITH_XID:
            raise misplaced(f"message {payload[:1]!r} in a streamed block", lsn)
        if payload[:1] == b"M" and payload[_TRANSACTIONAL_AT : _TRANSACTIONAL_AT + 1] == b"\1":
            self._with_messages.add(self._block)
        elif payload[0] in _DESCRIPTIONS:
            oid = int.from_bytes(payload[1 + _XID.size : 1 + 2 * _XID.size])
            self._arrived[self._block][payload[0], oid] = self._decoder.arrival()
        self._spool.append(self._block, Frame(_XID.unpack_from(payload, 1)[0], lsn, payload))

    def feed(self, message: AnyMessage, lsn: int, now_us: int) -> Iterator[EventBatch | None]:
        """Take a stream message that came at `lsn`; yields batches at a commit.

        None now and then during a long replay: the caller's chance to keep its connection alive.
        """
        match message:
            case StreamStart(xid, first):
                self._start(xid, first, lsn)
            case StreamStop() if self._block is not None:
                self._block = None
            case StreamAbort(xid, subxid) if self._block is None:
                self._abort(xid, subxid, lsn)
            case StreamCommit() if self._block is None and message.xid in self._aborted:
                yield from self._commit(message, lsn, now_us)
            case _:
                raise misplaced(type(message).__name__, lsn)

    def release(self, xid: int, lsn: int) -> frozenset[int]:
        """Forget a transaction, but not its frames: a Stream Prepare came at `lsn`.

        Return its subtransactions that were rolled back.
        """
        if self._block is not None or xid not in self._aborted:
            raise misplaced("StreamPrepare", lsn)
        self._with_messages.discard(xid)
        del self._arrived[xid]
        return frozenset(self._aborted.pop(xid))

    def _start(self, xid: int, first: bool, lsn: int) -> None:
        if self._block is not None or first == (xid in self._aborted):
            raise misplaced("StreamStart", lsn)
        self._block = xid
        self._aborted.setdefault(xid, set())
        self._arrived.setdefault(xid, {})

    def _abort(self, xid: int, subxid: int, lsn: int) -> None:
        """Forget a rolled-back transaction, or leave out a subtransaction when it is replayed.

        Raise MessageUnclear where a logical message may have been the subtransaction's.
        """
        if subxid == xid:
            self._forget(xid)
        elif xid in self._with_messages:
            raise MessageUnclear(
                "a logical message may belong to a subtransaction that was rolled back",
                operation="assemble streams",
                subject=f"xid {xid}",
                lsn=lsn,
                hint="the bridge continues with streaming off",
            )
        elif xid in self._aborted:
            self._aborted[xid].add(subxid)
            self._arrived[xid].clear()

    def _commit(self, commit: StreamCommit, lsn: int, now_us: int) -> Iterator[EventBatch | None]:
        """Yield the batches of a streamed transaction, replayed from the spool."""
        decoder = Decoder(streamed=True)
        last = yield from replay(
            surviving(self._spool.replay(commit.xid), self._aborted[commit.xid]),
            Decision(*commit),
            decoder=decoder,
            assembler=self._assembler,
            lsn=lsn,
            now_us=now_us,
        )
        self._decoder.learn(decoder, self._arrived[commit.xid])
        self._forget(commit.xid)
        if last is not None:
            yield last

    def _forget(self, xid: int) -> None:
        self._aborted.pop(xid, None)
        self._arrived.pop(xid, None)
        self._with_messages.discard(xid)
        self._spool.drop(xid)
