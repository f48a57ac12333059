"""The last committed progress record of the bridge's slot, read from Kafka."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
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
"""How long an observation waits for Kafka, if others follow."""
KAFKA = "Kafka"
"""Who remembers the timeline of a progress record."""

Read = Callable[[], KafkaProgress | None]


def with_published(first: KafkaProgress | None, view: View, read: Read) -> View:
    """Return the view with Kafka's record; `first` was read before the servers, None: no Kafka.

    So the record is older than the standby's position, as any consumer's is. The origin follows the
    record, and is read after it: if it is ahead, the record is read once more. If that comes too
    late, the first one tells of lost events only if it lacks what the bridge had published before.
    """
    if first is None:
        return view
    origin = bridge_position(view) or 0
    later = read() if not first.problem and origin > (first.lsn or 0) else None
    if later is not None and later.late:
        lost = (first.origin or 0) > (first.latest or 0)
        published = replace(first, late=not lost)
    else:
        later = later or first
        published = replace(later, lsn=first.lsn, latest=later.latest)
    milestones = dict.fromkeys((*view.milestones, *_milestones(first), *_milestones(published)))
    return replace(view, published=published, milestones=tuple(milestones))


def _milestones(published: KafkaProgress) -> tuple[tuple[str, Milestone], ...]:
    return ((KAFKA, published.milestone),) if published.milestone is not None else ()


class ProgressReader:
    """Reads the record for one observation after the other; Kafka may hang meanwhile."""

    def __init__(self, bridge: Bridge | None) -> None:
        self._bridge = bridge
        self._pending: Future[KafkaProgress] | None = None
        self._origin: int | None = None
        self._before: int | None = None
        """The bridge's origin as it was seen last, and before the pending reading began."""
        self._until = 0.0
        self.known: tuple[tuple[str, Milestone], ...] = ()
        """The newest timeline that Kafka has told; it stays met while Kafka gives no answer."""

    def read(self) -> KafkaProgress | None:
        """Return the record as an observation begins, None where the settings have no Kafka.

        An observation waits for Kafka for PATIENCE_S in all. What comes later serves the next one.
        While a reading hangs, no other is begun, and nobody waits for it.
        """
        hung = self._pending is not None
        self._until = time.monotonic() + (0.0 if hung else PATIENCE_S)
        found = self._read()
        if hung:
            self._until = time.monotonic() + PATIENCE_S
        if found is not None and found.late:
            return KafkaProgress(problem=f"no answer within {PATIENCE_S:g} s")
        return found

    def complete(self, first: KafkaProgress | None, view: View) -> View:
        """Return the view of that observation with Kafka's record, and what Kafka has told."""
        self._origin = bridge_position(view)
        seen = with_published(first, view, self._read)
        return replace(seen, milestones=tuple(dict.fromkeys((*seen.milestones, *self.known))))

    def _read(self) -> KafkaProgress | None:
        """Return what Kafka has of the bridge's slot; `late` where Kafka has not answered yet.

        The reading goes on in the background, and a later call gets its result.
        """
        if self._bridge is None or self._bridge.kafka is None:
            return None
        if self._pending is None:
            kafka, slot = self._bridge.kafka, self._bridge.slot
            self._before = self._origin
            self._pending = in_background(lambda: read_published(kafka, slot, READING_S))
        wait([self._pending], max(0.0, self._until - time.monotonic()))
        if not self._pending.done():
            return KafkaProgress(late=True)
        answer, self._pending = self._pending, None
        found = replace(answer.result(), origin=self._before)
        self._learn(_milestones(found))
        return found

    def _learn(self, milestones: tuple[tuple[str, Milestone], ...]) -> None:
        for who, met in milestones:
            known = dict(self.known).get(who)
            if known is None or known.system != met.system or met.timeline >= known.timeline:
                self.known = milestones


def in_background(ask: Callable[[], KafkaProgress]) -> Future[KafkaProgress]:
    """Ask in a thread that neither a command's end nor the process's waits for.

    Whatever goes wrong is an answer: why the record can't be read.
    """
    answer: Future[KafkaProgress] = Future()

    def run() -> None:
        try:
            found = ask()
        except BaseException as error:
            found = _problem(error)
        answer.set_result(found)

    try:
        threading.Thread(target=run, name="kafka", daemon=True).start()
    except RuntimeError as error:  # no more threads
        answer.set_result(_problem(error))
    return answer


def _problem(error: BaseException) -> KafkaProgress:
    return KafkaProgress(problem=f"{type(error).__name__}: {error}")


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
    position, server = record.position, record.server
    lsn = max(position.end_lsn, position.commit_lsn if position.seq else 0)
    began = max(server.history.values(), default=None)
    return KafkaProgress(lsn, lsn, server.system_identifier, server.timeline, began=began)
