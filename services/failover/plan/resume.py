"""What an interrupted command was about, from what is observed and from the journal. Pure.

seen                                             then
a primary that was promoted, something is left   complete it
a fenced primary and a standby                   the switchover goes on
no primary; marked subscriptions, or a begin     the promotion goes on
a primary that was never replaced, a begin       the switchover begins again
… and no begin in the journal                    marked subscriptions are enabled again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schemas.errors import ExitCode, OperatorNeeded
from services.failover.plan.failover import plan_failover, took_over
from services.failover.plan.rules import require_one_primary, require_one_system
from services.failover.plan.switchover import plan_rollback, plan_switchover
from services.failover.plan.wish import Plan, Wish

if TYPE_CHECKING:
    from services.failover.view import View

Planner = Callable[["View", Wish], Plan]


@dataclass(frozen=True, slots=True)
class Intent:
    """What the journal says of the last command, if that did not come to its end."""

    command: str
    target: str = ""
    rejoin: frozenset[str] = frozenset()
    accept_loss_of: frozenset[str] = frozenset()

    @classmethod
    def of(cls, command: str, document: dict[str, Any]) -> Intent:
        """From the journal."""
        return cls(
            command,
            str(document.get("target", "")),
            frozenset(document.get("rejoin", ())),
            frozenset(document.get("accept_loss_of", ())),
        )


def intent_of(wish: Wish) -> dict[str, Any]:
    """For the journal."""
    return {
        "target": wish.target,
        "rejoin": sorted(wish.rejoin),
        "accept_loss_of": sorted(wish.accept_loss_of),
    }


def choose(view: View, wish: Wish, intent: Intent | None) -> tuple[Planner, Wish]:
    """How to go on: the planner, and the wish as it was. Raises OperatorNeeded."""
    require_one_system(view)
    require_one_primary(view, "resume")
    if intent is not None:
        known = {node.name for node in view.nodes}
        wish = replace(
            wish,
            target=wish.target or (intent.target if intent.target in known else ""),
            rejoin=wish.rejoin | (intent.rejoin & known),
            accept_loss_of=wish.accept_loss_of | intent.accept_loss_of,
        )
    marked = any(found.marked for _, found in view.ours())
    if view.writable:
        node = view.writable[0]
        if took_over(node, view) or (wish.target == node.name and intent is not None):
            return plan_switchover, replace(wish, target=node.name, promoted=node.name)
        if intent is not None and intent.command == "switchover":
            return plan_switchover, wish
        return plan_rollback, wish
    if view.primary is not None:
        return plan_switchover, wish
    if intent is None and not marked:
        raise OperatorNeeded(
            "no primary answers, and nothing was begun that could go on",
            operation="resume",
            hint="slotfailover failover replaces a dead primary",
            exit_code=ExitCode.NOT_READY,
        )
    return plan_failover, wish
