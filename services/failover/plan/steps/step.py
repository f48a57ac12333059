"""A step: its text, statements, expected effect on the view, and postcondition. Pure.

`shown` is the exact SQL or command with secrets masked; `sql` is run. `effect` is the expected
change of the view, with which plans are checked. `holds` is the postcondition, judged on an
observed view.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.failover.model.host_commands import Command
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, NodeState, View


class Action(StrEnum):
    """The kind of a step."""

    CHECKPOINT = "checkpoint"
    SETTLE = "settle"
    REPLAY = "replay"
    FENCE = "fence"
    MARK = "mark"
    DRAIN = "drain"
    DISABLE = "disable"
    STOP = "stop"
    SHOOT = "shoot"
    RESET = "reset"
    ASK = "ask"
    CUT = "cut"
    PROMOTE = "promote"
    RECONNECT = "reconnect"
    LABEL = "label"
    REPOINT = "repoint"
    ENABLE = "enable"
    FLOW = "flow"
    SEND = "send"
    BRIDGE = "bridge"
    SLOT = "slot"
    FOLLOW = "follow"
    REJOIN = "rejoin"
    CLEAN = "clean"
    READY = "ready"
    START = "start"
    UNFENCE = "unfence"


NO_WAY_BACK = frozenset({Action.PROMOTE})
"""Steps that can't be taken back once ordered, whether or not their effect was seen."""
SEEN_TO_THE_END = NO_WAY_BACK | {Action.STOP, Action.SHOOT, Action.START}
"""Steps that no signal interrupts once ordered: half done, their state would be unknown."""
GIVES_WRITES = frozenset({Action.UNFENCE, Action.START})
"""Steps that let an old primary write: never beside a standby with an order to promote itself."""
OF_SUBSCRIBERS = frozenset({Action.DISABLE, Action.REPOINT, Action.ENABLE})
AFTERWARDS = frozenset(
    {Action.LABEL, Action.FLOW, Action.SEND, Action.BRIDGE, Action.SLOT, Action.FOLLOW}
    | {Action.REJOIN, Action.CLEAN, Action.READY, Action.RECONNECT}
)
"""Steps that run once writes work again: one that fails is left, and the rest goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    command: Command = ()
    """The command that is run on the node's machine."""
    lsn: int | None = None
    """Promote: what the standby must have received before. Drain: what all must have."""
    slots: tuple[str, ...] = ()
    """The slots that are watched."""
    copies: bool = False
    """Rejoin: a base backup may be taken."""
    progress: Callable[[View], str] = field(default=lambda _view: "", repr=False, compare=False)
    """How far it is, for those who wait."""
    guard: Callable[[View], None] = field(default=lambda _view: None, repr=False, compare=False)
    """Raises what forbids it, asked of a fresh observation right before the order."""

    @property
    def key(self) -> str:
        """The identity of the step, independent of its text."""
        return f"{self.action} {self.server} {self.subject}"


def with_node(view: View, name: str, change: Callable[[Node], Node]) -> View:
    """Return the view with the node of that name changed."""
    return replace(view, nodes=tuple(change(n) if n.name == name else n for n in view.nodes))


def with_state(view: View, name: str, change: Callable[[NodeState], NodeState]) -> View:
    """Return the view with the state of that node changed, if the node answers."""
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
    """Return the view with one subscription changed."""
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
    """Tell whether a consumer is connected to the node's slot."""
    found = node.state.slot(slot) if node.state else None
    return found is not None and found.active_pid is not None
