"""Plans the way from a live primary to another without loss, and the way back. Pure.

    on               step     before it (checked when planned)       after it (by observing)
    the standby      reset    a setting names standbys not there     it names none of them
    the old primary  checkp.  writable; it has a command to stop     its stop will be short
    the old primary  settle   standby or consumers are far behind    they are near
    the standby      replay   it has WAL that is not replayed        that is replayed
    the old primary  fence    writable; every slot is ready          no transaction writes
    the old primary  mark     fenced                                 the final LSN is known
    the old primary  drain    standby or a connected consumer lacks  they have it
                              the final LSN
    each subscriber  disable  enabled, fed by the old primary        disabled, marked so
    the old primary  stop     fenced, drained; it has a command      nothing listens there
    the standby      promote  no writable node; it has the final LSN it is writable
    then             what plan.completion says

Until `promote` all of it can be taken back: `plan_rollback`. Consumers are drained before they are
disabled, as a disabled subscription would not get the last changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from schemas.acceptance import options
from schemas.errors import ExitCode, OperatorNeeded, Retryable
from services.failover.checks.blockers import Blocker, foreign, unreachable
from services.failover.checks.half_moved import stays_disabled, void_mark
from services.failover.checks.readiness import candidate, judge_all, passed_over
from services.failover.model.preconditions import require_one_primary, require_one_system
from services.failover.model.standby_settings import listed
from services.failover.model.tokens import lost_wal
from services.failover.model.topology import failover_slots, follows
from services.failover.model.view import Reach
from services.failover.plan.completion import complete, detach, resets
from services.failover.plan.evidence import require_proof
from services.failover.plan.failover import plan_failover, require_node
from services.failover.plan.feeding import judge, led_to
from services.failover.plan.invariants import (
    check_invariants,
    missing_privilege,
    require_changeable,
    require_limits,
    require_nobody_hidden,
    require_nobody_left,
    require_privileges,
    require_promotable,
    require_ready,
    require_replaying,
    require_same_timeline,
    require_tight,
)
from services.failover.plan.request import Draft, Plan, Request
from services.failover.plan.steps import fencing, promotion, receivers, subscriptions
from services.failover.plan.steps.step import active
from services.failover.plan.succession import (
    require_newest_known,
    require_unpromoted,
    vouched,
)

if TYPE_CHECKING:
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View

OPERATION = "switch over"


def plan_switchover(view: View, request: Request) -> Plan:
    """Plan the steps from `view` to `request.target` (the best standby) as the primary.

    Raise OperatorNeeded (SPLIT_BRAIN, NOT_READY, WRONG_DATABASE), SettingsError for a target that
    is not a standby, SetupError (PRIVILEGE_MISSING).
    """
    require_one_system(view)
    require_node(view, request.target, OPERATION)
    require_nobody_hidden(view)
    require_one_primary(view, OPERATION)
    if view.writable and view.writable[0].name in (request.promoted, request.target):
        plan = complete(Draft(view, request), view.writable[0].name)
    elif view.primary is None and request.final_lsn is None:
        raise Retryable(
            "no node answers as a primary",
            operation=OPERATION,
            subject=", ".join(node.name for node in view.nodes),
            hint="slotfailover failover replaces a dead primary; slotfailover resume goes on where "
            "a switchover has stopped it",
        )
    elif view.primary is None:
        return plan_failover(view, request)
    else:
        plan = _whole(view, request, view.primary)
    check_invariants(plan, view, request)
    return plan


def plan_rollback(view: View, request: Request) -> Plan:
    """Plan the steps that undo an unfinished switchover or failover.

    The old primary goes on if it is alive, or if we have stopped it. Raise as `plan_switchover`.
    """
    require_one_system(view)
    require_one_primary(view, "roll back")
    draft = Draft(view, request)
    old = view.primary or _stopped(view, request)
    if old is not None and not old.writable:
        require_unpromoted(view, request, old)
    elif old is not None and old.name not in request.found_writable:
        require_newest_known(receivers.reconnected(view), request, old)
    if old is not None and not old.leading:
        draft.add(fencing.start_primary(old))
        return Plan(old.name, f"{old.name} is started again", tuple(draft.steps), ())
    if old is not None and old.fenced:
        draft.add(fencing.unfence(old))
    name = old.name if old is not None else ""
    for standby in view.standbys:
        if standby.state is not None and standby.state.cut:
            draft.add(receivers.reconnect(standby, name or standby.name))
    left = [*unreachable(view), *foreign(view), *_enable_again(draft, old)]
    why = f"{name} was not replaced and goes on" if name else "nothing was promoted"
    notes = vouched(view, request, old) if old is not None else []
    notes += [stays_disabled(where, found) for where, found in view.ours() if void_mark(found)]
    plan = Plan(name, why, tuple(draft.steps), (), tuple(left), tuple(notes))
    check_invariants(plan, view, request)
    return plan


def _enable_again(draft: Draft, old: Node | None) -> list[Blocker]:
    """Plan to enable what runs have disabled; return what has to stay so."""
    view, request = draft.view, draft.request
    left: list[Blocker] = []
    for subscriber, found in view.ours():
        if not subscriber.usable or found.destination is None:
            continue
        led = led_to(view, found, old)
        node = old or led
        verdict = judge(view, request, subscriber, found, node) if node is not None else None
        if verdict is not None and not verdict.may_feed and verdict.blocker is not None:
            left.append(verdict.blocker)
        elif node is None or led is None or led.name != node.name:
            left.append(_stays_disabled(subscriber, found))
        else:
            if old is None:
                require_unpromoted(view, request, node)
            draft.add(subscriptions.enable(subscriber, found, node))
    return left


def _stays_disabled(subscriber: Subscriber, subscription: Subscription) -> Blocker:
    return Blocker(
        f"{subscriber.name}/{subscription.name}",
        f"it stays disabled, as it leads to {subscription.conninfo.address}, which is not an "
        "address of the primary",
        "slotfailover repoint leads it to the primary, once there is one",
    )


def _whole(view: View, request: Request, old: Node) -> Plan:
    """Return the plan from the old primary that takes writes to the promoted standby.

    Pure in the order of steps: fence, final marker, drain, stop, promote, complete.
    """
    new = _target(view, request, old)
    require_newest_known(view, request, old)
    readiness = judge_all(view, new)
    _require_fit(view, request, old, new)
    stale = resets(new)
    require_privileges(new, resets=bool(stale), promotion=True)
    draft = Draft(view, request)
    draft.add(*stale)
    stops = old.has_command("stop")
    slots = _connected(old, stops=stops)
    ahead = fencing.written(view, old) - request.lag_bytes_max
    if old.writable and stops:
        draft.add(fencing.checkpoint(old, new))
    if old.writable and (slots or fencing.behind(view, old, new, slots, ahead)):
        draft.add(fencing.settle(old, new, slots, request.lag_bytes_max))
    if old.writable and fencing.replayed(view, new) < new.received:
        draft.add(fencing.wait_for_replay(old, new))
    if old.writable or fencing.early_sessions(view, old):
        draft.add(fencing.fence(old, new))
    if request.final_lsn is None:
        draft.add(fencing.write_final_marker(old, new))
    final = draft.request.known_final_lsn
    _require_drainable(view, request, old, new, final)
    waits = request.final_lsn is None or bool(fencing.behind(view, old, new, slots, final))
    if waits:
        draft.add(fencing.drain(old, new, slots, final))
    detach(draft, new)
    if stops:
        draft.add(fencing.stop_primary(old, new))
    final_request = draft.request
    require_proof(draft.view, final_request, draft.view.node(new.name))
    draft.add(
        promotion.promote(
            new, final, lambda seen: require_promotable(seen, final_request, new.name)
        )
    )
    rest = complete(draft, new.name)
    lost = [item for item in rest.left if item.token and item.exit_code is ExitCode.NOT_READY]
    accept = options(item.token for item in lost if item.token)
    remedy = "let its slot be synchronized: ALTER SUBSCRIPTION … SET (failover), while disabled"
    require_nobody_left(lost, f"{remedy}; or accept the loss: {accept}")
    notes = [] if request.target else passed_over(view, new)
    notes += [*_notes(view, old, slots, stops=stops), *vouched(view, request, old)]
    return replace(
        rest, why=f"{old.name} hands over to it", slots=readiness, notes=(*notes, *rest.notes)
    )


def _target(view: View, request: Request, old: Node) -> Node:
    """Return the standby to promote. Raise Retryable where it does not answer as a standby."""
    new = view.node(request.target) if request.target else candidate(view)
    if new is None or not new.standby:
        name = f"{new.name} is not a standby that answers" if new else "no standby answers"
        others = ", ".join(node.name for node in view.standbys) or "none"
        raise Retryable(
            f"{name} ({new.detail or 'it is the primary' if new else 'nothing to switch to'})",
            operation=OPERATION,
            subject=old.name,
            hint=f"start a standby, or choose another with --to; standbys now: {others}",
        )
    return new


def _require_fit(view: View, request: Request, old: Node, new: Node) -> None:
    """Raise if the switchover would fail or lose something, while nothing is changed yet."""
    require_ready(view, judge_all(view, new), request)
    require_limits(old, new)
    require_replaying(view, new)
    if not old.known_state.replication.may_fence:
        raise missing_privilege(old, "to end sessions and to fence")
    for node in (old, new):
        require_changeable(node)
    require_tight(old, ("stop",))
    require_same_timeline(view, old, new)
    problems = []
    if not new.known_state.replication.receiver_streaming:
        problems.append((f"{new.name} does not stream", f"read the log of {new.name}"))
    elif not follows(new, old):
        problems.append((f"{new.name} streams from elsewhere", f"let it stream from {old.name}"))
    delay = new.known_state.setting("recovery_min_apply_delay") or "0"
    if delay != "0":
        problems.append(
            (
                f"{new.name} replays on purpose later than it could, as would its promotion: "
                f"recovery_min_apply_delay = {delay} ms",
                "switch to another with --to; or ALTER SYSTEM SET recovery_min_apply_delay = 0 on "
                f"{new.name}, and SELECT pg_reload_conf()",
            )
        )
    problems += [
        (
            f"REPACK (CONCURRENTLY) runs on {old.name} (process {slot.active_pid}): the fence "
            f"would end it, and the stop would wait for its slot {slot.slot_name}",
            f"wait until it has ended, or end it: SELECT pg_cancel_backend({slot.active_pid})",
        )
        for slot in old.known_state.slots
        if slot.of_repack
    ]
    for name in listed(old.known_state.setting("synchronized_standby_slots")):
        slot = old.known_state.slot(name)
        if slot is None or slot.active_pid is None:
            problems.append(
                (
                    f"synchronized_standby_slots of {old.name} names {name}, which no standby uses:"
                    " consumers can't get the last changes, and the primary could not stop",
                    f"start that standby, or take {name} out of the setting",
                )
            )
    if problems and old.writable:
        raise OperatorNeeded(
            problems[0][0],
            operation=OPERATION,
            subject=old.name,
            hint=problems[0][1],
            exit_code=ExitCode.NOT_READY,
        )


def _require_drainable(view: View, request: Request, old: Node, new: Node, final: int) -> None:
    """Raise OperatorNeeded (NOT_READY) where the last WAL of a fenced primary can't arrive.

    Such a run, which begins with a fenced primary, would wait for that WAL in vain.
    """
    lacking = final - new.received
    if request.final_lsn is not None or old.writable or lacking <= 0:
        return
    if request.accept.takes(lost_wal(view.system, new, lacking)):
        return
    if new.known_state.replication.receiver_streaming and follows(new, old):
        return
    raise OperatorNeeded(
        f"{new.name} lacks {lacking} bytes of WAL that {old.name} has; {old.name} is "
        f"fenced, and {new.name} does not stream from it",
        operation=OPERATION,
        subject=new.name,
        lsn=final,
        hint=f"let {new.name} stream from {old.name} (read the log of {new.name}), then "
        f"slotfailover resume; or let {old.name} take writes again: slotfailover resume --rollback",
        exit_code=ExitCode.NOT_READY,
    )


def _connected(old: Node, *, stops: bool) -> tuple[str, ...]:
    """Return the slots whose consumers are connected, and will have the final LSN.

    Where the old primary is stopped, these are all logical slots, also those that no standby has:
    at its stop the server waits for every connected consumer, which is better known before.
    """
    state = old.state
    found = failover_slots(old)
    if stops and state is not None:
        logical = [slot for slot in state.slots if slot.slot_type == "logical"]
        found = (*found, *(slot for slot in logical if slot not in found))
    return tuple(slot.slot_name for slot in found if active(old, slot.slot_name))


def _notes(view: View, old: Node, slots: tuple[str, ...], *, stops: bool) -> list[str]:
    """Return what an operator should know: consumers that are away, an old primary that stays."""
    ours = {found.slot_name for _, found in view.ours() if found.marked}
    found = [
        f"the consumer of {slot.slot_name} is not connected: it gets the rest from the new primary"
        for slot in failover_slots(old)
        if slot.slot_name not in (*slots, *ours)
    ]
    if not stops:
        found.append(
            f"{old.name} has no `stop` command (failover.machines.{old.name}): it stays fenced "
            "until it rejoins; a client that asks for READ WRITE itself could still write there"
        )
    return found


def _stopped(view: View, request: Request) -> Node | None:
    """Return the only node that is not a standby, if it was stopped and may be started again."""
    found = [node for node in view.nodes if not node.standby]
    if len(found) != 1:
        return None
    node = found[0]
    ours = node.name in request.stopped or (request.revive and node.reach is Reach.REFUSED)
    return node if ours and node.has_command("start") else None
