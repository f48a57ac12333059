"""What is remembered outside of the servers' present state: by the journals and by Kafka.

Kafka's progress record   how far Kafka is, on which timeline of which cluster
the journal's promotions  the nodes that were ordered to promote themselves, and when
the journal's ends        the timeline that a run left behind, and the failover slots there were

Subscriptions remember for themselves (services.failover.timelines). What can't be read is said.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from services.failover.bridging import Bridge
from services.failover.cluster import Cluster
from services.failover.effects.promotion import PROMOTES
from services.failover.journal import Entry
from services.failover.published import read_published
from services.failover.timelines import Milestone, milestone_in
from services.failover.view import Published

_KAFKA_S = 3.0


@dataclass(frozen=True, slots=True)
class KnownSlots:
    """The failover slots that a primary had. `at`: UTC, ISO 8601."""

    names: frozenset[str] = frozenset()
    at: str = ""


class Asked:
    """Kafka's record, asked for while the servers are asked; a short deadline, then not judged."""

    def __init__(self, bridge: Bridge | None) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kafka")
        self._answer: Future[Published] | None = None
        if bridge is not None and bridge.kafka is not None:
            kafka, slot = bridge.kafka, bridge.slot
            self._answer = self._pool.submit(read_published, kafka, slot, _KAFKA_S)

    def answer(self) -> Published | None:
        """The record; None where the settings have no Kafka."""
        try:
            return self._answer.result() if self._answer is not None else None
        finally:
            self._pool.shutdown(wait=False)


def recall(cluster: Cluster, entries: Iterable[Entry], published: Published | None) -> list[str]:
    """Have every view of the cluster remember this too; return what can't be judged, as notes."""
    found: list[tuple[str, Milestone]] = []
    known = KnownSlots()
    promotions: list[tuple[str, str]] = []
    for entry in entries:
        if entry.step.startswith(PROMOTES) and entry.server:
            promotions.append((entry.server, entry.at))
        met = _milestone(entry.intent.get("met"))
        if met is not None:
            found.append((f"the journal ({entry.command} of {entry.at})", met))
        slots = entry.intent.get("failover_slots")
        if isinstance(slots, list):
            known = KnownSlots(frozenset(map(str, slots)), entry.at)
    if published is not None and published.system_identifier:
        cluster_, timeline = published.system_identifier, published.timeline
        found.append(("Kafka", Milestone(cluster_, timeline, published.began)))
    cluster.milestones = tuple(found)
    cluster.published = published
    cluster.promotions = tuple(promotions)
    cluster.known_slots = known.names
    cluster.known_slots_at = known.at
    if published is not None and published.problem:
        return [f"not judged: how far Kafka is, as its record can't be read ({published.problem})"]
    return []


def _milestone(text: object) -> Milestone | None:
    return milestone_in(text) if isinstance(text, str) else None
