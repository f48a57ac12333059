"""pgoutput's bytes to batches: which state machine gets a message. Pure, for one connection.

    inside a streamed block        Streams keeps it        (services.bridge.transactions.streams)
    inside a prepared transaction  Prepared keeps it       (services.bridge.transactions.prepared)
    else                           the Assembler takes it  (services.bridge.transactions.assembler)

What was kept reaches the Assembler at its commit.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from schemas.events import HEARTBEAT_PREFIX, MARKER_PREFIX, PreparedRecord
from schemas.snapshot import SNAPSHOT_PREFIX
from services.bridge.compiled import Messages
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import PREPARED_MESSAGES, STREAM_MESSAGES
from services.bridge.transactions.assembler import Assembler, EventBatch
from services.bridge.transactions.prepared import Prepared
from services.bridge.transactions.streams import FrameStore, Streams
from services.waiter import Waiter

_PLAIN_KINDS: Final = frozenset((b"C", b"I", b"U", b"D"))
"""In a transaction that is open, whatever else is: no block can be."""
_STREAM_KINDS: Final = frozenset((b"S", b"E", b"c", b"A"))
_PREPARED_KINDS: Final = frozenset((b"b", b"P", b"p", b"K", b"r"))
_PREFIX_AT: Final = 1 + 1 + 8
"""Where the prefix of a logical message begins: kind, flags, LSN; in a streamed block, an xid."""
_XID_BYTES: Final = 4
_MARKER_BYTES_MAX: Final = 1024


class Pipeline:
    """`emit` gets every batch in commit order; `waiter`: of long replays."""

    def __init__(
        self,
        spool: FrameStore,
        assembler: Assembler,
        *,
        emit: Callable[[EventBatch], None],
        waiter: Waiter,
        prepared_topic: str,
        slot: str,
        staged: Iterable[PreparedRecord] = (),
    ) -> None:
        self.skipped = ""
        """The first prefix of logical messages that no setting names."""
        self._emit = emit
        self._waiter = waiter
        self._assembler = assembler
        self._decoder = Decoder()
        self._streams = Streams(spool, assembler, self._decoder)
        self._prepared = Prepared(
            spool,
            self._streams,
            assembler,
            self._decoder,
            topic=prepared_topic,
            slot=slot,
            staged=staged,
        )

    def take_all(self, messages: Messages, now_us: int) -> None:
        """Take messages with the WAL positions that they came at. Raise as `take`.

        As many at once as can be: whole transactions, rows of the open one, any other message.
        """
        assembler, decoder = self._assembler, self._decoder
        index, count = 0, len(messages)
        while index < count:
            batch = None
            if assembler.inside:
                index = assembler.rows(messages, index, decoder)
                batch = assembler.full()
            elif not (self._streams.inside or self._prepared.inside):
                index, batch = assembler.transactions(messages, index, decoder, now_us)
            if batch is not None:
                self._emit(batch)
            elif index < count:
                lsn, payload = messages[index]
                self.take(payload, lsn, now_us)
                index += 1

    def take(self, payload: bytes, lsn: int, now_us: int) -> None:
        """Take one message that came at WAL position `lsn`. Raise DecodeError, OperatorNeeded."""
        kind = payload[:1]
        if kind == b"M":
            payload = self._wanted(payload)
        if kind in _PLAIN_KINDS and self._assembler.inside:
            self._feed(payload, lsn, now_us)
            return
        if self._streams.inside and kind != b"E":
            self._streams.hold(payload, lsn)
            return
        if self._prepared.inside and kind != b"P":
            self._prepared.hold(payload, lsn)
            return
        if kind in _STREAM_KINDS:
            message = self._decoder.decode(payload, lsn)
            assert isinstance(message, STREAM_MESSAGES)
            self._drain(self._streams.feed(message, lsn, now_us))
        elif kind in _PREPARED_KINDS:
            message = self._decoder.decode(payload, lsn)
            assert isinstance(message, PREPARED_MESSAGES)
            self._drain(self._prepared.feed(message, lsn, now_us))
        else:
            self._feed(payload, lsn, now_us)

    def _wanted(self, payload: bytes) -> bytes:
        """Return a logical message, without its content where nobody wants that.

        Any login may write one of any size, without a grant.
        """
        at = _PREFIX_AT + (_XID_BYTES if self._streams.inside else 0)
        end = payload.find(b"\0", at)
        prefix = payload[at:end].decode(errors="replace")
        forged = prefix == MARKER_PREFIX and len(payload) - end > _MARKER_BYTES_MAX
        wanted = prefix == SNAPSHOT_PREFIX or self._assembler.publishes(prefix)
        if end < 0 or (wanted and not forged):
            return payload
        if not prefix.startswith(HEARTBEAT_PREFIX):
            self.skipped = self.skipped or prefix
        return payload[: end + 1] + bytes(4)

    def _feed(self, payload: bytes, lsn: int, now_us: int) -> None:
        batch = self._assembler.take(self._decoder, payload, lsn, now_us)
        if batch is not None:
            self._emit(batch)

    def advance(self, wal_end: int) -> None:
        """Move the position to `wal_end`: a keepalive said that nothing before is left to send."""
        if self._prepared.inside:
            return
        batch = self._assembler.advance(wal_end)
        if batch is not None:
            self._emit(batch)

    def _drain(self, batches: Iterator[EventBatch | None]) -> None:
        """Emit batches; between them, where there is None, let others work."""
        for batch in batches:
            if batch is None:
                self._waiter.turn()
            else:
                self._emit(batch)
        self._decoder.writers.clear()  # what was replayed may have described relations anew
