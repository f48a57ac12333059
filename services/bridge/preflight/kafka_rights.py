"""Asks Kafka what the bridge's principal may do with topics and groups, without making any.

a topic that is there       the operations that Kafka says are allowed (DescribeTopics)
a topic that would be made  CreateTopics, to be validated only: rights, replicas, configuration
a group                     DescribeGroups
a transactional id          not judged: its own request, InitProducerId, leaves a record
"""

from collections.abc import Iterable, Iterator
from typing import Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclOperation
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode, SetupError, SlotbridgeError
from schemas.findings import Finding
from schemas.settings import Settings
from services.bridge.preflight.finding import contact, not_judged, start_refusal, would
from services.bridge.sink.offsets import in_parts
from services.bridge.sink.topic_creation import not_created
from services.bridge.sink.topic_requirements import named
from services.bridge.sink.topics import Topics
from services.kafka.client import kafka_error
from services.kafka.records import REQUEST_TIMEOUT_S

_NEEDED: Final = {AclOperation.READ: "Read", AclOperation.WRITE: "Write"}
_GROUP: Final = "slotbridge-start-preflight"


def kafka_rights(topics: Topics, tables: Iterable[str], settings: Settings) -> Iterator[Finding]:
    """Yield what Kafka allows; `topics` are refreshed, `tables`: the topics of published tables."""
    prefix = topics.prefix
    yield contact(f"Kafka {topics.settings.bootstrap_servers}", f"brokers: {topics.brokers}")
    yield from _existing(topics, sorted({name for name, _ in topics.written()}))
    yield from _planned(topics, topics.planned(sorted(set(tables))))
    groups = [_GROUP]
    if settings.tables is not None:
        groups.append(f"slottables-{prefix}")
    for group in groups:
        yield from _group(topics.admin, group)
    yield not_judged(
        f"Write on transactional ids slotbridge.{prefix}.",
        "Kafka has no request that asks for it and leaves nothing behind",
    )


def _existing(topics: Topics, names: list[str]) -> Iterator[Finding]:
    """Yield the rights that the bridge lacks on topics which exist."""
    denied: dict[str, list[str]] = {}
    for part in in_parts(names):
        asked = topics.admin.describe_topics(
            TopicCollection([*part]),
            include_authorized_operations=True,
            request_timeout=REQUEST_TIMEOUT_S,
        )
        for name, future in asked.items():
            try:
                allowed = future.result(REQUEST_TIMEOUT_S + 5).authorized_operations
            except KafkaException as error:
                yield start_refusal(
                    "kafka-refuses", kafka_error(error, "describe", ""), f"topic {name}"
                )
                continue
            if allowed is not None:
                lacking = [words for one, words in _NEEDED.items() if one not in allowed]
                denied.setdefault(" and ".join(lacking), []).append(name)
    for right, of in denied.items():
        if right:
            lack = SetupError(
                f"Kafka does not allow {right}",
                hint=f"grant it on topics with the prefix {topics.prefix}. (`slotbridge docs "
                "set-up`, Security)",
                exit_code=ExitCode.PRIVILEGE_MISSING,
            )
            yield start_refusal("kafka-refuses", lack, f"topics {named(of)}")


def _planned(topics: Topics, planned: list[NewTopic]) -> Iterator[Finding]:
    """Let Kafka validate the topics that a start, or a first event, makes."""
    fine: list[str] = []
    refused: dict[str, tuple[SlotbridgeError, list[str]]] = {}
    for part in in_parts(planned):
        asked = topics.admin.create_topics(
            [*part], validate_only=True, request_timeout=REQUEST_TIMEOUT_S
        )
        for name, future in asked.items():
            try:
                future.result(REQUEST_TIMEOUT_S + 5)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    denied = not_created(error, name)
                    refused.setdefault(denied.message, (denied, []))[1].append(name)
                    continue
            fine.append(name)
    for reason, names in refused.values():
        yield start_refusal("kafka-refuses", reason, f"topics {named(names)}, which do not exist")
    if fine:
        replicas = min(topic.replication_factor for topic in planned)
        yield would(f"topics {named(fine)}", f"made; replicas: {replicas}")


def _group(admin: AdminClient, group: str) -> Iterator[Finding]:
    """Yield the right that the bridge lacks on its consumer group."""
    asked = admin.describe_consumer_groups([group], request_timeout=REQUEST_TIMEOUT_S)
    try:
        asked[group].result(REQUEST_TIMEOUT_S + 5)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            denied = SetupError(
                "Kafka does not allow Read",
                hint="grant it (`slotbridge docs set-up`, Security)",
                exit_code=ExitCode.PRIVILEGE_MISSING,
            )
            yield start_refusal("kafka-refuses", denied, f"group {group}")
