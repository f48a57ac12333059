"""Many records into librdkafka: straight and through confluent-kafka, what is taken is the same."""

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from services.bridge import compiled
from services.bridge.events.event import Event
from services.bridge.events.shaping.outbox import Headers
from services.bridge.sink import batch_produce
from services.bridge.sink.batch_produce import murmur2, partition_of, plain, sender
from services.demo.copies import committed_messages
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.test_topics import prepared
from tests.providers.interface import Broker
from tests.providers.waiting import patient

NOBODY = {"log_level": 0, "message.max.bytes": 1000}
VALUES = {"refused": b"v" * 1001, "tombstone": None, "empty": b""}


def is_straight(producer: Producer) -> bool:
    return getattr(sender(producer), "func", None) is not plain


def event(kind: str, topic: str = "topic") -> Event:
    return Event(
        "other" if kind == "unknown" else topic,
        None if kind == "no key" else b"key",
        VALUES.get(kind, b"value"),
        HEADERS if kind == "headers" else [] if kind == "no headers" else None,
        kind == "broadcast",
        placed_by=PLACES.get(kind),
    )


HEADERS: Headers = [("a", b"b\0c"), ("ł", "ö"), ("none", None), ("empty", b""), ("a", "twice")]
PLACES: dict[str, bytes | int] = {
    "placed": b"another key",
    "first partition": 0,
    "last partition": 2,
    "partition beyond": 3,
    "no partition": -2,
}
TAKEN = (
    *("plain", "tombstone", "empty", "no key", "placed", "headers", "no headers"),
    *("first partition", "last partition"),
)
KINDS = (*TAKEN, "partition beyond", "no partition", "broadcast", "unknown", "refused")


@pytest.fixture(scope="module")
def unconnected() -> Producer:
    return Producer(NOBODY)


@given(kinds=st.lists(st.sampled_from(KINDS)), data=st.data())
def test_records_are_sent_up_to_the_first_special_one(
    twin: str, unconnected: Producer, kinds: list[str], data: st.DataObject
) -> None:
    since = data.draw(st.integers(0, len(kinds)))
    end = data.draw(st.integers(since, len(kinds)))
    send, before = sender(unconnected), len(unconnected)
    touched: set[str] = set()
    index = send([event(kind) for kind in kinds], since, end, {"topic": 3}, touched)
    assert touched == {"topic"} or (index == since and not touched)
    assert index == next((i for i in range(since, end) if kinds[i] not in TAKEN), end)
    assert len(unconnected) - before == index - since
    unconnected.purge()
    unconnected.poll(0)


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
    ],
)
def test_a_text_chooses_the_partition_that_it_has_as_a_key(key: bytes, hashed: int) -> None:
    """The hashes are those of Kafka's own test, UtilsTest.testMurmur2."""
    assert partition_of(key, 7919) == (hashed & 0x7FFFFFFF) % 7919
    assert partition_of(None, 7919) == -1


@given(st.binary())
def test_both_ways_of_hashing_agree(twin: str, text: bytes) -> None:
    way = compiled.engine.records.murmur2 if compiled.engine is not None else murmur2
    assert way(text) == murmur2(text)


def test_no_more_than_the_queue_holds(twin: str) -> None:
    producer = Producer({**NOBODY, "queue.buffering.max.messages": 7})
    assert sender(producer)([event("plain")] * 10, 0, 10, {"topic": 3}, set()) == len(producer) == 7
    producer.purge()


def told(headers: Any) -> list[tuple[str, Any]]:
    """Headers with bytes alone as values."""
    return [(n, v.encode() if isinstance(v, str) else v) for n, v in headers or ()]


def test_headers_beyond_what_goes_straight_are_left(twin: str, unconnected: Producer) -> None:
    many = event("plain")._replace(headers=[(f"h{number}", b"") for number in range(33)])
    sent = sender(unconnected)([many], 0, 1, {"topic": 3}, set())
    assert sent == (0 if twin == "compiled" else 1)
    fewer = many._replace(headers=(many.headers or [])[:32])
    assert sender(unconnected)([fewer], 0, 1, {"topic": 3}, set()) == 1
    unconnected.purge()
    unconnected.poll(0)


@pytest.mark.long
def test_consumers_read_the_records_that_were_sent(
    twin: str, kafka: Broker, topic_prefix: str
) -> None:
    one, other = f"{topic_prefix}.one", f"{topic_prefix}.other"
    _settings, topics = prepared(kafka, topic_prefix)
    assert topics.partitions(one) == topics.partitions(other) == 3
    events = [event(kind, topic) for kind in 2 * TAKEN for topic in (one, one, other)]
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "partitioner": "murmur2_random"}
    )
    assert is_straight(producer) == (twin == "compiled")
    touched: set[str] = set()
    assert sender(producer)(events, 0, len(events), dict.fromkeys((one, other), 3), touched) == len(
        events
    )
    assert touched == {one, other}
    assert producer.flush(patient(30)) == 0
    for topic in (one, other):
        expected = [(each.key, each.value) for each in events if each.topic == topic]
        found = read_committed(kafka.bootstrap_servers, [topic])
        assert sorted(map(repr, expected)) == sorted(repr((r.key, r.value)) for r in found)
        given = [told(each.headers) for each in events if each.topic == topic]
        messages = committed_messages(kafka.bootstrap_servers, [topic])
        assert sorted(map(repr, given)) == sorted(repr(told(m.headers())) for m in messages)
        keyed = [(r.key, r.value) for r in found if r.key is not None]
        assert sorted(map(repr, keyed)) == sorted(repr(pair) for pair in expected if pair[0])
        partitions = {r.partition for r in found if r.key is not None}
        assert partitions == {partition_of(b"key", 3), partition_of(b"another key", 3), 0, 2}
        assert partition_of(b"key", 3) != partition_of(b"another key", 3)


def librdkafka_threads() -> set[str]:
    """Return the ids of this process's threads `rdk:main`: each producer and consumer has one."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        # One of an earlier test may end in the middle of this look.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (thread / "comm").read_text().strip() == "rdk:main":
                found.add(thread.name)
    return found


def test_a_producer_is_freed_with_what_sends_into_it(twin: str) -> None:
    gc.collect()
    before = librdkafka_threads()
    producer = Producer(NOBODY)
    send = sender(producer)
    assert send([event("plain")], 0, 1, {"topic": 3}, set()) == 1
    (its_thread,) = librdkafka_threads() - before
    producer.purge()
    del producer
    gc.collect()
    assert its_thread in librdkafka_threads()  # `send` keeps it alive
    del send
    gc.collect()
    assert its_thread not in librdkafka_threads()


def test_an_unverified_confluent_kafka_is_used_by_its_produce_alone(
    twin: str, monkeypatch: pytest.MonkeyPatch, unconnected: Producer
) -> None:
    assert is_straight(unconnected) == (twin == "compiled")
    assert {batch_produce.VERSION} == batch_produce.KNOWN_VERSIONS
    monkeypatch.setattr(batch_produce, "VERSION", "99.0")
    assert not is_straight(unconnected)
