"""Subscriptions that a run has disabled and not enabled again: whom they wait for. Pure.

A killed run may have promoted the node to which it was leading a subscription, or somebody else may
have. While that node gives no answer, an older primary, or one of another branch, must not feed the
subscription: it would get rows that were given up, and miss those that the newer primary has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from schemas.acceptance import options
from schemas.errors import ExitCode
from schemas.lsn import format_lsn
from services.failover.checks import remedies
from services.failover.checks.blockers import Blocker
from services.failover.model.destination import named
from services.failover.model.timelines import left_at
from services.failover.model.tokens import not_promoted
from services.postgres.identifiers import identifier

if TYPE_CHECKING:
    from schemas.acceptance import Token
    from schemas.findings import Remedy
    from services.failover.model.destination import Destination
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View


class Suspect(NamedTuple):
    """A node that may be a newer primary: its word does not rule that out."""

    name: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a primary may not be the one to which a run was leading a subscription."""

    subject: str
    """`subscriber/subscription`."""
    destination: Destination
    suspects: tuple[Suspect, ...]
    """The nodes that may be that primary."""
    behind: bool
    """The primary has not left the timeline from which the promotion began: it may be the old one.
    Else it is a later one, and only the subscription itself has to wait."""
    void: bool = False
    """Somebody has changed the subscription since: it has no say about any other."""
    tokens: tuple[Token, ...] = ()
    """What an operator accepts who vouches that nobody has promoted these nodes."""

    @property
    def reason(self) -> str:
        """Whom the subscription was led to, and who may be that primary."""
        who = " and ".join(suspect.reason for suspect in self.suspects)
        led = f"disabled {self.subject} to lead it to {self.destination}"
        since = ", somebody has changed it since" if self.void else ""
        return f"a run that did not end {led}{since}, and {who}"

    @property
    def hint(self) -> str:
        """The remedy: never a mere ENABLE, which takes the protection away."""
        remedies = ", ".join(suspect.remedy for suspect in self.suspects)
        who = " and ".join(suspect.name for suspect in self.suspects)
        branch = "" if self.behind else " on a branch that the primary does not descend from"
        return (
            f"{remedies}, then slotfailover repoint or resume; if nobody has promoted {who} since"
            f"{branch}, say so to the command: {options(self.tokens)}"
        )


def rivals(view: View, subscription: Subscription, primary: Node | None) -> tuple[str, ...]:
    """Return who else may be the primary to which a run was leading a disabled subscription.

    Nobody, if `primary` is that one, or descends from it. A mark alone names nobody.
    """
    led = subscription.disabled_for
    if led is None or (primary is not None and _arrived(led, subscription, primary)):
        return ()
    new = primary.name if primary is not None else ""
    others = tuple(node.name for node in view.nodes if node.name != new)
    if led.node in ("", named(new)):
        return others
    return tuple(name for name in others if named(name) == led.node) or (led.node,)


def suspect(view: View, name: str, primary: Node | None) -> Suspect | None:
    """Return why the node may be newer than `primary`, None if it is known not to be.

    That is known of a standby on the same or an older timeline that was not cut off to be promoted.
    """
    node = next((node for node in view.nodes if node.name == name), None)
    if node is None:
        reason = f"{name} is not in failover.nodes: nobody can ask it"
        return Suspect(name, reason, f"name {name} in failover.nodes again")
    if node.state is None:
        reason = f"nobody can ask {name} ({node.detail or node.reach})"
        return Suspect(name, reason, f"bring {name} back")
    timeline, role = node.state.server.timeline, "primary" if node.leading else "standby"
    above = primary.known_state.server.timeline if primary is not None else timeline
    rival = node.leading and (primary is None or primary.leading)
    if timeline > above or (timeline == above and rival):
        reason = f"{name} answers as a {role} on timeline {timeline}"
        return Suspect(name, reason, f"bring back the primary of timeline {timeline}")
    if node.state.cut:
        reason = f"{name} is cut off from every primary, as it is before its promotion"
        return Suspect(name, reason, f"slotfailover resume --rollback lets {name} stream again")
    return None


