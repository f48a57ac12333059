"""Damages Kafka's copy on purpose, so that a test can see the comparison fail."""

import uuid
from typing import Final, Literal

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from services.demo.copies import committed

Fault = Literal["loss", "duplicate"]
FAULTS: Final[tuple[Fault, ...]] = ("loss", "duplicate")
_TIMEOUT_S: Final = 30.0


def plant(fault: Fault, bootstrap_servers: str, topic: str) -> None:
    """Delete the oldest records of a partition of `topic`, or repeat one of its records."""
    if fault == "loss":
        _lose(bootstrap_servers, topic)
    else:
        _repeat(bootstrap_servers, topic)


def _lose(bootstrap_servers: str, topic: str) -> None:
    """Delete the first half of a partition's records."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": str(uuid.uuid4())})
    try:
        for partition in consumer.list_topics(topic, timeout=_TIMEOUT_S).topics[topic].partitions:
            place = TopicPartition(topic, partition)
            low, high = consumer.get_watermark_offsets(place, timeout=_TIMEOUT_S)
            if high - low > 20:
                cut = TopicPartition(topic, partition, (low + high) // 2)
                admin = AdminClient({"bootstrap.servers": bootstrap_servers})
                for future in admin.delete_records([cut]).values():
                    future.result(_TIMEOUT_S)
                return
    finally:
        consumer.close()
    raise KafkaException(f"{topic} has nothing to delete")


def _repeat(bootstrap_servers: str, topic: str) -> None:
    partition, key, value = [r for r in committed(bootstrap_servers, topic) if r[2] is not None][-1]
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    producer.produce(topic, value, key, partition)
    producer.flush(_TIMEOUT_S)
