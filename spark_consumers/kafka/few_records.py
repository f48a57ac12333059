"""Reads ranges of committed records of Kafka into this process, where they are few."""

import time
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaException, TopicPartition

from schemas.errors import SlotbridgeError
from schemas.settings import KafkaSettings
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.kafka.reader import Offsets
from spark_consumers.kafka.small_topic_tail import consumer, taken
from spark_consumers.liveness import tick

RECORDS_MAX: Final = 20_000
"""Offsets of a small epoch. With more, Spark's start of a job costs less than one process does."""
BYTES_MAX: Final = 16 * 2**20
_DEADLINE_S: Final = 20.0
_POLL_S: Final = 0.1
_AT_ONCE: Final = 5_000


class Record(NamedTuple):
    """A committed record of Kafka that has a value; `ts_ms` is Kafka's time stamp."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    ts_ms: int = 0


class RecordReader:
    """A consumer that is kept from epoch to epoch."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._consumer: Consumer | None = None

    def close(self) -> None:
        """Close the connections to the broker."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def read(self, starts: Offsets, ends: Offsets) -> dict[str, list[Record]]:
        """Return the records with a value between offsets, by topic.

        Raise Unsuited where they are many, or Kafka does not give them at once: Spark's way says
        what is wrong.
        """
        places = {
            (topic, number): (start, ends[topic][number])
            for topic, numbers in starts.items()
            for number, start in numbers.items()
            if start < ends[topic][number]
        }
        if sum(end - start for start, end in places.values()) > RECORDS_MAX:
            raise Unsuited("many events")
        found: dict[str, list[Record]] = {topic: [] for topic in starts}
        if places:
            try:
                self._read(places, found)
            except (KafkaException, SlotbridgeError) as error:
                self.close()
                raise Unsuited("Kafka did not give the events") from error
        return found

    def _read(
        self, places: dict[tuple[str, int], tuple[int, int]], found: dict[str, list[Record]]
    ) -> None:
        """Read the records of partitions from their starts to their ends."""
        if self._consumer is None:
            self._consumer = consumer(self._kafka, wait_ms=10)
        self._consumer.assign(
            [TopicPartition(topic, number, at) for (topic, number), (at, _) in places.items()]
        )
        left = {place: end for place, (_, end) in places.items()}
        size, deadline = 0, time.monotonic() + _DEADLINE_S
        while left:
            if time.monotonic() > deadline:
                raise Unsuited("Kafka did not give the events")
            for message in self._some():
                topic = message.topic() or ""
                record = taken(message, topic)
                if record is None or (topic, record.partition) not in left:
                    continue
                place, end = (topic, record.partition), left[topic, record.partition]
                if isinstance(record, TopicPartition):
                    at = record.offset
                elif record.offset < end:
                    at = record.offset + 1
                    partition, offset, ts_ms, key, value = record
                    if value is not None:
                        size += len(value)
                        found[topic].append(Record(topic, partition, offset, key, value, ts_ms))
                else:
                    at = record.offset
                if at >= end:
                    del left[place]
            if size > BYTES_MAX:
                raise Unsuited("many events")
            tick()
        self._consumer.unassign()

    def _some(self) -> list[Any]:
        """Return what is there as soon as something is; `consume` alone waits for all of it."""
        assert self._consumer is not None
        first = self._consumer.poll(_POLL_S)
        return [] if first is None else [first, *self._consumer.consume(_AT_ONCE, timeout=0)]
