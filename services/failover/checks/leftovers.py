"""Slots that nobody will move again: what they hold back, on every node. Pure.

A physical slot holds back WAL, and, where its standby had hot_standby_feedback on, VACUUM: through
hot_standby_feedback a standby's leftover slot does so on the primary, too.
Source: PostgreSQL documentation 26.2.6 Replication Slots, 53.20 pg_replication_slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.findings import Severity
from services.failover.checks import remedies
from services.failover.checks.model import Seen, check
from services.failover.model.standby_settings import listed
from services.failover.model.topology import follows, slot_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.failover.checks.facts import Facts
    from services.failover.model.view import Node, NodeState
    from services.postgres.slots import Slot

GROUP = "slots"


@check(
    "leftover-slot",
    group=GROUP,
    title="every slot is moved by a standby or a consumer",
    consequence="the slot holds back WAL for ever, and VACUUM where it has an xmin: disk and "
    "tables grow on this node, and by hot_standby_feedback on the primary",
    severity=Severity.WARNING,
)
def leftover_slot(facts: Facts) -> Iterator[Seen]:
    """Look for inactive slots that nobody needs.

    These are physical slots of no known standby, and a standby's own failover slots.
    """
    required = {wanted.slot for wanted in facts.required}
    for node in facts.view.nodes:
        if node.state is None:
            continue
        waited_for = listed(node.state.setting("synchronized_standby_slots"))
        for slot in node.state.slots:
            if slot.active_pid is not None or slot.temporary or slot.invalidation_reason:
                continue
            if slot.of_server:
                continue
            own = node.standby and slot.failover and not slot.synced
            if slot.slot_type == "physical":
                if slot.slot_name not in waited_for or not node.leading:
                    yield from _physical(facts, node, node.state, slot)
            elif own and slot.slot_name not in required:
                yield _leftover(node, node.state, slot, ours=True)


def _physical(facts: Facts, node: Node, state: NodeState, slot: Slot) -> Iterator[Seen]:
    """Judge an inactive physical slot by who may use it."""
    if slot.restart_lsn is None and slot.xmin_age is None and slot.catalog_xmin_age is None:
        return
    users = [
        other
        for other in facts.view.nodes
        if other.name != node.name
        and slot_of(other) == slot.slot_name
        and (other.state is None or (other.standby and _may_come(other, node)))
    ]
    if users:
        return  # that standby is away; other checks say so
    unheard = [other.name for other in facts.view.nodes if other.state is None]
    if unheard and node.leading:
        yield Seen(
            slot.slot_name,
            _holds(node, state, slot),
            unknown=f"it may be the slot of {', '.join(unheard)}, which can't be asked",
        )
        return
    yield _leftover(node, state, slot, ours=_was_the_primarys(facts, node, slot))


def _may_come(standby: Node, node: Node) -> bool:
    """Tell whether a standby follows the node, or at least streams from nobody else."""
    return follows(standby, node) or not standby.known_state.replication.receiver_streaming


def _was_the_primarys(facts: Facts, node: Node, slot: Slot) -> bool:
    """Tell whether the primary used this slot of a standby before it was promoted itself."""
    primary = facts.view.primary
    if not node.standby or primary is None or primary.state is None:
        return False
    return slot.slot_name in (slot_of(primary), primary.state.setting("primary_slot_name"))


def _leftover(node: Node, state: NodeState, slot: Slot, *, ours: bool) -> Seen:
    """Return the finding of a slot that nobody uses, with the statement that drops it."""
    vacuum = slot.xmin_age is not None or slot.catalog_xmin_age is not None
    kind = "physical slot" if slot.slot_type == "physical" else "slot from when it was the primary"
    return Seen(
        slot.slot_name,
        _holds(node, state, slot),
        f"nobody uses the {kind} {slot.slot_name} of {node.name}, and it holds back "
        + ("VACUUM and WAL" if vacuum else "WAL"),
        remedies.run_statements(
            "",
            remedies.order(node.name, remedies.drop_slot(slot.slot_name)),
            by_hand="" if ours else "something that the settings do not name may use it",
        ),
        Severity.CRITICAL if vacuum else Severity.WARNING,
        since=slot.inactive_since or "",
    )


def _holds(node: Node, state: NodeState, slot: Slot) -> str:
    """Return what a slot holds back: WAL, and rows from VACUUM."""
    written = state.replication.written_lsn or node.received
    parts = [f"active = f on {node.name}"]
    if slot.restart_lsn is not None:
        parts.append(f"holds back {max(0, written - slot.restart_lsn)} bytes of WAL")
    for name, age in (("xmin", slot.xmin_age), ("catalog_xmin", slot.catalog_xmin_age)):
        if age is not None:
            parts.append(f"{name} is {age} transactions old")
    return ", ".join(parts)
