"""The steps that make a standby the primary, and prove that its consumers have come. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from services.failover.model import statements
from services.failover.model.conninfo import at_any
from services.failover.model.standby_settings import listed
from services.failover.model.view import FENCE
from services.failover.plan.steps.step import Action, Step, active, with_state
from services.postgres.server import SettingValue

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.failover.model.view import Node, NodeState, View

PROMOTES = "promote "
"""So begins the text of a step that promotes, in every journal."""


def reset(node: Node, setting: str, items: tuple[str, ...]) -> Step:
    """Remove names of missing standbys from a setting, so that no commit waits for them."""
    sql = statements.alter_system(setting, items)
    return Step(
        action=Action.RESET,
        server=node.name,
        subject=setting,
        node=node.name,
        text=f"set {setting} to '{', '.join(items)}' on {node.name}",
        before=f"{setting} names standbys that do not exist",
        after=f"commits and decoding on {node.name} wait only for standbys that exist",
        effect=lambda view: with_state(view, node.name, lambda s: with_setting(s, setting, items)),
        holds=lambda view: listed(_setting(view, node, setting)) == items,
        shown=sql,
        sql=sql,
    )


def lift(node: Node) -> Step:
    """Remove the fence that a standby has because it is a copy of a fenced primary."""
    return Step(
        action=Action.RESET,
        server=node.name,
        subject=FENCE,
        node=node.name,
        text=f"take away the fence that {node.name} was copied with",
        before=f"the files of {node.name} are a copy of a primary that was fenced then",
        after=f"{FENCE} is as it was before that fence",
        effect=lambda view: with_state(
            view, node.name, lambda s: replace(s, fence_mark="", read_only=False)
        ),
        holds=lambda view: (
            (state := view.node(node.name).state) is not None and not state.fence_mark
        ),
        shown=statements.UNFENCED,
        sql=statements.UNFENCED,
    )


def promote(
    node: Node, lsn: int | None = None, guard: Callable[[View], None] = lambda _view: None
) -> Step:
    """Make the standby the primary; `lsn` is the position that it must have, if one is known.

    `guard` is asked of a fresh observation right before the order.
    """
    return Step(
        action=Action.PROMOTE,
        server=node.name,
        subject="",
        node=node.name,
        text=f"{PROMOTES}{node.name}",
        before="no server that answers sees another primary alive",
        after=f"{node.name} is writable",
        effect=lambda view: with_state(view, node.name, _promoted),
        holds=lambda view: view.node(node.name).writable,
        shown=(statements.PROMOTE,),
        sql=(statements.PROMOTE,),
        lsn=lsn,
        guard=guard,
    )


def label(node: Node, primary: Node) -> Step:
    """Tell the outside (a load balancer, Kubernetes) of the node's role."""
    role = "primary" if node is primary else "standby"
    command = node.known_machine.command("label", role=role, **names_of(primary))
    return Step(
        action=Action.LABEL,
        server=node.name,
        subject=role,
        node=primary.name,
        text=f"label {node.name} as {role}",
        before=f"{node.name} is the {role}",
        after="the command ended with 0",
        effect=lambda view: view,
        holds=lambda view: True,
        shown=(shlex.join(command),),
        command=command,
    )


def redirect_bridge(view: View, node: Node, slot: str) -> Step:
    """Tell the bridge where the new primary is: its address first, then the other nodes'."""
    others = (other.address for other in view.nodes if other.name != node.name)
    conninfo = at_any((node.address, *others)).text
    return Step(
        action=Action.SEND,
        server=node.name,
        subject=slot,
        node=node.name,
        text=f"send the bridge to {node.address}",
        before=f"{node.name} is writable, and the bridge is not there",
        after="the bridge has taken the order",
        effect=lambda view: view,
        holds=lambda view: True,
        shown=(f"POST {view.bridge_url}/v1/source {conninfo}",),
        sql=(conninfo,),
    )


