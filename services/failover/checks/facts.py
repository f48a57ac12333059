"""The facts that checks judge: the view, one standby, and the slots that must survive. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.failover.model.view import Node, NodeState, View
    from services.postgres.slots import Slot

THE_BRIDGE = "the bridge"
_TABLESYNC = re.compile(r"pg_\d+_sync_\d+_\d+")
"""Slots of initial copies: needed only while a subscription says so, else the copy is repeated."""


@dataclass(frozen=True, slots=True)
class Required:
    """A slot that must survive, and how far its consumers are (name -> position in bytes)."""

    slot: str
    consumers: tuple[tuple[str, int], ...] = ()
    wanted_by: tuple[str, ...] = ()
    """Subscriptions that have failover on, and the bridge; empty where only the pair knows it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The input of all checks."""

    view: View
    standby: Node | None
    required: tuple[Required, ...]

    @property
    def above(self) -> tuple[tuple[Node, NodeState], ...]:
        """The primary and its state; empty if no node but the judged one is a primary."""
        primary = self.view.primary
        if primary is None or primary.state is None:
            return ()
        judged = self.standby is not None and self.standby.name == primary.name
        return () if judged else ((primary, primary.state),)

    @property
    def below(self) -> tuple[tuple[Node, NodeState], ...]:
        """The judged standby and its state; empty if there is none."""
        if self.standby is None or self.standby.state is None:
            return ()
        return ((self.standby, self.standby.state),)

    @property
    def both(self) -> tuple[tuple[Node, NodeState, Node, NodeState], ...]:
        """Primary and standby; empty where either is missing."""
        return tuple((*above, *below) for above in self.above for below in self.below)

    def upstream(self, slot: str) -> Slot | None:
        """Return the slot on the primary, None if it has none of that name."""
        return next((state.slot(slot) for _, state in self.above), None)

    def copy(self, slot: str) -> Slot | None:
        """Return the slot on the judged standby, None if it has none of that name."""
        return next((state.slot(slot) for _, state in self.below), None)


def facts_of(view: View, standby: Node | None) -> Facts:
    """Return the facts about a view and a standby, with every slot that must survive."""
    return Facts(view, standby, required_slots(view))


def required_slots(view: View) -> tuple[Required, ...]:
    """Return every slot that must survive, by name.

    These are the primary's permanent failover slots, the slots of failover subscriptions, and the
    bridge's slot. Without a primary, the slots that it had when it was last seen, and those that
    standbys have synchronized, take the place of the first.
    """
    wanted: dict[str, list[str]] = {name: [] for name in _slots_of_the_pair(view)}
    consumers: dict[str, list[tuple[str, int]]] = {}
    for subscriber, subscription in view.ours():
        if not subscription.failover:
            continue
        label = f"{subscriber.name}/{subscription.name}"
        for slot in filter(None, (subscription.slot_name, *subscription.sync_slots)):
            wanted.setdefault(slot, []).append(label)
            if subscription.remote_lsn is not None and slot == subscription.slot_name:
                consumers.setdefault(slot, []).append((label, subscription.remote_lsn))
    if view.bridge_slot is not None:
        wanted.setdefault(view.bridge_slot, []).append(THE_BRIDGE)
        position = bridge_position(view)
        if position is not None:
            consumers.setdefault(view.bridge_slot, []).append(("bridge", position))
        if view.published is not None and view.published.lsn is not None:
            consumers.setdefault(view.bridge_slot, []).append(("Kafka", view.published.lsn))
    return tuple(
        Required(name, tuple(consumers.get(name, ())), tuple(wanted[name]))
        for name in sorted(wanted)
    )


def bridge_position(view: View) -> int | None:
    """Return how far the bridge is by its origin, on the node where that is furthest."""
    origin = f"slotbridge_{view.bridge_slot}"
    positions = [node.state.origins.get(origin) for node in view.nodes if node.state is not None]
    return max((position for position in positions if position is not None), default=None)


def _slots_of_the_pair(view: View) -> set[str]:
    """Return the failover slots of the primary; without one, those last seen or on standbys."""
    primary = view.primary
    if primary is not None and primary.state is not None:
        return set(filter(_lasts, primary.state.failover_slots))
    return set(filter(_lasts, view.slots_last_seen or ())) | {
        slot.slot_name
        for node in view.standbys
        if node.state is not None
        for slot in node.state.slots
        if (slot.synced or slot.failover) and _is_made(slot)
    }


def _is_made(slot: Slot) -> bool:
    """Tell whether a logical slot is complete, and not one of a table's initial copy."""
    return (
        slot.slot_type == "logical"
        and (slot.confirmed_flush_lsn is not None or slot.invalidation_reason is not None)
        and _lasts(slot.slot_name)
    )


def _lasts(name: str) -> bool:
    """Tell whether a slot of this name is not one of a table's initial copy."""
    return _TABLESYNC.fullmatch(name) is None
