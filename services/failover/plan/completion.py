"""Plans the steps that are left once a node is the new primary, whoever promoted it. Pure.

on               step     before it                              after it (by observing)
the new primary  reset    a setting names standbys not there     it names none of them
each subscriber  disable  enabled, fed by the old primary        disabled, marked so
each subscriber  repoint  disabled; the new primary is writable  its conninfo leads there
each subscriber  enable   repointed, marked, its slot usable     enabled, the mark gone
the new primary  flow     enabled                                each slot has its walsender
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from schemas.errors import ExitCode
from services.failover.checks.blockers import (
    Blocker,
    lost_copies,
    unidentified,
    unreachable,
)
from services.failover.checks.half_moved import stays_disabled
from services.failover.checks.readiness import judge_promoted
from services.failover.model import statements
from services.failover.model.standby_settings import (
    commits_can_go_on,
    listed,
    on_command_line,
    slots_in_use,
    slots_that_exist,
)
from services.failover.model.tokens import lost_slot
from services.failover.model.view import FENCE
from services.failover.plan.feeding import clings, judge, misled, moves
from services.failover.plan.invariants import (
    has_stray_fence,
    require_nobody_left,
    require_privileges,
    require_unfencing,
)
from services.failover.plan.notes import Measured
from services.failover.plan.request import Draft, Plan
from services.failover.plan.standbys import attach_standbys, kept_off
from services.failover.plan.steps import promotion, receivers, subscriptions
from services.failover.plan.steps.step import Action, active
from services.failover.plan.succession import doubt_now, require_newest_known, vouched

if TYPE_CHECKING:
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View
    from services.failover.plan.steps.step import Step


def complete(draft: Draft, name: str, *, standbys: bool = True) -> Plan:
    """Add the steps that remain once the node of that name is the new primary.

    Without `standbys` another manager looks after them: settings and standbys are left alone.
    """
    node = draft.view.node(name)
    if draft.request.promoted != name:
        require_newest_known(draft.view, draft.request, node)
    stale = resets(node) if standbys else ()
    require_privileges(node, resets=bool(stale), promotion=False)
    if standbys:
        require_unfencing(node)
    draft.add(*stale)
    _label(draft, name, name)
    left = [*unreachable(draft.view), *unidentified(draft.view)]
    notes = [*vouched(draft.view, draft.request, node), *_subscriptions(draft, name, left)]
    if draft.request.require_subscribers and any(s.action is Action.PROMOTE for s in draft.steps):
        remedy = "promote without --require-subscribers, and move them later: slotfailover repoint"
        require_nobody_left(left, "; or ".join((*[item.hint for item in left[:1]], remedy)))
    left += _settings_out_of_reach(node)
    left += _read_only(node) if draft.request.promoted == name else []
    if not standbys:
        notes += [
            f"{setting} of {name} names standbys that are not there; after a look: "
            + "; ".join(statements.alter_system(setting, items))
            for setting, items in _stale(node)
        ]
        return _drawn(draft, name, left, notes)
    notes += _written_late(draft)
    rest = attach(draft, name)
    return replace(rest, left=(*left, *rest.left), notes=(*notes, *rest.notes))


def detach(draft: Draft, new: Node) -> None:
    """Disable each subscription that another server feeds, marked for the node to be promoted.

    What an earlier run led elsewhere is marked anew: else its mark would tell of another primary.
    """
    for subscriber, found in draft.view.ours():
        given_up = f"{subscriber.name}/{found.name}" in draft.request.given_up
        leaves = moves(found, new) or clings(draft.view, found, new)
        if given_up or not subscriber.usable or not leaves:
            continue
        doubt = doubt_now(draft.view, draft.request, subscriber, found, new)
        anew = found.marked and doubt is None and not subscriptions.leads(found, new)
        if found.enabled or anew:
            feeder = _feeder(draft.view, found)
            draft.add(subscriptions.disable(subscriber, found, new, feeder))


def _feeder(view: View, subscription: Subscription) -> Node | None:
    """Return the primary that is seen to feed the subscription, None where that is not certain."""
    node, name = view.primary, subscription.slot_name
    if node is None or name is None or not (subscription.enabled and subscription.fed):
        return None
    return node if active(node, name) and not moves(subscription, node) else None


def attach(draft: Draft, name: str) -> Plan:
    """Add the steps for the primary's standbys: attach, reconnect and label them."""
    left = attach_standbys(draft, name)
    for other in draft.view.nodes:
        if other.state is not None and other.state.cut:
            draft.add(receivers.reconnect(other, name))
    for other in draft.view.standbys:
        _label(draft, other.name, name)
    return replace(_drawn(draft, name, left, []), to_do=kept_off(draft, name))


