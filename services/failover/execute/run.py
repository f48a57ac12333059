"""Observe, plan, perform the first step, and again, until nothing is left to do.

Each round plans anew from what is observed, so a command that was killed at any step is resumed,
and a server that comes or goes meanwhile is reckoned with. Each step is recorded before it is
performed. A switchover or failover that fails before its promotion was ordered is taken back; from
the order on nothing is.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from schemas.acceptance import Kind
from schemas.errors import NOTHING, ExitCode, Retryable, SlotbridgeError, changed_after
from services.failover.checks.blockers import Blocker
from services.failover.checks.readiness import Readiness
from services.failover.execute import perform_step
from services.failover.execute.interruption import Interrupted, Interruption
from services.failover.execute.journal import DONE, Journal
from services.failover.execute.perform_step import LOOKS_MIN, POLL_S, REPORT_EVERY_S
from services.failover.execute.promotion_order import MayBePromoted, require_nothing_ordered
from services.failover.model.view import Reach, View
from services.failover.observe.cluster import Cluster
from services.failover.plan.evidence import StillHeard
from services.failover.plan.notes import merge
from services.failover.plan.request import Plan, Request, after_step
from services.failover.plan.resume import Planner, intent_of, with_way_back
from services.failover.plan.steps.step import (
    AFTERWARDS,
    GIVES_WRITES,
    NO_WAY_BACK,
    OF_SUBSCRIBERS,
    SEEN_TO_THE_END,
    Action,
    Step,
)
from services.failover.plan.succession import vouching
from services.failover.plan.switchover import plan_rollback

_ATTEMPTS_MAX = 5
_GO_ON = "go on with: slotfailover resume"
DISABLE_S = 5.0
"""A subscription that can't be disabled in this time does not keep everybody else waiting."""
_HEARD_S = 6.0
"""How long an open connection is observed again before it counts as proof."""


