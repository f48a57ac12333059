"""The partitions that a reader of transactions reads: found, begun where they were left, paused."""

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas.errors import OperatorNeeded
from services.kafka.client import kafka_error, make_client, passing
from slotbridge.consumer.position import OPERATION, Partition

_RECORDS_AT_ONCE: Final = 500
_REQUEST_S: Final = 10.0
_FETCH_WAIT_MS: Final = 100
_JUST_MADE: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION)
Options = Mapping[str, str | int | float | bool]


class Partitions:
    """Reads committed records of partitions that are added one by one. For one thread.

    A client of its own asks about topics: a broker answers the requests of a connection in their
    order, and a fetch waits there for records.
    """

    def __init__(
        self, bootstrap_servers: str, options: Options, passed: Callable[..., None]
    ) -> None:
        """`passed(partition, offset)`: called where a partition was read beyond an offset."""
        common: dict[str, Any] = {
            "bootstrap.servers": bootstrap_servers,
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
            **options,
            "group.id": f"slotbridge-consumer-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
        }
        self._consumer = make_client(Consumer, {**common, "isolation.level": "read_committed"})
        self._asking = make_client(Consumer, {**common, "isolation.level": "read_uncommitted"})
        self._passed = passed
        self._paused: set[Partition] = set()
        self.assigned: set[Partition] = set()
        self.backlog = False
        """Whether more records have come already than `records` has yielded."""

    def close(self) -> None:
        """Disconnect from all brokers."""
        self._asking.close()
        self._consumer.close()

    def find(self, topic: str) -> list[Partition]:
        """Return a topic's partitions, [] where there is no such topic (yet)."""
        try:
            found = self._asking.list_topics(topic, timeout=_REQUEST_S).topics[topic]
        except KafkaException as error:
            raise kafka_error(error, OPERATION, topic) from error
        return [] if found.error is not None else [(topic, n) for n in sorted(found.partitions)]

    def bounds(self, partition: Partition) -> tuple[int, int] | None:
        """Return a partition's first offset, and its end, open transactions included.

        None where that passes: a partition that was just made, or whose leader changes.
        """
        try:
            asked = TopicPartition(*partition)
            return self._asking.get_watermark_offsets(asked, timeout=_REQUEST_S)
        except KafkaException as error:
            if passing(error.args[0]) or error.args[0].code() in _JUST_MADE:
                return None
            raise kafka_error(error, OPERATION, partition[0]) from error

    def add(self, starts: Mapping[Partition, int]) -> None:
        """Begin to read partitions, each at its offset."""
        if starts:
            self._consumer.incremental_assign(
                [TopicPartition(topic, number, at) for (topic, number), at in starts.items()]
            )
            self.assigned |= starts.keys()

    def hold_back(self, partitions: Collection[Partition]) -> None:
        """Pause these partitions, and let all others go on."""
        held = set(partitions)
        for change, moved in (
            (self._consumer.pause, held - self._paused),
            (self._consumer.resume, self._paused - held),
        ):
            if moved:
                change([TopicPartition(topic, number) for topic, number in sorted(moved)])
        self._paused = held

    def records(self, wait_s: float) -> Iterator[Message]:
        """Yield records that have come within `wait_s`.

        Raise OperatorNeeded where Kafka has removed what was not read, or SlotbridgeError.
        """
        messages = self._consumer.consume(_RECORDS_AT_ONCE, wait_s)
        self.backlog = len(messages) == _RECORDS_AT_ONCE
        for message in messages:
            failure, topic = message.error(), message.topic() or ""
            if failure is None:
                yield message
            elif failure.code() == KafkaError._PARTITION_EOF:
                # A record that ends a transaction is passed by this alone.
                self._passed((topic, message.partition() or 0), (message.offset() or 0) - 1)
            elif failure.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
                raise removed(topic)
            elif not passing(failure):
                raise kafka_error(KafkaException(failure), OPERATION, topic)


def removed(topic: str) -> OperatorNeeded:
    """Return the error for records that Kafka has removed before they were read."""
    return OperatorNeeded(
        "Kafka has removed records that were not read yet",
        operation=OPERATION,
        subject=topic,
        hint="the topic's retention was too short, or it was made again: begin anew",
    )
