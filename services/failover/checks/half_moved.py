"""Subscriptions that a run has disabled and not enabled again: whom they wait for. Pure.

A killed run may have promoted the node to which it was leading a subscription, or somebody else may
have. While that node gives no answer, an older primary, or one of another branch, must not feed the
subscription: it would get rows that were given up, and miss those that the newer primary has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.errors import ExitCode
from schemas.lsn import format_lsn
from services.failover.checks import remedies
from services.failover.checks.blockers import Blocker
from services.failover.model.destination import named
from services.failover.model.statements import identifier
from services.failover.model.timelines import left_at

if TYPE_CHECKING:
    from services.failover.checks.model import Remedy
    from services.failover.model.destination import Destination
    from services.failover.model.view import Node, Subscriber, Subscription, View

VOUCH = "--no-newer-primary"


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a primary may not be the one to which a run was leading a subscription."""

    subject: str
    """`subscriber/subscription`."""
    destination: Destination
    silent: tuple[Node, ...]
    """The nodes that may be that primary, and give no answer."""
    behind: bool
    """The primary has not left the timeline from which the promotion began: it may be the old one.
    Else it is a later one, and only the subscription itself has to wait."""

    @property
    def reason(self) -> str:
        """Whom the subscription was led to, and who can't be asked."""
        who = ", ".join(f"{node.name} ({node.detail or node.reach})" for node in self.silent)
        return (
            f"a run that did not end disabled {self.subject} to lead it to {self.destination}, "
            f"and nobody can ask {who}"
        )

    @property
    def hint(self) -> str:
        """The remedy: never a mere ENABLE, which takes the protection away."""
        who = ", ".join(node.name for node in self.silent)
        return (
            f"bring {who} back, then slotfailover repoint or resume; if it was not promoted since, "
            f"say so to the command: {VOUCH}"
        )


def doubt_of(
    view: View, subscriber: Subscriber, subscription: Subscription, primary: Node | None
) -> Doubt | None:
    """Return why `primary` (None: none answers) must not feed a disabled subscription, or None."""
    led = subscription.destination
    if led is None:
        return None
    behind = True
    if primary is not None:
        server, history = primary.known_state.server, primary.known_state.provenance.history
        behind = led.is_behind(server.timeline, history, subscription.milestone)
        if not behind and (led.met is not None or led.node in ("", named(primary.name))):
            return None
    meant = [node for node in view.nodes if named(node.name) == led.node and node is not primary]
    silent = tuple(node for node in meant or view.nodes if node.state is None)
    subject = f"{subscriber.name}/{subscription.name}"
    return Doubt(subject, led, silent, behind) if silent else None


def doubts(view: View, primary: Node) -> list[Doubt]:
    """Return the doubts about `primary` of all subscriptions that a run has disabled."""
    found = (doubt_of(view, where, s, primary) for where, s in view.ours())
    return [doubt for doubt in found if doubt is not None]


def disabled_by_runs(view: View) -> tuple[str, ...]:
    """Return the subscriptions that a run has disabled, of this cluster or of another."""
    found = [(where, s) for where, s in view.ours() if s.marked]
    return tuple(f"{where.name}/{s.name}" for where, s in (*found, *view.marked_elsewhere()))


def enabling(view: View, subscriber: Subscriber, subscription: Subscription) -> Remedy:
    """Return what lets a disabled subscription go on: a mere ENABLE only if a person disabled it.

    An ENABLE by hand would take away what a run's mark protects from.
    """
    if not subscription.marked:
        sql = f"ALTER SUBSCRIPTION {identifier(subscription.name)} ENABLE"
        order = remedies.order(subscriber.name, sql)
        return remedies.run_statements("", order, by_hand="somebody has disabled it for a reason")
    doubt = doubt_of(view, subscriber, subscription, view.primary)
    if doubt is not None:
        return remedies.manual(doubt.hint, because=doubt.reason)
    return remedies.manual(
        "slotfailover resume, or slotfailover repoint, goes on with it",
        because=f"a run that did not end disabled it to lead it to {subscription.destination}",
    )


def branch_of(node: Node, doubt: Doubt) -> str:
    """Return on which timeline the node is, and where it left the one that the doubt is about."""
    state, parent = node.known_state, doubt.destination.left
    left = left_at(state.provenance.history or (), parent)
    told = f", which left timeline {parent} at {format_lsn(left)}" if left is not None else ""
    return f"timeline {state.server.timeline}{told}"


def held(doubt: Doubt, primary: Node) -> Blocker:
    """Return a blocker for a subscription that waits, while the others go on."""
    return Blocker(
        doubt.subject,
        f"{doubt.reason}; {primary.name} is on {branch_of(primary, doubt)}",
        doubt.hint,
        ExitCode.SPLIT_BRAIN,
    )
