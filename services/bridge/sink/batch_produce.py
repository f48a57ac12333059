"""Send many records to librdkafka: by rd_kafka_produce, else through confluent-kafka.

Calling rd_kafka_produce directly (services.bridge.compiled.records) requires the C extension and a
confluent-kafka release whose Handle layout is verified (KNOWN_VERSIONS). confluent-kafka's own
`produce` parses its arguments and has librdkafka look up the topic under a lock for each record.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Final

from confluent_kafka import KafkaException, Producer, cimpl

from services.bridge import compiled
from services.bridge.compiled import foreign
from services.bridge.events.event import Event

VERSION: Final = version("confluent-kafka")
KNOWN_VERSIONS: Final = frozenset({"2.16.1"})
"""Those whose Handle (confluent_kafka.h) is known to begin with the rd_kafka_t*."""
NOT_TAKEN: Final = (BufferError, KafkaException)
"""The exceptions of `produce` when it has not taken a record."""

Send = Callable[[Sequence[Event], int, int, dict[str, int], set[str]], int]
"""send(events, index, end, ready, touched) -> index of the first of events[index:end] that is not
sent; the topics of those that are, are added to `touched`, perhaps with that of the first other.

All are sent (`end`), or that one calls for care: it is for every partition, names one that its
topic lacks, or is of a topic that is not in `ready` (topic -> number of partitions); or it was not
taken.
"""


def sender(producer: Producer) -> Send:
    """Return the fastest function that sends records into `producer`."""
    if compiled.engine is not None and (handle := _handle(producer)):
        straight: Send = compiled.engine.records.Records(producer, handle, *FUNCTIONS).send
        return straight
    return partial(plain, producer.produce)


def plain(
    produce: Callable[..., None],
    events: Sequence[Event],
    index: int,
    end: int,
    ready: dict[str, int],
    touched: set[str],
) -> int:
    """Send as `Send` does, by confluent-kafka's `produce`."""
    while index < end:
        event = events[index]
        topic, placed_by = event.topic, event.placed_by
        if event.broadcast or topic not in ready:
            break
        if isinstance(placed_by, int) and not 0 <= placed_by < ready[topic]:
            break
        touched.add(topic)
        partition = partition_of(placed_by, ready[topic])
        try:
            produce(topic, event.value, event.key, partition, headers=event.headers)
        except NOT_TAKEN:
            break
        index += 1
    return index


def _handle(producer: Producer) -> int:
    """Return the address of librdkafka's producer, whose opaque is `producer`; 0 if not known."""
    if VERSION not in KNOWN_VERSIONS or not all((_OPAQUE, *FUNCTIONS)):
        return 0
    handle = ctypes.c_void_p.from_address(id(producer) + object.__basicsize__).value
    opaque = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_OPAQUE)
    return handle if handle and opaque(handle) == id(producer) else 0


def partition_of(placed_by: bytes | int | None, partitions: int) -> int:
    """Return the partition that `placed_by` is or chooses as a key would; -1: the key chooses."""
    if placed_by is None:
        return _BY_KEY
    if isinstance(placed_by, int):
        return placed_by
    return (murmur2(placed_by) & _POSITIVE) % partitions


def murmur2(text: bytes) -> int:
    """Return the hash by which Kafka's clients choose a key's partition (Utils.murmur2)."""
    found = _SEED ^ len(text)
    whole = len(text) // 4 * 4
    for at in range(0, whole, 4):
        word = int.from_bytes(text[at : at + 4], "little") * _FACTOR & _WORD
        word = (word ^ word >> 24) * _FACTOR & _WORD
        found = found * _FACTOR & _WORD ^ word
    if whole < len(text):
        found = (found ^ int.from_bytes(text[whole:], "little")) * _FACTOR & _WORD
    found = (found ^ found >> 13) * _FACTOR & _WORD
    return found ^ found >> 15


_FACTOR: Final = 0x5BD1E995
_SEED: Final = 0x9747B28C
_WORD: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF
_BY_KEY: Final = -1
_OPAQUE: Final = foreign.address(cimpl, "rd_kafka_opaque")
FUNCTIONS: Final = tuple(
    foreign.address(cimpl, f"rd_kafka_{name}")
    for name in ("topic_new", "topic_destroy", "produce", "produceva", "error_destroy")
)
"""Addresses of what Records calls (rdkafka.h)."""
