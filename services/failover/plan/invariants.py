"""Rules that every plan must keep, and the errors that refuse a plan. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.acceptance import options
from schemas.errors import ExitCode, OperatorNeeded, SetupError, SlotbridgeError
from services.failover.checks.capacity import hidden_settings, too_low
from services.failover.checks.readiness import Readiness, judge_all
from services.failover.model import statements
from services.failover.model.standby_settings import why_fixed
from services.failover.model.tokens import lost_slot, lost_wal
from services.failover.model.view import Reach
from services.failover.plan.evidence import not_let_in, require_proof
from services.failover.plan.feeding import clings, judge, led_to, moves
from services.failover.plan.request import OPERATION, Plan, Request, after_step
from services.failover.plan.steps.step import Action

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.failover.checks.blockers import Blocker
    from services.failover.model.view import Node, View
    from services.failover.plan.steps.step import Step


def require_same_timeline(view: View, old: Node, new: Node) -> None:
    """Raise OperatorNeeded (TIMELINE) unless a count of bytes says which WAL `new` lacks.

    It does so only if both are on one timeline: WAL of another timeline is other WAL.
    """
    if old.state is None or new.state is None:
        return
    theirs, own = old.state.server.timeline, new.state.server.timeline
    what = ""
    if own != theirs:
        what = f"{new.name} is on timeline {own}, and the primary {old.name} on {theirs}"
    else:
        starts = {_start(old), _start(new)} - {None}
        streams = new.state.replication.receiver_streaming
        more = new.received - (old.state.replication.written_lsn or 0)
        if len(starts) > 1:
            what = f"timeline {own} of {new.name} began elsewhere than that of {old.name}"
        elif more > 0 and not streams:
            what = f"{new.name} has {more} bytes of WAL that {old.name} never wrote"
    if what:
        others = ", ".join(n.name for n in view.standbys if n is not new) or "none"
        raise OperatorNeeded(
            f"{what}: nobody can tell which commits a promotion would lose",
            operation=OPERATION,
            subject=new.name,
            lsn=old.received,
            hint=f"let {new.name} stream from {old.name} (read the log of {new.name}), or make it "
            f"a standby of it again: slotfailover rejoin {new.name}; or choose another with --to; "
            f"other standbys now: {others}",
            exit_code=ExitCode.TIMELINE,
        )


def _start(node: Node) -> int | None:
    """Return where a node's timeline began, None if that is unknown or it is the first."""
    met = node.milestone("")
    return met.began if met is not None else None


def check_invariants(plan: Plan, view: View, request: Request) -> None:
    """Simulate the plan; raise SlotbridgeError (BUG) if a step would be dangerous in its view."""
    for step in plan.steps:
        broken = _broken_rule(step, view, request)
        if broken:
            raise SlotbridgeError(f"planned {step.text} although {broken}", operation=OPERATION)
        view = step.effect(view)
        request = after_step(request, step, view)


def _broken_rule(step: Step, view: View, request: Request) -> str:
    """Return the rule that the step would break in this view, "" if it breaks none."""
    node = view.node(step.node)
    if step.action is Action.PROMOTE:
        try:
            require_promotable(view, request, node.name)
        except OperatorNeeded as error:
            return error.message
        leaking = [n for n in view.nodes if n is not node and n.leading and _leaks(n)]
        if leaking:
            return f"{leaking[0].name} can still be written: {_leaks(leaking[0])}"
        lacking = (request.final_lsn or 0) - node.received
        if lacking > 0 and not request.accept.takes(lost_wal(view.system, node, lacking)):
            return f"{node.name} has not received the final LSN"
        if lost := _refused(view, judge_all(view, node), request):
            return f"slots are not ready: {', '.join(sorted(slot.slot for slot in lost))}"
        fed = [
            s.name
            for where, s in view.ours()
            if where.usable and s.enabled and (moves(s, node) or clings(view, s, node))
            if f"{where.name}/{s.name}" not in request.given_up
        ]
        return f"subscriptions are enabled: {', '.join(fed)}" if fed else ""
    if step.action is Action.REJOIN and view.node(step.server).writable:
        return f"{step.server} is writable"
    if step.action is Action.STOP and view.node(step.server).writable:
        return f"{step.server} takes writes"
    if step.action in (Action.REPOINT, Action.ENABLE):
        return _misfed(step, view, request)
    return ""