@dataclass(frozen=True, slots=True)
class Performed:
    """A performed step, and the time until it was verified."""

    step: Step
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run: performed steps, and remaining work."""

    new_primary: str
    performed: tuple[Performed, ...]
    slots: tuple[Readiness, ...]
    left: tuple[Blocker, ...]
    notes: tuple[str, ...]
    seconds: float
    to_do: tuple[Blocker, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """OK, or CHECK_FAILED where something is left: what was done is done."""
        return ExitCode.CHECK_FAILED if self.left else ExitCode.OK

    def as_json(self) -> dict[str, object]:
        """Return the document for `--json`."""
        return {
            "new_primary": self.new_primary,
            "steps": [
                {"step": p.step.text, "seconds": round(p.seconds, 3), "detail": p.detail}
                for p in self.performed
            ],
            "slots": [slot.as_json() for slot in self.slots],
            "left": [left.as_json() for left in self.left],
            "to_do": [item.as_json() for item in self.to_do],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class Run:
    """One command's run. `narrate` is called after each step, `report` with a step's progress.

    `started` is when the command began (time.monotonic), for the seconds of the result.
    """

    cluster: Cluster
    journal: Journal
    deadline_s: float
    narrate: Callable[[Performed], None]
    report: Callable[[str], None]
    started: float
    performed: list[Performed] = field(default_factory=list)
    late: list[Blocker] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    interruption: Interruption = field(default_factory=Interruption)
    hold: Callable[[View], None] = lambda _view: None
    """Sees that the commands' lock is still ours; raises Retryable (LOCKED)."""
    begun: list[Step] = field(default_factory=list)
    """The steps that were performed, or may have been."""
    _changed: bool = False
    """Something was changed, and not taken back."""
    _rival: bool = False
    """Another command has the lock: what it may be doing is not interfered with."""
    _found_writable: frozenset[str] = frozenset()
    """The nodes that took writes when the run began, before any order to promote another."""
    _request: Request = field(default_factory=Request)
    _view: View = field(default_factory=lambda: View((), ()))

    def carry_out(
        self, view: View, request: Request, planner: Planner, *, undo: bool = False
    ) -> Result:
        """Plan and perform steps until nothing is left to do.

        With `undo`, a failure before the promotion is rolled back. Raise what the planner and
        `perform` raise, with the present state of the servers in the hint. Steps that fail once
        writes are accepted again, and those of a subscriber that is lost, are left for another run.
        """
        plan, view = plan_patiently(self.cluster, planner, view, request, self._wait)
        self.journal.begin(view, intent_of(request, view))
        self._request, self._view = request, view
        self._found_writable = frozenset(node.name for node in view.writable)
        try:
            plan, view = self._loop(plan, view, planner)
        except (Exception, KeyboardInterrupt) as error:  # a bug of ours, too, leaves no fence
            raise self._broken_off(error, undo=undo) from error
        left = (*plan.left, *self.late)
        seconds = time.monotonic() - self.started
        self.journal.end(view, "; ".join(item.line for item in left) or DONE, seconds)
        return Result(
            plan.new_primary,
            tuple(self.performed),
            plan.slots,
            left,
            (*plan.notes, *self.journal.problems),
            seconds,
            plan.to_do,
        )

    def _loop(self, plan: Plan, view: View, planner: Planner) -> tuple[Plan, View]:
        """Perform the first step and plan anew until no step is left; return the last plan, view.

        A step that fails is left out where the rest may go on without it; else raise its error.
        """
        notes = plan.notes
        while plan.steps:
            step, request = plan.steps[0], self._request
            try:
                view = self._perform(step, view)
            except SlotbridgeError as error:
                view = self._look()
                if isinstance(error, Interrupted) or self._rival:
                    raise
                if step.action in AFTERWARDS:
                    self.late.append(_not_done(step, error))
                    self._request = replace(request, done_steps=request.done_steps | {step.key})
                elif isinstance(error, MayBePromoted) and step.action is not Action.DISABLE:
                    self._leave(step, error)
                elif self._may_lose(step, error):
                    self._request = replace(request, done_steps=request.done_steps | {step.key})
                elif self._gives_up(step, error):
                    name = f"{step.server}/{step.subject}"
                    self._request = replace(request, given_up=request.given_up | {name})
                    self.late.append(_given_up(name, error))
                elif not self._lost_subscriber(step, error):
                    raise
            else:
                self._request = after_step(request, step, view)
            plan, view = plan_patiently(self.cluster, planner, view, self._request, self._wait)
            self._view = view
            notes = merge(notes, plan.notes)
        return replace(plan, notes=notes), view

    def _wait(self, text: str) -> None:
        self.interruption.check()
        if text:
            self.report(text)

    def _perform(self, step: Step, view: View) -> View:
        """Perform one step, recorded before, narrated and recorded after, whatever comes of it."""
        self.interruption.check()
        self._keep_lock(view)
        require_nothing_ordered(self.cluster, vouching(view, self._request, step))
        started = time.monotonic()
        self.attempts[step.key] += 1
        self.begun.append(step)
        self.journal.started(step, view)
        deadline_s = self.deadline_s
        if step.action is Action.DISABLE:
            deadline_s = min(deadline_s, DISABLE_S)
        self._changed |= step.action in SEEN_TO_THE_END
        try:
            seen = perform_step.perform(
                step, self.cluster, deadline_s, self.report, interruption=self.interruption
            )
        except SlotbridgeError as error:
            self._note(step, self._look(), started, str(error))
            raise
        self._changed = True
        self._note(step, seen, started, step.after)
        return seen

    def _keep_lock(self, view: View) -> None:
        """Raise Retryable (LOCKED), and remember it, where another command has the lock."""
        try:
            self.hold(view)
        except Retryable as error:
            locked = error.exit_code is ExitCode.LOCKED
            self._rival = locked and not isinstance(error, Interrupted)
            raise

    def _look(self) -> View:
        """Observe the servers; if that fails, return the last view: no error hides another."""
        try:
            return self.cluster.observe()
        except SlotbridgeError:
            return self._view

    def _note(self, step: Step, view: View, begun: float, outcome: str) -> None:
        seconds = time.monotonic() - begun
        self.performed.append(Performed(step, seconds, outcome))
        self.narrate(self.performed[-1])
        self.journal.write(step, view, seconds, outcome)

    def _lost_subscriber(self, step: Step, error: SlotbridgeError) -> bool:
        """Tell whether a step failed because a subscriber stopped answering.

        The step is then left for another run.
        """
        lost = error.exit_code is ExitCode.SERVER_UNREACHABLE and step.action in OF_SUBSCRIBERS
        return lost and self.attempts[step.key] < _ATTEMPTS_MAX

    def _leave(self, step: Step, error: MayBePromoted) -> None:
        """Leave a subscription as it is, as it may be led to a standby that is to be promoted."""
        name = f"{step.server}/{step.subject}"
        given_up, done = self._request.given_up | {name}, self._request.done_steps | {step.key}
        self._request = replace(self._request, given_up=given_up, done_steps=done)
        self.late.append(Blocker(name, error.message, error.hint, error.exit_code))

    def _gives_up(self, step: Step, error: SlotbridgeError) -> bool:
        """Tell whether to give up a subscriber's step so that the promotion can follow."""
        lost = error.exit_code is ExitCode.SERVER_UNREACHABLE
        may = self._request.subscribers_may_stay and not self._request.require_subscribers
        ordered = isinstance(error, MayBePromoted)
        return may and step.action in OF_SUBSCRIBERS and not lost and not ordered

    def _may_lose(self, step: Step, error: SlotbridgeError) -> bool:
        """Tell whether the standby may be promoted without the rest of a replaced primary's WAL.

        The wait for that WAL has reached its deadline, and the primary is to be replaced by force.
        A plan without the wait promotes the standby if the loss was accepted, and else refuses by
        the bytes.
        """
        late = step.action is Action.DRAIN and error.exit_code is ExitCode.DEADLINE
        losing = any(token.kind is Kind.LOST_WAL for token in self._request.accept.tokens)
        return late and (self._request.fence or losing)

    def _broken_off(self, error: BaseException, *, undo: bool) -> SlotbridgeError:
        """Return the error with what was done about it and with the servers' present state.

        A run that has changed something does not end with the exit code of a refusal.
        """
        with self.interruption.shielded():
            about = ""
            if self.interruption.no_way_back:
                names = [step.server for step in self.begun if step.action in NO_WAY_BACK]
                about = f"; {names[-1]} had been told to promote itself, so nothing was taken back"
            elif self._rival and self.begun:
                about = "; nothing was taken back: who has the lock now may rely on what was done"
            elif undo:
                about = self._take_back() if self.begun else "; nothing had been changed"
            view = self._look()
            standing = "; ".join(f"{name} is {what}" for name, what in standing_of(view).items())
            cause = _as_ours(error)
            hint = cause.hint
            if self._rival and self.begun:
                on = "run this one again: it goes on with what it began"
                if undo:
                    back = ", or slotfailover resume --rollback takes it back"
                    on = "slotfailover resume goes on with what this one began"
                    on += back * (not self.interruption.no_way_back)
                hint = "; ".join(filter(None, (hint, f"then {on}")))
            elif not self.interruption.no_way_back:
                hint = with_way_back(hint, view)
            self.journal.end(view, f"{cause}{about}", time.monotonic() - self.started)
        false = self._changed and changed_after(cause.exit_code) == NOTHING
        return type(cause)(
            f"{cause.message}{about}. Now {standing}",
            operation=cause.operation,
            subject=cause.subject,
            lsn=cause.lsn,
            hint=hint,
            exit_code=ExitCode.CHECK_FAILED if false else cause.exit_code,
        )

    def _take_back(self) -> str:
        """Restore the old primary, standbys and subscriptions; return what came of it."""
        stopped = {step.server for step in self.begun if step.action is Action.STOP}
        self._request = replace(
            self._request,
            stopped=self._request.stopped | stopped,
            found_writable=self._found_writable,
            marked=self._request.marked
            | {f"{s.server}/{s.subject}" for s in self.begun if s.action is Action.DISABLE},
        )
        self._await_end_of(stopped)
        off = ", ".join(sorted(self._request.power_fenced))
        stays = f"; {off} was fenced by its machine's command, and stays so" if off else ""
        try:
            view = self.cluster.observe()
            while (plan := plan_rollback(view, self._request)).steps:
                if plan.steps[0].action in GIVES_WRITES:
                    known = plan.new_primary in self._found_writable
                    standbys = dict.fromkeys(node.name for node in view.standbys)
                    require_nothing_ordered(self.cluster, standbys, known=known)
                self._perform(plan.steps[0], view)
                view = self.cluster.observe()
        except SlotbridgeError as error:
            why = f"{error.message}; {error.hint}" if error.hint else error.message
            return f"; and it could not be taken back ({why}){stays}"
        stay_disabled = self._request.marked & {item.subject for item in plan.left}
        self._changed = bool(off or stay_disabled)
        goes_on = f", {plan.new_primary} goes on" if plan.new_primary else ", no primary answers"
        left = "".join(f"; {item.subject}: {item.reason}" for item in plan.left)
        return f"; it was taken back{goes_on}{stays}{left}"

    def _await_end_of(self, stopped: set[str]) -> None:
        """Wait for servers that may be shutting down: they can't be started before."""
        until = time.monotonic() + self.deadline_s
        while time.monotonic() < until:
            view = self._look()
            if all(view.node(name).reach is not Reach.CLOSED for name in stopped):
                return
            time.sleep(POLL_S)


