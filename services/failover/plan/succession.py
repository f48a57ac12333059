"""Rules by which an old primary that came back is not taken for the newest one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.acceptance import options
from schemas.errors import ExitCode, OperatorNeeded
from services.failover.checks.blockers import Blocker
from services.failover.checks.half_moved import (
    Doubt,
    branch_of,
    doubt_of,
    doubts,
    is_behind,
    rivals,
    suspect,
)
from services.failover.model.destination import named
from services.failover.model.tokens import not_promoted
from services.failover.model.view import Reach
from services.failover.plan.request import OPERATION, Request
from services.failover.plan.steps.step import OF_SUBSCRIBERS

if TYPE_CHECKING:
    from schemas.acceptance import Token
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View
    from services.failover.plan.steps.step import Step


def require_unpromoted(view: View, request: Request, old: Node) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) where the old primary must not be let write again.

    A killed run may have ordered a promotion. On a node that does not answer, nobody can see that
    order or its result: so every other node must answer as a standby, on no newer timeline. A run
    that itself found the primary writable and fenced it has given no such order.
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
            "take it out of failover.nodes, and run this again: it prints the token for that",
            exit_code=ExitCode.SPLIT_BRAIN,
        )


def require_newest_known(view: View, request: Request, node: Node) -> None:
    """Raise OperatorNeeded where another node is, or may be, newer than the primary `node`."""
    require_nobody_ahead(view, node)
    require_no_newer(view, request, node)


def require_no_newer(view: View, request: Request, node: Node) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) where the primary `node` may be an old one.

    A run has disabled a subscription to lead it beyond the timeline that `node` is on. If it was
    killed, it may have promoted a node that gives no answer now, or followed its promotion.
    """
    if found := _behind(view, request, node):
        where = branch_of(node, found[0])
        what = f"{node.name} may be an old primary that came back: it is on {where}"
        raise _refusal(what, node, found)


def require_nobody_promoted(view: View, request: Request, chosen: Node) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) where a run may have promoted another than `chosen`."""
    found = _behind(view, request, chosen)
    if found := [doubt for doubt in found if doubt.destination.node != named(chosen.name)]:
        raise _refusal("another node may have been promoted already", chosen, found)


def require_expendable(view: View, request: Request, primary: Node) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) where a node to be rebuilt may be the newer primary."""
    require_no_newer(view, request, primary)
    for name in sorted(request.rejoin):
        if found := newer_perhaps(view, request, view.node(name), primary):
            raise OperatorNeeded(
                f"{name} may have been promoted, and is not rebuilt; {found.reason}",
                operation=OPERATION,
                subject=name,
                hint=found.hint,
                exit_code=found.exit_code,
            )


def newer_perhaps(view: View, request: Request, node: Node, primary: Node) -> Blocker | None:
    """Return why a node must not be rebuilt, as it may be newer than `primary`; None if it may.

    A mark tells, void or not, wherever its subscription leads; or the journal's last order does.
    """
    for doubt in _open(view, request, primary):
        if node.name in [one.name for one in doubt.suspects]:
            return Blocker(node.name, doubt.reason, doubt.hint, ExitCode.SPLIT_BRAIN)
    ordered = "" if request.promoted == primary.name else _last_ordered(view, primary)
    found = suspect(view, node.name, primary)
    token = not_promoted(view.system, node.name, view.promoted_from)
    if ordered != node.name or found is None or request.accept.takes(token):
        return None
    return Blocker(
        node.name,
        f"the journal has an order of {view.promotions[-1][1]} to promote {node.name}, "
        f"{primary.name} on timeline {primary.known_state.server.timeline} does not descend from "
        f"that promotion, as far as is known, and {found.reason}",
        f"{found.remedy}; if {node.name} has not become a primary by that order, say so to the "
        f"command: {options([token])}",
        ExitCode.SPLIT_BRAIN,
    )


def _last_ordered(view: View, primary: Node) -> str:
    """Return the node that was last ordered to be promoted, "" if `primary` came of that order.

    A promotion begins a timeline with a higher number: a primary that came of it has such a
    timeline in its history.
    """
    if not view.promotions or view.promotions[-1][0] == primary.name:
        return ""
    past = [timeline for timeline, _ in primary.known_state.provenance.history or ()]
    descends = view.promoted_from and any(timeline > view.promoted_from for timeline in past)
    return "" if descends else view.promotions[-1][0]