def _misfed(step: Step, view: View, request: Request) -> str:
    """Return why the step's node must not get or feed the subscription, "" if it may."""
    node, found = view.node(step.node), view.subscription(step.server, step.subject)
    (subscriber,) = (each for each in view.subscribers if each.name == step.server)
    if found is None or found.enabled:
        return "the subscription is not there or enabled"
    verdict = judge(view, request, subscriber, found, node)
    if not (verdict.may_feed if step.action is Action.ENABLE else verdict.may_lead):
        why = verdict.blocker.reason if verdict.blocker is not None else "a person has disabled it"
        return f"{node.name} must not feed it: {why}"
    if node.leading and not node.fenced and view.primary != node:
        return f"{node.name} is not the primary"
    astray = step.action is Action.ENABLE and led_to(view, found, node) != node
    return "it still leads elsewhere" if astray else ""


def require_nobody_hidden(view: View) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) if a node is up and does not let us in."""
    for node in view.nodes:
        if node.reach in (Reach.CLOSED, Reach.BARRED):
            raise not_let_in(node)


def _refused(view: View, readiness: Iterable[Readiness], request: Request) -> list[Readiness]:
    """Return the slots that are not ready, and whose loss is not accepted."""
    takes = request.accept.takes
    return [
        slot
        for slot in readiness
        if not slot.ready and not takes(lost_slot(view.system, slot.slot, slot.standby))
    ]


def require_ready(view: View, readiness: tuple[Readiness, ...], request: Request) -> None:
    """Raise OperatorNeeded (NOT_READY) unless every slot is ready or its loss is accepted."""
    if lost := _refused(view, readiness, request):
        detail = "; ".join(f"{slot.slot}: {slot.reasons[0]}" for slot in lost)
        accept = options(lost_slot(view.system, slot.slot, slot.standby) for slot in lost)
        raise OperatorNeeded(
            f"{len(lost)} of {len(readiness)} slots would be lost: {detail}",
            operation=OPERATION,
            subject=lost[0].standby,
            hint=f"repair it ({lost[0].reasons[0].remedy}), or accept the loss: {accept}",
            exit_code=ExitCode.NOT_READY,
        )


def require_replaying(view: View, node: Node) -> None:
    """Raise OperatorNeeded (NOT_READY) for a standby whose replay is paused.

    If a person has paused replay, a promotion resumes it. If the standby's limits are lower than
    the primary's, the promotion never ends and can't be taken back. Both pauses look the same.
    Source: xlogrecovery.c, recoveryPausesHere, RecoveryRequiresIntParameter.
    """
    if node.state is not None and node.replay_paused:
        others = ", ".join(n.name for n in view.standbys if n is not node) or "none"
        raise OperatorNeeded(
            f"replay is {node.state.replication.replay_pause} on {node.name}: if its limits are "
            "lower than the primary's, its promotion would never end",
            operation=OPERATION,
            subject=node.name,
            lsn=node.state.replication.replayed_lsn,
            hint=f"SELECT pg_wal_replay_resume() on {node.name}, then run this again; if the "
            "server ends then, its log names the settings to raise before it is started; or order "
            f"another to be the primary (slotfailover failover --to); other standbys now: {others}",
            exit_code=ExitCode.NOT_READY,
        )


def require_promotable(view: View, request: Request, name: str) -> None:
    """Raise OperatorNeeded where the order to promote must not be given, as things stand now."""
    require_proof(view, request, view.node(name))
    require_replaying(view, view.node(name))


def require_limits(old: Node, new: Node) -> None:
    """Raise OperatorNeeded (NOT_READY) where the standby's limits are lower than the primary's.

    Limits that one of them does not tell prove nothing, and are refused too.
    """
    if hidden := hidden_settings(old.known_state, new.known_state):
        names = ", ".join(f"{name} of {new.name if b else old.name}" for name, b in hidden)
        raise OperatorNeeded(
            f"{names} can't be read: nobody can tell whether {new.name} could go on replaying and "
            "be promoted",
            operation=OPERATION,
            subject=new.name,
            hint="connect as a role that may read pg_settings: failover.nodes, or failover.admins",
            exit_code=ExitCode.NOT_READY,
        )
    lower = too_low(old.known_state, new.known_state)
    if lower:
        values = ", ".join(
            f"{name} ({new.known_state.setting(name)}, {old.known_state.setting(name)} on "
            f"{old.name})"
            for name in lower
        )
        raise OperatorNeeded(
            f"limits of {new.name} are lower than those of {old.name}: {values}; once it learns of "
            "them, it stops replaying and can't be promoted",
            operation=OPERATION,
            subject=new.name,
            hint=f"raise them on {new.name}, and restart it",
            exit_code=ExitCode.NOT_READY,
        )


def require_nobody_left(left: Sequence[Blocker], remedy: str) -> None:
    """Raise OperatorNeeded (NOT_READY) for subscriptions that would be left behind."""
    if left:
        raise OperatorNeeded(
            "subscriptions would be left behind: "
            + "; ".join(f"{item.subject}: {item.reason}" for item in left),
            operation=OPERATION,
            subject=left[0].subject,
            hint=remedy,
            exit_code=ExitCode.NOT_READY,
        )


def require_tight(node: Node, ends: tuple[str, ...]) -> None:
    """Raise OperatorNeeded (NOT_READY) if a fence would not hold and no command ends the node.

    `ends` are the commands that the plan would use for it.
    """
    if any(node.has_command(command) for command in ends):
        return
    if leaks := _leaks(node):
        raise OperatorNeeded(
            f"{node.name} could still be written while it is fenced, by {leaks}",
            operation=OPERATION,
            subject=node.name,
            hint="end, decide, disable or reset each of them; or give the node a `stop` command: "
            f"failover.machines.{node.name}",
            exit_code=ExitCode.NOT_READY,
        )


def require_changeable(node: Node) -> None:
    """Raise SetupError (SERVER_SETTING) where ALTER SYSTEM is switched off, or has no effect."""
    if why := why_fixed(node.known_state):
        raise SetupError(
            f"{why} on {node.name}, so its settings can't be changed",
            operation=OPERATION,
            subject=node.name,
            hint="another program manages this server's settings: let it promote the standby, "
            "then run slotfailover repoint; or set allow_alter_system = on, and restart the server "
            "without the setting on its command line",
            exit_code=ExitCode.SERVER_SETTING,
        )


def _leaks(node: Node) -> str:
    found = node.state.leaks if node.state is not None else ()
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def require_privileges(
    node: Node, *, resets: bool, promotion: bool, cut: bool = False, fence: bool = False
) -> None:
    """Raise SetupError (PRIVILEGE_MISSING) unless our role may do what the plan needs there."""
    rights = node.known_state.replication
    if fence and not rights.may_fence:
        raise missing_privilege(node, "to end sessions and to fence", "do not pass --fence")
    if cut and not rights.may_cut:
        raise missing_privilege(
            node,
            "to cut off a standby",
            "GRANT ALTER SYSTEM ON PARAMETER primary_conninfo TO …",
        )
    if promotion and not rights.may_promote:
        raise missing_privilege(
            node,
            "to promote",
            "GRANT EXECUTE ON FUNCTION pg_promote(boolean, integer) TO …",
        )
    if resets and not rights.may_configure:
        raise missing_privilege(
            node,
            "to change its settings",
            "GRANT ALTER SYSTEM ON PARAMETER synchronized_standby_slots, synchronous_standby_names "
            "TO …; GRANT EXECUTE ON FUNCTION pg_reload_conf() TO …",
        )


def has_stray_fence(node: Node) -> bool:
    """Tell whether a node has the fence of a primary that it is, or was, a standby of."""
    return node.state is not None and bool(node.state.fence_mark) and not node.fenced


def require_unfencing(node: Node) -> None:
    """Raise SetupError (PRIVILEGE_MISSING) for a stray fence that our role can't lift."""
    if has_stray_fence(node) and node.state is not None and not node.state.replication.may_fence:
        raise missing_privilege(
            node,
            "to lift a fence that was copied with the data",
            f"run as a superuser there: {'; '.join(statements.UNFENCED)}",
        )


def require_readable_history(node: Node) -> None:
    """Raise SetupError if our role could not find, after a promotion, who is past its start."""
    if node.state is not None and not node.state.provenance.may_read_history:
        raise missing_privilege(
            node,
            "to read the history of timelines",
            "run sql/roles.sql on the primary: it makes slotfailover.timeline_history()",
        )


def missing_privilege(node: Node, lacks: str, grant: str = "") -> SetupError:
    """Return the error of a role that lacks a privilege on a node, e.g. `to promote`."""
    return SetupError(
        f"our role lacks the privilege {lacks} on {node.name}",
        operation=OPERATION,
        subject=node.name,
        hint=f"name a superuser's connection string in failover.admins.{node.name}"
        + (f", or {grant}" if grant else ""),
        exit_code=ExitCode.PRIVILEGE_MISSING,
    )
