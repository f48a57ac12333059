"""Which slots must survive a failover, and whether a standby has each in a usable state. Pure.

A slot is usable after the promotion of a standby when that standby has it `synced AND NOT
temporary AND invalidation_reason IS NULL`, and has at least the WAL that the slot's consumers have.
Source: PostgreSQL documentation 29.3 Logical Replication Failover; slotsync.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.lsn import format_lsn

if TYPE_CHECKING:
    from services.failover.view import Node, View
    from services.slots import Slot

CREATE_AGAIN = (
    "on the subscriber: ALTER SUBSCRIPTION … DISABLE, SET (failover = false), "
    "SET (failover = true), ENABLE"
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a slot is not ready: what is so, how it was seen, what to do about it."""

    text: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text} ({self.evidence})"


@dataclass(frozen=True, slots=True)
class Required:
    """A slot that must survive, and how far its consumers are (name -> position in bytes)."""

    slot: str
    consumers: tuple[tuple[str, int], ...] = ()
    wanted_by: str = ""
    """The subscription that has failover on, or "" where only the pair knows the slot."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """The judgement on one slot, for one standby."""

    slot: str
    standby: str
    reasons: tuple[Reason, ...]
    confirmed_flush_lsn: int | None
    consumers: tuple[tuple[str, int], ...]

    @property
    def ready(self) -> bool:
        """The slot can be used after the standby's promotion."""
        return not self.reasons

    def as_json(self) -> dict[str, object]:
        """For `--json`; LSNs as PostgreSQL prints them."""
        flushed = self.confirmed_flush_lsn
        return {
            "slot": self.slot,
            "ready": self.ready,
            "standby": self.standby or None,
            "confirmed_flush_lsn": None if flushed is None else format_lsn(flushed),
            "consumers": {name: format_lsn(lsn) for name, lsn in self.consumers},
            "reasons": [
                {"reason": r.text, "evidence": r.evidence, "remedy": r.remedy} for r in self.reasons
            ],
        }


def required_slots(view: View) -> tuple[Required, ...]:
    """Every slot that must survive, by name.

    With a primary: its permanent failover slots and those that failover subscriptions name.
    Without: what standbys have synchronized, what subscriptions name, and the bridge's slot.
    """
    found: dict[str, Required] = {}
    for name in _slots_of_the_pair(view):
        found[name] = Required(name)
    for subscriber, subscription in view.ours():
        if not subscription.failover:
            continue
        label = f"{subscriber.name}/{subscription.name}"
        for slot in filter(None, (subscription.slot_name, *subscription.sync_slots)):
            position = subscription.remote_lsn if slot == subscription.slot_name else None
            before = found.get(slot, Required(slot)).consumers
            own = ((label, position),) if position is not None else ()
            found[slot] = Required(slot, (*before, *own), wanted_by=label)
    bridge = view.bridge_slot
    if bridge is not None and bridge in found:
        found[bridge] = _with_origin(found[bridge], view)
    return tuple(found[name] for name in sorted(found))


def judge(view: View, required: Required, standby: Node | None) -> Readiness:
    """Whether `standby` (None: there is none) has the slot in a usable state."""
    consumers = required.consumers
    upstream = _upstream_slot(view, required.slot)
    if upstream is not None and upstream.confirmed_flush_lsn is not None:
        consumers = (*consumers, ("its slot on the primary", upstream.confirmed_flush_lsn))
    if standby is None or standby.state is None:
        reason = Reason(
            "there is no standby to fail over to",
            "no node answers as a standby",
            "start a standby and add it to failover.nodes",
        )
        return Readiness(required.slot, "", (reason,), None, consumers)
    copy = standby.state.slot(required.slot)
    reasons = [
        *_upstream_reasons(view, required, upstream),
        *_copy_reasons(copy, required.slot, standby),
        *_ahead_reasons(standby, consumers),
    ]
    flushed = copy.confirmed_flush_lsn if copy else None
    return Readiness(required.slot, standby.name, tuple(reasons), flushed, consumers)


def judge_all(view: View, standby: Node | None) -> tuple[Readiness, ...]:
    """Every required slot, judged for one standby."""
    return tuple(judge(view, required, standby) for required in required_slots(view))