def _drawn(draft: Draft, name: str, left: list[Blocker], notes: list[str]) -> Plan:
    """Return the draft as the plan that completes a promotion which has happened."""
    node = draft.view.node(name)
    return Plan(
        new_primary=name,
        why=f"it is the primary already, on timeline {node.known_state.server.timeline}",
        steps=tuple(draft.steps),
        slots=judge_promoted(draft.view, node),
        left=tuple(left),
        notes=tuple(notes),
    )


def _label(draft: Draft, name: str, primary: str) -> None:
    """Run the `label` commands of the primary and of the nodes that rejoin.

    This is done in each run: nobody can see whether an earlier run, which was killed, did it.
    """
    node = draft.view.node(name)
    given = draft.request.labels if name == primary else name in draft.request.rejoin
    if given and node.has_command("label"):
        draft.add(promotion.label(node, draft.view.node(primary)))


def _subscriptions(draft: Draft, primary: str, left: list[Blocker]) -> list[str]:
    """Move the subscriptions and the bridge; return notes, and add to `left`."""
    view, request = draft.view, draft.request
    node = view.node(primary)
    notes: list[str] = []
    fed: set[str] = set()
    for subscriber, subscription in view.ours():
        if not subscriber.usable or f"{subscriber.name}/{subscription.name}" in request.given_up:
            continue
        if not subscription.enabled and not subscription.marked:
            notes.append(stays_disabled(subscriber, subscription))
        verdict = judge(view, request, subscriber, subscription, node)
        if verdict.blocker is not None and verdict.accepted:
            notes.append(f"loss accepted: {verdict.blocker.line}")
        elif verdict.blocker is not None:
            left.append(verdict.blocker)
        if not verdict.may_lead:
            continue
        left += lost_copies(subscriber, subscription, node)
        _move(draft, subscriber, subscription, node, may_feed=verdict.may_feed)
        if verdict.may_feed and subscription.slot_name:
            fed.add(subscription.slot_name)
    # After a move all are verified, also those that have come by themselves.
    fresh = draft.request.promoted == primary
    waiting = {name for name in fed if fresh or not _flows(node, name)}
    if waiting:
        draft.add(promotion.flow(node, tuple(sorted(waiting))))
    if view.bridge_slot is not None:
        left += _bridge(draft, node, view.bridge_slot, fresh=fresh)
    return notes


def _flows(node: Node, name: str) -> bool:
    """Tell whether the slot feeds a consumer, by its position and not by its connection."""
    slot, switch = node.known_state.slot(name), node.known_state.switch_lsn
    confirmed = slot.confirmed_flush_lsn if slot is not None else None
    old = switch is not None and (confirmed is None or confirmed < switch)
    return active(node, name) and not old and not node.known_state.replication.withheld_by


def _written_late(draft: Draft) -> list[str]:
    """Return notes on a fenced primary's writes after its final LSN, which will be lost."""
    request = draft.request
    return [
        Measured(
            f"{node.name} gave out {node.state.next_xid - request.final_xid} transaction numbers "
            "after the final LSN, to autovacuum, the bridge's heartbeat, or a client that asked "
            f"for READ WRITE; changes of such a client are lost when {node.name} rejoins (the log "
            f"of {node.name} may name the client)",
            about=f"late writes of {node.name}",
        )
        for node in draft.view.nodes
        if node.fenced and node.state is not None and node.state.next_xid is not None
        if request.final_xid is not None and node.state.next_xid > request.final_xid
    ]


