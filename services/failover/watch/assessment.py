"""Assesses one observation: whether it is complete, and what a repoint would do. Pure.

seen                                                            then
half of the servers or more give no sign of life                partial
no node takes writes, or two do                                 forbidden
nodes of several clusters; a node is up and lets nobody in      forbidden
a standby is on a newer timeline than the primary               forbidden
a subscription that is to move, or a standby, is still fed by
another server: the old primary lives                           forbidden
a node is neither there nor gone                                allowed, after a longer wait
otherwise                                                       what a repoint would do
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.errors import SlotbridgeError
from services.failover.checks.half_moved import disabled_by_runs
from services.failover.model.topology import follows
from services.failover.model.view import Reach
from services.failover.plan.feeding import moves
from services.failover.plan.rejoin import plan_repoint
from services.failover.plan.steps.step import OF_SUBSCRIBERS

if TYPE_CHECKING:
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, View
    from services.failover.plan.request import Plan, Request

_SIGNS = (Reach.ANSWERS, Reach.REFUSED, Reach.CLOSED, Reach.BARRED)
"""Something is there, or nothing listens there: either is known. Silence is not."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """The parts of an observation on which acting depends. Equal assessments agree."""

    primary: str = ""
    """The one node that takes writes."""
    timeline: int = 0
    partial: str = ""
    """Why this is not the whole picture."""
    forbidden: str = ""
    """Why nothing may be done, whole or not."""
    silent: tuple[str, ...] = ()
    """Nodes that are neither there nor gone."""
    pending: tuple[str, ...] = ()
    """The steps by which subscriptions would be moved."""
    held: tuple[str, ...] = ()
    """The subscriptions that a run has disabled, and that are not enabled again yet."""
    remembered: bool = False
    """Somebody remembers the newest timeline of this cluster, and the primary descends from it."""
    complete: bool = False
    """Every node answered."""

    @property
    def actionable(self) -> bool:
        """Acting on it is right, were it seen often and long enough."""
        return bool(self.primary and self.pending) and not (self.partial or self.forbidden)


def assess(view: View, request: Request) -> Assessment:
    """Judge one observation: the steps of a repoint, what forbids it, who is silent."""
    silent = tuple(node.name for node in view.nodes if node.reach is Reach.SILENT)
    partial = _partial(view)
    try:
        plan = plan_repoint(view, request)
    except SlotbridgeError as error:
        primary = view.writable[0].name if len(view.writable) == 1 else ""
        held = disabled_by_runs(view)
        return Assessment(primary, 0, partial, error.message, silent, held=held)
    node = view.node(plan.new_primary)
    return Assessment(
        primary=node.name,
        timeline=node.known_state.server.timeline,
        partial=partial,
        forbidden=_fed_elsewhere(view, node),
        silent=silent,
        pending=moving(plan),
        held=disabled_by_runs(view),
        remembered=_remembered(view),
        complete=all(found.state is not None for found in view.nodes),
    )


def moving(plan: Plan) -> tuple[str, ...]:
    """Return the texts of the steps that change subscriptions; leave out waiting for consumers."""
    return tuple(step.text for step in plan.steps if step.action in OF_SUBSCRIBERS)


def _remembered(view: View) -> bool:
    """Tell whether anybody remembers the newest timeline.

    A subscription that was led elsewhere since it noted a timeline does not count, nor one that a
    run has disabled, and perhaps led elsewhere: its note is older.
    """
    noted = [found.milestone for _, found in view.ours() if _is_current(found)]
    milestones = [met for _, met in view.milestones]
    return any(met and met.timeline and met.system == view.system for met in (*noted, *milestones))


def _is_current(subscription: Subscription) -> bool:
    met = subscription.milestone
    current = met is not None and met.address == str(subscription.conninfo.address)
    return current and not subscription.marked


def _partial(view: View) -> str:
    """Return words where at least half of the servers are silent, else ""."""
    servers = [(node.name, node.reach) for node in view.nodes]
    servers += [(subscriber.name, subscriber.reach) for subscriber in view.subscribers]
    unknown = [name for name, reach in servers if reach not in _SIGNS]
    if 2 * len(unknown) < len(servers):
        return ""
    return f"{len(unknown)} of {len(servers)} servers are silent: {', '.join(unknown)}"


def _fed_elsewhere(view: View, primary: Node) -> str:
    """Return the evidence that another primary lives, "" if there is none."""
    fed = [
        f"{where.name}/{found.name} is connected to another server"
        for where, found in view.ours()
        if found.fed and found.enabled and moves(found, primary)
    ]
    known = [node for node in view.nodes if node.state is not None]
    fed += [
        f"{node.name} streams from a server that does not answer here"
        for node in view.standbys
        if node.state is not None
        and node.state.replication.receiver_streaming
        and not any(follows(node, above) for above in known if above is not node)
    ]
    return "; ".join(fed)
