"""The Kafka record produced for a change, with its source table and position. Pure."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from schemas.events import PLACEHOLDER_VALUES_HEADER
from services.bridge import compiled
from services.bridge.events.shaping.outbox import Headers

EVENT_OVERHEAD_BYTES: Final = 200
"""Bytes of memory of one event beyond its key and value (objects and list slots)."""
FIRST_PARTITION: Final = 0
"""The partition of tables without a key, which keeps them in order."""
REASON_HEADER: Final = "slotbridge.reason"
"""Header of an event without a topic that is of a table: why it has none."""


class Event(NamedTuple):
    """One record for Kafka. `value` None is a tombstone; `broadcast`: to every partition.

    `table` (`schema.table`, empty for a record without a table), `seq` and `lsn` name the change.
    `placed_by`: JSON that chooses the partition as a key would: the key's where `key` also has a
    schema or its id, or that of other columns; a number is the partition; None: `key` chooses.
    `op` is the operation that the row counts as in metrics: c, u, d, t or r, and c of an outbox's
    row; empty for a record without a row of its own, as the tombstone behind a delete.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers | None = None
    broadcast: bool = False
    table: str = ""
    seq: int = -1
    lsn: int = 0
    placed_by: bytes | int | None = None
    op: str = ""


def placeholder_values(names: Iterable[str]) -> Headers | None:
    """Return the header that names columns as JSON strings; None without names."""
    listed = ",".join(names)
    return [(PLACEHOLDER_VALUES_HEADER, f"[{listed}]")] if listed else None


def size_of(events: Iterable[Event]) -> int:
    """Return how many bytes these events take in memory."""
    size = 0
    for event in events:
        size += EVENT_OVERHEAD_BYTES + len(event.value or b"") + len(event.key or b"")
        if isinstance(event.placed_by, bytes):
            size += len(event.placed_by)
    return size


class Stamp(NamedTuple):
    """The fields that all events of a transaction share; times in microseconds since 1970."""

    xid: int
    commit_lsn: int
    commit_time_us: int
    previous_commit_lsn: int
    encoded_us: int


class Ended(NamedTuple):
    """The end of a transaction in a batch: how many of the batch's events come before it."""

    events: int
    stamp: Stamp
    end_lsn: int


if compiled.engine is not None:  # it makes and reads these tuples by the places of their fields
    for kind in (Event, Stamp, Ended):
        assert compiled.engine.rows.FIELDS[kind.__name__] == kind._fields
