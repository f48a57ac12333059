"""The steps that keep a standby's receiver from every primary, and let it go on. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.failover import statements
from services.failover.effects.step import Action, Step, with_state

if TYPE_CHECKING:
    from services.failover.view import Node, NodeState


def ask(standby: Node, new: Node) -> Step:
    """Let the standby connect anew to what feeds it: what lives, answers."""
    return Step(
        Action.ASK,
        standby.name,
        "",
        new.name,
        f"let {standby.name} connect anew to what it receives from",
        "its connection is open, though somebody vouches that its primary is off",
        "no primary has answered it",
        lambda view: with_state(view, standby.name, _deaf),
        lambda view: not _receives(view.node(standby.name)),
        (
            *statements.primary_conninfo("host=/slotfailover-cut/… (the rest as it is)"),
            *statements.primary_conninfo("(as it was)"),
        ),
    )


def cut(standby: Node, new: Node) -> Step:
    """Let the standby receive nothing more, and see that it does not."""
    return Step(
        Action.CUT,
        standby.name,
        "",
        new.name,
        f"cut off the receiver of {standby.name}",
        "what it still gets does not count: nobody else has seen a primary",
        "it has no receiver, and can't start one",
        lambda view: with_state(view, standby.name, _cut),
        lambda view: is_cut(view.node(standby.name)),
        statements.primary_conninfo("host=/slotfailover-cut/… (the rest as it is)"),
    )


def reconnect(standby: Node, primary: str) -> Step:
    """Give a standby, or a promoted one, the primary_conninfo that it had before it was cut off."""
    return Step(
        Action.RECONNECT,
        standby.name,
        "",
        primary,
        f"give {standby.name} its primary_conninfo again",
        "its receiver was cut off for the promotion",
        "it leads where it led before",
        lambda view: with_state(view, standby.name, lambda state: replace(state, cut=False)),
        lambda view: (state := view.node(standby.name).state) is not None and not state.cut,
        statements.primary_conninfo("(as it was)"),
    )


def is_cut(node: Node) -> bool:
    """Whether it receives nothing, and won't."""
    state = node.state
    return state is not None and state.cut and not state.replication.receiver_streaming


def _receives(node: Node) -> bool:
    return node.state is not None and node.state.replication.receiver_streaming


def _deaf(state: NodeState) -> NodeState:
    receiver = replace(state.replication, receiver_streaming=False, heard_age_s=None)
    return replace(state, replication=receiver)


def _cut(state: NodeState) -> NodeState:
    return replace(_deaf(state), cut=True)
