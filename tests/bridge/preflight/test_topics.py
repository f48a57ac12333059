"""What is told of tables' topics: compacted ones, and differences from the settings. Pure."""

from typing import Any

import pytest

from schemas.findings import Severity
from schemas.kafka import KafkaSettings
from schemas.naming import Naming
from schemas.shaping import ShapingSettings
from services.bridge.events.event import Event
from services.bridge.preflight.facts import Facts, Kafka, Primary
from services.bridge.preflight.topics import topics
from services.bridge.sink.compaction import Compacted, refused_by_compaction
from services.bridge.sink.dead_letters import Origin, refusal
from services.bridge.sink.topic_differences import differences
from services.bridge.sink.topic_requirements import Topic
from services.kafka.client import INVALID_RECORD

TABLES = [("public", "t", True), ("public", "keyless", False), ("public", "left_out", False)]
PRIMARY = Primary(180000, {}, 0, (), None, None, (), ())


@pytest.mark.parametrize(
    ("shaping", "truncates", "found"),
    [
        ({}, True, [("public.t", True), ("public.keyless", False)]),
        ({}, False, [("public.keyless", False)]),
        ({"skip": {"public.*": ["t"]}}, True, [("public.keyless", False)]),
        (
            {"keys": {"public.keyless": ["n"]}},
            True,
            [("public.t", True), ("public.keyless", True)],
        ),
        ({"routes": [{"tables": ".*", "topic": "all"}]}, True, []),
    ],
)
def test_tables_whose_compacted_topics_refuse_events(
    shaping: dict[str, Any], truncates: bool, found: list[tuple[str, bool]]
) -> None:
    chosen = ShapingSettings.model_validate({"exclude": ["public.left_out"], **shaping})
    policies = {f"b.public.{name}": "compact,delete" for _, name, _ in TABLES}
    told = refused_by_compaction(
        TABLES, Naming("b", chosen), lambda topic: policies.get(topic, ""), truncates=truncates
    )
    assert [(one.table, one.keyed) for one in told] == found


def test_differences_are_of_what_the_settings_say_alone() -> None:
    config = {"cleanup.policy": "compact,delete", "retention.ms": 5, "preallocate": True}
    settings = KafkaSettings.model_validate(
        {
            "bootstrap_servers": "k:1",
            "topic_prefix": "b",
            "topics": {"b.*": {"partitions": 2, "replication_factor": -1, "config": config}},
        }
    )
    is_now = {"cleanup.policy": "delete,compact", "retention.ms": "6", "preallocate": "false"}
    there = [(Topic("b.t", 1, is_now), 4), (Topic("b.u", 1, None), 2), (Topic("other", 1, {}), 9)]
    found = [one[:4] for one in differences(settings, there)]
    assert found == [
        ("b.t", "partitions", "4", "2"),
        ("b.t", "retention.ms", "6", "5"),
        ("b.t", "preallocate", "false", "true"),
    ]


def test_preflight_tells_both() -> None:
    settings = KafkaSettings.model_validate(
        {
            "bootstrap_servers": "k:1",
            "topic_prefix": "b",
            "topics": {"b.*": {"partitions": 2, "config": {"retention.ms": 5}}},
        }
    )
    there = [(Topic(name, 3, {"retention.ms": "6"}), 1) for name in ("b.t", "b.u")]
    names = frozenset(("b.t", "b.u"))
    kafka = Kafka(
        topics=tuple(one for one, _ in there),
        partitions=dict.fromkeys(names, 1),
        table_topics=names,
        message_bytes_max=0,
        counted=names,
        differences=tuple(differences(settings, there)),
        compacted=(Compacted("public.t", "b.t", True), Compacted("public.u", "b.u", False)),
    )
    facts = Facts("s", "b", "k:1", False, 3, True, PRIMARY, kafka, None)
    found = [one for one in topics(facts) if one.check in ("topic-differs", "topic-refuses-events")]
    assert [(one.severity, one.subject) for one in found] == [
        (Severity.WARNING, "topics b.t, b.u"),
        (Severity.WARNING, "topics b.t, b.u"),
        (Severity.WARNING, "public.t"),
        (Severity.CRITICAL, "public.u"),
    ]
    assert "topic-partitions" not in {one.check for one in topics(facts)}
    assert "shaping.skip: {public.t: [t]}" in found[2].remedy.text
    assert "--entity-name b.u --add-config cleanup.policy=delete" in found[3].remedy.text


@pytest.mark.parametrize(
    ("key", "broadcast", "reason", "hint"),
    [
        (None, True, INVALID_RECORD, "shaping.skip: {public.t: [t]}"),
        (None, False, INVALID_RECORD, "cleanup.policy=delete on topic b.t"),
        (b"k", False, INVALID_RECORD, "InvalidRecordException"),
        (None, True, "Broker: Message size too large", "max.message.bytes"),
    ],
)
def test_the_hint_of_a_refused_record_is_that_of_its_reason(
    key: bytes | None, broadcast: bool, reason: str, hint: str
) -> None:
    event = Event("b.t", key, b"{}", None, broadcast, "public.t", 0, 7)
    error = refusal(event, Origin(1, 7, None), reason, avoidable=True)
    assert hint in error.hint and "on_refused: dead_letter" in error.hint
    assert ("max.message.bytes" in error.hint) == (reason != INVALID_RECORD)
