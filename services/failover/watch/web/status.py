"""The documents of /v1/status and /v1/plan, made from a snapshot. Pure; LSNs as PostgreSQL's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schemas.errors import SlotbridgeError
from schemas.lsn import format_lsn
from services.failover.model.managers import is_managed
from services.failover.plan.failover import plan_failover
from services.failover.plan.rejoin import plan_repoint
from services.failover.plan.request import plan_as_json
from services.failover.plan.switchover import plan_switchover
from services.failover.watch.snapshot import lags_of, position_of, role_of

if TYPE_CHECKING:
    from services.failover.model.subscription import Subscription
    from services.failover.model.view import Node, Subscriber, View
    from services.failover.plan.request import Request
    from services.failover.watch.snapshot import Snapshot


def status_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return the last observation, the decision, and the acts of watch."""
    view, checkup, assessment = snapshot.view, snapshot.checkup, snapshot.memory.assessment
    drilled = snapshot.drilled
    return {
        "at": snapshot.at or None,
        "observations": snapshot.counts.observations,
        "problem": snapshot.problem or None,
        "primary": assessment.primary or None,
        "timeline": assessment.timeline or None,
        "ready": checkup.ready if checkup is not None else None,
        "severity": checkup.severity if checkup is not None else None,
        "summary": checkup.summary if checkup is not None else None,
        "decision": {
            "verdict": snapshot.decision.verdict,
            "reason": snapshot.decision.reason,
            "pending": list(assessment.pending),
            "agreeing": snapshot.memory.agreeing,
        },
        "automatic": snapshot.automatic,
        "leading": snapshot.leading,
        "lease": snapshot.lease.as_json() if snapshot.lease is not None else None,
        "pause": snapshot.pause.as_json(),
        "at_work": snapshot.at_work or None,
        "nodes": [_node(node) for node in view.nodes] if view is not None else [],
        "slots": [slot.as_json() for slot in checkup.slots] if checkup is not None else [],
        "subscribers": [_subscriber(found) for found in view.subscribers] if view else [],
        "lag_bytes": lags_of(view) if view is not None else {},
        "events": [{"at": event.at, "text": event.text} for event in snapshot.events],
        "repoints": snapshot.counts.repoints,
        "repoint_failures": snapshot.counts.failures,
        "last_drill": None
        if drilled is None
        else {
            "at": drilled.at,
            "usable": drilled.well,
            "outcome": drilled.outcome,
            "age_s": round(drilled.age_s),
        },
    }


def plan_of(view: View, request: Request) -> dict[str, Any]:
    """Return the plan of a switchover now (of a failover without a primary), or the error.

    Under a manager, return what repoint would do.
    """
    alive = view.primary
    managed = is_managed(view.managed_by)
    name = "repoint" if managed else "failover" if alive is None else "switchover"
    try:
        if managed:
            plan = plan_repoint(view, request)
        elif alive is None:
            plan = plan_failover(view, request)
        else:
            plan = plan_switchover(view, replace(request, rejoin=frozenset({alive.name})))
    except SlotbridgeError as error:
        problem = {"error": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}
        return {"order": name, **problem}
    return {"order": name, **plan_as_json(plan, hooks=False)}


def _node(node: Node) -> dict[str, Any]:
    """Return a node as JSON of the status page."""
    state = node.state
    position = position_of(node)
    return {
        "name": node.name,
        "role": role_of(node),
        "address": str(node.address),
        "reach": node.reach,
        "detail": node.detail or None,
        "timeline": state.server.timeline if state is not None else None,
        "lsn": format_lsn(position) if position is not None else None,
        "streams": state.replication.receiver_streaming if state is not None else None,
    }


def _subscriber(subscriber: Subscriber) -> dict[str, Any]:
    return {
        "name": subscriber.name,
        "reach": subscriber.reach,
        "detail": subscriber.detail or None,
        "subscriptions": [_subscription(found) for found in subscriber.subscriptions],
    }


def _subscription(subscription: Subscription) -> dict[str, Any]:
    return {
        "name": subscription.name,
        "enabled": subscription.enabled,
        "slot": subscription.slot_name,
        "leads_to": str(subscription.conninfo.address),
        "connected": subscription.fed,
        "lsn": format_lsn(subscription.remote_lsn) if subscription.remote_lsn is not None else None,
    }
