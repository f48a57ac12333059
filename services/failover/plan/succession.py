"""Rules by which an old primary that came back is not taken for the newest one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.errors import ExitCode, OperatorNeeded
from services.failover.plan.request import OPERATION, Request

if TYPE_CHECKING:
    from services.failover.model.view import Node, Subscription, View


def require_unpromoted(view: View, request: Request, old: Node) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) where the old primary must not be let write again.

    A killed run may have ordered a promotion. On a node that does not answer, nobody can see that
    order or its result: so every other node must answer as a standby, on no newer timeline. If this
    run itself found the primary writable and fenced it, it knows that it gave no such order.
    """
    if old.name in request.found_writable:
        return
    ours = old.state.server.timeline if old.state is not None else request.begun_on
    for node in view.nodes:
        if node.name == old.name:
            continue
        if not node.standby:
            what = f"{node.name} does not answer as a standby ({node.detail or node.reach})"
        elif node.state is not None and ours and node.state.server.timeline > ours:
            what = f"{node.name} is on timeline {node.state.server.timeline}, {old.name} on {ours}"
        else:
            continue
        raise OperatorNeeded(
            f"{what}: the interrupted run may have ordered {node.name} to promote itself, so "
            f"{old.name} must not take writes again",
            operation="roll back",
            subject=node.name,
            hint=f"let {node.name} answer, then slotfailover resume --rollback, or slotfailover "
            f"resume if it is the primary by now; or make sure that {node.name} never runs again, "
            "take it out of failover.nodes, and run this again",
            exit_code=ExitCode.SPLIT_BRAIN,
        )


def require_newest_known(view: View, request: Request, node: Node) -> None:
    """Raise OperatorNeeded where a silent node, or a standby, may tell of a newer primary."""
    require_no_newer(view, request, node)
    require_no_standby_ahead(view, node)


def require_no_newer(view: View, request: Request, node: Node) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) where a node without an answer may be a newer primary.

    A run has disabled a subscription for a timeline that the primary `node` is not on. If it was
    killed, it may have promoted a node that gives no answer now, or followed its promotion.
    """
    timeline = node.known_state.server.timeline
    led = [f"{where.name}/{s.name}" for where, s in view.ours() if not _may_follow(s, timeline)]
    unseen = [other for other in view.nodes if other.state is None]
    if not led or not unseen or request.no_newer_primary:
        return
    names = ", ".join(f"{other.name} ({other.detail or other.reach})" for other in unseen)
    raise OperatorNeeded(
        f"{node.name} may be an old primary that came back: a run that did not end disabled "
        f"{', '.join(led)} to lead it to a newer one, and nobody can ask {names}",
        operation=OPERATION,
        subject=node.name,
        hint=f"let {', '.join(other.name for other in unseen)} answer, and run this again; if it "
        "was not promoted since: slotfailover repoint --no-newer-primary",
        exit_code=ExitCode.SPLIT_BRAIN,
    )


def require_no_standby_ahead(view: View, node: Node) -> None:
    """Raise OperatorNeeded (TIMELINE) where a standby is on a newer timeline than the primary."""
    timeline = node.known_state.server.timeline
    newer = [
        other
        for other in view.standbys
        if other.state is not None and other.state.server.timeline > timeline
    ]
    if newer:
        found = "; ".join(
            f"{other.name} is a standby on timeline {other.known_state.server.timeline}"
            for other in newer
        )
        raise OperatorNeeded(
            f"{found}, {node.name} a primary on {timeline}: it may be an old one that came back",
            operation=OPERATION,
            subject=node.name,
            hint="bring back the primary of the newer timeline; if that timeline is given up, "
            f"slotfailover rejoin {newer[0].name}",
            exit_code=ExitCode.TIMELINE,
        )


def _may_follow(subscription: Subscription, timeline: int) -> bool:
    """Tell whether a primary on `timeline` is not older than where a run was leading it."""
    destination, met = subscription.destination, subscription.milestone
    if destination is None:
        return True
    if destination.timeline:
        return timeline >= destination.timeline
    return met is not None and 0 < met.timeline < timeline