def bridge(node: Node, slot: str) -> Step:
    """Wait until the bridge has come to the new primary."""
    return Step(
        action=Action.BRIDGE,
        server=node.name,
        subject=slot,
        node=node.name,
        text=f"wait for the bridge at {node.name}: slot {slot}",
        before=f"{node.name} is writable",
        after=f"a marker message written on {node.name} is in Kafka:"
        f" slot {slot} is active and confirmed past it",
        effect=lambda view: with_state(view, node.name, lambda state: _flowing(state, (slot,))),
        holds=lambda view: active(view.node(node.name), slot),
        shown=statements.marker(node.name),
        sql=statements.marker(node.name),
        slots=(slot,),
        progress=lambda view: _missing(
            view.node(node.name), (slot,), f"the bridge has not connected to {node.name} yet"
        ),
    )


def flow(node: Node, slots: tuple[str, ...]) -> Step:
    """Wait until every subscription's worker is connected to the new primary."""
    return Step(
        action=Action.FLOW,
        server=node.name,
        subject="",
        node=node.name,
        text=f"wait for the subscriptions' workers at {node.name}: {', '.join(slots)}",
        before="the subscriptions are enabled",
        after=f"each slot has its walsender, and is confirmed past a marker message written on "
        f"{node.name}",
        effect=lambda view: with_state(view, node.name, lambda state: _flowing(state, slots)),
        holds=lambda view: all(active(view.node(node.name), slot) for slot in slots),
        shown=statements.marker(node.name),
        sql=statements.marker(node.name),
        slots=slots,
        progress=lambda view: _missing(
            view.node(node.name), slots, f"subscriptions have not connected to {node.name} yet"
        ),
    )


def names_of(primary: Node) -> dict[str, str]:
    """Return the placeholders of commands that name the new primary, with their values."""
    return {
        "primary": primary.name,
        "primary_host": primary.address.host or primary.address.hostaddr,
        "primary_port": primary.address.port,
    }


def _missing(node: Node, slots: tuple[str, ...], absent: str) -> str:
    """Return what consumers wait for at the node; `absent`: the words if slots are not active."""
    withheld = node.state.replication.withheld_by if node.state is not None else ()
    if withheld:
        return (
            f"decoding on {node.name} waits for {', '.join(withheld)}, which "
            "synchronized_standby_slots names and no standby uses"
        )
    alone = [slot for slot in slots if not active(node, slot)]
    names = f"slot{'s' * (len(alone) > 1)} {', '.join(alone)}"
    return f"{absent} ({names})" if alone else "not all have confirmed the marker"


def with_setting(state: NodeState, setting: str, items: tuple[str, ...]) -> NodeState:
    """Return the state with another value of a list setting."""
    known = state.settings.get(setting, SettingValue("", ""))
    value = replace(known, value=", ".join(items))
    return replace(state, settings={**state.settings, setting: value})


def _setting(view: View, node: Node, name: str) -> str:
    state = view.node(node.name).state
    return state.setting(name) if state is not None else ""


def _promoted(state: NodeState) -> NodeState:
    """Return a standby's state after its promotion.

    Temporary slots are dropped, and a timeline begins where the standby's WAL ended.
    """
    received = state.replication.received_lsn
    before = state.provenance.history
    left = ((state.server.timeline, received),) if received is not None else ()
    history = None if before is None else (*before, *left)
    return replace(
        state,
        server=replace(state.server, in_recovery=False, timeline=state.server.timeline + 1),
        replication=replace(
            state.replication,
            received_lsn=None,
            written_lsn=received,
            receiver_streaming=False,
            slotsync_worker=False,
        ),
        slots=tuple(slot for slot in state.slots if not slot.temporary),
        switch_lsn=received,
        provenance=replace(state.provenance, history=history),
    )


def _flowing(state: NodeState, fed: tuple[str, ...]) -> NodeState:
    """Return the state in which each of the slots is fed, past what the server has written."""
    written = state.replication.written_lsn
    return replace(
        state,
        slots=tuple(
            replace(slot, active_pid=1, confirmed_flush_lsn=written)
            if slot.slot_name in fed
            else slot
            for slot in state.slots
        ),
    )