def doubt_of(
    view: View, subscriber: Subscriber, subscription: Subscription, primary: Node | None
) -> Doubt | None:
    """Return why `primary` (None: none answers) must not feed a disabled subscription, or None."""
    led = subscription.disabled_for
    found = [suspect(view, name, primary) for name in rivals(view, subscription, primary)]
    suspects = tuple(one for one in found if one is not None)
    if led is None or not suspects:
        return None
    behind = primary is None or is_behind(subscription, primary)
    subject, void = f"{subscriber.name}/{subscription.name}", not subscription.marked
    tokens = tuple(not_promoted(view.system, one.name, led) for one in suspects)
    return Doubt(subject, led, suspects, behind, void, tokens)


def is_behind(subscription: Subscription, primary: Node) -> bool:
    """Tell whether `primary` may be older than the one to which a run led the subscription."""
    led, state = subscription.disabled_for, primary.known_state
    history, noted = state.provenance.history, subscription.milestone
    return led is not None and led.is_behind(state.server.timeline, history, noted)


def _arrived(led: Destination, subscription: Subscription, primary: Node) -> bool:
    known = led.identified or led.node == named(primary.name)
    return known and not is_behind(subscription, primary)


def doubts(view: View, primary: Node) -> list[Doubt]:
    """Return the doubts about `primary` of all subscriptions that a run has disabled."""
    found = (doubt_of(view, where, s, primary) for where, s in view.awaiting())
    return [doubt for doubt in found if doubt is not None]


def disabled_by_runs(view: View) -> tuple[str, ...]:
    """Return the subscriptions that a run has disabled, of this cluster or of another.

    Also those whose mark is void: nobody has enabled them since.
    """
    found = [(where, s) for where, s in view.ours() if s.disabled_for]
    found += [*view.marked_elsewhere(), *view.awaiting()]
    return tuple(dict.fromkeys(f"{where.name}/{s.name}" for where, s in found))


def void_mark(subscription: Subscription) -> Destination | None:
    """Return to whom a run led a subscription that somebody has changed since, None without one."""
    return None if subscription.as_marked else subscription.disabled_for


def stays_disabled(subscriber: Subscriber, subscription: Subscription) -> str:
    """Return a note on a subscription that is disabled, and that no command enables."""
    note, led = f"{subscriber.name}/{subscription.name} was disabled, and stays so", ""
    if void := void_mark(subscription):
        led = f": a run did so to lead it to {void}, and somebody has changed it since"
    return note + led


def enabling(view: View, subscriber: Subscriber, subscription: Subscription) -> Remedy:
    """Return what lets a disabled subscription go on: a mere ENABLE only if a person disabled it.

    An ENABLE by hand would take away what a run's mark protects from.
    """
    sql = f"ALTER SUBSCRIPTION {identifier(subscription.name)} ENABLE"
    if void := void_mark(subscription):
        return remedies.manual(
            f"once you have made sure that no newer primary than its own was promoted: {sql}",
            because=f"a run disabled it to lead it to {void}, and somebody has changed it since",
        )
    if not subscription.marked:
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
    """Return words: the node's timeline, and where it left the timeline in doubt."""
    state, parent = node.known_state, doubt.destination.left
    left = left_at(state.provenance.history or (), parent)
    branching = f", which left timeline {parent} at {format_lsn(left)}" if left is not None else ""
    return f"timeline {state.server.timeline}{branching}"


def held(doubt: Doubt, primary: Node) -> Blocker:
    """Return a blocker for a subscription that waits, while the others go on."""
    return Blocker(
        doubt.subject,
        f"{doubt.reason}; {primary.name} is on {branch_of(primary, doubt)}",
        doubt.hint,
        ExitCode.SPLIT_BRAIN,
    )
