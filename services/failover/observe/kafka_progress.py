"""The last committed progress record of the bridge's slot, read from Kafka."""

from collections.abc import Callable
from dataclasses import replace

from schemas.errors import SlotbridgeError
from schemas.settings import KafkaSettings
from services.failover.checks.facts import bridge_position
from services.failover.model.kafka_progress import KafkaProgress
from services.failover.model.view import View

_DEADLINE_S = 10.0
KAFKA = "Kafka"
"""Who remembers the timeline of a progress record."""


def with_published(
    kafka: KafkaSettings | None, slot: str | None, survey: Callable[[], View]
) -> View:
    """Return the view with Kafka's record, read before the standby's position as any consumer's is.

    The origin follows the record, and is read after it. If it is ahead, the record is read once
    more.
    """
    if kafka is None or slot is None:
        return survey()
    first = read_published(kafka, slot, _DEADLINE_S)
    view = survey()
    origin = bridge_position(view) or 0
    again = not first.problem and origin > (first.lsn or 0)
    later = read_published(kafka, slot, _DEADLINE_S) if again else first
    published = replace(later, lsn=first.lsn, latest=later.latest)
    met = () if published.milestone is None else ((KAFKA, published.milestone),)
    return replace(view, published=published, milestones=(*view.milestones, *met))


def read_published(kafka: KafkaSettings, slot: str, deadline_s: float) -> KafkaProgress:
    """Return the slot's last committed progress record, or why it can't be read."""
    from services.kafka.records import last_progress, no_such_topic  # imported late: it is slow

    try:
        record = last_progress(kafka, slot, deadline_s=deadline_s)
    except SlotbridgeError as error:
        return KafkaProgress() if no_such_topic(error) else KafkaProgress(problem=str(error))
    if record is None:
        return KafkaProgress()
    lsn = max(record.end_lsn, record.commit_lsn if record.seq else 0)
    began = max(record.history.values(), default=None) if record.history is not None else None
    return KafkaProgress(lsn, lsn, record.system_identifier, record.timeline, began=began)
