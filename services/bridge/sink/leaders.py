"""Partitions that no broker leads: nobody can read them, or write to them.

A start waits for them, before it changes anything in Kafka. Events go to Kafka in commit order, so
that the first row for such a partition would stop everything in any case; what hangs in it must be
ended by what is known now, and it may be the only one that shows how a transaction was decided.
"""

from collections.abc import Iterable
from typing import Final

from confluent_kafka.admin._metadata import ClusterMetadata

from schemas.errors import ExitCode, Retryable
from services.bridge.sink.offsets import Partition, name_of

_NAMED_MAX: Final = 5


def leaderless(metadata: ClusterMetadata) -> frozenset[Partition]:
    """Return the partitions without a leader, of all topics. Pure."""
    return frozenset(
        (name, number)
        for name, topic in metadata.topics.items()
        for number, partition in topic.partitions.items()
        if partition.leader < 0
    )


def require_leaders(written: Iterable[Partition], missing: frozenset[Partition]) -> None:
    """Raise Retryable (KAFKA_UNREACHABLE) with the partitions in `written` that lack a leader."""
    found = sorted(missing.intersection(written))
    if not found:
        return
    more = len(found) - _NAMED_MAX
    raise Retryable(
        f"{', '.join(map(name_of, found[:_NAMED_MAX]))}{f' and {more} more' * (more > 0)} "
        "have no leader, so the bridge can't check that they still have the slot's events",
        operation="check the partitions' leaders",
        subject="Kafka",
        hint="start the brokers that have these partitions, or delete a topic that nobody needs",
        exit_code=ExitCode.KAFKA_UNREACHABLE,
    )
