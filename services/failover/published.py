"""What Kafka has of the bridge's slot, for `check`: its last committed progress record."""

from collections.abc import Callable
from dataclasses import replace

from schemas.errors import SlotbridgeError
from schemas.settings import KafkaSettings
from services.failover.checks.facts import bridge_position
from services.failover.view import Published, View

_DEADLINE_S = 10.0


def with_published(
    kafka: KafkaSettings | None, slot: str | None, survey: Callable[[], View]
) -> View:
    """The view with Kafka's record, read before the standby's position as every consumer's is.

    The origin follows the record, and is read after it: seen ahead, the record is read once more.
    """
    if kafka is None or slot is None:
        return survey()
    first = _read(kafka, slot)
    view = survey()
    origin = bridge_position(view) or 0
    later = _read(kafka, slot) if not first.problem and origin > (first.lsn or 0) else first
    return replace(view, published=replace(later, lsn=first.lsn, latest=later.latest))


def _read(kafka: KafkaSettings, slot: str) -> Published:
    from services.kafka.records import last_progress, no_such_topic  # imported late: it is slow

    try:
        record = last_progress(kafka, slot, deadline_s=_DEADLINE_S)
    except SlotbridgeError as error:
        return Published() if no_such_topic(error) else Published(problem=str(error))
    if record is None:
        return Published()
    lsn = max(record.end_lsn, record.commit_lsn if record.seq else 0)
    return Published(lsn, lsn, record.system_identifier, record.timeline)
