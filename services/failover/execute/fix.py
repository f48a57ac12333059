"""`check --fix`: the remedies that a program may perform, performed and checked again.

All of it holds the commands' lock, which is looked at again before each order: what is right of a
pair at rest may be wrong while a switchover, a failover or a `watch` changes it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from schemas.errors import Retryable, SlotbridgeError
from schemas.findings import Finding, Order
from schemas.settings import FailoverSettings
from services.failover.checks.check_report import Checkup
from services.failover.execute.journal import DONE, FIX, STARTED, Journal
from services.failover.execute.lock import Lock, locked
from services.failover.observe.cluster import Cluster
from services.failover.observe.server_link import Unreachable
from services.postgres.server import Connection

_POLL_S = 0.25
_FOLLOWS_S = 15.0
"""The server starts a slotsync worker at most every 10 s."""


@dataclass(frozen=True, slots=True)
class Fixes:
    """The remedies to perform now, each once, and those that are left to a person."""

    orders: tuple[Order, ...]
    of: frozenset[tuple[str, str]]
    """(check, subject) of what they are to repair."""
    left: tuple[Finding, ...]


def fixes_of(checkup: Checkup, done: Iterable[Order] = ()) -> Fixes:
    """Return the orders of all findings that a program may repair, except those of `done`."""
    fixable = [finding for finding in checkup.problems if finding.remedy.fixes]
    orders = {order: None for finding in fixable for order in finding.remedy.orders}
    return Fixes(
        tuple(order for order in orders if order not in set(done)),
        frozenset((finding.check, finding.subject) for finding in fixable),
        tuple(finding for finding in checkup.problems if not finding.remedy.fixes),
    )


def repair(
    cluster: Cluster,
    settings: FailoverSettings,
    look: Callable[[], Checkup],
    agree: Callable[[Fixes], bool],
) -> tuple[Checkup, list[Order], list[str]]:
    """Perform the remedies that `agree` accepts, until a program may repair nothing more.

    Return the last checkup, what was done, and why the journal could not be written. Raise
    Retryable (LOCKED) where another command is at work, and what `perform` raises.
    """
    database, path = settings.journal_database, settings.journal
    view = cluster.observe()
    with locked(cluster, view, database, path) as lock:
        journal = Journal(path, cluster, database, FIX)
        checkup = look()  # anew: another command may have changed things until it had ended
        done: list[Order] = []
        while (fixes := fixes_of(checkup, done)).of and agree(fixes):
            # An operator may take long to agree, and a manager or a person act meanwhile.
            checkup = look()
            needed = set(fixes_of(checkup, done).orders)
            orders = [order for order in fixes.orders if order in needed]
            if not orders:
                continue
            perform_orders(cluster, orders, lock, journal)
            done += orders
            checkup = await_effect(cluster, look, fixes, settings.step_deadline_ms / 1000)
    return checkup, done, journal.problems


def perform_orders(cluster: Cluster, orders: Iterable[Order], lock: Lock, journal: Journal) -> None:
    """Run the orders one by one, each recorded before and after, while the lock is ours.

    Raise Retryable (LOCKED, SERVER_UNREACHABLE), and what ServerLink.order raises.
    """
    begun = time.monotonic()
    view = cluster.observe()
    journal.begin(view, {})
    outcome = "it was broken off"
    try:
        for order in orders:
            view = cluster.observe()
            lock.hold(view)
            journal.fixing(view, order.server, order.shown, STARTED)
            _run(cluster, order)
            journal.fixing(view, order.server, order.shown, DONE)
        outcome = DONE
    except SlotbridgeError as error:
        outcome = str(error)
        raise
    finally:
        journal.end(view, outcome, time.monotonic() - begun)


def _run(cluster: Cluster, order: Order) -> None:
    """Execute a remedy's statements on its server."""
    link = cluster.nodes.get(order.server) or cluster.subscribers[order.server]

    def run(connection: Connection) -> None:
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
