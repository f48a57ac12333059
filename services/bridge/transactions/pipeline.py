"""pgoutput's bytes to portions: which state machine gets a message. Pure, for one connection.

    inside a streamed block        Streams keeps it        (services.bridge.transactions.streams)
    inside a prepared transaction  Prepared keeps it       (services.bridge.transactions.prepared)
    else                           the Assembler takes it  (services.bridge.transactions.assembler)

What was kept reaches the Assembler at its commit.
"""

from collections.abc import Callable, Iterable, Iterator

from schemas.events import PreparedRecord
from services.bridge.decoding.decoder import Decoder
from services.bridge.decoding.messages import (
    PREPARED_MESSAGES,
    STREAM_MESSAGES,
)
from services.bridge.transactions.assembler import Assembler, Portion
from services.bridge.transactions.prepared import Prepared
from services.bridge.transactions.streams import FrameStore, Streams


class Pipeline:
    """`emit` gets every portion in commit order; `breathe` is called now and then meanwhile."""

    def __init__(
        self,
        spool: FrameStore,
        assembler: Assembler,
        *,
        emit: Callable[[Portion], None],
        breathe: Callable[[], None],
        prepared_topic: str,
        slot: str,
        staged: Iterable[PreparedRecord] = (),
    ) -> None:
        self._emit = emit
        self._breathe = breathe
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

    def take(self, payload: bytes, lsn: int, now_us: int) -> None:
        """Take one message that came at WAL position `lsn`. Raises DecodeError, OperatorNeeded."""
        if self._streams.inside and payload[:1] != b"E":
            self._streams.hold(payload, lsn)
            return
        if self._prepared.inside and payload[:1] != b"P":
            self._prepared.hold(payload, lsn)
            return
        message = self._decoder.decode(payload, lsn)
        if isinstance(message, STREAM_MESSAGES):
            self._drain(self._streams.feed(message, lsn, now_us))
            return
        if isinstance(message, PREPARED_MESSAGES):
            self._drain(self._prepared.feed(message, lsn, now_us))
            return
        portion = self._assembler.feed(message, lsn, now_us)
        if portion is not None:
            self._emit(portion)

    def advance(self, wal_end: int) -> None:
        """The server says that nothing before `wal_end` is left to send (a keepalive)."""
        if self._prepared.inside:
            return
        portion = self._assembler.advance(wal_end)
        if portion is not None:
            self._emit(portion)

    def _drain(self, portions: Iterator[Portion | None]) -> None:
        for portion in portions:
            if portion is None:
                self._breathe()
            else:
                self._emit(portion)
