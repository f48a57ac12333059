"""Deletion vectors of Iceberg's format version 3, and the Puffin file that holds them.

    blob     length (4, big-endian), magic, vector, CRC-32 of magic and vector (4, big-endian)
    vector   the 64-bit Roaring bitmap's portable form: positions of rows that are deleted

Pure. See the Iceberg specification, "Deletion Vectors", and Puffin's, "deletion-vector-v1".
"""

import json
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from pyroaring import BitMap64

_PUFFIN = b"PFA1"
_MAGIC = b"\xd1\xd3\x39\x64"
_POSITION_FIELD = 2147483645
_HEAD, _TAIL = 4, 4


class Blob(NamedTuple):
    """Where a data file's deletion vector is in a Puffin file, and how many rows it deletes."""

    offset: int
    length: int
    rows: int


def blob(vector: BitMap64) -> bytes:
    """Write a deletion vector."""
    body = _MAGIC + vector.serialize()
    return len(body).to_bytes(_HEAD, "big") + body + zlib.crc32(body).to_bytes(_TAIL, "big")


def vector_of(blob: bytes) -> BitMap64:
    """Read a deletion vector; raise ValueError for bytes that are none."""
    body, crc = blob[_HEAD:-_TAIL], blob[-_TAIL:]
    whole = len(body) == int.from_bytes(blob[:_HEAD], "big")
    if not whole or not body.startswith(_MAGIC) or zlib.crc32(body) != int.from_bytes(crc, "big"):
        raise ValueError("these bytes are not a deletion vector")
    return BitMap64.deserialize(body[len(_MAGIC) :])


def puffin(vectors: Mapping[str, BitMap64]) -> tuple[bytes, dict[str, Blob]]:
    """Write the vectors of data files (by path) into one Puffin file."""
    parts, at = [_PUFFIN], len(_PUFFIN)
    places, described = {}, []
    for path, vector in vectors.items():
        part = blob(vector)
        places[path] = Blob(at, len(part), len(vector))
        described.append(
            {
                "type": "deletion-vector-v1",
                "fields": [_POSITION_FIELD],
                "snapshot-id": -1,
                "sequence-number": -1,
                "offset": at,
                "length": len(part),
                "properties": {"referenced-data-file": path, "cardinality": str(len(vector))},
            }
        )
        parts.append(part)
        at += len(part)
    footer = json.dumps({"blobs": described, "properties": {"created-by": "slottables"}}).encode()
    parts += [_PUFFIN, footer, len(footer).to_bytes(4, "little"), bytes(4), _PUFFIN]
    return b"".join(parts), places
