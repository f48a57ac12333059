"""Observe, plan, perform the first step, and again, until nothing is left to do.

Each round plans anew from what is observed, so a command that was killed at any step is resumed by
running it again, and a server that comes or goes meanwhile is reckoned with.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from schemas.errors import ExitCode, Retryable
from services.failover import steps
from services.failover.cluster import Cluster
from services.failover.effects.step import OF_SUBSCRIBERS, Action, Step
from services.failover.journal import Journal
from services.failover.plan.failover import plan_failover
from services.failover.plan.wish import Plan, Wish
from services.failover.readiness import Readiness
from services.failover.verdicts import Left

_ATTEMPTS_MAX = 5


@dataclass(frozen=True, slots=True)
class Performed:
    """A step that was performed: what, and how long it took until it was verified."""

    step: Step
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a failover has done, and what is left to do."""

    new_primary: str
    performed: tuple[Performed, ...]
    slots: tuple[Readiness, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        """OK, or the gravest of what is left."""
        gravity = (ExitCode.WITNESSES_DISAGREE, ExitCode.NOT_READY, ExitCode.ANSWER_IS_NO)
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


def run(
    cluster: Cluster,
    plan: Plan,
    wish: Wish,
    *,
    deadline_s: float,
    journal: Journal,
    narrate: Callable[[Performed], None],
    started: float,
) -> Result:
    """Carry out `plan`, planning anew after each step; `narrate` is told of each step done.

    `started` is when the command began (time.monotonic), for the seconds of the result.

    Raises what plan_failover and steps.perform raise. A subscriber that is lost on the way is left
    for another run, as is a subscription whose worker does not connect in time.
    """
    performed: list[Performed] = []
    late: tuple[Left, ...] = ()
    notes = plan.notes
    attempts: Counter[str] = Counter()
    while plan.steps and not late:
        step = plan.steps[0]
        attempts[step.text] += 1
        begun = time.monotonic()
        try:
            view = steps.perform(step, cluster, deadline_s)
            outcome = step.after
        except Retryable as error:
            view = cluster.observe()
            outcome = str(error)
            if step.action is Action.FLOW:
                late = (_not_connected(step, deadline_s),)
            elif not _lost_subscriber(step, error) or attempts[step.text] >= _ATTEMPTS_MAX:
                journal.write(step, view, time.monotonic() - begun, outcome)
                raise
        seconds = time.monotonic() - begun
        performed.append(Performed(step, seconds, outcome))
        narrate(performed[-1])
        journal.write(step, view, seconds, outcome)
        if step.action is Action.PROMOTE:
            wish = replace(wish, promoted=step.node)
        plan = plan_failover(view, wish)
        notes += tuple(note for note in plan.notes if note not in notes)
    if journal.problem:
        notes += (journal.problem,)
    return Result(
        plan.new_primary,
        tuple(performed),
        plan.slots,
        (*plan.left, *late),
        notes,
        time.monotonic() - started,
    )


def _lost_subscriber(step: Step, error: Retryable) -> bool:
    """The step failed since a subscriber stopped answering: it will be left for another run."""
    of_subscriber = step.action in OF_SUBSCRIBERS
    return of_subscriber and error.exit_code is ExitCode.SERVER_UNREACHABLE


def _not_connected(step: Step, deadline_s: float) -> Left:
    return Left(
        step.server,
        f"no subscription's worker came to all of the slots {step.subject} in {deadline_s:.0f} s",
        "read the subscribers' logs; the subscriptions are enabled and go on trying",
    )
