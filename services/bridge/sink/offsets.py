"""Where partitions end, asked of their leaders: for readers of all, or of committed records."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import OFFSET_SPEC_LATEST, _AdminClientImpl

from schemas.errors import ExitCode, Retryable
from services.kafka.client import kafka_error
from services.kafka.records import REQUEST_TIMEOUT_S

ASKED_AT_ONCE: Final = 200
"""Topics or partitions: answers about 5,000 take more memory than everything else."""
_LATEST: Final[int] = OFFSET_SPEC_LATEST
Partition = tuple[str, int]
_T = TypeVar("_T")


class PartitionEnd(NamedTuple):
    """The offset after the last record, and the leader's epoch, of a partition."""

    offset: int
    epoch: int


Asked = Mapping[Partition, "Future[Any]"]
"""Partition -> the request in which it is asked about; one for up to ASKED_AT_ONCE partitions."""


def ask_ends(admin: AdminClient, partitions: Iterable[Partition], *, committed: bool) -> Asked:
    """Ask for the ends of `partitions`; returns at once. `committed`: the last stable offsets.

    Straight to the C class, as this is done for every Kafka transaction: AdminClient.list_offsets
    wraps each partition in three objects, a lock and a future of its own, which costs more than all
    that the network does.
    """
    asked: Future[Any] = Future()
    asked.set_running_or_notify_cancel()
    partitions = [*partitions]
    if not partitions:
        return {}
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    _AdminClientImpl.list_offsets(
        admin,
        [TopicPartition(topic, partition, _LATEST) for topic, partition in partitions],
        asked,
        isolation_level_value=level.value,
        request_timeout=REQUEST_TIMEOUT_S,
    )
    return dict.fromkeys(partitions, asked)


def answers(futures: Asked) -> dict[Partition, PartitionEnd]:
    """Await the answers. Raise Retryable for a partition whose leader has not answered."""
    ends: dict[Partition, PartitionEnd] = {}
    for partition, answer in _each_answer(futures):
        if isinstance(answer, KafkaException):
            raise kafka_error(
                answer, "ask where the partition ends", name_of(partition)
            ) from answer
        if answer is None:
            raise Retryable(
                "the leader of the partition does not answer",
                operation="ask where the partition ends",
                subject=name_of(partition),
                hint="check that all brokers run",
                exit_code=ExitCode.KAFKA_UNREACHABLE,
            )
        ends[partition] = answer
    return ends


def some_answers(futures: Asked) -> dict[Partition, PartitionEnd]:
    """Return the answers, without the partitions whose leader has not answered."""
    return {
        partition: answer
        for partition, answer in _each_answer(futures)
        if isinstance(answer, PartitionEnd)
    }


def _each_answer(
    futures: Asked,
) -> Iterator[tuple[Partition, PartitionEnd | KafkaException | None]]:
    """Yield of each partition where it ends, or why that is not known; None: no leader has told.

    librdkafka reports no error for a leader that does not answer, but an offset below 0.
    """
    ends: dict[Partition, PartitionEnd | KafkaException] = {}
    for request in dict.fromkeys(futures.values()):
        try:
            infos = request.result()
        except KafkaException as error:
            ends |= {partition: error for partition, one in futures.items() if one is request}
            continue
        for where, info in infos.items():
            partition = (where.topic, where.partition)
            if isinstance(info, KafkaError):
                ends[partition] = KafkaException(info)
            elif info.offset >= 0:
                epoch = info.leader_epoch
                ends[partition] = PartitionEnd(info.offset, -1 if epoch is None else epoch)
    for partition in futures:
        yield partition, ends.get(partition)


def count_partitions(producer: Producer, topic: str) -> int:
    """Ask how many partitions `topic` has; `producer` asks, so that it can write to all of them."""
    try:
        return len(producer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic].partitions)
    except KafkaException as error:
        raise kafka_error(error, "ask for the partitions", f"topic {topic}") from error


def name_of(partition: Partition) -> str:
    """Return `topic[partition]`, for messages."""
    return f"{partition[0]}[{partition[1]}]"


def in_parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield `items` in parts of ASKED_AT_ONCE."""
    for at in range(0, len(items), ASKED_AT_ONCE):
        yield items[at : at + ASKED_AT_ONCE]
