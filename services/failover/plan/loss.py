"""Counts the commits that a promotion would lose, and notes where no witness knows. Pure.

witness                                        its report
a standby that answers                         the WAL it has; what its primary last said it had
the sighting: the last primary, as this        its position, timeline, synchronous_standby_names,
machine saw it (`services.failover.observe.last_contact`)  and how long ago that was

A commit that was acknowledged under `ANY w (n names)` is on w of the n. If fewer than n - w + 1 of
them answer, all w may be among the silent ones: then nobody knows whether commits are lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.acceptance import options
from schemas.errors import ExitCode, OperatorNeeded
from schemas.lsn import format_lsn
from services.failover.checks.loss import has_received_all, last_contact, losses, slots_not_judged
from services.failover.model.tokens import lost_wal
from services.failover.plan.notes import Measured

if TYPE_CHECKING:
    from services.failover.model.view import Node, View
    from services.failover.plan.request import Request


def require_no_loss(view: View, request: Request, chosen: Node, operation: str) -> list[str]:
    """Raise OperatorNeeded (NOT_READY) for more loss than was accepted; return the notes."""
    found = losses(view, chosen)
    tokens = [lost_wal(view.system, chosen, loss.lacking, loss.kind) for loss in found]
    refused = [n for n, token in enumerate(tokens) if not request.accept.takes(token)]
    if refused:
        raise OperatorNeeded(
            "; ".join(found[n].reason for n in refused),
            operation=operation,
            subject=chosen.name,
            lsn=chosen.received or None,
            hint=f"{found[refused[0]].hint}; or lose those commits: "
            + options(tokens[n] for n in refused),
            exit_code=ExitCode.NOT_READY,
        )
    lines = [f"loss accepted: {loss.reason}" for loss in found] or [last_contact(view, chosen)]
    notes: list[str] = [Measured(text, about=f"loss {n}") for n, text in enumerate(lines)]
    notes += [slots_not_judged(view), *_not_judged(view, chosen)]
    seen = view.sighting
    if seen is not None and seen.synchronous:
        notes.append(
            f"commits on {chosen.name} wait for no standby until one has rejoined; on {seen.node} "
            f"they waited for '{seen.synchronous}'"
        )
    return notes


def _not_judged(view: View, chosen: Node) -> list[str]:
    """Return notes on possible losses that no answering server can judge."""
    seen, mine = view.sighting, chosen.known_state.server.timeline
    notes: list[str] = [
        Measured(
            f"not judged: how much WAL {node.name} has; it was restarted, and has read its WAL up "
            f"to {format_lsn(node.received)}",
            about=f"WAL of {node.name}",
        )
        for node in view.standbys
        if node.name != chosen.name and not has_received_all(node)
    ]
    notes += [
        Measured(
            f"not judged: how much WAL {node.name} has; it does not answer",
            about=f"WAL of {node.name}",
        )
        for node in view.nodes
        if node.state is None
        and node.name != chosen.name
        and (seen is None or seen.node != node.name)
    ]
    if seen is not None and seen.timeline < mine:
        notes.append(
            f"not judged: which standbys commits waited for on timeline {mine}, as {seen.node} was "
            f"last seen as the primary on timeline {seen.timeline}"
        )
    return notes
