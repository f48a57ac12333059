"""Follows a small topic from its beginning: shapes of tables, dead letters.

An END is read before the markers of its Kafka transaction may have reached other topics. Whoever
needs what belongs to it reads those up to where they were written when the END was there.

A topic that was deleted and made again has other records at the same offsets: it has another id,
which is compared before and after each read.
"""

import time
from typing import NamedTuple, TypeVar

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from pydantic import BaseModel, ValidationError

from schemas.errors import BadInput, ExitCode, OperatorNeeded, Retryable
from schemas.settings import KafkaSettings
from services.kafka.client import passing
from spark_consumers.kafka.reader import TopicOffsets, client_options, kafka_failure

log = structlog.get_logger()
READ_DEADLINE_S = 60.0
_SHOWN_WITHIN_S = 5.0
"""How long a topic that was there may be missing, as it is being made."""
_LOOK_S = 0.2
_READ_ANEW_HINT = "find out who deleted it, and try again: the next read begins with the new topic"
_POLL_S = 1.0
_MANY = 5000
Document = TypeVar("Document", bound=BaseModel)


class CommittedRecord(NamedTuple):
    """A committed record; `ts_ms` is Kafka's time stamp."""

    partition: int
    offset: int
    ts_ms: int
    key: bytes | None
    value: bytes | None


def consumer(kafka: KafkaSettings, *, wait_ms: int = 50) -> Consumer:
    """Return a consumer of committed records that keeps no offsets in Kafka.

    `wait_ms`: how long a broker waits for new records before it says that there are none.
    """
    return Consumer(
        client_options(kafka)
        | {
            "group.id": f"slottables-{kafka.topic_prefix}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": wait_ms,
        }
    )


class MadeAgainError(OperatorNeeded):
    """A topic was deleted and made again: no table is at fault, so that none is parked for it."""


