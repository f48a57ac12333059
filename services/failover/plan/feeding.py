"""The one judgement of which node may feed a subscription now. Pure.

Every step that enables or repoints a subscription is planned by it, forward and back, and
`plan.invariants` asks it again of each step. What a standby feeds is not asked about: it stays.

why not                                                        then the subscription
the node is not a primary, or nobody can ask what it has       stays disabled
a run has disabled it, and may have led it to a newer primary  stays as it is
the node's only address leads elsewhere from there             stays as it is
its slot is not there, or its position does not fit            is led there, and stays disabled
a person has disabled it                                       is led there, and stays disabled
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from schemas.errors import ExitCode
from services.failover.checks.blockers import Blocker, fault_of
from services.failover.checks.half_moved import held
from services.failover.plan.steps.step import active
from services.failover.plan.succession import doubt_now

if TYPE_CHECKING:
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View
    from services.failover.plan.request import Request


class Judgement(NamedTuple):
    """Whether a node may feed a subscription, and why not."""

    blocker: Blocker | None = None
    may_lead: bool = True
    """The subscription may be pointed at the node."""
    may_feed: bool = True
    """It may be enabled there, too."""
    accepted: bool = False
    """The operator accepts what `blocker` says is lost."""


def judge(
    view: View, request: Request, subscriber: Subscriber, subscription: Subscription, node: Node
) -> Judgement:
    """Judge whether `node` may feed the subscription now, and if not, why."""
    where = f"{subscriber.name}/{subscription.name}"
    if node.state is None and _was_fed(subscription):
        return Judgement(may_lead=False)
    if not node.leading:
        what = "is not a primary" if node.state is not None else "does not answer"
        why = f"it stays disabled: nothing proves that {node.name}, which {what}, may feed it"
        hint = "slotfailover repoint leads it to the primary, once there is one"
        return Judgement(Blocker(where, why, hint), may_lead=False, may_feed=False)
    doubt = doubt_now(view, request, subscriber, subscription, node)
    if doubt is not None:
        return Judgement(held(doubt, node), may_lead=False, may_feed=False)
    if moves(subscription, node) and node.private and not subscriber.local:
        return Judgement(_no_address(subscriber, where, node), may_lead=False, may_feed=False)
    if not (subscription.marked or subscription.enabled):
        return Judgement(may_feed=False)
    unproven = subscription.marked or moves(subscription, node) or clings(view, subscription, node)
    fault = fault_of(subscriber, subscription, node, positions=unproven)
    accepted = fault is not None and request.accept.takes(fault.token)
    return Judgement(fault, True, fault is None or (accepted and fault.skippable), accepted)


def _was_fed(subscription: Subscription) -> bool:
    """Tell whether the timeline from which a run was to lead it away is known to have fed it.

    On timeline 1 nobody was promoted. Else a run may have disabled it before, and for a reason.
    """
    led, met = subscription.destination, subscription.milestone
    left = led.left if led is not None else 0
    fed = met is not None and met.address == str(subscription.conninfo.address)
    return left == 1 or (left > 1 and met is not None and fed and met.timeline == left)


def moves(subscription: Subscription, node: Node) -> bool:
    """Return whether the subscription has to be moved to reach the node."""
    return not subscription.conninfo.leads_to(node.endpoints)


def misled(view: View, subscription: Subscription, node: Node) -> bool:
    """Tell whether its list of hosts may lead it to a fenced primary, which is a `primary`, too."""
    return subscription.conninfo.takes_any_primary and bool(_rivals(view, subscription, node))


def clings(view: View, subscription: Subscription, node: Node) -> bool:
    """Tell whether a subscription that leads to `node` stays connected to a fenced primary."""
    fed = [n for n in _rivals(view, subscription, node) if active(n, subscription.slot_name or "")]
    return not moves(subscription, node) and (bool(fed) or misled(view, subscription, node))


def _rivals(view: View, subscription: Subscription, node: Node) -> list[Node]:
    """Return the other primaries that the subscription names."""
    named = [n for n in view.nodes if subscription.conninfo.names(n.endpoints)]
    return [other for other in named if other.leading and other.name != node.name]


def led_to(view: View, subscription: Subscription, old: Node | None) -> Node | None:
    """Return the node that a disabled subscription leads to, None if it leads to none surely.

    If it was only disabled, and not moved yet, it leads to `old`, also by an unknown address.
    """
    if old is not None and not moves(subscription, old):
        return None if misled(view, subscription, old) else old
    known = next((node for node in view.nodes if not moves(subscription, node)), None)
    led = subscription.destination
    return old if known is None and led is not None and led.left else known


def _no_address(subscriber: Subscriber, where: str, node: Node) -> Blocker:
    return Blocker(
        where,
        f"the only known address of {node.name}, {node.address}, leads to another server on the "
        f"machine of {subscriber.name}",
        f"set failover.advertised.{node.name} to the address by which {subscriber.name} reaches "
        "it, and run slotfailover repoint",
        ExitCode.SETTINGS,
    )
