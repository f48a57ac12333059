"""Notes in the progress topic: which hanging transactions the bridge is about to end as committed.

    … T hangs … | note | records that mean nothing, COMMIT | tombstone of the note

Kafka aborts what a dead producer had open. That marker also reaches T, which had been decided to be
committed, and nothing else would tell of it: T's progress record may have been visible all along.
With the note, the next start compares what its partitions show (`republish`).

A note is not part of a Kafka transaction, so that nothing undoes it. Each has a key of its own:
what a bridge that was fenced meanwhile still writes removes no other's. A note that nobody has
removed does no harm, as it is only believed where the partitions show that something is missing.
"""

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Final

from schemas.events import SETTLING_KEY_PREFIX, progress_topic
from schemas.progress import HangingRange, ProgressRecord, SettlingNote
from services.bridge.recovery.event_positions import is_note
from services.bridge.sink.offsets import Partition
from services.bridge.sink.topics import Topics
from services.kafka.delivery import deliver
from services.kafka.records import READ_DEADLINE_S, Record, parse_record

_TAIL_RECORDS: Final = 200
_RANGES_MAX: Final = 2000
"""Of one note: it must not be larger than a record may be."""
_OPERATION: Final = "note which hanging transactions to end"


def write_note(
    topics: Topics,
    slot: str,
    starts: Mapping[Partition, int],
    record: ProgressRecord | None,
) -> list[bytes]:
    """Note that the records of these partitions from their offsets on are about to be committed.

    Return the keys, for `clear`, once Kafka has the notes. Raise Retryable where it has not.
    """
    ranges = [_range(topics, where, start) for where, start in starts.items()]
    now_ms = time.time_ns() // 1_000_000
    notes: dict[bytes, bytes | None] = {}
    for since in range(0, len(ranges), _RANGES_MAX):
        some = ranges[since : since + _RANGES_MAX]
        note = SettlingNote(slot=slot, ranges=some, record=record, ts_ms=now_ms)
        key = b"%s%s:%s" % (SETTLING_KEY_PREFIX, slot.encode(), uuid.uuid4().hex.encode())
        notes[key] = note.model_dump_json().encode()
    _write(topics, notes)
    return [*notes]


def clear(topics: Topics, keys: Iterable[bytes]) -> None:
    """Remove the notes of transactions that are committed."""
    _write(topics, dict.fromkeys(keys))


def read_notes(topics: Topics, slot: str) -> dict[bytes, SettlingNote]:
    """Return the slot's notes by key; all of them are behind its last progress record.

    While there is a note, no session writes another progress record without judging it. No
    transaction of this bridge may hang in the topic. Raise as `last_progress` does.
    """
    topic, own = progress_topic(topics.prefix), slot.encode()
    found: dict[bytes, SettlingNote] = {}
    for offset, key, value in _tail(topics, own):
        if key == own and value is not None:
            found.clear()
        elif isinstance(key, bytes) and is_note(key):
            found.pop(key, None)
            if value is not None:
                found[key] = parse_record(SettlingNote, topic, offset, value)
    return {key: note for key, note in found.items() if note.slot == slot}


def _tail(topics: Topics, own: bytes) -> list[Record]:
    """Read the progress topic from the last record of the key `own` on, or from some before it."""
    deadline = time.monotonic() + READ_DEADLINE_S
    found: list[Record] = []
    with topics.reader(progress_topic(topics.prefix)) as reader:
        low, start = reader.bounds()
        step = _TAIL_RECORDS
        while start > low and not any(key == own and value for _, key, value in found):
            stop, start = start, max(low, start - step)
            step *= 2
            found = [*reader.between(start, stop, deadline), *found]
    return found


def _range(topics: Topics, where: Partition, start: int) -> HangingRange:
    """Return the records from `start` to the partition's end, counted, with aborted ones."""
    topic, partition = where
    with topics.reader(topic, partition, committed=False) as reader:
        end = reader.bounds()[1]
        deadline = time.monotonic() + READ_DEADLINE_S
        messages = reader.messages(start, end, deadline)
        count = sum(1 for _ in topics.waiter.each(messages, _TAIL_RECORDS))
    return HangingRange(topic=topic, partition=partition, start=start, end=end, records=count)


def _write(topics: Topics, notes: Mapping[bytes, bytes | None]) -> None:
    """Return once Kafka has all of `notes`, outside of any transaction."""
    deliver(
        topics.settings,
        progress_topic(topics.prefix),
        notes,
        operation=_OPERATION,
        hint="check that as many replicas of the topic as min.insync.replicas asks for run",
        waiter=topics.waiter,
    )
