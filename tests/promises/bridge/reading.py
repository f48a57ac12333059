"""Kafka's records as a read_committed consumer has them, keys, values and headers as they are."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from confluent_kafka import Message
from confluent_kafka.admin import AdminClient

from services.demo import copies
from tests.providers.waiting import patient

READ_TIMEOUT_S = patient(30)
DECIDED_S = patient(10)
"""How long a busy Kafka may take to tell all partitions what it has committed."""


class Record(NamedTuple):
    """One committed record."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, str | bytes | None]


def read_committed(servers: str, topics: Collection[str]) -> list[Record]:
    """All records of `topics` up to their present ends, in the order of each partition.

    Topics that are not there have none.
    """
    there = AdminClient({"bootstrap.servers": servers}).list_topics(timeout=READ_TIMEOUT_S).topics
    found = [topic for topic in topics if topic in there]
    return [_record(one) for one in copies.committed_messages(servers, found, decided_s=DECIDED_S)]


def committed(
    servers: str, topic: str, *, decided_s: float = DECIDED_S
) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    """(partition, key, value) of all records of a topic up to its present ends."""
    return copies.committed(servers, topic, decided_s=decided_s)


def _record(message: Message) -> Record:
    return Record(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        message.key(),
        message.value(),
        dict(message.headers() or []),
    )
