"""The last key of a topic, whose schema the keys to come have (`kafka.key_bytes: connect`)."""

import time
from typing import Final

from schemas.events import SETTLED_KEY
from services.bridge.sink.topics import Topics
from services.kafka.records import READ_DEADLINE_S

_FIRST_LOOK: Final = 20
_FARTHER: Final = 10


def last_key(topics: Topics, topic: str) -> bytes | None:
    """Return the key of a topic's newest committed record that has one, None without one."""
    found: tuple[int, bytes] | None = None
    partitions = topics.partitions(topic) if topics.has(topic) else 0
    for partition in range(partitions):
        one = _of_partition(topics, topic, partition)
        if one is not None and (found is None or one[0] > found[0]):
            found = one
    return None if found is None else found[1]


def _of_partition(topics: Topics, topic: str, partition: int) -> tuple[int, bytes] | None:
    """Return the time and the key of a partition's last record with a key."""
    with topics.reader(topic, partition) as reader:
        low, stop, count = reader.bounds()[0], reader.stable_end(), _FIRST_LOOK
        while stop > low:
            start, found = max(low, stop - count), None
            for message in reader.messages(start, stop, time.monotonic() + READ_DEADLINE_S):
                key = message.key()
                data = key.encode() if isinstance(key, str) else key
                if data is not None and data != SETTLED_KEY:
                    found = message.timestamp()[1], data
            if found is not None:
                return found
            stop, count = start, count * _FARTHER  # markers and aborted records take offsets, too
    return None
