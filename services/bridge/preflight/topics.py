"""Kafka's topics: what may lose, refuse or misplace events. Pure."""

from collections.abc import Iterator
from typing import Final

from schemas.events import prepared_topic, progress_topic, schema_topic
from schemas.findings import Finding, Severity
from services.bridge.preflight.facts import Facts, Kafka
from services.bridge.preflight.finding import advice
from services.bridge.sink.compaction import DELETE
from services.bridge.sink.topic_differences import grouped
from services.bridge.sink.topic_requirements import command, lacks, named

_REPLICAS: Final = "fewer than 3 replicas"


def topics(facts: Facts) -> Iterator[Finding]:
    """Yield findings about the topics that the slot writes to."""
    if facts.kafka is None:
        return
    yield from _kept(facts, facts.kafka)
    yield from _of_the_guarantee(facts, facts.kafka)
    yield from _sizes(facts, facts.kafka)
    yield from _partitions(facts, facts.kafka)
    yield from _as_settings(facts.kafka)
    yield from _compacted(facts, facts.kafka)


def _kept(facts: Facts, kafka: Kafka) -> Iterator[Finding]:
    """Yield a finding for each topic that loses records which the bridge or a reader needs.

    The bridge's own topics must keep their last records for ever. In a table's topic, compaction
    with a retention time loses rows that nobody changes.
    """
    own = {topic_of(facts.prefix) for topic_of in (progress_topic, schema_topic, prepared_topic)}
    for topic in kafka.topics:
        config = topic.config or {}
        policy = config.get("cleanup.policy", "")
        if topic.name in own and topic.config is not None and topic.loses_old_records:
            yield advice(
                "topic-forgets",
                Severity.CRITICAL,
                f"topic {topic.name}",
                f"cleanup.policy = {policy}, retention.ms = {config.get('retention.ms')}",
                "Kafka deletes what the bridge must find again: it refuses its next start",
                command(facts.servers, topic.name, "cleanup.policy=compact"),
                refuses=True,
            )
        elif topic.name not in own and "compact" in policy and "delete" in policy:
            yield advice(
                "topic-compacts-and-deletes",
                Severity.WARNING,
                f"topic {topic.name}",
                f"cleanup.policy = {policy}, retention.ms = {config.get('retention.ms')}",
                "rows that nobody changes for longer than the retention vanish from the topic",
                command(facts.servers, topic.name, "cleanup.policy=compact"),
            )


def _of_the_guarantee(facts: Facts, kafka: Kafka) -> Iterator[Finding]:
    """Yield what a start of the bridge warns of, with the change that ends the warning."""
    for lack, names in lacks(kafka.topics, facts.prefix).items():
        if lack.config:
            change = "; ".join(command(facts.servers, name, lack.config) for name in names[:1])
        elif lack.what.startswith(_REPLICAS):
            change = "add brokers, then kafka-reassign-partitions.sh with three replicas each"
        else:
            change = f"grant DescribeConfigs on topics {facts.prefix}. to the bridge's principal"
        yield advice(
            "topic-configuration",
            Severity.WARNING,
            f"topics {named(names)}",
            lack.what,
            "committed events may be lost with a broker, or be told wrongly",
            change,
        )


def _sizes(facts: Facts, kafka: Kafka) -> Iterator[Finding]:
    """Warn of topics that refuse messages which the producer may send."""
    for topic in kafka.topics:
        limit = (topic.config or {}).get("max.message.bytes", "")
        if limit.isdigit() and int(limit) < kafka.message_bytes_max:
            wanted = f"max.message.bytes={kafka.message_bytes_max}"
            yield advice(
                "topic-takes-less",
                Severity.WARNING,
                f"topic {topic.name}",
                f"max.message.bytes = {limit}, and the producer sends up to message.max.bytes = "
                f"{kafka.message_bytes_max}",
                "a row between the two stops the bridge (41), or becomes a dead letter",
                command(facts.servers, topic.name, wanted),
            )


def _partitions(facts: Facts, kafka: Kafka) -> Iterator[Finding]:
    """Note topics with fewer partitions than kafka.partitions."""
    for name in sorted(kafka.table_topics - kafka.counted):
        found = kafka.partitions.get(name, 0)
        if found < facts.partitions_wanted:
            yield advice(
                "topic-partitions",
                Severity.NOTE,
                f"topic {name}",
                f"{found} partitions, kafka.partitions = {facts.partitions_wanted}",
                "fewer consumers can share the topic than was planned; more partitions later move "
                "keys to others",
                f"kafka-topics.sh --bootstrap-server {facts.servers} --alter --topic {name} "
                f"--partitions {facts.partitions_wanted}; or set kafka.partitions: {found}",
            )


def _as_settings(kafka: Kafka) -> Iterator[Finding]:
    """Yield a finding for each way in which topics differ from kafka.topics."""
    for (key, found, wanted), same in grouped(kafka.differences).items():
        yield advice(
            "topic-differs",
            Severity.WARNING,
            f"topics {named([one.topic for one in same])}",
            f"{key} = {found}, and kafka.topics says {wanted}",
            "the bridge makes new topics as the settings say, and never changes an existing one",
            same[0].change,
        )


def _compacted(facts: Facts, kafka: Kafka) -> Iterator[Finding]:
    """Warn of compacted topics of tables whose events may lack a key."""
    for one in kafka.compacted:
        yield advice(
            "topic-refuses-events",
            Severity.WARNING if one.keyed else Severity.CRITICAL,
            one.table,
            one.evidence,
            one.consequence,
            one.change(command(facts.servers, one.topic, DELETE)),
        )
