"""From what is observed to what has to be done: the ordered steps of a failover. Pure.

    on               step     before it (checked when planned)       after it (by observing)
    each subscriber  disable  enabled, fed by the old primary        disabled, marked so
    the candidate    reset    a setting names standbys not there     it names none of them
    the candidate    promote  no writable node; every slot ready     it is no longer in recovery
                              or its loss accepted; reachable
                              subscriptions disabled
    each subscriber  repoint  disabled; the new primary is writable  its conninfo leads there
    each subscriber  enable   repointed, marked, its slot usable     enabled, the mark gone
    the new primary  flow     enabled                                each slot has its walsender

`plan_failover` may be asked at any time, also half-way: steps that are done are not planned again,
so that a command that was killed is resumed by running it anew. Nothing else is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SetupError, SlotbridgeError
from services.failover import effects
from services.failover.effects import Action, Step
from services.failover.readiness import Readiness, candidate, judge_all, judge_promoted
from services.failover.standby_lists import commits_can_go_on, listed, slots_that_exist
from services.failover.verdicts import Left, fault_of, unreachable
from services.failover.view import Reach

if TYPE_CHECKING:
    from services.failover.view import Node, Subscriber, Subscription, View

OPERATION = "fail over"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the operator asked for."""

    accept_loss_of: frozenset[str] = frozenset()
    promoted: str = ""
    """The node that this run has promoted, once it has."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to be done, why so, and what can't be done now."""

    new_primary: str
    why: str
    steps: tuple[Step, ...]
    slots: tuple[Readiness, ...]
    left: tuple[Left, ...] = ()
    notes: tuple[str, ...] = ()


def plan_failover(view: View, wish: Wish) -> Plan:
    """The steps from `view` to a new primary that feeds the reachable subscriptions.

    Raises OperatorNeeded: SPLIT_BRAIN where a primary may be alive, NOT_READY where a slot would
    be lost, WRONG_DATABASE where nodes are of different clusters; Retryable where no standby
    answers; SetupError (PRIVILEGE_MISSING) before anything is changed.
    """
    require_one_system(view)
    _require_nobody_hidden(view)
    if view.writable:
        plan = _completion(view, _promoted(view, wish), wish)
    else:
        plan = _promotion(view, wish)
    check_invariants(plan, view, wish)
    return plan


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


def check_invariants(plan: Plan, view: View, wish: Wish) -> None:
    """Walk the plan in thought; raise SlotbridgeError (BUG) if a step would be dangerous there."""
    for step in plan.steps:
        broken = _broken_rule(step, view, wish)
        if broken:
            raise SlotbridgeError(f"planned {step.text} although {broken}", operation=OPERATION)
        view = effects.after(step, view)


def _broken_rule(step: Step, view: View, wish: Wish) -> str:
    """The rule that the step would break in this view, or ""."""
    node = view.node(step.node)
    if step.action is Action.PROMOTE:
        if view.writable:
            return f"{view.writable[0].name} is writable"
        lost = {slot.slot for slot in judge_all(view, node) if not slot.ready}
        if lost - wish.accept_loss_of:
            return f"slots are not ready: {', '.join(sorted(lost - wish.accept_loss_of))}"
        fed = [s.name for where, s in view.ours() if where.usable and s.enabled and _moves(s, node)]
        return f"subscriptions are enabled: {', '.join(fed)}" if fed else ""
    if step.action in (Action.REPOINT, Action.ENABLE):
        subscription = view.subscription(step.server, step.subject)
        if subscription is None or subscription.enabled:
            return "the subscription is not there or enabled"
        if view.primary is not node:
            return f"{node.name} is not the primary"
        if step.action is Action.ENABLE and not subscription.conninfo.leads_to(node.endpoints):
            return "it still leads elsewhere"
    return ""


def _require_nobody_hidden(view: View) -> None:
    for node in view.nodes:
        if node.reach is Reach.CLOSED:
            raise OperatorNeeded(
                f"{node.name} listens on its port but does not let us in, so it may be writing: "
                f"{node.detail}",
                operation=OPERATION,
                subject=node.name,
                hint="stop it, or correct its conninfo in failover.nodes",
                exit_code=ExitCode.SPLIT_BRAIN,
            )