def plan_patiently(
    cluster: Cluster, planner: Planner, view: View, request: Request, report: Callable[[str], None]
) -> tuple[Plan, View]:
    """Return the plan, and the view that it was made for. Raise what the planner raises.

    While somebody still hears a primary, observe again for up to _HEARD_S: the connection of one
    that has just died ends by itself.
    """
    until, looks = time.monotonic() + _HEARD_S, 0
    reported_s = 0.0
    while True:
        try:
            return planner(view, request), view
        except StillHeard as error:
            looks += 1
            if time.monotonic() > until and looks > LOOKS_MIN:
                raise
            due = time.monotonic() - reported_s > REPORT_EVERY_S
            reported_s = time.monotonic() if due else reported_s
            report(f"looking again: {error.message}" if due else "")
        time.sleep(POLL_S)
        view = cluster.observe()


def standing_of(view: View) -> dict[str, str]:
    """Describe each node's role in a word or two, and name the disabled subscriptions."""
    found = {}
    for node in view.nodes:
        if node.state is None:
            found[node.name] = "down" if node.reach == "refused" else f"{node.reach}"
        else:
            role = "the primary" if node.leading else "a standby"
            found[node.name] = f"{role}, fenced" if node.fenced else role
    found |= {f"{where.name}/{s.name}": "disabled" for where, s in view.ours() if s.marked}
    return found


