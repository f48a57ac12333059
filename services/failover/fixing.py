"""`check --fix`: the remedies that a program may perform, performed and checked again."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from schemas.errors import Retryable
from services.failover.checks.model import Finding, Order
from services.failover.checkup import Checkup
from services.failover.cluster import Cluster
from services.failover.links import Unreachable
from services.slots import Connection

_POLL_S = 0.25
_FOLLOWS_S = 15.0
"""The server starts a slotsync worker at most every 10 s."""


@dataclass(frozen=True, slots=True)
class Fixes:
    """What can be done now: each order once, and what is left to a person."""

    orders: tuple[Order, ...]
    of: frozenset[tuple[str, str]]
    """(check, subject) of what they are to repair."""
    left: tuple[Finding, ...]


def fixes_of(checkup: Checkup, done: Iterable[Order] = ()) -> Fixes:
    """The orders of all findings that a program may repair, without those that were done."""
    fixable = [finding for finding in checkup.problems if finding.remedy.fixes]
    orders = {order: None for finding in fixable for order in finding.remedy.orders}
    return Fixes(
        tuple(order for order in orders if order not in set(done)),
        frozenset((finding.check, finding.subject) for finding in fixable),
        tuple(finding for finding in checkup.problems if not finding.remedy.fixes),
    )


def perform(cluster: Cluster, orders: Iterable[Order]) -> None:
    """Run them, one by one. Raises Retryable (SERVER_UNREACHABLE), and what Link.order raises."""
    for order in orders:
        link = cluster.nodes.get(order.server) or cluster.subscribers[order.server]

        def run(connection: Connection, order: Order = order) -> None:
            for statement in order.sql:
                connection.execute(statement.encode())

        try:
            link.order(run)
        except Unreachable as error:
            raise Retryable(
                f"{order.server} stopped answering: {error.detail}",
                operation="fix",
                subject=order.server,
                hint="run slotfailover check again to see what was done",
            ) from error


def await_effect(
    cluster: Cluster, look: Callable[[], Checkup], fixes: Fixes, deadline_s: float
) -> Checkup:
    """Check until neither what was repaired nor what follows is found, or the time is over."""
    begun = time.monotonic()
    while True:
        checkup = look()
        found = {(finding.check, finding.subject) for finding in checkup.problems}
        follows = any(finding.remedy.follows for finding in checkup.problems)
        waited_s = time.monotonic() - begun
        if waited_s > deadline_s or not (found & fixes.of or (follows and waited_s < _FOLLOWS_S)):
            return checkup
        for link in cluster.nodes.values():
            link.close()  # a new connection wakes the postmaster, which else looks once a minute
        time.sleep(_POLL_S)
