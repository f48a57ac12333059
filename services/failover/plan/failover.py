"""From a dead primary to a new one: the ordered steps of a failover. Pure.

    on               step     before it (checked when planned)       after it (by observing)
    other nodes      shoot    --fence, not seen to be a standby       its command ended with 0
    the old primary  fence    --fence, and it answers                no transaction writes
    the old primary  mark     fenced                                 the final LSN is known
    the old primary  drain    the candidate lacks the final LSN      it has it
    the candidate    reset    a setting names standbys not there     it names none of them
    each subscriber  disable  enabled, fed by the old primary        disabled, marked so
    the old primary  shoot,   it was drained                         nothing listens there
                     or stop
    each standby     cut      nobody has seen a primary              it has no receiver
    the candidate    promote  plan.evidence; every slot ready or its it is no longer in recovery
                              loss accepted; reachable
                              subscriptions disabled
    then             what plan.completion says

`plan_failover` may be asked at any time, also half-way: steps that are done are not planned again,
so that a command that was killed is resumed by running it anew. Nothing else is remembered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from schemas.acceptance import options
from schemas.errors import ExitCode, OperatorNeeded, Retryable, SettingsError
from services.failover.checks.half_moved import doubts
from services.failover.checks.readiness import candidate, judge_all, passed_over
from services.failover.model.preconditions import (
    require_newest,
    require_one_primary,
    require_one_system,
)
from services.failover.model.standby_settings import why_fixed
from services.failover.model.tokens import lost_wal
from services.failover.model.topology import follows
from services.failover.model.view import Reach
from services.failover.plan.completion import complete, detach, resets
from services.failover.plan.evidence import drained, require_proof, to_ask, unjudged_notes
from services.failover.plan.feeding import moves
from services.failover.plan.invariants import (
    check_invariants,
    require_changeable,
    require_limits,
    require_privileges,
    require_promotable,
    require_readable_history,
    require_ready,
    require_replaying,
    require_same_timeline,
    require_tight,
    require_unfencing,
)
from services.failover.plan.loss import require_no_loss
from services.failover.plan.request import OPERATION, Draft, Plan, Request
from services.failover.plan.steps import fencing, promotion, receivers
from services.failover.plan.succession import require_nobody_promoted, vouched

if TYPE_CHECKING:
    from services.failover.model.view import Node, View


def plan_failover(view: View, request: Request) -> Plan:
    """Plan the steps from `view` to a new primary that feeds the reachable subscriptions.

    Raise OperatorNeeded: SPLIT_BRAIN where a primary may be alive, NOT_READY where a slot or too
    much WAL would be lost, WRONG_DATABASE where nodes are of different clusters; Retryable where no
    standby answers; SettingsError for an unknown target; SetupError (PRIVILEGE_MISSING,
    SERVER_SETTING) before anything is changed.
    """
    require_one_system(view)
    require_node(view, request.target, OPERATION)
    draft = Draft(view, request)
    new = _promoted(view, request)
    if new is not None:
        _shoot_the_rest(draft, new)
        require_one_primary(draft.view, OPERATION)
        for node in draft.view.nodes:
            if node.reach not in (Reach.ANSWERS, Reach.REFUSED, Reach.SILENT):
                require_proof(draft.view, draft.request, draft.view.node(new.name))
        plan = complete(draft, new.name)
    else:
        plan = _promotion(draft, view)
    check_invariants(plan, view, request)
    return plan


def require_node(view: View, name: str, operation: str) -> None:
    """Raise SettingsError for an unknown name; "" stands for the best."""
    if name and name not in {node.name for node in view.nodes}:
        raise SettingsError(
            f"{name} is not a node",
            operation=operation,
            hint=f"failover.nodes has {', '.join(node.name for node in view.nodes)}",
        )


def _promoted(view: View, request: Request) -> Node | None:
    """Return the node that was promoted in place of a primary that is gone, or None.

    Of several primaries, with --fence, the newest. Raise OperatorNeeded for any other primary.
    """
    if not view.writable:
        return None
    if not request.fence:
        require_one_primary(view, OPERATION)
    node = max(view.writable, key=_timeline)
    keeps = node.name == request.promoted or took_over(node, view)
    if keeps and request.target in ("", node.name):
        return node
    if request.fence and len(view.writable) == 1:
        return None
    require_one_primary(view, OPERATION)
    raise OperatorNeeded(
        f"the primary {node.name} is alive and writable",
        operation=OPERATION,
        subject=node.name,
        hint=_hint_of_marked(view, node)
        or "a failover is for a dead primary; slotfailover switchover replaces a living one",
        exit_code=ExitCode.SPLIT_BRAIN,
    )


def _shoot_the_rest(draft: Draft, new: Node) -> None:
    """Plan, with --fence, the `fence` command of every node not seen to be a standby."""
    for node in draft.view.nodes:
        needed = node.name not in (new.name, *draft.request.power_fenced) and not node.standby
        if draft.request.fence and needed and node.has_command("fence"):
            draft.add(fencing.shoot(node, new))


def _unfenced(view: View, request: Request, chosen: Node) -> list[str]:
    """Return notes on nodes that give no answer and have no `fence` command."""
    notes: list[str] = []
    for node in view.nodes:
        if node.name == chosen.name or node.state is not None or node.has_command("fence"):
            continue
        done = "nothing fences it, even with --fence" if request.fence else "nothing fences it"
        notes.append(
            f"{node.name} has no `fence` command (failover.machines.{node.name}): {done}. If "
            "something starts it again, there are two primaries: keep it off until it rejoins"
        )
    return notes


def _timeline(node: Node) -> int:
    return node.state.server.timeline if node.state is not None else 0


def took_over(node: Node, view: View) -> bool:
    """Tell whether this primary was a standby once, and something of a failover may be left to do.

    The evidence is in its slots, as those of a promoted standby keep synced = t, or in
    subscriptions that were disabled for a failover and lead elsewhere. A primary that streams to
    every other node has nothing to take over from; it also reports standbys that do not answer.
    """
    state = node.known_state
    slots = [slot for slot in state.slots if slot.failover]
    promoted = state.server.timeline > 1 and (
        not slots
        or any(slot.synced for slot in slots)
        or any(s.marked and moves(s, node) for _, s in view.ours())
    )
    others = [other for other in view.nodes if other is not node]
    settled = all(s.conninfo.leads_to(node.endpoints) for _, s in view.ours())
    seen = [other for other in others if other.state is not None]
    by_slots = sum(bool(fed.slot) for fed in state.provenance.feeds)
    fed = len(seen) == len(others) or by_slots >= len(others)
    healthy = settled and bool(others) and fed and all(follows(other, node) for other in seen)
    return promoted and not healthy


def _hint_of_marked(view: View, primary: Node) -> str:
    """Return what to do about subscriptions that an interrupted run left disabled."""
    marked = [f"{where.name}/{s.name}" for where, s in view.ours() if s.marked]
    if found := doubts(view, primary):
        return f"{found[0].reason}: {found[0].hint}"
    return (
        f"an interrupted run left {', '.join(marked)} disabled: slotfailover resume goes on with "
        "it, slotfailover resume --rollback takes it back"
        if marked
        else ""
    )


def _promotion(draft: Draft, before: View) -> Plan:
    """Plan a whole failover: no node was promoted yet."""
    view, request = draft.view, draft.request
    chosen = _chosen(view, request)
    old = _answering(view, request, chosen)
    if old is None:
        _shoot_the_rest(draft, chosen)
    _require_powers(draft, chosen, old)
    require_newest(view, chosen, OPERATION)
    require_nobody_promoted(view, request, chosen)
    require_readable_history(chosen)
    require_replaying(view, chosen)
    for standby in to_ask(draft.view, draft.request, chosen):
        draft.add(receivers.ask(standby, chosen))
    require_proof(fencing.gone(draft.view, old) if old else draft.view, draft.request, chosen)
    readiness = judge_all(view, chosen)
    require_ready(view, readiness, request)
    stale = resets(chosen)
    notes = [*unjudged_notes(before, request, chosen), *_unfenced(before, request, chosen)]
    notes += vouched(before, request, chosen)
    notes += [] if request.target else passed_over(view, chosen)
    if old is not None:
        notes += _drain(draft, old, chosen)
    elif request.final_lsn is None:
        notes += require_no_loss(view, request, chosen, OPERATION)
    draft.add(*stale)
    detach(draft, chosen)
    if old is not None:
        _put_down(draft, old, chosen)
    if draft.request.final_lsn is None:
        _cut_off(draft, chosen)
    final = _at_least(draft, chosen)
    final_request = draft.request
    if old is not None:  # by what can be seen of it, it may still feed somebody
        require_proof(draft.view, final_request, draft.view.node(chosen.name))
    draft.add(
        promotion.promote(
            chosen, final, lambda seen: require_promotable(seen, final_request, chosen.name)
        )
    )
    rest = complete(draft, chosen.name)
    return replace(
        rest,
        why="it was chosen with --to" if request.target else _why(chosen, view),
        slots=readiness,
        notes=(*rest.notes, *notes),
    )


def _answering(view: View, request: Request, chosen: Node) -> Node | None:
    """Return the old primary if it answers and is, or is to be, fenced; else None.

    Raise OperatorNeeded if a primary that answers may stay one.
    """
    found = [node for node in view.nodes if node.leading and node.name != chosen.name]
    for node in found:
        if not (request.fence and len(found) == 1) and not drained(node, request):
            require_proof(view, request, chosen)
    return found[0] if len(found) == 1 else None


def _require_powers(draft: Draft, chosen: Node, old: Node | None) -> None:
    """Raise SetupError, before anything is changed, if a server does not allow the failover."""
    require_privileges(chosen, resets=bool(resets(chosen)), promotion=True)
    require_unfencing(chosen)
    if resets(chosen):
        require_changeable(chosen)
    if old is None and draft.request.final_lsn is None:
        for standby in draft.view.standbys:
            if _to_be_cut(standby) and (standby.name == chosen.name or _receives(standby)):
                require_changeable(standby)
                require_privileges(standby, resets=False, promotion=False, cut=True)
    if old is not None and not drained(old, draft.request):
        require_limits(old, chosen)
        require_changeable(old)
        require_privileges(old, resets=False, promotion=False, fence=True)
        require_tight(old, ("stop", "fence"))


def _drain(draft: Draft, old: Node, chosen: Node) -> list[str]:
    """Plan to fence the old primary, which answers, and to bring the candidate all of its WAL.

    Return what is lost with the operator's consent. Raise OperatorNeeded (NOT_READY) for more.
    """
    require_same_timeline(draft.view, old, chosen)
    streams = chosen.state is not None and chosen.state.replication.receiver_streaming
    streams = streams and follows(chosen, old)
    if not drained(old, draft.request):
        if old.writable or fencing.early_sessions(draft.view, old):
            draft.add(fencing.fence(old, chosen))
        draft.add(fencing.write_final_marker(old, chosen))
    final = draft.request.known_final_lsn
    standby = draft.view.node(chosen.name)
    lacking = max(0, final - standby.received)
    waits = fencing.drain(old, chosen, (), final)
    if lacking and streams and waits.key not in draft.request.done_steps:
        draft.add(waits)
        return []
    token = lost_wal(draft.view.system, standby, lacking)
    if lacking and not draft.request.accept.takes(token):
        raise OperatorNeeded(
            f"{chosen.name} lacks {lacking} bytes of WAL that {old.name} has, and {old.name} "
            "answers" + ("" if streams else f"; {chosen.name} does not stream from it"),
            operation=OPERATION,
            subject=chosen.name,
            lsn=final,
            hint=f"let {chosen.name} stream from {old.name} (read the log of {chosen.name}); or "
            f"lose those commits: {options([token])} (the number at its end is of bytes: raise it "
            "where writes go on meanwhile)",
            exit_code=ExitCode.NOT_READY,
        )
    return [f"loss accepted: {lacking} bytes of WAL of {old.name}"] if lacking else []


def _put_down(draft: Draft, old: Node, chosen: Node) -> None:
    """Plan the end of a drained primary by its machine's `fence` or `stop` command."""
    if old.has_command("fence"):
        if old.name not in draft.request.power_fenced:
            draft.add(fencing.shoot(old, chosen))
    elif old.has_command("stop"):
        draft.add(fencing.stop_primary(old, chosen))


def _at_least(draft: Draft, chosen: Node) -> int | None:
    """Return the LSN that the candidate must have before it is promoted: the final one.

    Return None if the candidate lacks WAL and may be promoted without it.
    """
    final = draft.request.final_lsn
    has = draft.view.node(chosen.name).received
    return final if final is not None and has >= final else None


def _cut_off(draft: Draft, chosen: Node) -> None:
    for standby in draft.view.standbys:
        needed = standby.name == chosen.name or _receives(standby)
        if _to_be_cut(standby) and (needed or _may_be_cut(standby)):
            draft.add(receivers.cut(standby, chosen))


def _to_be_cut(standby: Node) -> bool:
    state = standby.state
    return state is not None and state.upstream is not None and not receivers.is_cut(standby)


def _may_be_cut(standby: Node) -> bool:
    """Tell whether our role and the server allow to cut the standby's receiver off."""
    state = standby.state
    return state is not None and not why_fixed(state) and state.replication.may_cut


def _receives(standby: Node) -> bool:
    return standby.state is not None and standby.state.replication.receiver_streaming


def _chosen(view: View, request: Request) -> Node:
    """Return the standby to promote: the requested, else the best. Raise where none answers."""
    chosen = view.node(request.target) if request.target else candidate(view)
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
