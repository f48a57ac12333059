"""Reading a one-partition topic's committed records, and the last progress record among them."""

import time
import uuid
from collections.abc import Iterator
from typing import Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from pydantic import BaseModel, ValidationError

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SlotbridgeError
from schemas.events import progress_topic
from schemas.progress import ProgressRecord
from schemas.settings import KafkaSettings
from services.kafka.client import client_options, kafka_error, make_client, passing

REQUEST_TIMEOUT_S: Final = 10.0
READ_DEADLINE_S: Final = 90.0
_TAIL_RECORDS: Final = 200
Record = tuple[int, bytes | str | None, bytes | None]
"""(offset, key, value)."""
Contract = TypeVar("Contract", bound=BaseModel)


class TopicReader:
    """Reads the committed records of a topic's partition (its only one) between two offsets.

    Not `committed`: those of open and aborted transactions as well.
    """

    def __init__(
        self, settings: KafkaSettings, topic: str, partition: int = 0, *, committed: bool = True
    ) -> None:
        self.topic = topic
        self._partition = partition
        self._options = {
            **client_options(settings),
            "group.id": f"slotbridge-start-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 50,
        }
        self._consumer = make_client(Consumer, self._options)

    def __enter__(self) -> "TopicReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def bounds(self) -> tuple[int, int]:
        """Return (first offset, offset after the last one), open transactions included.

        The question is asked as read_uncommitted: a read_committed consumer would be told the last
        stable offset instead.
        """
        options = {**self._options, "isolation.level": "read_uncommitted"}
        asking = make_client(Consumer, options)
        try:
            return asking.get_watermark_offsets(
                TopicPartition(self.topic, self._partition), timeout=REQUEST_TIMEOUT_S
            )
        except KafkaException as error:
            raise kafka_error(error, "read the topic", self.topic) from error
        finally:
            asking.close()

    def stable_end(self) -> int:
        """Return the last stable offset: all transactions with records before it have ended."""
        assert self._options["isolation.level"] == "read_committed"
        try:
            return self._consumer.get_watermark_offsets(
                TopicPartition(self.topic, self._partition), timeout=REQUEST_TIMEOUT_S
            )[1]
        except KafkaException as error:
            raise kafka_error(error, "read the topic", self.topic) from error

    def first_since(self, time_ms: int) -> int:
        """Return the first offset with a timestamp of `time_ms` or later; without one, the end."""
        asked = TopicPartition(self.topic, self._partition, time_ms)
        try:
            found = self._consumer.offsets_for_times([asked], timeout=REQUEST_TIMEOUT_S)[0]
        except KafkaException as error:
            raise kafka_error(error, "read the topic", self.topic) from error
        return found.offset if found.offset >= 0 else self.bounds()[1]

    def partitions(self) -> list[int]:
        """Return the numbers of the topic's partitions, [] where there is no such topic."""
        try:
            found = self._consumer.list_topics(self.topic, timeout=REQUEST_TIMEOUT_S)
        except KafkaException as error:
            raise kafka_error(error, "read the topic", self.topic) from error
        return sorted(found.topics[self.topic].partitions)

    def last(self, count: int, deadline: float) -> Iterator[Record]:
        """Yield the committed records among the last `count`; see `between`."""
        low, end = self.bounds()
        return self.between(max(low, end - count), end, deadline)

    def first_from(self, offset: int) -> list[Record]:
        """Return a list with the record at `offset`, empty where there is none."""
        return list(self.between(offset, offset + 1, time.monotonic() + REQUEST_TIMEOUT_S))

    def between(self, start: int, stop: int, deadline: float) -> Iterator[Record]:
        """Yield the committed records in [start, stop) as (offset, key, value); as `messages`."""
        for message in self.messages(start, stop, deadline):
            yield message.offset() or 0, message.key(), message.value()

    def messages(self, start: int, stop: int, deadline: float) -> Iterator[Message]:
        """Yield the committed records in [start, stop).

        An open transaction of another producer hides what follows it: wait until it has ended, or
        raise Retryable at `deadline` (time.monotonic).
        """
        if start >= stop:
            return
        self._consumer.assign([TopicPartition(self.topic, self._partition, start)])
        while time.monotonic() < deadline:
            message = self._consumer.poll(1.0)
            if message is None:
                continue
            failure, offset = message.error(), message.offset() or 0
            if failure is None:
                if offset < stop:
                    yield message
                if offset >= stop - 1:
                    return
            elif failure.code() == KafkaError._PARTITION_EOF:
                if offset >= stop:
                    return
            elif not passing(failure):
                raise kafka_error(KafkaException(failure), "read the topic", self.topic)
        raise Retryable(
            "the end of the topic was not reached: another producer has an open transaction",
            operation="read the topic",
            subject=self.topic,
            hint="the transaction ends at its producer's transaction timeout. If it does not, it "
            "is hanging: restart the bridge that owns it, or find the owner with "
            "kafka-transactions.sh find-hanging",
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )


def last_progress(
    settings: KafkaSettings,
    slot: str,
    *,
    deadline_s: float,
    until: int | None = None,
    having: bytes = b"",
    records_max: int = 2**63,
) -> ProgressRecord | None:
    """Return the last committed progress record of `slot`, None if there is none, or a tombstone.

    The topic is read backwards from its end, each time twice as many records: others may have
    written there since. `until`: begin at this offset, which is not beyond the last stable one.
    `having`: look for the last record with these bytes in it, among the last `records_max` of the
    topic.

    Raise OperatorNeeded for a record that is not a progress record, Retryable when the end isn't
    reached.
    """
    topic = progress_topic(settings.topic_prefix)
    with TopicReader(settings, topic) as reader:
        low, end = reader.bounds()
        low = max(low, end - records_max)
        start = end if until is None else until
        deadline = time.monotonic() + deadline_s
        step = _TAIL_RECORDS
        while start > low:
            stop, start = start, max(low, start - step)
            step *= 2
            last, removed = None, False
            for offset, key, value in reader.between(start, stop, deadline):
                if key == slot.encode() and value is None:
                    last, removed = None, True
                elif key == slot.encode() and value is not None and having in value:
                    last = (offset, value)
            if last is not None:
                return parse_record(ProgressRecord, topic, *last)
            if removed:
                break
    return None


def newest(
    settings: KafkaSettings, topic: str, key: bytes, records_max: int, *, deadline_s: float
) -> list[bytes]:
    """Return the values of `key` among the last committed records of each partition.

    Raise Retryable when the end isn't reached.
    """
    deadline = time.monotonic() + deadline_s
    with TopicReader(settings, topic) as first:
        partitions = first.partitions()
    found: list[bytes] = []
    for partition in partitions:
        with TopicReader(settings, topic, partition) as reader:
            records = reader.last(records_max, deadline)
            found += [value for _, name, value in records if name == key and value is not None]
    return found


def no_such_topic(error: SlotbridgeError) -> bool:
    """Tell whether a read failed because the topic does not exist."""
    cause = error.__cause__
    unknown = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION)
    return isinstance(cause, KafkaException) and cause.args[0].code() in unknown


def parse_record(kind: type[Contract], topic: str, offset: int, value: bytes | str) -> Contract:
    """Parse a key or value by its contract. Raise OperatorNeeded where it is something else."""
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the record"
        raise OperatorNeeded(
            f"this record is not a {kind.__name__} as this release writes them ({where}: "
            f"{first['msg']}): another release, or another program, writes to this topic",
            operation="read the topic",
            subject=f"{topic}[0]@{offset}",
            hint="start the release that wrote it, use another kafka.topic_prefix, or repair the "
            "topic",
        ) from error
