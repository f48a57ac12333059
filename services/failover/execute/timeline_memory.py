"""Timelines that journals and Kafka remember, beside the servers' present state.

Kafka's progress record   how far Kafka is, on which timeline of which cluster
the journal's promotions  the nodes that were ordered to promote themselves, and when
the journal's ends        the timeline that a run left behind, the failover slots there were, and
                          for which standbys commits waited

Subscriptions remember for themselves (model.timelines). What can't be read is said.
"""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime

from schemas.lsn import parse_lsn
from services.failover.execute.journal import DONE, END, Entry, instant
from services.failover.model.kafka_progress import KafkaProgress
from services.failover.model.loss_limit import Sighting
from services.failover.model.timelines import Milestone, milestone_in
from services.failover.observe.bridge_client import Bridge
from services.failover.observe.cluster import Cluster
from services.failover.observe.kafka_progress import KAFKA, in_background, read_published
from services.failover.observe.last_contact import JournalSighting
from services.failover.plan.steps.promotion import PROMOTES

_KAFKA_S = 5.0


@dataclass(frozen=True, slots=True)
class KnownSlots:
    """The failover slots that a primary had. `at`: UTC, ISO 8601."""

    names: frozenset[str] = frozenset()
    at: str = ""


class Asked:
    """Kafka's record, asked for while the servers are asked; what comes too late is not judged."""

    def __init__(self, bridge: Bridge | None) -> None:
        self._due = time.monotonic() + _KAFKA_S
        self._answer: Future[KafkaProgress] | None = None
        if bridge is not None and bridge.kafka is not None:
            kafka, slot = bridge.kafka, bridge.slot
            self._answer = in_background(lambda: read_published(kafka, slot, _KAFKA_S))

    def answer(self) -> KafkaProgress | None:
        """Return Kafka's record, None where the settings have no Kafka.

        Waits until _KAFKA_S after it was asked for, whatever the client is doing then.
        """
        if self._answer is None:
            return None
        try:
            return self._answer.result(max(0.0, self._due - time.monotonic()))
        except TimeoutError:
            return KafkaProgress(problem=f"no answer within {_KAFKA_S:.0f} s")


def recall(
    cluster: Cluster,
    entries: Iterable[Entry],
    published: KafkaProgress | None,
    unread: Iterable[str] = (),
) -> list[str]:
    """Add these timelines to every view of the cluster; return notes on what is not judged.

    `unread`: the journals that could not be read, and why.
    """
    found: list[tuple[str, Milestone]] = []
    known = KnownSlots()
    last_primary: JournalSighting | None = None
    promotions: list[tuple[str, str]] = []
    promoted_by, promoted_from = "", 0
    begun_on: dict[str, int] = {}
    failover_slots: dict[str, frozenset[str]] = {}
    kept = list(entries)
    for entry in kept:
        if isinstance(begun := entry.intent.get("timeline"), int):
            begun_on[entry.run] = begun
        if entry.step.startswith(PROMOTES) and entry.server:
            promotions.append((entry.server, entry.at))
            promoted_by, promoted_from = entry.run, begun_on.get(entry.run, 0)
        met = _milestone(entry.intent.get("met"))
        slots = entry.intent.get("failover_slots")
        if met is not None:
            if isinstance(slots, list):
                failover_slots[met.system] = frozenset(map(str, slots))
            found.append((f"the journal ({entry.command} of {entry.at})", met))
            last_primary = _later(last_primary, _last_primary(entry, met, failover_slots))
            if entry.run == promoted_by and (entry.step, entry.outcome) == (END, DONE):
                promoted_from = promoted_from or met.timeline - 1
        if isinstance(slots, list):
            known = KnownSlots(frozenset(map(str, slots)), entry.at)
    if published is not None and published.milestone is not None:
        found.append((KAFKA, published.milestone))
    cluster.milestones = tuple(found)
    cluster.unread = tuple(unread)
    cluster.published = published
    cluster.promotions = tuple(promotions)
    cluster.promoted_from = promoted_from
    cluster.sightings.by_journals = last_primary
    cluster.recorded_at = max((e.at for e in kept), default="", key=instant)
    cluster.known_slots = known.names
    cluster.known_slots_at = known.at
    notes = [
        f"not judged: which timelines and orders to promote it has; {why}" for why in cluster.unread
    ]
    if published is not None and published.problem:
        why = published.problem
        notes.append(f"not judged: how far Kafka is, as its record can't be read ({why})")
    return notes


def _last_primary(
    entry: Entry, met: Milestone, slots: Mapping[str, frozenset[str]]
) -> JournalSighting | None:
    """Return the last primary as a journal's entry tells it, None where it does not.

    `slots`: system -> the failover slots by this entry, or by the last one before that told them.
    """
    node, names, lsn = (entry.intent.get(key) for key in ("primary", "synchronous", "lsn"))
    if not (isinstance(node, str) and isinstance(names, str) and isinstance(lsn, str)):
        return None
    try:
        at = datetime.fromisoformat(entry.at)
        where, failover_slots = parse_lsn(lsn), slots.get(met.system)
        sighting = Sighting(node, met.timeline, where, 0.0, names, "by the journal", failover_slots)
    except ValueError:
        return None
    return JournalSighting(
        met.system, at if at.tzinfo is not None else at.replace(tzinfo=UTC), sighting
    )


def _later(one: JournalSighting | None, other: JournalSighting | None) -> JournalSighting | None:
    kept = [sighting for sighting in (one, other) if sighting is not None]
    return max(kept, key=lambda sighting: sighting.sighting.position, default=None)


def _milestone(text: object) -> Milestone | None:
    return milestone_in(text) if isinstance(text, str) else None
