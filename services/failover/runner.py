"""Observe, plan, perform the first step, and again, until nothing is left to do.

Each round plans anew from what is observed, so a command that was killed at any step is resumed,
and a server that comes or goes meanwhile is reckoned with. A switchover that fails before its
promotion is taken back.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from services.failover import steps
from services.failover.cluster import Cluster
from services.failover.effects.step import AFTERWARDS, OF_SUBSCRIBERS, Action, Step
from services.failover.journal import DONE, Journal
from services.failover.plan.resume import Planner, intent_of
from services.failover.plan.switchover import plan_rollback
from services.failover.plan.wish import Plan, Wish, learned
from services.failover.readiness import Readiness
from services.failover.verdicts import Left
from services.failover.view import View

_ATTEMPTS_MAX = 5


@dataclass(frozen=True, slots=True)
class Performed:
    """A step that was performed: what, and how long it took until it was verified."""

    step: Step
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has done, and what is left to do."""

    new_primary: str
    performed: tuple[Performed, ...]
    slots: tuple[Readiness, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        """OK, or the gravest of what is left."""
        gravity = (
            *(ExitCode.WITNESSES_DISAGREE, ExitCode.NOT_READY, ExitCode.PRIVILEGE_MISSING),
            *(ExitCode.SETTINGS, ExitCode.ANSWER_IS_NO),
        )
        found = {left.exit_code for left in self.left}
        return next((code for code in gravity if code in found), ExitCode.OK)

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "new_primary": self.new_primary,
            "steps": [
                {"step": p.step.text, "seconds": round(p.seconds, 3), "detail": p.detail}
                for p in self.performed
            ],
            "slots": [slot.as_json() for slot in self.slots],
            "left": [left.as_json() for left in self.left],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class Run:
    """One command's run. `narrate` is told of each step done, `tell` of a step's progress.

    `started` is when the command began (time.monotonic), for the seconds of the result.
    """

    cluster: Cluster
    journal: Journal
    deadline_s: float
    narrate: Callable[[Performed], None]
    tell: Callable[[str], None]
    started: float
    performed: list[Performed] = field(default_factory=list)
    late: list[Left] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)

    def carry_out(self, view: View, wish: Wish, planner: Planner, *, undo: bool = False) -> Result:
        """Plan and perform until nothing is left; with `undo`, a failure before the promotion is
        taken back.

        Raises what the planner and steps.perform raise, with the state of things in the hint. What
        fails once writes are taken again, and a subscriber that is lost, are left for another run.
        """
        plan = planner(view, wish)
        self.journal.begin(view, intent_of(wish))
        try:
            plan, view = self._loop(plan, view, wish, planner)
        except (SlotbridgeError, KeyboardInterrupt) as error:
            raise self._broken_off(error, wish, undo=undo) from error
        left = (*plan.left, *self.late)
        seconds = time.monotonic() - self.started
        outcome = "; ".join(item.line for item in left) or DONE
        self.journal.end(view, outcome, seconds)
        notes = (*plan.notes, *self.journal.problems)
        return Result(plan.new_primary, tuple(self.performed), plan.slots, left, notes, seconds)

    def _loop(self, plan: Plan, view: View, wish: Wish, planner: Planner) -> tuple[Plan, View]:
        notes = plan.notes
        while plan.steps:
            step = plan.steps[0]
            try:
                view = self._perform(step)
            except SlotbridgeError as error:
                view = self.cluster.observe()
                if step.action in AFTERWARDS:
                    self.late.append(_not_done(step, error))
                    wish = replace(wish, past=wish.past | {step.key})
                elif not self._lost_subscriber(step, error):
                    raise
            else:
                wish = learned(wish, step, view)
            plan = planner(view, wish)
            notes += tuple(note for note in plan.notes if note not in notes)
        return replace(plan, notes=notes), view

    def _perform(self, step: Step) -> View:
        """Perform one step, narrated and recorded, whatever comes of it."""
        begun = time.monotonic()
        self.attempts[step.key] += 1
        try:
            view = steps.perform(step, self.cluster, self.deadline_s, self.tell)
        except SlotbridgeError as error:
            self._note(step, self.cluster.observe(), begun, str(error))
            raise
        self._note(step, view, begun, step.after)
        return view

    def _note(self, step: Step, view: View, begun: float, outcome: str) -> None:
        seconds = time.monotonic() - begun
        self.performed.append(Performed(step, seconds, outcome))
        self.narrate(self.performed[-1])
        self.journal.write(step, view, seconds, outcome)

    def _lost_subscriber(self, step: Step, error: SlotbridgeError) -> bool:
        """The step failed since a subscriber stopped answering: it is left for another run."""
        lost = error.exit_code is ExitCode.SERVER_UNREACHABLE and step.action in OF_SUBSCRIBERS
        return lost and self.attempts[step.key] < _ATTEMPTS_MAX

    def _broken_off(
        self, error: SlotbridgeError | KeyboardInterrupt, wish: Wish, *, undo: bool
    ) -> SlotbridgeError:
        """The error with what was done about it, and how things stand now."""
        promoted = any(done.step.action is Action.PROMOTE for done in self.performed)
        about = ""
        if undo and not promoted and self.performed:
            about = self._take_back(wish)
        view = self.cluster.observe()
        standing = "; ".join(f"{name} is {what}" for name, what in standing_of(view).items())
        cause = error if isinstance(error, SlotbridgeError) else _interrupted()
        self.journal.end(view, f"{cause}{about}", time.monotonic() - self.started)
        kind = type(cause)
        return kind(
            cause.message + about,
            operation=cause.operation,
            subject=cause.subject,
            lsn=cause.lsn,
            hint=f"{cause.hint}. Now {standing}".removeprefix(". "),
            exit_code=cause.exit_code,
        )

    def _take_back(self, wish: Wish) -> str:
        """Let the old primary go on; says what came of it."""
        try:
            while (plan := plan_rollback(self.cluster.observe(), wish)).steps:
                self._perform(plan.steps[0])
        except SlotbridgeError as error:
            return f"; and it could not be taken back ({error.message})"
        return f"; it was taken back, {plan.new_primary} goes on"


def standing_of(view: View) -> dict[str, str]:
    """How each node stands, in a word or two; and which subscriptions are disabled."""
    found = {}
    for node in view.nodes:
        if node.state is None:
            found[node.name] = "down" if node.reach == "refused" else f"{node.reach}"
        else:
            role = "the primary" if node.leading else "a standby"
            found[node.name] = f"{role}, fenced" if node.fenced else role
    found |= {f"{where.name}/{s.name}": "disabled" for where, s in view.ours() if s.marked}
    return found


def _not_done(step: Step, error: SlotbridgeError) -> Left:
    hints = {
        Action.FLOW: "read the subscribers' logs; the subscriptions are enabled and go on trying",
        Action.SEND: error.hint,
        Action.BRIDGE: "see that it runs, and that source.conninfo names every node",
        Action.REJOIN: f"mend it, then slotfailover rejoin {step.server}",
        Action.READY: f"slotfailover check says why; then slotfailover rejoin {step.server}",
    }
    hint = hints.get(step.action) or error.hint or "go on with: slotfailover resume"
    return Left(step.server, f"{step.text}: {error.message}", hint)


def _interrupted() -> Retryable:
    return Retryable(
        "it was interrupted",
        operation="run",
        hint="go on with: slotfailover resume",
        exit_code=ExitCode.DEADLINE,
    )