class SmallTopicTail:
    """The committed records of a topic, each given once."""

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: TopicOffsets,
        topic: str,
        offsets_max: int | None = None,
    ) -> None:
        """Begin at the topic's first record, or at the last `offsets_max` offsets."""
        self.topic = topic
        self._offsets_max = offsets_max
        self._topics = topics
        self._consumer = consumer(kafka)
        self._at: dict[int, int] = {}
        self.lost_beginning = False
        """Whether the topic's first records were gone already when it was first read."""
        self.id = ""
        """Kafka's id of the topic that is read, "" while it is not known."""
        self._hint = _READ_ANEW_HINT
        self._warned = False

    def close(self) -> None:
        """Close the connections to the broker."""
        self._consumer.close()

    def expect(self, known_id: str, hint: str) -> None:
        """Refuse a topic with another id than `known_id`, that of an earlier process.

        `hint`: the remedy if the topic was made again, for an owner who has taken its records.
        """
        self.id, self._hint = known_id, hint

    def new(self, deadline_s: float = READ_DEADLINE_S) -> list[CommittedRecord]:
        """Return the committed records that were written up to now, by partition and offset.

        Wait for open transactions; raise Retryable when they don't end in time, and as
        `require_same` does. What was read until then is not given again: begin a new tail.
        """
        partitions = self.require_same()
        if not partitions:
            return []
        found = self._read(partitions, deadline_s)
        self.require_same()  # so the records are of the topic that was asked for before
        return found

    def require_same(self) -> tuple[int, ...]:
        """Return the topic's partitions, () for a topic that was never there.

        Raise MadeAgainError where the topic was made again, Retryable where one that was there is
        missing for 5 s. A topic whose id Kafka does not tell is not judged; the log says so once.
        """
        deadline = time.monotonic() + _SHOWN_WITHIN_S
        while True:
            self._topics.refresh(self.topic)
            partitions = self._topics.partitions(self.topic)
            if partitions:
                self._compare(self._topics.id(self.topic))
            if partitions or not (self.id or self._at):
                return partitions
            if time.monotonic() > deadline:
                raise Retryable(
                    "Kafka does not show the topic any more",
                    operation="read Kafka",
                    subject=self.topic,
                    hint="check that nobody has deleted it and that this principal may describe it",
                    exit_code=ExitCode.KAFKA_UNREACHABLE,
                )
            time.sleep(_LOOK_S)

    def _compare(self, topic_id: str) -> None:
        """Note the topic's id. Raise MadeAgainError for another one; warn once if unknown."""
        if self.id and topic_id and self.id != topic_id:
            raise MadeAgainError(
                "the topic was deleted and made again: it may lack records that were not read yet",
                operation="read Kafka",
                subject=self.topic,
                hint=self._hint,
            )
        if not topic_id and (self.id or self._at) and not self._warned:
            self._warned = True
            log.warning(
                "not judged: whether the topic was deleted and created again",
                topic=self.topic,
                why="Kafka tells no id",
            )
        self.id = topic_id or self.id

    def _read(self, partitions: tuple[int, ...], deadline_s: float) -> list[CommittedRecord]:
        """Return the records up to the present end, in order. Raise Retryable at the deadline."""
        self._assign(partitions)
        ends = self._topics.written({self.topic: partitions})[self.topic]
        found = []
        deadline = time.monotonic() + deadline_s
        while any(self._at[number] < end for number, end in ends.items()):
            if time.monotonic() > deadline:
                raise Retryable(
                    "the end of the topic was not reached: a transaction is open",
                    operation="read Kafka",
                    subject=self.topic,
                    exit_code=ExitCode.KAFKA_UNREACHABLE,
                )
            for message in self._consumer.consume(_MANY, timeout=_POLL_S / 20):
                record = taken(message, self.topic)
                if isinstance(record, TopicPartition):
                    self._at[record.partition] = max(self._at[record.partition], record.offset)
                elif record is not None:
                    self._at[record.partition] = record.offset + 1
                    if record.value is not None:  # else it ends a transaction that hangs
                        found.append(record)
        return sorted(found)

    def parsed(self, record: CommittedRecord, kind: type[Document]) -> Document:
        """Parse a record as `kind`, the model of the topic.

        Raise BadInput, which names the record's partition and offset.
        """
        try:
            return kind.model_validate_json(record.value or b"")
        except ValidationError as error:
            raise BadInput(
                f"the record is not a {kind.__name__} of this version",
                operation="read Kafka",
                subject=f"{self.topic}, partition {record.partition}, offset {record.offset}",
                hint="run bridge and slottables of the same version",
                exit_code=ExitCode.RECORD_REFUSED,
            ) from error

    def _assign(self, partitions: tuple[int, ...]) -> None:
        """Begin with new partitions: at their first offset, or `offsets_max` before the end."""
        new = [number for number in partitions if number not in self._at]
        if not new:
            return
        first = self._topics.first({self.topic: tuple(new)})[self.topic]
        self._at |= first
        if self._offsets_max is not None:
            ends = self._topics.written({self.topic: tuple(new)})[self.topic]
            self._at |= {n: max(first[n], end - self._offsets_max) for n, end in ends.items()}
        self.lost_beginning |= any(first.values())
        self._consumer.assign(
            [TopicPartition(self.topic, number, at) for number, at in sorted(self._at.items())]
        )


def taken(message: object, topic: str) -> CommittedRecord | TopicPartition | None:
    """Convert what a consumer returned: a message to a record, a partition's end to its place.

    Return None for a passing error; raise for any other.
    """
    failure = message.error()  # type: ignore[attr-defined]
    place = message.partition(), message.offset()  # type: ignore[attr-defined]
    if failure is None:
        _, ts_ms = message.timestamp()  # type: ignore[attr-defined]
        return CommittedRecord(*place, ts_ms, message.key(), message.value())  # type: ignore[attr-defined]
    if failure.code() == KafkaError._PARTITION_EOF:
        return TopicPartition(topic, *place)
    if passing(failure):
        return None
    raise kafka_failure(KafkaException(failure), topic)