def _promoted(view: View, wish: Wish) -> Node:
    """The one writable node, if it was promoted in place of a primary that is gone."""
    names = ", ".join(
        f"{node.name} (timeline {node.state.server.timeline})"
        for node in view.writable
        if node.state is not None
    )
    if len(view.writable) > 1:
        raise OperatorNeeded(
            f"several nodes are writable: {names}",
            operation=OPERATION,
            hint="stop the one with the older timeline at once, then run this command again",
            exit_code=ExitCode.SPLIT_BRAIN,
        )
    node = view.writable[0]
    if node.name != wish.promoted and not _took_over(node, view):
        raise OperatorNeeded(
            f"the primary {names} is alive and writable",
            operation=OPERATION,
            subject=node.name,
            hint=_hint_of_marked(view)
            or "a failover is for a dead primary; stop it first if it must be replaced",
            exit_code=ExitCode.SPLIT_BRAIN,
        )
    return node


def _took_over(node: Node, view: View) -> bool:
    """Whether this primary was a standby once, and something of a failover may be left to do.

    Its slots tell, as those of a promoted standby keep synced = t; or subscriptions that were
    disabled for a failover and lead elsewhere. A primary that streams to every other node has
    nothing to take over from.
    """
    state = node.state
    assert state is not None
    slots = [slot for slot in state.slots if slot.failover]
    promoted = state.server.timeline > 1 and (
        not slots
        or any(slot.synced for slot in slots)
        or any(s.marked and _moves(s, node) for _, s in view.ours())
    )
    others = [other for other in view.nodes if other is not node]
    settled = all(s.conninfo.leads_to(node.endpoints) for _, s in view.ours())
    healthy = settled and bool(others) and all(other.standby for other in others)
    return promoted and not healthy


def _hint_of_marked(view: View) -> str:
    marked = [f"{where.name}/{s.name}" for where, s in view.ours() if s.marked]
    return (
        f"an interrupted failover left {', '.join(marked)} disabled: ALTER SUBSCRIPTION … ENABLE "
        "there if this primary stays, or stop it and run this command again"
        if marked
        else ""
    )


def _promotion(view: View, wish: Wish) -> Plan:
    """The whole way: no node is writable."""
    chosen = candidate(view)
    if chosen is None:
        raise Retryable(
            "no standby answers: "
            + "; ".join(f"{node.name}: {node.detail}" for node in view.nodes),
            operation=OPERATION,
            hint="start a standby, or bring the old primary back",
        )
    verdicts = judge_all(view, chosen)
    _require_ready(verdicts, wish)
    resets = _resets(chosen)
    _require_privileges(chosen, resets=bool(resets), promotion=True)
    steps = [
        effects.disable(subscriber, subscription, chosen)
        for subscriber, subscription in view.ours()
        if subscriber.usable and subscription.enabled and _moves(subscription, chosen)
    ]
    steps += [*resets, effects.promote(chosen)]
    ahead = view
    for step in steps:
        ahead = effects.after(step, ahead)
    rest = _completion(ahead, ahead.node(chosen.name), wish)
    return replace(
        rest,
        why=_why(chosen, view),
        steps=(*steps, *rest.steps),
        slots=verdicts,
        notes=(*_silent_nodes(view), *rest.notes),
    )


def _completion(view: View, node: Node, wish: Wish) -> Plan:
    """What is left to do once `node` is the new primary."""
    assert node.state is not None
    resets = _resets(node)
    _require_privileges(node, resets=bool(resets), promotion=False)
    steps: list[Step] = list(resets)
    left = [*unreachable(view), *_settings_out_of_reach(node)]
    notes: list[str] = []
    waiting: set[str] = set()
    for subscriber, subscription in view.ours():
        if not subscriber.usable:
            continue
        fault = _fault(subscriber, subscription, node)
        accepted = fault is not None and fault.slot in wish.accept_loss_of
        if fault is not None and accepted:
            notes.append(f"loss accepted: {fault.line}")
        elif fault is not None:
            left.append(fault)
        may_go_on = fault is None or (accepted and fault.skippable)
        steps += _moves_of(subscriber, subscription, node, may_go_on=may_go_on)
        feeds = may_go_on and (subscription.enabled or subscription.marked)
        if feeds and subscription.slot_name and not effects.active(node, subscription.slot_name):
            waiting.add(subscription.slot_name)
        if not subscription.enabled and not subscription.marked:
            notes.append(f"{subscriber.name}/{subscription.name} was disabled before, it stays so")
    if waiting:
        steps.append(effects.flow(node, tuple(sorted(waiting))))
    return Plan(
        new_primary=node.name,
        why=f"{node.name} is the primary already, on timeline {node.state.server.timeline}",
        steps=tuple(steps),
        slots=judge_promoted(view, node),
        left=tuple(left),
        notes=tuple(notes),
    )


