"""Where partitions end, asked of their leaders: for readers of all, or of committed records."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

from confluent_kafka import IsolationLevel, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from services.kafka.client import kafka_error
from services.kafka.records import REQUEST_TIMEOUT_S

ASKED_AT_ONCE: Final = 200
"""Topics or partitions: answers about 5,000 take more memory than everything else."""
Partition = tuple[str, int]
_T = TypeVar("_T")


class End(NamedTuple):
    """The offset after the last record, and the leader's epoch, of a partition."""

    offset: int
    epoch: int


Asked = Mapping[Partition, "Future[Any]"]


def ask_ends(admin: AdminClient, places: Iterable[Partition], *, committed: bool) -> Asked:
    """Ask for the ends of `places`; returns at once. `committed`: the last stable offsets."""
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    asked = admin.list_offsets(
        {TopicPartition(*place): OffsetSpec.latest() for place in places},  # type: ignore[no-untyped-call]
        isolation_level=level,
        request_timeout=REQUEST_TIMEOUT_S,
    )
    return {(where.topic, where.partition): future for where, future in asked.items()}


def answers(asked: Asked) -> dict[Partition, End]:
    """Await what was asked. Raises Retryable for a partition of which no leader has told.

    librdkafka reports no error for a leader that does not answer, but an offset below 0.
    """
    found = {}
    for place, future in asked.items():
        try:
            told = future.result()
        except KafkaException as error:
            raise kafka_error(error, "ask where the partition ends", name_of(place)) from error
        if told.offset < 0:
            raise Retryable(
                "the leader of the partition does not answer",
                operation="ask where the partition ends",
                subject=name_of(place),
                hint="check that all brokers run",
                exit_code=ExitCode.KAFKA_UNREACHABLE,
            )
        found[place] = End(told.offset, -1 if told.leader_epoch is None else told.leader_epoch)
    return found


def some_answers(asked: Asked) -> dict[Partition, End]:
    """As `answers`, without the partitions of which no leader has told."""
    found: dict[Partition, End] = {}
    for place, future in asked.items():
        with contextlib.suppress(SlotbridgeError):
            found |= answers({place: future})
    return found


def count_partitions(producer: Producer, topic: str) -> int:
    """How many partitions `topic` has now; `producer` asks, so that it can write to all of them."""
    try:
        return len(producer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic].partitions)
    except KafkaException as error:
        raise kafka_error(error, "ask for the partitions", f"topic {topic}") from error


def name_of(place: Partition) -> str:
    """Return `topic[partition]`, for messages."""
    return f"{place[0]}[{place[1]}]"


def in_parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """`items`, as many at a time as are asked about at once."""
    for at in range(0, len(items), ASKED_AT_ONCE):
        yield items[at : at + ASKED_AT_ONCE]
