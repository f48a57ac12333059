"""The last committed progress record of the bridge's slot, read from Kafka."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from schemas.errors import SlotbridgeError
from schemas.settings import KafkaSettings
from services.failover.checks.facts import bridge_position
from services.failover.model.kafka_progress import KafkaProgress
from services.failover.model.timelines import Milestone
from services.failover.model.view import View
from services.failover.observe.bridge_client import Bridge

READING_S = 10.0
"""How long one reading may take."""
PATIENCE_S = 1.0
"""How long an observation waits for a reading that others follow."""
KAFKA = "Kafka"
"""Who remembers the timeline of a progress record."""

Read = Callable[[], KafkaProgress | None]


def with_published(first: KafkaProgress | None, view: View, read: Read) -> View:
    """Return the view with Kafka's record; `first` was read before the servers, None: no Kafka.

    So the record is older than the standby's position, as any consumer's is. The origin follows the
    record, and is read after it: if it is ahead, the record is read once more.
    """
    if first is None:
        return view
    origin = bridge_position(view) or 0
    again = not first.problem and origin > (first.lsn or 0)
    later = (read() if again else None) or first
    published = replace(later, lsn=first.lsn, latest=later.latest)
    met: tuple[tuple[str, Milestone], ...] = ()
    if published.milestone is not None:
        met = ((KAFKA, published.milestone),)
    return replace(view, published=published, milestones=(*view.milestones, *met))


class ProgressReader:
    """Reads the record for one observation after the other; Kafka may hang meanwhile."""

    def __init__(self, bridge: Bridge | None) -> None:
        self._bridge = bridge
        self._pending: Future[KafkaProgress] | None = None

    def read(self) -> KafkaProgress | None:
        """Return the record as it is now, or a problem where it does not come in PATIENCE_S.

        None where the settings have no Kafka.
        While a reading hangs, no other is begun, and nobody waits for it; its answer is too old.
        """
        if self._bridge is None or self._bridge.kafka is None:
            return None
        hung = self._pending is not None
        if self._pending is None:
            kafka, slot = self._bridge.kafka, self._bridge.slot
            self._pending = in_background(lambda: read_published(kafka, slot, READING_S))
        try:
            found = self._pending.result(0.0 if hung else PATIENCE_S)
        except TimeoutError:
            return KafkaProgress(problem=f"no answer within {PATIENCE_S:g} s")
        self._pending = None
        return self.read() if hung else found


def in_background(ask: Callable[[], KafkaProgress]) -> Future[KafkaProgress]:
    """Ask in a thread that neither a command's end nor the process's waits for."""
    answer: Future[KafkaProgress] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="kafka", daemon=True).start()
    return answer


def bridge_progress(bridge: Bridge | None) -> KafkaProgress | None:
    """Return the record of the settings' bridge, or why it can't be read; None without Kafka."""
    if bridge is None or bridge.kafka is None:
        return None
    return read_published(bridge.kafka, bridge.slot, READING_S)


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