def judge_promoted(view: View, node: Node) -> tuple[Readiness, ...]:
    """Every required slot, judged on the new primary itself: there, permanent and valid."""
    verdicts = []
    for required in required_slots(view):
        slot = node.state.slot(required.slot) if node.state else None
        found = _copy_reasons(slot, required.slot, node, synced=False)
        flushed = slot.confirmed_flush_lsn if slot else None
        verdicts.append(
            Readiness(required.slot, node.name, tuple(found), flushed, required.consumers)
        )
    return tuple(verdicts)


def candidate(view: View) -> Node | None:
    """The standby to promote: the one with the most WAL; among equals one with all slots ready."""
    return min(
        view.standbys,
        key=lambda node: (
            -node.received,
            sum(not slot.ready for slot in judge_all(view, node)),
            node.name,
        ),
        default=None,
    )


def _slots_of_the_pair(view: View) -> set[str]:
    primary = view.primary
    if primary is not None and primary.state is not None:
        return {
            slot.slot_name
            for slot in primary.state.slots
            if slot.failover and not slot.temporary and slot.slot_type == "logical"
        }
    synced = {
        slot.slot_name
        for node in view.standbys
        if node.state is not None
        for slot in node.state.slots
        if slot.slot_type == "logical" and (slot.synced or slot.failover)
    }
    return synced | ({view.bridge_slot} if view.bridge_slot else set())


def _upstream_slot(view: View, slot: str) -> Slot | None:
    primary = view.primary
    return primary.state.slot(slot) if primary is not None and primary.state is not None else None


def _with_origin(required: Required, view: View) -> Required:
    """The bridge's slot with the position of the origin that the bridge moves on the pair."""
    origin = f"slotbridge_{required.slot}"
    positions = [node.state.origins.get(origin) for node in view.nodes if node.state is not None]
    known = [position for position in positions if position is not None]
    own = (("bridge", max(known)),) if known else ()
    return Required(required.slot, (*required.consumers, *own), required.wanted_by)


def _upstream_reasons(view: View, required: Required, upstream: Slot | None) -> list[Reason]:
    primary = view.primary
    if primary is None:
        return []
    if upstream is None:
        return [
            Reason(
                f"the primary {primary.name} has no slot of that name",
                f"wanted by {required.wanted_by or 'the bridge'}",
                "create the slot, or correct the subscription's slot_name",
            )
        ]
    if not upstream.failover:
        return [
            Reason(
                "the slot's failover is off, though its subscription's is on",
                f"pg_replication_slots.failover = f on {primary.name}, "
                f"pg_subscription.subfailover = t at {required.wanted_by}",
                CREATE_AGAIN,
            )
        ]
    return []


def _copy_reasons(
    copy: Slot | None, slot: str, standby: Node, *, synced: bool = True
) -> list[Reason]:
    where = f"pg_replication_slots on {standby.name}"
    if copy is None:
        return [
            Reason(
                f"{standby.name} does not have it",
                f"no such row in {where}",
                "see the conditions of slot synchronization; the worker naps up to 30 s",
            )
        ]
    reasons = []
    if synced and not copy.synced:
        reasons.append(
            Reason(
                f"{standby.name} has a slot of its own of that name, which blocks synchronization",
                f"synced = f in {where}",
                f"on {standby.name}: SELECT pg_drop_replication_slot('{slot}')",
            )
        )
    if copy.temporary:
        reasons.append(
            Reason(
                "its copy is still temporary and would be dropped at promotion",
                f"temporary = t in {where}",
                "let its consumer advance it: enable the subscription or start the bridge, and "
                "write to the primary (pg_log_standby_snapshot() is enough)",
            )
        )
    if copy.invalidation_reason is not None:
        reasons.append(
            Reason(
                "its copy is invalidated",
                f"invalidation_reason = {copy.invalidation_reason} in {where}",
                "create the slot again and load its consumer anew",
            )
        )
    return reasons


def _ahead_reasons(standby: Node, consumers: tuple[tuple[str, int], ...]) -> list[Reason]:
    return [
        Reason(
            f"its consumer is ahead of {standby.name} by {position - standby.received} bytes",
            f"{name} is at {format_lsn(position)}, "
            f"{standby.name} has WAL up to {format_lsn(standby.received)}",
            "let the standby catch up; name its physical slot in synchronized_standby_slots on "
            "the primary so that this can't happen",
        )
        for name, position in consumers
        if position > standby.received
    ]
