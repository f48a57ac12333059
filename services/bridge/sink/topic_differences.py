"""Where an existing topic differs from what `kafka.topics` says of it. Pure.

The bridge makes topics as the settings say, and never changes one that exists.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from schemas.kafka import KafkaSettings
from services.bridge.sink.topic_requirements import BROKERS_DEFAULT, Topic, command, config_text


class TopicDifference(NamedTuple):
    """One difference of a topic; `key`: as kafka.topics has it."""

    topic: str
    key: str
    found: str
    wanted: str
    change: str


def differences(
    settings: KafkaSettings, topics: Iterable[tuple[Topic, int]]
) -> Iterator[TopicDifference]:
    """Yield each difference of `topics` (with their partitions) from what the settings give."""
    for topic, partitions in topics:
        given = settings.of_topic(topic.name)
        found = f"--bootstrap-server {settings.bootstrap_servers} --alter --topic {topic.name}"
        if given.partitions not in (None, partitions):
            more = f"kafka-topics.sh {found} --partitions {given.partitions}"
            kept = f"set partitions: {partitions} in kafka.topics"
            fewer = int(given.partitions or 0) < partitions
            yield TopicDifference(
                topic.name,
                "partitions",
                str(partitions),
                str(given.partitions),
                kept if fewer else f"{more} (which moves keys to others); or {kept}",
            )
        if given.replication_factor not in (None, BROKERS_DEFAULT, topic.replicas):
            yield TopicDifference(
                topic.name,
                "replication_factor",
                str(topic.replicas),
                str(given.replication_factor),
                f"kafka-reassign-partitions.sh, with {given.replication_factor} replicas of each "
                "partition",
            )
        for key, value in given.config.items():
            wanted, is_now = config_text(value), (topic.config or {}).get(key)
            if is_now is not None and _parts(wanted) != _parts(is_now):
                listed = f"[{wanted}]" if "," in wanted else wanted
                change = command(settings.bootstrap_servers, topic.name, f"{key}={listed}")
                yield TopicDifference(topic.name, key, is_now, wanted, change)


def grouped(
    topic_differences: Iterable[TopicDifference],
) -> dict[tuple[str, str, str], list[TopicDifference]]:
    """Return (key, found, wanted) -> the differences that are the same but for their topics."""
    groups: dict[tuple[str, str, str], list[TopicDifference]] = {}
    for one in topic_differences:
        groups.setdefault((one.key, one.found, one.wanted), []).append(one)
    return groups


def _parts(value: str) -> set[str]:
    """Return the items of a list; other values are one item."""
    return {part.strip() for part in value.split(",")}
