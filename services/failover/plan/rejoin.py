"""After someone else's promotion: `repoint`; an old primary a standby again: `rejoin`. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from schemas.errors import ExitCode, OperatorNeeded, SettingsError, SetupError
from services.failover.model.preconditions import require_one_primary, require_one_system
from services.failover.plan.completion import attach, complete
from services.failover.plan.invariants import check_invariants, require_nobody_hidden
from services.failover.plan.request import Draft, Plan, Request
from services.failover.plan.succession import require_expendable, unjudged, vouched

if TYPE_CHECKING:
    from services.failover.model.view import Node, View


def plan_repoint(view: View, request: Request) -> Plan:
    """Plan how subscriptions and bridge follow the present primary; leave its settings alone."""
    primary = _primary(view, "repoint")
    require_nobody_hidden(view)
    plan = complete(Draft(view, request), primary.name, standbys=False)
    check_invariants(plan, view, request)
    return plan


def plan_rejoin(view: View, request: Request) -> Plan:
    """Plan the steps that make the nodes of `request.rejoin` standbys of the present primary."""
    known = {node.name for node in view.nodes}
    strangers = sorted(request.rejoin - known)
    if strangers:
        raise SettingsError(
            f"{strangers[0]} is not a node",
            operation="rejoin",
            hint=f"failover.nodes has {', '.join(sorted(known))}",
        )
    primary = _primary(view, "rejoin")
    if primary.name in request.rejoin:
        raise OperatorNeeded(
            f"{primary.name} is the primary",
            operation="rejoin",
            subject=primary.name,
            hint="rejoin the node that is not; slotfailover switchover makes another the primary",
            exit_code=ExitCode.SPLIT_BRAIN,
        )
    require_expendable(view, request, primary)
    plan = attach(Draft(view, request), primary.name)
    for left in plan.left:
        if left.exit_code is ExitCode.PRIVILEGE_MISSING and left.subject in request.rejoin:
            raise SetupError(
                left.reason,
                operation="rejoin",
                subject=left.subject,
                hint=left.hint,
                exit_code=ExitCode.PRIVILEGE_MISSING,
            )
    check_invariants(plan, view, request)
    notes = (*vouched(view, request, primary), *unjudged(view, request, primary))
    return replace(plan, notes=(*notes, *plan.notes))


def _primary(view: View, operation: str) -> Node:
    """Return the one primary that takes writes. Raise OperatorNeeded where there is none."""
    require_one_system(view)
    require_one_primary(view, operation)
    if not view.writable:
        raise OperatorNeeded(
            "no node is a primary that takes writes",
            operation=operation,
            subject=", ".join(node.name for node in view.nodes),
            hint="promote one first: slotfailover failover; or complete the interrupted command: "
            "slotfailover resume",
            exit_code=ExitCode.NOT_READY,
        )
    return view.writable[0]
