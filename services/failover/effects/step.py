"""A step: what it says, what it runs, what it is expected to do, and what proves it. Pure.

`shown` is the exact SQL or command with secrets masked, `sql` what is run. `effect` is what the
step does in thought, with which plans are checked; `holds` is its postcondition, asked of what is
observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.failover.view import Node, NodeState, Subscription, View


class Action(StrEnum):
    """What a step does."""

    DISABLE = "disable"
    REPOINT = "repoint"
    ENABLE = "enable"
    RESET = "reset"
    PROMOTE = "promote"
    FLOW = "flow"


OF_SUBSCRIBERS = frozenset({Action.DISABLE, Action.REPOINT, Action.ENABLE})


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
    effect: Callable[[View], View] = field(repr=False, compare=False)
    holds: Callable[[View], bool] = field(repr=False, compare=False)
    shown: tuple[str, ...] = ()
    sql: tuple[str, ...] = field(default=(), repr=False)


def with_state(view: View, name: str, change: Callable[[NodeState], NodeState]) -> View:
    """The view with another state of the node of that name, if it answers."""
    return replace(
        view,
        nodes=tuple(
            replace(node, state=change(node.state))
            if node.name == name and node.state is not None
            else node
            for node in view.nodes
        ),
    )


def with_subscription(
    view: View, server: str, name: str, change: Callable[[Subscription], Subscription]
) -> View:
    """The view with another state of one subscription."""
    return replace(
        view,
        subscribers=tuple(
            replace(
                subscriber,
                subscriptions=tuple(
                    change(s) if s.name == name else s for s in subscriber.subscriptions
                ),
            )
            if subscriber.name == server
            else subscriber
            for subscriber in view.subscribers
        ),
    )


def active(node: Node, slot: str) -> bool:
    """Whether a consumer is connected to the node's slot."""
    found = node.state.slot(slot) if node.state else None
    return found is not None and found.active_pid is not None
