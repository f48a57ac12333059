"""Conditions that a pair must meet before any plan is made for it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.errors import ExitCode, OperatorNeeded
from services.failover.model.timelines import contradiction

if TYPE_CHECKING:
    from services.failover.model.view import Node, View


def require_one_system(view: View) -> None:
    """Raise OperatorNeeded (WRONG_DATABASE) if the nodes are not all of one cluster."""
    found: dict[str, list[str]] = {}
    for node in view.nodes:
        if node.state is not None:
            found.setdefault(node.state.server.system_identifier, []).append(node.name)
    if len(found) > 1:
        listing = "; ".join(f"{', '.join(names)}: {system}" for system, names in found.items())
        raise OperatorNeeded(
            f"the nodes belong to different clusters: system identifiers {listing}",
            operation="compare nodes",
            hint="correct failover.nodes: every node must be a copy of the same primary",
            exit_code=ExitCode.WRONG_DATABASE,
        )


def require_one_primary(view: View, operation: str) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) if several nodes take writes."""
    if len(view.writable) > 1:
        names = ", ".join(
            f"{node.name} (timeline {node.state.server.timeline})"
            for node in view.writable
            if node.state is not None
        )
        raise OperatorNeeded(
            f"several nodes are writable: {names}",
            operation=operation,
            hint="stop the one with the older timeline at once, then run this command again",
            exit_code=ExitCode.SPLIT_BRAIN,
        )
    if view.primary is not None:
        require_newest(view, view.primary, operation)


def require_newest(view: View, node: Node, operation: str) -> None:
    """Raise OperatorNeeded (TIMELINE) if the node is not on the newest timeline that anybody met.

    Somebody has then met a timeline that is not an ancestor of the node's: an old primary has come
    back, or two nodes were promoted apart.
    """
    found = outdated(view, node)
    if found:
        raise OperatorNeeded(
            f"{node.name} does not have the newest timeline that was seen: {found}",
            operation=operation,
            subject=node.name,
            hint="bring back the node with the newer timeline. If that timeline is given up for "
            "good, load anew the tables of every subscription that was fed from it, take the "
            "note and the mark out of its comment (COMMENT ON SUBSCRIPTION), remove the journal's "
            "entries whose intent names it (failover.journal, and slotfailover.journal on every "
            "node), and start the bridge over with a new slot and topic prefix: each of these "
            "remembers it",
            exit_code=ExitCode.TIMELINE,
        )


def outdated(view: View, node: Node) -> str:
    """Return why the node does not descend from every timeline that was met, "" if it does."""
    if node.state is None:
        return ""
    timeline, history = node.state.server.timeline, node.state.provenance.history
    for who, met in view.met():
        found = contradiction(met, timeline, history)
        if found:
            return f"{found}, which {who} remembers"
    return ""
