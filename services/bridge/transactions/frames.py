"""Frames as bytes: subxid:u32 lsn:u64 length:u32 payload, one raw pgoutput message each. Pure."""

import struct
from collections.abc import Iterator

from services.bridge.pgoutput.messages import Frame

HEAD = struct.Struct("!IQI")


def pack_frame(frame: Frame) -> bytes:
    """Return the bytes of one frame."""
    return HEAD.pack(frame.subxid, frame.lsn, len(frame.payload)) + frame.payload


def unpack_frames(data: bytes | bytearray) -> Iterator[tuple[Frame, int]]:
    """Yield the whole frames at the start of `data`, each with the position after it."""
    pos = 0
    while pos + HEAD.size <= len(data):
        subxid, lsn, length = HEAD.unpack_from(data, pos)
        start = pos + HEAD.size
        if start + length > len(data):
            return
        pos = start + length
        yield Frame(subxid, lsn, bytes(data[start:pos])), pos