def _fault(subscriber: Subscriber, subscription: Subscription, node: Node) -> Left | None:
    """Why the subscription can't go on; None also for one that an operator keeps disabled."""
    moves = _moves(subscription, node)
    if not (moves or subscription.marked or subscription.enabled):
        return None
    return fault_of(subscriber, subscription, node, positions=moves or subscription.marked)


def _moves_of(
    subscriber: Subscriber, subscription: Subscription, node: Node, *, may_go_on: bool
) -> list[Step]:
    """What this subscription still needs; one that may not go on ends repointed and disabled."""
    moves = _moves(subscription, node)
    steps = []
    if moves and subscription.enabled:
        steps.append(effects.disable(subscriber, subscription, node))
    if moves:
        steps.append(effects.repoint(subscriber, subscription, node))
    if may_go_on and (subscription.marked or (moves and subscription.enabled)):
        steps.append(effects.enable(subscriber, subscription, node))
    return steps


def _moves(subscription: Subscription, node: Node) -> bool:
    return not subscription.conninfo.leads_to(node.endpoints)


def _resets(node: Node) -> tuple[Step, ...]:
    """The settings that would make commits or decoding wait for standbys that are not there."""
    return tuple(
        effects.reset(node, setting, items)
        for setting, items in _stale(node)
        if not _on_command_line(node, setting)
    )


def _settings_out_of_reach(node: Node) -> list[Left]:
    return [
        Left(
            node.name,
            f"{setting} names standbys that are not there, and comes from the command line",
            f"restart {node.name} without it, or commits or decoding wait for ever",
        )
        for setting, _ in _stale(node)
        if _on_command_line(node, setting)
    ]


def _stale(node: Node) -> list[tuple[str, tuple[str, ...]]]:
    """(setting, the names that may stay) for each setting that names too much."""
    state = node.state
    assert state is not None
    found = []
    named = state.setting("synchronized_standby_slots")
    kept = slots_that_exist(named, state.slots)
    if kept != listed(named):
        found.append(("synchronized_standby_slots", kept))
    if not commits_can_go_on(
        state.setting("synchronous_standby_names"), state.replication.followers
    ):
        found.append(("synchronous_standby_names", ()))
    return found


def _on_command_line(node: Node, setting: str) -> bool:
    assert node.state is not None
    return node.state.settings[setting].source == "command line"


def _require_ready(verdicts: tuple[Readiness, ...], wish: Wish) -> None:
    lost = [slot for slot in verdicts if not slot.ready and slot.slot not in wish.accept_loss_of]
    if lost:
        detail = "; ".join(f"{slot.slot}: {slot.reasons[0]}" for slot in lost)
        accept = " ".join(f"--accept-loss-of {slot.slot}" for slot in lost)
        raise OperatorNeeded(
            f"{len(lost)} of {len(verdicts)} slots would be lost: {detail}",
            operation=OPERATION,
            subject=lost[0].standby,
            hint=f"repair it ({lost[0].reasons[0].remedy}), or accept the loss: {accept}",
            exit_code=ExitCode.NOT_READY,
        )


def _require_privileges(node: Node, *, resets: bool, promotion: bool) -> None:
    assert node.state is not None
    rights = node.state.replication
    if promotion and not rights.may_promote:
        raise _missing(node, "GRANT EXECUTE ON FUNCTION pg_promote(boolean, integer) TO …")
    if resets and not rights.may_configure:
        raise _missing(
            node,
            "GRANT ALTER SYSTEM ON PARAMETER synchronized_standby_slots, synchronous_standby_names "
            "TO …; GRANT EXECUTE ON FUNCTION pg_reload_conf() TO …",
        )


def _missing(node: Node, grant: str) -> SetupError:
    return SetupError(
        f"our role lacks a privilege on {node.name}",
        operation=OPERATION,
        subject=node.name,
        hint=f"connect as a superuser, or {grant}",
        exit_code=ExitCode.PRIVILEGE_MISSING,
    )


def _why(chosen: Node, view: View) -> str:
    others = [node for node in view.standbys if node is not chosen]
    if not others:
        return f"{chosen.name} is the only standby that answers"
    behind = ", ".join(f"{o.name} {chosen.received - o.received} bytes behind" for o in others)
    return f"{chosen.name} has the most WAL ({behind}), and its slots are ready or given up"


def _silent_nodes(view: View) -> list[str]:
    return [
        f"{node.name} did not answer ({node.detail}): make sure that it is off, not only cut off"
        for node in view.nodes
        if node.reach is Reach.SILENT
    ]
