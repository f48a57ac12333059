"""Kept messages of one transaction, fed to the Assembler when its commit is known. Pure."""

from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from services.bridge.compiled import Messages, new_messages
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import Begin, Commit, Frame
from services.bridge.transactions.assembler import Assembler, EventBatch

BATCH_FRAMES: Final = 1_000
BATCH_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Decision:
    """The commit of a transaction whose messages were kept; positions as in Commit."""

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_time_us: int


def surviving(frames: Iterable[Frame], aborted: Collection[int]) -> Iterator[Frame]:
    """Leave out what was rolled back, descriptions too: the server gives them anew afterwards."""
    for frame in frames:
        if frame.subxid not in aborted:
            yield frame


def replay(
    frames: Iterable[Frame],
    decision: Decision,
    *,
    decoder: Decoder,
    assembler: Assembler,
    lsn: int,
    now_us: int,
) -> Generator[EventBatch | None, None, EventBatch | None]:
    """Yield the transaction's batches but the last, complete one, and return that.

    None now and then: the caller's chance to keep its connection alive. None is returned for what
    Kafka has whole. `decoder` must be new; it knows the relations afterwards.
    """
    feed, take = assembler.feed, assembler.take
    feed(Begin(decision.commit_lsn, decision.commit_time_us, decision.xid), lsn, now_us)
    kept = iter(frames)
    while messages := _some(kept):
        index = 0
        while index < len(messages):
            index = assembler.rows(messages, index, decoder)
            batch = assembler.full()
            if batch is None and index < len(messages):
                at, payload = messages[index]
                batch = take(decoder, payload, at, now_us)
                index += 1
            if batch is not None:
                yield batch
        yield None
    end = Commit(decision.commit_lsn, decision.end_lsn, decision.commit_time_us)
    return feed(end, lsn, now_us)


def _some(frames: Iterator[Frame]) -> Messages:
    """Return the next batch of messages, bounded by BATCH_FRAMES and BATCH_BYTES.

    Between two batches the caller answers the server.
    """
    messages = new_messages()
    size = 0
    for frame in frames:
        messages.append((frame.lsn, frame.payload))
        size += len(frame.payload)
        if len(messages) >= BATCH_FRAMES or size >= BATCH_BYTES:
            break
    return messages
