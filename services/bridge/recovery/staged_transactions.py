"""Reads the prepared transactions of a slot from `<prefix>.prepared` into the spool at a start."""

import time
from collections.abc import Iterator
from typing import Final, Protocol

from schemas.errors import OperatorNeeded
from schemas.events import PreparedKey, PreparedRecord
from services.bridge.pgoutput.messages import Frame
from services.bridge.progress.errors import RECOVER_ANYWAY
from services.bridge.transactions.prepared import waiting_place
from services.bridge.transactions.staging import read_frames
from services.kafka.records import READ_DEADLINE_S, Record, parse_record

_STEP: Final = 20_000


class _Store(Protocol):
    def append(self, xid: int, frame: Frame) -> None: ...


class Records(Protocol):
    """Committed records of a one-partition topic; services.kafka.records.TopicReader is one."""

    topic: str

    def bounds(self) -> tuple[int, int]: ...
    def between(self, start: int, stop: int, deadline: float) -> Iterator[Record]: ...


def load_staged(reader: Records, slot: str, spool: _Store | None = None) -> list[PreparedRecord]:
    """Return the undecided prepared transactions of `slot`, and put their frames into `spool`.

    Raise OperatorNeeded when a part is missing or can't be read, SpoolFull when they exceed the
    spool's bound.
    """
    parts: dict[str, dict[int, int]] = {}
    records: dict[str, PreparedRecord] = {}
    for offset, key, value in _all(reader):
        name = parse_record(PreparedKey, reader.topic, offset, key or b"")
        if name.slot != slot:
            continue
        if value is None:
            parts.get(name.gid, {}).pop(name.part, None)
            if name.part == 0:
                records.pop(name.gid, None)
            continue
        parts.setdefault(name.gid, {})[name.part] = offset
        if name.part == 0:
            records[name.gid] = parse_record(PreparedRecord, reader.topic, offset, value)
    if spool is not None:
        for record in records.values():
            _fill(spool, reader, record, parts[record.gid])
    return list(records.values())


def _all(reader: Records) -> Iterator[Record]:
    """Yield all records; however many there are, each _STEP of them has a deadline of its own."""
    low, end = reader.bounds()
    for start in range(low, end, _STEP):
        deadline = time.monotonic() + READ_DEADLINE_S
        yield from reader.between(start, min(end, start + _STEP), deadline)


def _fill(spool: _Store, reader: Records, record: PreparedRecord, offsets: dict[int, int]) -> None:
    try:
        for frame in read_frames(_values(reader, record, offsets)):
            spool.append(waiting_place(record.xid), frame)
    except ValueError as error:
        raise _broken(reader.topic, f"prepared transaction {record.gid!r}: {error}") from error


def _values(reader: Records, record: PreparedRecord, offsets: dict[int, int]) -> Iterator[bytes]:
    """Yield a staged transaction's parts in order. Raise ValueError for one that is missing."""
    for part in range(1, record.parts + 1):
        if part not in offsets:
            raise ValueError(f"part {part} of {record.parts} is missing")
        offset = offsets[part]
        found = list(reader.between(offset, offset + 1, time.monotonic() + READ_DEADLINE_S))
        if not found or found[0][2] is None:
            raise ValueError(f"part {part} of {record.parts} is gone")
        yield found[0][2]


def _broken(topic: str, what: str) -> OperatorNeeded:
    return OperatorNeeded(
        f"{what}: the transaction can't be published at its COMMIT PREPARED",
        operation="read the staged transactions",
        subject=topic,
        hint=f"Kafka lost staged records: restore the topic, or {RECOVER_ANYWAY}",
    )
