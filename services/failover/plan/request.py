"""A request: what an operator asks for; and the plan that answers it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from schemas.acceptance import Acceptance
from services.failover.plan.steps.fencing import written
from services.failover.plan.steps.step import Action

if TYPE_CHECKING:
    from services.failover.checks.blockers import Blocker
    from services.failover.checks.readiness import Readiness
    from services.failover.model.view import View
    from services.failover.plan.steps.step import Step

OPERATION = "fail over"
_ONCE = frozenset(
    {Action.CHECKPOINT, Action.SETTLE, Action.REPLAY}
    | {Action.LABEL, Action.FLOW, Action.SEND, Action.BRIDGE}
)


@dataclass(frozen=True, slots=True)
class Request:
    """The operator's request, and facts that this run has learned and no server shows."""

    accept: Acceptance = field(default_factory=Acceptance)
    target: str = ""
    """The standby that is to be the primary; "": the best."""
    rejoin: frozenset[str] = frozenset()
    """The nodes that are to be made standbys at the end."""
    fence: bool = False
    """A primary that is alive, or may be, is fenced instead of being a reason to refuse."""
    copies: bool = False
    """A node that pg_rewind can't make a standby again may be replaced by a base backup."""
    given_up: frozenset[str] = frozenset()
    """`subscriber/subscription` of what could not be changed in this run, and is left as it is."""
    begun_on: int = 0
    """The timeline on which the resumed command began; 0 if that is unknown."""
    labels: bool = False
    """The new primary's `label` command is run."""
    require_subscribers: bool = False
    """Nothing is promoted while a subscription would be left behind."""
    subscribers_may_stay: bool = False
    """A subscription that can't be changed is left, instead of ending the run."""
    revive: bool = True
    """A rollback starts a primary that does not run; without this, only one that we stopped."""
    found_writable: frozenset[str] = frozenset()
    """The nodes that took writes when this run began, if it takes back what it did itself."""
    stopped: frozenset[str] = frozenset()
    """The nodes that this run has stopped."""
    lag_bytes_max: int = 16 * 2**20
    synchronous_standbys: int = 0
    marked: frozenset[str] = frozenset()
    """`subscriber/subscription` of what this run itself has disabled: whom it leads it to."""
    promoted: str = ""
    """The node that this run has promoted or led subscriptions to, once it has."""
    final_lsn: int | None = None
    """The last position of the fenced primary that can matter, once it is known."""
    power_fenced: frozenset[str] = frozenset()
    """The nodes whose `fence` command has ended with 0 in this run."""
    final_xid: int | None = None
    """The next transaction number of the fenced primary, when the final LSN was noted."""
    done_steps: frozenset[str] = frozenset()
    """Keys of steps not to be planned again: done without a trace, or given up."""

    @property
    def known_final_lsn(self) -> int:
        """The final LSN of a primary that is fenced and marked. Raises LookupError before that."""
        if self.final_lsn is None:
            raise LookupError("the final LSN is not known before the fenced primary is marked")
        return self.final_lsn


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps to perform, the reasons for them, and the blockers that are left."""

    new_primary: str
    why: str
    steps: tuple[Step, ...]
    slots: tuple[Readiness, ...]
    left: tuple[Blocker, ...] = ()
    notes: tuple[str, ...] = ()
    to_do: tuple[Blocker, ...] = ()
    """What is a person's to do once the command is done; the exit code does not depend on it."""


def after_step(request: Request, step: Step, view: View) -> Request:
    """Return the request after a step, once `view` shows it done."""
    if step.action in (Action.PROMOTE, Action.REPOINT):
        return replace(request, promoted=step.node)
    if step.action is Action.DISABLE:
        return replace(request, marked=request.marked | {f"{step.server}/{step.subject}"})
    if step.action is Action.MARK:
        state = view.node(step.server).state
        final_xid = state.next_xid if state is not None else None
        return replace(
            request, final_lsn=written(view, view.node(step.server)), final_xid=final_xid
        )
    if step.action is Action.STOP:
        return replace(request, stopped=request.stopped | {step.server})
    if step.action is Action.SHOOT:
        return replace(request, power_fenced=request.power_fenced | {step.server})
    if step.action in _ONCE:
        return replace(request, done_steps=request.done_steps | {step.key})
    return request


class Draft:
    """Steps one after another, each in the view that the ones before lead to."""

    def __init__(self, view: View, request: Request) -> None:
        self.view = view
        self.request = request
        self.steps: list[Step] = []

    def add(self, *steps: Step) -> None:
        """Add these steps to the plan, except those that are done."""
        for step in steps:
            if step.key not in self.request.done_steps:
                self.steps.append(step)
                self.view = step.effect(self.view)
                self.request = after_step(self.request, step, self.view)


def plan_as_json(plan: Plan, *, hooks: bool = True) -> dict[str, object]:
    """Return a plan as JSON; without `hooks`, hide commands, which may hold secrets."""
    return {
        "new_primary": plan.new_primary,
        "why": plan.why,
        "steps": [
            {
                "step": step.text,
                "server": step.server,
                "before": step.before,
                "sql": list(step.shown)
                if hooks or not step.command
                else [f"the command of failover.machines.{step.server}"],
                "after": step.after,
            }
            for step in plan.steps
        ],
        "slots": [slot.as_json() for slot in plan.slots],
        "left": [left.as_json() for left in plan.left],
        "to_do": [item.as_json() for item in plan.to_do],
        "notes": list(plan.notes),
    }
