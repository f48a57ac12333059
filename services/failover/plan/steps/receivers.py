"""The steps that keep a standby's receiver from every primary, and let it go on. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.failover.model import statements
from services.failover.plan.steps.step import Action, Step, with_state

if TYPE_CHECKING:
    from services.failover.model.view import Node, NodeState, View


def ask(standby: Node, new: Node) -> Step:
    """Let the standby connect anew to the server that feeds it: a primary that is alive answers."""
    return Step(
        action=Action.ASK,
        server=standby.name,
        subject="",
        node=new.name,
        text=f"let {standby.name} connect anew to its primary",
        before=f"{standby.name} holds a connection, though its primary counts as off",
        after=f"no primary has answered {standby.name}",
        effect=lambda view: with_state(view, standby.name, _deaf),
        holds=lambda view: not _receives(view.node(standby.name)),
        shown=(
            *statements.primary_conninfo("host=/slotfailover-cut/… (the rest as it is)"),
            *statements.primary_conninfo("(as it was)"),
        ),
    )


def cut(standby: Node, new: Node) -> Step:
    """Let the standby receive nothing more, and see that it does not."""
    return Step(
        action=Action.CUT,
        server=standby.name,
        subject="",
        node=new.name,
        text=f"cut off the receiver of {standby.name}",
        before=f"no other server sees a primary; what {standby.name} alone receives is not proof",
        after=f"{standby.name} has no receiver, and can't start one",
        effect=lambda view: with_state(view, standby.name, _cut),
        holds=lambda view: is_cut(view.node(standby.name)),
        shown=statements.primary_conninfo("host=/slotfailover-cut/… (the rest as it is)"),
    )


def reconnect(standby: Node, primary: str) -> Step:
    """Give a standby, or a promoted one, the primary_conninfo that it had before it was cut off."""
    return Step(
        action=Action.RECONNECT,
        server=standby.name,
        subject="",
        node=primary,
        text=f"give {standby.name} its primary_conninfo again",
        before=f"the receiver of {standby.name} was cut off for the promotion",
        after=f"primary_conninfo of {standby.name} leads where it led before",
        effect=lambda view: with_state(view, standby.name, lambda state: replace(state, cut=False)),
        holds=lambda view: (state := view.node(standby.name).state) is not None and not state.cut,
        shown=statements.primary_conninfo("(as it was)"),
    )


def reconnected(view: View) -> View:
    """Return the view once every receiver that was cut off may stream again."""
    for node in view.nodes:
        view = with_state(view, node.name, lambda state: replace(state, cut=False))
    return view


def is_cut(node: Node) -> bool:
    """Tell whether a node's receiver is cut off and gets nothing more."""
    state = node.state
    return state is not None and state.cut and not state.replication.receiver_streaming


def _receives(node: Node) -> bool:
    return node.state is not None and node.state.replication.receiver_streaming


def _deaf(state: NodeState) -> NodeState:
    receiver = replace(state.replication, receiver_streaming=False, heard_age_s=None)
    return replace(state, replication=receiver)


def _cut(state: NodeState) -> NodeState:
    return replace(_deaf(state), cut=True)