def _bridge(draft: Draft, node: Node, slot: str, *, fresh: bool) -> list[Blocker]:
    """Plan to wait for the bridge; return why it can't come. One that never ran has no origin."""
    found = node.known_state.slot(slot)
    gone = found is None and f"slotbridge_{slot}" in node.known_state.origins
    invalid = found is not None and found.invalidation_reason is not None
    token = lost_slot(draft.view.system, slot, node.name)
    if (gone or invalid) and not draft.request.accept.takes(token):
        reason = f"is invalidated on {node.name}" if invalid else f"is not on {node.name}"
        return [
            Blocker(
                "bridge",
                f"the slot {slot} {reason}",
                "events are missing from here on: start over with a new slot and topic prefix",
                ExitCode.NOT_READY,
                token,
            )
        ]
    if found is not None and not invalid and (fresh or not active(node, slot)):
        if draft.view.bridge_url and not active(node, slot):
            draft.add(promotion.redirect_bridge(draft.view, node, slot))
        draft.add(promotion.bridge(node, slot))
    return []


def _move(
    draft: Draft, subscriber: Subscriber, subscription: Subscription, node: Node, *, may_feed: bool
) -> None:
    """Add the steps that a subscription still needs to follow the new primary.

    A subscription that may not be fed ends repointed and disabled. One that clings to a fenced
    primary is disabled and enabled, once in a run, so that its worker connects anew.
    """
    elsewhere = moves(subscription, node) or misled(draft.view, subscription, node)
    again = f"{subscriber.name}/{subscription.name}" not in draft.request.marked
    leaves = moves(subscription, node) or (again and clings(draft.view, subscription, node))
    disabled = leaves and subscription.enabled
    if disabled:
        draft.add(subscriptions.disable(subscriber, subscription, node))
    if elsewhere:
        draft.add(subscriptions.repoint(subscriber, _now(draft, subscriber, subscription), node))
    if may_feed and (subscription.marked or disabled):
        draft.add(subscriptions.enable(subscriber, _now(draft, subscriber, subscription), node))


def _now(draft: Draft, subscriber: Subscriber, subscription: Subscription) -> Subscription:
    """Return the subscription as the steps planned so far leave it."""
    return draft.view.subscription(subscriber.name, subscription.name) or subscription


def resets(node: Node) -> tuple[Step, ...]:
    """Return the steps that remove settings which would make commits or decoding wait for ever.

    The settings name standbys that are not there. A copy of a fenced primary also has its fence,
    which is lifted.
    """
    stale = tuple(
        promotion.reset(node, setting, items)
        for setting, items in _stale(node)
        if not on_command_line(node.known_state, setting)
    )
    return (*stale, *([promotion.lift(node)] if has_stray_fence(node) else []))


def _read_only(node: Node) -> list[Blocker]:
    """Return a blocker for somebody else's setting that keeps everybody from writing."""
    if node.state is None or not node.state.read_only or node.state.fence_mark:
        return []
    sql = f"ALTER SYSTEM RESET {FENCE}; SELECT pg_reload_conf()"
    why = f"{FENCE} is on, and slotfailover did not set it: every write fails"
    return [Blocker(node.name, why, f"if nobody set it on purpose: {sql}")]


def _settings_out_of_reach(node: Node) -> list[Blocker]:
    return [
        Blocker(
            node.name,
            f"{setting} names standbys that are not there, and comes from the command line",
            f"restart {node.name} without it, or commits or decoding wait for ever",
        )
        for setting, _ in _stale(node)
        if on_command_line(node.known_state, setting)
    ]


def _stale(node: Node) -> list[tuple[str, tuple[str, ...]]]:
    """Return (setting, the names that may stay) for each setting that names too much."""
    state = node.known_state
    found = []
    named = state.setting("synchronized_standby_slots")
    kept = slots_that_exist(named, state.slots)
    if state.server.in_recovery:
        kept = slots_in_use(named, state.slots)
    withheld = state.replication.withheld_by
    kept = tuple(name for name in kept if name not in withheld)
    if kept != listed(named):
        found.append(("synchronized_standby_slots", kept))
    if not commits_can_go_on(
        state.setting("synchronous_standby_names"), state.replication.followers
    ):
        found.append(("synchronous_standby_names", ()))
    return found
