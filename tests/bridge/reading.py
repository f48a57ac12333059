"""Kafka's records as a read_committed consumer has them, keys, values and headers as they are."""

import uuid
from collections.abc import Collection, Iterator
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from services.demo.copies import decided_ends

READ_TIMEOUT_S = 30.0


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
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"slotbridge-read-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        metadata = consumer.list_topics(timeout=READ_TIMEOUT_S).topics
        places = [
            TopicPartition(topic, partition, 0)
            for topic in topics
            if topic in metadata
            for partition in metadata[topic].partitions
        ]
        return list(_up_to_the_ends(consumer, servers, places))
    finally:
        consumer.close()


def _up_to_the_ends(
    consumer: Consumer, servers: str, places: list[TopicPartition]
) -> Iterator[Record]:
    ends = decided_ends(consumer, servers, places)
    left = {place for place, end in ends.items() if end > 0}
    consumer.assign([place for place in places if (place.topic, place.partition) in left])
    while left:
        for message in consumer.consume(1000, timeout=0.1):
            failure = message.error()
            place = (message.topic() or "", message.partition() or 0)
            offset = message.offset() or 0
            if failure is None:
                if offset < ends[place]:
                    yield _record(message)
            elif failure.code() == KafkaError._PARTITION_EOF:
                left.discard(place)
            else:
                raise KafkaException(failure)
            if offset >= ends[place] - 1:
                left.discard(place)


def _record(message: Message) -> Record:
    return Record(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        message.key(),
        message.value(),
        dict(message.headers() or []),
    )
