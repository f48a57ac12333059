"""Finds the command that was interrupted, by observation and by the journal. Pure.

seen                                             then
a primary that was promoted, something is left   complete it
a fenced primary and a standby                   the switchover goes on
no primary; marked subscriptions, or a begin     the promotion goes on
a primary that was never replaced, a begin       the switchover begins again
… and no begin in the journal                    marked subscriptions are enabled again

A begin of another cluster, of an older timeline, or more than a day away does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schemas.errors import ExitCode, OperatorNeeded, SlotbridgeError
from services.failover.model.preconditions import require_one_primary, require_one_system
from services.failover.plan.failover import plan_failover, took_over
from services.failover.plan.request import Plan, Request
from services.failover.plan.steps.receivers import reconnected
from services.failover.plan.succession import require_newest_known
from services.failover.plan.switchover import plan_rollback, plan_switchover

if TYPE_CHECKING:
    from services.failover.model.view import View

Planner = Callable[["View", Request], Plan]
INTENT_MAX_S = 24 * 3600.0
"""A run that began earlier is not resumed."""


@dataclass(frozen=True, slots=True)
class Intent:
    """The last command by the journal, if it did not end.

    A journal is a table that others may write to, and a run of last month may be its last: what was
    accepted then is not accepted now, and only a run of this cluster, of now, is gone on with.
    """

    command: str
    target: str = ""
    rejoin: frozenset[str] = frozenset()
    system: str = ""
    timeline: int = 0
    """The primary's timeline when it began; 0 if none answered: a standby may have an older one."""
    age_s: float = 0.0
    require_subscribers: bool = False
    """This option demands more and consents to nothing: so a resumed run keeps it."""

    @classmethod
    def of(cls, command: str, document: dict[str, Any], age_s: float = 0.0) -> Intent:
        """Return the intent that the journal's `begin` entry describes."""
        timeline = document.get("timeline", 0)
        return cls(
            command,
            str(document.get("target", "")),
            frozenset(map(str, document.get("rejoin", ()))),
            str(document.get("system", "")),
            timeline if isinstance(timeline, int) else 0,
            age_s,
            document.get("require_subscribers") is True,
        )

    def stale(self, view: View) -> str:
        """Return why the run can't be resumed, "" if it can."""
        states = [node.state for node in view.nodes if node.state is not None]
        newest = max((state.server.timeline for state in states), default=0)
        if abs(self.age_s) > INTENT_MAX_S:
            when = f"{abs(self.age_s) / 3600:.0f} hours"
            return f"it began {when} ago" if self.age_s > 0 else f"by its clock it begins in {when}"
        if self.system and self.system not in {s.server.system_identifier for s in states}:
            return "it was about another cluster"
        if self.timeline and newest > self.timeline + 1:
            return f"it began on timeline {self.timeline}, and this is timeline {newest}"
        return ""


def offering_way_back(planner: Planner) -> Planner:
    """Return the planner with errors that name the way back as long as writes are fenced."""

    def plan(view: View, request: Request) -> Plan:
        try:
            return planner(view, request)
        except SlotbridgeError as error:
            error.hint = with_way_back(error.hint, view)
            raise

    return plan


def with_way_back(hint: str, view: View) -> str:
    """Return the hint, with the way back where writes are fenced and the hint lacks it."""
    old = view.primary
    if old is None or not old.fenced or "--rollback" in hint:
        return hint
    known = f"or let {old.name} take writes again: slotfailover resume --rollback"
    return "; ".join(filter(None, (hint, known)))


def intent_of(request: Request, view: View) -> dict[str, Any]:
    """Return the intent of a run, for the journal's `begin` entry."""
    states = [node.state for node in view.nodes if node.state is not None]
    return {
        "target": request.target,
        "rejoin": sorted(request.rejoin),
        "accept": " ".join(sorted(map(str, request.accept.tokens))),
        "require_subscribers": request.require_subscribers,
        "system": states[0].server.system_identifier if states else "",
        "timeline": max(
            (node.state.server.timeline for node in view.nodes if node.leading and node.state),
            default=request.begun_on,
        ),
    }


def undo(view: View, request: Request) -> tuple[Planner, Request]:
    """Choose to go back. Raise OperatorNeeded (SPLIT_BRAIN) once a standby was promoted."""
    for node in view.writable:
        if took_over(node, view):
            raise OperatorNeeded(
                f"{node.name} was promoted, and nothing goes back to an older primary",
                operation="roll back",
                subject=node.name,
                hint="slotfailover resume goes on with what is left",
                exit_code=ExitCode.SPLIT_BRAIN,
            )
    return plan_rollback, request


def choose(view: View, request: Request, intent: Intent | None) -> tuple[Planner, Request]:
    """Choose how to go on: return the planner and the request as it was. Raise OperatorNeeded."""
    require_one_system(view)
    require_one_primary(view, "resume")
    stale = intent.stale(view) if intent is not None else ""
    intent = None if stale else intent
    if intent is not None:
        known = {node.name for node in view.nodes}
        request = replace(
            request,
            target=request.target or (intent.target if intent.target in known else ""),
            rejoin=request.rejoin | (intent.rejoin & known),
            begun_on=intent.timeline,
            require_subscribers=request.require_subscribers or intent.require_subscribers,
        )
    marked = any(found.marked for _, found in view.ours())
    if view.writable:
        node = view.writable[0]
        require_newest_known(reconnected(view), request, node)
        if took_over(node, view) or (request.target == node.name and intent is not None):
            return plan_switchover, replace(request, target=node.name, promoted=node.name)
        if intent is not None and intent.command == "switchover":
            return plan_switchover, request
        return plan_rollback, request
    if view.primary is not None:
        return plan_switchover, request
    if intent is None and not marked:
        raise OperatorNeeded(
            "no primary answers, and there is no unfinished command to resume"
            + (f": the last one is not resumed, because {stale}" if stale else ""),
            operation="resume",
            hint="slotfailover failover replaces a dead primary",
            exit_code=ExitCode.NOT_READY,
        )
    return plan_failover, request
