"""From a dead primary to a new one: the ordered steps of a failover. Pure.

    on               step     before it (checked when planned)       after it (by observing)
    each subscriber  disable  enabled, fed by the old primary        disabled, marked so
    the candidate    reset    a setting names standbys not there     it names none of them
    the candidate    promote  no writable node; every slot ready     it is no longer in recovery
                              or its loss accepted; reachable
                              subscriptions disabled
    then             what plan.completion says

`plan_failover` may be asked at any time, also half-way: steps that are done are not planned again,
so that a command that was killed is resumed by running it anew. Nothing else is remembered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from schemas.errors import ExitCode, OperatorNeeded, Retryable
from services.failover.effects import fencing, promotion, subscriptions
from services.failover.effects.topology import follows
from services.failover.plan.completion import complete, resets
from services.failover.plan.loss import require_no_loss
from services.failover.plan.rules import (
    check_invariants,
    moves,
    require_newest,
    require_nobody_hidden,
    require_one_primary,
    require_one_system,
    require_privileges,
    require_readable_history,
    require_ready,
)
from services.failover.plan.wish import OPERATION, Draft, Plan, Wish
from services.failover.readiness import candidate, judge_all
from services.failover.view import Reach

if TYPE_CHECKING:
    from services.failover.view import Node, View


def plan_failover(view: View, wish: Wish) -> Plan:
    """The steps from `view` to a new primary that feeds the reachable subscriptions.

    Raises OperatorNeeded: SPLIT_BRAIN where a primary may be alive, NOT_READY where a slot would
    be lost, WRONG_DATABASE where nodes are of different clusters; Retryable where no standby
    answers; SetupError (PRIVILEGE_MISSING) before anything is changed.
    """
    require_one_system(view)
    draft = Draft(view, wish)
    if wish.fence:
        _fence(draft)
    require_nobody_hidden(draft.view, draft.wish.shot)
    if draft.view.writable:
        plan = complete(draft, _promoted(draft.view, draft.wish).name)
    else:
        plan = _promotion(draft, view)
    check_invariants(plan, view, wish)
    return plan


def _fence(draft: Draft) -> None:
    """Plan that every primary but a promoted one can't write: by its machine, else by itself."""
    view = draft.view
    newest = max((n for n in view.writable), key=_timeline, default=None)
    keeps = newest is not None and (newest.name == draft.wish.promoted or took_over(newest, view))
    new = newest if keeps and newest is not None else _chosen(view, draft.wish)
    for node in view.nodes:
        if node is new or node.standby or node.fenced or node.name in draft.wish.shot:
            continue
        if node.machine is not None and node.machine.has("fence"):
            if node.reach is not Reach.REFUSED:
                draft.add(fencing.shoot(node, new))
        elif node.writable:
            draft.add(fencing.fence(node, new))


def _timeline(node: Node) -> int:
    return node.state.server.timeline if node.state is not None else 0


def _promoted(view: View, wish: Wish) -> Node:
    """The one writable node, if it was promoted in place of a primary that is gone."""
    require_one_primary(view, OPERATION)
    node = view.writable[0]
    if node.name != wish.promoted and not took_over(node, view):
        raise OperatorNeeded(
            f"the primary {node.name} is alive and writable",
            operation=OPERATION,
            subject=node.name,
            hint=_hint_of_marked(view)
            or "a failover is for a dead primary; slotfailover switchover replaces a living one",
            exit_code=ExitCode.SPLIT_BRAIN,
        )
    return node


def took_over(node: Node, view: View) -> bool:
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
        or any(s.marked and moves(s, node) for _, s in view.ours())
    )
    others = [other for other in view.nodes if other is not node]
    settled = all(s.conninfo.leads_to(node.endpoints) for _, s in view.ours())
    healthy = settled and bool(others) and all(follows(other, node) for other in others)
    return promoted and not healthy


def _hint_of_marked(view: View) -> str:
    marked = [f"{where.name}/{s.name}" for where, s in view.ours() if s.marked]
    return (
        f"an interrupted failover left {', '.join(marked)} disabled: ALTER SUBSCRIPTION … ENABLE "
        "there if this primary stays, or stop it and run this command again"
        if marked
        else ""
    )


def _promotion(draft: Draft, before: View) -> Plan:
    """The whole way: no node is writable."""
    view, wish = draft.view, draft.wish
    chosen = _chosen(view, wish)
    require_newest(view, chosen, OPERATION)
    verdicts = judge_all(view, chosen)
    require_ready(verdicts, wish)
    notes = require_no_loss(view, wish, chosen, OPERATION)
    stale = resets(chosen)
    require_privileges(chosen, resets=bool(stale), promotion=True)
    require_readable_history(chosen)
    for subscriber, subscription in view.ours():
        if subscriber.usable and subscription.enabled and moves(subscription, chosen):
            draft.add(subscriptions.disable(subscriber, subscription, chosen))
    draft.add(*stale, promotion.promote(chosen))
    rest = complete(draft, chosen.name)
    return replace(
        rest,
        why="it was chosen with --to" if wish.target else _why(chosen, view),
        slots=verdicts,
        notes=(*_silent_nodes(before, wish), *rest.notes, *notes),
    )


def _chosen(view: View, wish: Wish) -> Node:
    chosen = view.node(wish.target) if wish.target else candidate(view)
    if chosen is None or not chosen.standby:
        raise Retryable(
            "no standby answers: "
            + "; ".join(f"{node.name}: {node.detail}" for node in view.nodes if not node.standby),
            operation=OPERATION,
            hint="start a standby, or bring the old primary back",
        )
    return chosen


def _why(chosen: Node, view: View) -> str:
    others = [node for node in view.standbys if node is not chosen]
    if not others:
        return f"{chosen.name} is the only standby that answers"
    behind = ", ".join(f"{o.name} {chosen.received - o.received} bytes behind" for o in others)
    return f"{chosen.name} has the most WAL ({behind}), and its slots are ready or given up"


def _silent_nodes(view: View, wish: Wish) -> list[str]:
    return [
        f"{node.name} did not answer ({node.detail}): make sure that it is off, not only cut off"
        for node in view.nodes
        if node.reach is Reach.SILENT and node.name not in wish.shot
    ]
