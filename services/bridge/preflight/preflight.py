"""Everything that `slotbridge preflight` looks at, as one list of findings.

connections   servers, registry, storage, catalog, slotfailover's nodes
start         what a start does on the primary and in Kafka, or why it is refused
kafka_rights  what Kafka lets the bridge do
gather        facts of the primary and the topics, for the rules of `examination`
"""

from dataclasses import dataclass

from schemas.errors import SlotbridgeError
from schemas.findings import Finding
from schemas.naming import Naming
from schemas.settings import KafkaSettings, Settings, SourceSettings
from services.bridge.preflight.connections import connections
from services.bridge.preflight.examination import examine, gravest_first
from services.bridge.preflight.facts import Facts
from services.bridge.preflight.finding import START, not_judged, start_refusal
from services.bridge.preflight.gather import gather
from services.bridge.preflight.kafka_rights import kafka_rights
from services.bridge.preflight.start import start
from services.bridge.sink.topics import Topics
from services.bridge.source.candidates import find_primary


@dataclass(frozen=True, slots=True)
class Preflight:
    """The findings, the gravest first; `facts`: None where the primary could not be examined."""

    findings: list[Finding]
    facts: Facts | None


def look(
    settings: Settings, source: SourceSettings, kafka: KafkaSettings, sample_s: float
) -> Preflight:
    """Look at everything. What does not answer is a finding, not an error."""
    findings = [*connections(settings, source)]
    topics: Topics | None = None
    try:
        asked = Topics(kafka, settings.shaping)
        asked.refresh()
    except SlotbridgeError as error:
        findings += [
            start_refusal("kafka-refuses", error),
            not_judged("Kafka's topics", error.message),
        ]
    else:
        topics = asked
    facts = None
    try:
        candidate = find_primary(source)
        with candidate.connection as connection:
            findings += start(settings, source, topics, connection)
            facts = gather(source, kafka, settings, sample_s, candidate, topics)
            findings += examine(facts)
            findings += [not_judged(subject, why) for subject, why in facts.unread]
    except SlotbridgeError as error:
        if not any(one.wrong and one.group == START for one in findings):  # of each host
            findings.append(start_refusal("no-primary", error))
    if topics is not None:
        try:
            findings += kafka_rights(topics, _topics_of(settings, source, kafka, facts), settings)
        except SlotbridgeError as error:
            findings.append(start_refusal("kafka-refuses", error))
    return Preflight(gravest_first(findings), facts)


def _topics_of(
    settings: Settings, source: SourceSettings, kafka: KafkaSettings, facts: Facts | None
) -> list[str]:
    """Return the topics of the tables that are published, or will be."""
    naming = Naming(kafka.topic_prefix, settings.shaping)
    published = [(one.schema, one.name) for one in facts.primary.tables] if facts else []
    tables = published or source.single_tables
    return [naming.table(*table).name for table in tables if naming.publishes(*table)]
