"""A connector's offset as Kafka Connect stores it: parsed, and as a file holds it. Pure.

A distributed worker keeps it in a compacted topic, a standalone one in a file: a Java map of byte
arrays, as Java serializes it. Key: `["connector",{"server":"prefix"}]`; value: a JSON object.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_MAP: Final = (
    b"\xac\xed\x00\x05sr\x00\x11java.util.HashMap\x05\x07\xda\xc1\xc3\x16`\xd1\x03\x00\x02"
    b"F\x00\nloadFactorI\x00\tthresholdxp"
)
_ARRAY: Final = b"ur\x00\x02[B\xac\xf3\x17\xf8\x06\x08T\xe0\x02\x00\x00xp"
_ARRAY_AGAIN: Final = b"uq\x00~\x00\x02"
_NULL: Final = b"p"
_END: Final = b"x"
_LOAD_FACTOR: Final = 0.75
_CAPACITY_MIN: Final = 16


class Offset(NamedTuple):
    """The position up to which Debezium says it has published, in WAL positions; 0: none.

    `commit_lsn`: the end of the last transaction that is there whole. `lsn`: the last change.
    """

    commit_lsn: int
    lsn: int
    unfinished: str
    """Which snapshot is not finished, "" for none."""


def offset_of(value: bytes) -> Offset:
    """Read an offset. Raise ValueError for anything else."""
    document = json.loads(value)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004
    processed = int(document.get("lsn_proc") or document.get("lsn") or 0)
    return Offset(
        int(document.get("lsn_commit") or 0),
        max(processed, int(document.get("lsn") or 0)),
        _snapshot(document),
    )


def _snapshot(document: Mapping[str, Any]) -> str:
    """Return the snapshot that Debezium has not finished, "" if it has."""
    finished = document.get("last_snapshot_record") or document.get("snapshot_completed")
    if document.get("snapshot") not in (None, False, "false") and not finished:
        return "the initial snapshot"
    if document.get("incremental_snapshot_collections"):
        return "an incremental snapshot"
    return ""


def released_offset(lsn: int, time_us: int) -> bytes:
    """Return the offset with which Debezium begins at `lsn` and searches for nothing.

    Without `lsn_proc` and `lsn_commit` it takes the first message that the server sends. Source:
    PostgresStreamingChangeEventSource.execute.
    """
    return json.dumps({"ts_usec": time_us, "lsn": lsn}, separators=(",", ":")).encode()


def offset_key(connector: str, prefix: str) -> bytes:
    """Return the key of a connector's offset, as Connect writes it."""
    return json.dumps([connector, {"server": prefix}], separators=(",", ":")).encode()


def is_key(key: bytes | str | None, connector: str, prefix: str) -> bool:
    """Tell whether `key` is the key of this connector's offset."""
    try:
        return bool(json.loads(key or b"null") == [connector, {"server": prefix}])
    except ValueError:
        return False


def read_map(data: bytes) -> dict[bytes, bytes | None]:
    """Return what a standalone worker's offset file has. Raise ValueError for another file.

    A worker that is killed while it writes the file leaves a part of it, which it takes for nothing
    when it starts again (FileOffsetBackingStore.load): so it is here.
    """
    if not data.startswith(_MAP[: len(data)]):
        raise ValueError("it is not a standalone worker's offset file")
    try:
        (count,) = struct.unpack_from(">i", data, len(_MAP) + 14)
        at = len(_MAP) + 18
        found: dict[bytes, bytes | None] = {}
        for _ in range(count):
            key, at = _bytes(data, at)
            value, at = _bytes(data, at)
            found[key or b""] = value
    except struct.error:
        return {}
    if data[at:] not in (_END, b""):
        raise ValueError("it has more than a map")
    return found if data[at:] else {}


def _bytes(data: bytes, at: int) -> tuple[bytes | None, int]:
    """Read a serialized Java byte[] at `at`; return it (None for null) and where it ends.

    Raise struct.error where the data is cut off, ValueError for another object.
    """
    if data[at : at + 1] == _NULL:
        return None, at + 1
    for start in (_ARRAY, _ARRAY_AGAIN):
        if data.startswith(start, at):
            at += len(start)
            (length,) = struct.unpack_from(">i", data, at)
            (found,) = struct.unpack_from(f"{length}s", data, at + 4)
            return found, at + 4 + length
    if any(start.startswith(data[at:]) for start in (_ARRAY, _ARRAY_AGAIN)):
        raise struct.error("cut off")
    raise ValueError("it is not a map of byte arrays")


def write_map(offsets: Mapping[bytes, bytes | None]) -> bytes:
    """Return the offset file with `offsets`."""
    capacity = _CAPACITY_MIN
    while capacity * _LOAD_FACTOR < len(offsets):
        capacity *= 2
    out = [_MAP, struct.pack(">fi", _LOAD_FACTOR, int(capacity * _LOAD_FACTOR))]
    out.append(b"w\x08" + struct.pack(">ii", capacity, len(offsets)))
    start = _ARRAY
    for pair in offsets.items():
        for one in pair:
            if one is None:
                out.append(_NULL)
            else:
                out.append(start + struct.pack(">i", len(one)) + one)
                start = _ARRAY_AGAIN
    return b"".join([*out, _END])
