"""Reads the progress topic without fencing and without waiting, as any process may.

    … committed records …  | last stable offset |  … records of transactions not ended …  | end
      `record`: the last                            `hidden`: those of the slot

A bridge that is alive may go on writing meanwhile. What was committed stays true.
"""

import time
from typing import NamedTuple

from schemas.events import progress_topic
from schemas.progress import ProgressRecord
from services.bridge.recovery.event_positions import is_note
from services.bridge.sink.topics import Topics
from services.kafka.records import READ_DEADLINE_S, parse_record

_TAIL_RECORDS = 200
_HIDDEN_MAX = 1000


class Visible(NamedTuple):
    """The visible record of a slot, and the `others` that have a record in the topic too.

    A slot whose last record is a tombstone has none. Where the slot has no record, the whole topic
    was read; else from its last one on.
    """

    record: ProgressRecord | None
    hidden: tuple[ProgressRecord, ...]
    others: tuple[str, ...]


def read_visible(topics: Topics, slot: str) -> Visible:
    """Read backwards, more at each step, to the slot's last record.

    Raise OperatorNeeded for a record that is not a ProgressRecord, Retryable when the broker does
    not answer.
    """
    topic, key = progress_topic(topics.prefix), slot.encode()
    deadline = time.monotonic() + READ_DEADLINE_S
    seen: dict[str, bool] = {}
    record = None
    with topics.reader(topic) as reader:
        low, end = reader.bounds()
        start = stable = min(reader.stable_end(), end)
        step = _TAIL_RECORDS
        removed = False
        while record is None and start > low:
            stop, start = start, max(low, start - step)
            step *= 2
            chunk: dict[str, bool] = {}
            last: tuple[int, bytes | None] | None = None
            for offset, name, value in reader.between(start, stop, deadline):
                if is_note(name):
                    continue
                if name != key:
                    chunk[_text(name)] = value is not None
                else:
                    last = (offset, value)
            if last is not None and not removed:
                offset, value = last
                removed = value is None
                record = (
                    None if value is None else parse_record(ProgressRecord, topic, offset, value)
                )
            seen = chunk | seen
    hidden = []
    with topics.reader(topic, committed=False) as reader:
        for offset, name, value in reader.between(stable, min(end, stable + _HIDDEN_MAX), deadline):
            if name == key and value is not None:
                hidden.append(parse_record(ProgressRecord, topic, offset, value))
    others = sorted(name for name, present in seen.items() if present)
    return Visible(record, tuple(hidden), tuple(others))


def _text(name: bytes | str | None) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
