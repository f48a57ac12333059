"""A prepared transaction as records of `<prefix>.prepared`, and back. Pure.

    part 0      PreparedRecord (JSON), written last
    part n      a piece of zlib(frames), PART_BYTES each          frames as in the spool
    tombstones  of all parts, once it is decided; a header tells the end_lsn of the decision

All parts are written in the Kafka transaction that moves the progress past the PREPARE; a large one
in several, of which the last has part 0 and moves it. What a crash leaves before that is written
again under the same keys.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from schemas.events import PreparedKey, PreparedRecord
from services.bridge.events.event import Event
from services.bridge.pgoutput.messages import Frame
from services.bridge.transactions.frames import pack_frame, unpack_frames
from services.bridge.transactions.replay import BATCH_FRAMES

DECIDED_AT: Final = "end_lsn"
PART_BYTES: Final = 512 * 1024
_COMPRESSION: Final = 1
_WINDOW_BYTES: Final = 256 * 1024


def staged_parts(
    topic: str, slot: str, gid: str, frames: Iterable[Frame]
) -> Iterator[Event | None]:
    """Yield the records of the frames, parts 1 and on.

    None now and then: the caller's chance to keep its connection alive.
    """
    packer = zlib.compressobj(_COMPRESSION)
    buffer = bytearray()
    part = 0
    for number, frame in enumerate(frames, 1):
        if number % BATCH_FRAMES == 0:
            yield None
        buffer += packer.compress(pack_frame(frame))
        while len(buffer) >= PART_BYTES:
            part += 1
            yield Event(topic, part_key(slot, gid, part), bytes(buffer[:PART_BYTES]))
            del buffer[:PART_BYTES]
    buffer += packer.flush()
    yield Event(topic, part_key(slot, gid, part + 1), bytes(buffer))


def staged_header(topic: str, record: PreparedRecord) -> Event:
    """Return part 0, the description of a staged transaction."""
    value = record.model_dump_json().encode()
    return Event(topic, part_key(record.slot, record.gid, 0), value)


def tombstones(topic: str, record: PreparedRecord, decided_at: int) -> list[Event]:
    """Return the records that remove a staging, part 0 first.

    Their headers tell where the decision's WAL ends.
    """
    keys = (part_key(record.slot, record.gid, part) for part in range(record.parts + 1))
    return [Event(topic, key, None, [(DECIDED_AT, str(decided_at))]) for key in keys]


def read_frames(parts: Iterable[bytes]) -> Iterator[Frame]:
    """Yield the frames of parts 1 and on. Raise ValueError when they are not whole."""
    unpacker = zlib.decompressobj()
    rest = b""
    try:
        for piece in _unpacked(unpacker, parts):
            rest += piece
            used = 0
            for frame, end in unpack_frames(rest):
                yield frame
                used = end
            rest = rest[used:]
    except zlib.error as error:
        raise ValueError("not compressed as it was staged") from error
    if rest or not unpacker.eof:
        raise ValueError("a staged part is missing")


def _unpacked(unpacker: "zlib._Decompress", parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield pieces of at most _WINDOW_BYTES, and what is left at the end."""
    for part in parts:
        waiting = part
        while waiting:
            yield unpacker.decompress(waiting, _WINDOW_BYTES)
            waiting = unpacker.unconsumed_tail
    yield unpacker.flush()


def part_key(slot: str, gid: str, part: int) -> bytes:
    """Return the key of a part's record."""
    return PreparedKey(slot=slot, gid=gid, part=part).model_dump_json().encode()