def unjudged(view: View, request: Request, primary: Node) -> list[str]:
    """Return notes on nodes to be rebuilt that subscribers without an answer may be waiting for."""
    silent = [found.name for found in view.subscribers if found.reach is not Reach.ANSWERS]
    return [
        f"not judged: whether a run was leading a subscription of {', '.join(silent)} to {name}, "
        "as nobody can read its mark"
        for name in sorted(request.rejoin)
        if silent and suspect(view, name, primary) is not None
    ]


def _behind(view: View, request: Request, node: Node) -> list[Doubt]:
    """Return the doubts that keep every subscription from a primary, which may be the old one."""
    found = _open(view, request, node)
    return [doubt for doubt in found if doubt.behind and not doubt.void]


def _open(view: View, request: Request, node: Node) -> list[Doubt]:
    """Return the doubts about a primary for which nobody has vouched."""
    return [doubt for doubt in doubts(view, node) if not _vouched(request, doubt)]


def _vouched(request: Request, doubt: Doubt) -> bool:
    """Tell whether an operator vouches that none of the doubt's suspects was promoted."""
    return all([request.accept.takes(one) for one in doubt.tokens])  # noqa: C419 - each is used


def _refusal(what: str, node: Node, doubts: list[Doubt]) -> OperatorNeeded:
    return OperatorNeeded(
        f"{what}; {'; '.join(doubt.reason for doubt in doubts)}",
        operation=OPERATION,
        subject=node.name,
        hint=doubts[0].hint,
        exit_code=ExitCode.SPLIT_BRAIN,
    )


def doubt_now(
    view: View, request: Request, subscriber: Subscriber, subscription: Subscription, node: Node
) -> Doubt | None:
    """Return why the primary `node` must not feed a subscription that a run has disabled, or None.

    What this run itself has marked is known to it: it gave no order to promote, or `node` obeyed.
    """
    if _own(request, subscriber, subscription, node):
        return None
    doubt = doubt_of(view, subscriber, subscription, node)
    return None if doubt is None or _vouched(request, doubt) else doubt


def vouching(view: View, request: Request, step: Step) -> dict[str, Token]:
    """Return the nodes on whose word a step at a subscriber relies, with what replaces their word.

    These are the nodes that its subscription's mark names, and those of every other mark that
    names a newer primary than the step's node.
    """
    if step.action not in OF_SUBSCRIBERS:
        return {}
    node, standbys = view.node(step.node), {other.name for other in view.standbys}
    tokens: dict[str, Token] = {}
    for where, found in view.awaiting():
        if (where.name, found.name) == (step.server, step.subject):
            relies = not _own(request, where, found, node)
        else:
            relies = _holds_up(request, where, found, node)
        if not relies or found.disabled_for is None:
            continue
        for name in standbys.intersection(rivals(view, found, node)):
            token = not_promoted(view.system, name, found.disabled_for)
            if not request.accept.takes(token):
                tokens[name] = token
    return tokens


def _holds_up(
    request: Request, subscriber: Subscriber, subscription: Subscription, node: Node
) -> bool:
    """Tell whether a mark, which this run did not write, tells of a newer primary than `node`."""
    led, own = subscription.destination, f"{subscriber.name}/{subscription.name}" in request.marked
    if led is None or own or led.node == named(node.name):
        return False
    return is_behind(subscription, node)


def _own(request: Request, subscriber: Subscriber, subscription: Subscription, node: Node) -> bool:
    marked = f"{subscriber.name}/{subscription.name}" in request.marked
    return marked and node.name in (request.promoted, *request.found_writable)


def vouched(view: View, request: Request, node: Node) -> list[str]:
    """Return notes on what an operator has vouched for."""
    found = [doubt for doubt in doubts(view, node) if _vouched(request, doubt)]
    return [f"{doubt.reason}: overridden by {options(doubt.tokens)}" for doubt in found]


def require_nobody_ahead(view: View, node: Node) -> None:
    """Raise OperatorNeeded (TIMELINE) where a node is on a newer timeline than the primary."""
    timeline = node.known_state.server.timeline
    newer = [
        other
        for other in view.nodes
        if other.state is not None and other.state.server.timeline > timeline
    ]
    if newer:
        found = "; ".join(
            f"{other.name} is a {'primary' if other.leading else 'standby'} on timeline "
            f"{other.known_state.server.timeline}"
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
