"""The steps a failover is made of: what each says, runs, is expected to do, and proves. Pure.

`Step.shown` is the exact SQL with secrets masked, `Step.sql` what is run. `after` is a step's
effect in thought, with which plans are checked; `done` is its postcondition, asked of what is
observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from services.failover import statements
from services.failover.standby_lists import listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.failover.address import Conninfo
    from services.failover.view import Node, NodeState, Subscriber, Subscription, View


class Action(StrEnum):
    """What a step does."""

    DISABLE = "disable"
    RESET = "reset"
    PROMOTE = "promote"
    REPOINT = "repoint"
    ENABLE = "enable"
    FLOW = "flow"


@dataclass(frozen=True, slots=True)
class Step:
    """One change of one server, or one thing to wait for."""

    action: Action
    server: str
    """The subscriber or node that is changed or watched."""
    subject: str
    """The subscription, setting or slots (comma-separated) it is about; "" for a whole node."""
    node: str
    """The new primary."""
    text: str
    before: str
    after: str
    shown: tuple[str, ...] = ()
    sql: tuple[str, ...] = field(default=(), repr=False)
    conninfo: Conninfo | None = None
    """Repoint: where the subscription will lead."""
    items: tuple[str, ...] = ()
    """Reset: what the setting will name."""


def disable(subscriber: Subscriber, subscription: Subscription, node: Node) -> Step:
    """Stop the subscription from being fed by a primary that may come back."""
    sql = statements.disable(subscription.name, subscription.comment)
    return Step(
        Action.DISABLE,
        subscriber.name,
        subscription.name,
        node.name,
        f"disable subscription {subscription.name} at {subscriber.name}",
        "it is enabled",
        "it is disabled, and marked so in its comment",
        sql,
        sql,
    )


def reset(node: Node, setting: str, items: tuple[str, ...]) -> Step:
    """Take the names of what is not there out of a setting, so that nothing waits for it."""
    sql = statements.alter_system(setting, items)
    return Step(
        Action.RESET,
        node.name,
        setting,
        node.name,
        f"set {setting} to '{', '.join(items)}' on {node.name}",
        "it names standbys that are not there",
        "commits and decoding wait only for standbys that are there",
        sql,
        sql,
        items=items,
    )


def promote(node: Node) -> Step:
    """Make the standby the primary."""
    return Step(
        Action.PROMOTE,
        node.name,
        "",
        node.name,
        f"promote {node.name}",
        "no node is writable; it has replayed all the WAL it received",
        "it is writable",
        (statements.PROMOTE,),
        (statements.PROMOTE,),
    )


def repoint(subscriber: Subscriber, subscription: Subscription, node: Node) -> Step:
    """Point the subscription at the new primary."""
    conninfo = subscription.conninfo.at(node.address)
    return Step(
        Action.REPOINT,
        subscriber.name,
        subscription.name,
        node.name,
        f"point subscription {subscription.name} at {subscriber.name} to {node.address}",
        f"it is disabled, and {node.name} is writable",
        f"its connection string leads to {node.name}",
        statements.connection(subscription.name, conninfo, masked=True),
        statements.connection(subscription.name, conninfo, masked=False),
        conninfo,
    )


def enable(subscriber: Subscriber, subscription: Subscription, node: Node) -> Step:
    """Let the subscription go on from the new primary."""
    sql = statements.enable(subscription.name, subscription.comment)
    return Step(
        Action.ENABLE,
        subscriber.name,
        subscription.name,
        node.name,
        f"enable subscription {subscription.name} at {subscriber.name}",
        f"it leads to {node.name}, whose slot is valid and at or before its position",
        "it is enabled, and the mark is gone",
        sql,
        sql,
    )


def flow(node: Node, slots: tuple[str, ...]) -> Step:
    """Wait until every subscription's worker is connected to the new primary."""
    return Step(
        Action.FLOW,
        node.name,
        ",".join(slots),
        node.name,
        f"wait for the subscriptions' workers at {node.name}: {', '.join(slots)}",
        "they are enabled",
        "each slot has its walsender",
    )


def after(step: Step, view: View) -> View:
    """The view as it will be once the step has done what it should."""
    if step.action is Action.DISABLE:
        return _with_subscription(view, step, _disabled)
    if step.action is Action.ENABLE:
        return _with_subscription(view, step, _enabled)
    if step.action is Action.REPOINT:
        return _with_subscription(
            view, step, lambda s: replace(s, conninfo=step.conninfo or s.conninfo)
        )
    changed = {Action.RESET: _reset, Action.PROMOTE: _promoted, Action.FLOW: _flowing}
    return replace(
        view,
        nodes=tuple(
            replace(node, state=changed[step.action](node.state, step))
            if node.name == step.server and node.state is not None
            else node
            for node in view.nodes
        ),
    )


def done(step: Step, view: View) -> bool:
    """Whether the step's postcondition holds in what is observed."""
    node = view.node(step.node)
    subscription = view.subscription(step.server, step.subject)
    match step.action:
        case Action.DISABLE:
            return subscription is not None and not subscription.enabled
        case Action.ENABLE:
            return subscription is not None and subscription.enabled
        case Action.REPOINT:
            return subscription is not None and subscription.conninfo.leads_to(node.endpoints)
        case Action.PROMOTE:
            return node.writable
        case Action.RESET:
            state = node.state
            return state is not None and listed(state.setting(step.subject)) == step.items
        case Action.FLOW:
            return all(active(node, slot) for slot in step.subject.split(","))


def active(node: Node, slot: str) -> bool:
    """Whether a consumer is connected to the node's slot."""
    found = node.state.slot(slot) if node.state else None
    return found is not None and found.active_pid is not None


def _with_subscription(
    view: View, step: Step, change: Callable[[Subscription], Subscription]
) -> View:
    return replace(
        view,
        subscribers=tuple(
            replace(
                subscriber,
                subscriptions=tuple(
                    change(s) if s.name == step.subject else s for s in subscriber.subscriptions
                ),
            )
            if subscriber.name == step.server
            else subscriber
            for subscriber in view.subscribers
        ),
    )


def _disabled(subscription: Subscription) -> Subscription:
    return replace(subscription, enabled=False, comment=statements.marked(subscription.comment))


def _enabled(subscription: Subscription) -> Subscription:
    return replace(subscription, enabled=True, comment=statements.unmarked(subscription.comment))


def _reset(state: NodeState, step: Step) -> NodeState:
    value = replace(state.settings[step.subject], value=", ".join(step.items))
    return replace(state, settings={**state.settings, step.subject: value})


def _promoted(state: NodeState, _step: Step) -> NodeState:
    """A standby's promotion: temporary slots are dropped, and a timeline begins where it was."""
    received = state.replication.received_lsn
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
    )


def _flowing(state: NodeState, step: Step) -> NodeState:
    fed = step.subject.split(",")
    return replace(
        state,
        slots=tuple(
            replace(slot, active_pid=1) if slot.slot_name in fed else slot for slot in state.slots
        ),
    )