def _not_done(step: Step, error: SlotbridgeError) -> Blocker:
    """Return what is left of a step that failed after the promotion, with its hint."""
    hints = {
        Action.FLOW: "read the subscribers' logs; the subscriptions are enabled and go on trying",
        Action.SEND: error.hint,
        Action.BRIDGE: "read the log of the bridge; check that source.conninfo names every node, "
        "restart the bridge, or set bridge.control_url",
        Action.REJOIN: f"repair the cause, then slotfailover rejoin {step.server}",
        Action.READY: f"slotfailover check says why; then slotfailover rejoin {step.server}",
    }
    hint = hints.get(step.action) or error.hint or _GO_ON
    return Blocker(step.server, f"{step.text}: {error.message}", hint)


def _given_up(name: str, error: SlotbridgeError) -> Blocker:
    why = f"it could not be changed ({error.message}), and may still be fed by the old primary"
    hints = ("keep the old primary off", error.hint, "then slotfailover repoint")
    return Blocker(name, why, "; ".join(filter(None, hints)))


def _as_ours(error: BaseException) -> SlotbridgeError:
    """Return any error as one of ours; one that is not ours is a bug."""
    if isinstance(error, SlotbridgeError):
        return error
    if not isinstance(error, KeyboardInterrupt):
        return SlotbridgeError(f"{type(error).__name__}: {error}", operation="run")
    code = ExitCode.DEADLINE
    return Retryable("the run was interrupted", operation="run", hint=_GO_ON, exit_code=code)
