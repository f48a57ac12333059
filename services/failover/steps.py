"""One step, performed on its server and verified by observing again until the step's deadline."""

import time
from collections.abc import Callable

from schemas.errors import ExitCode, Retryable, SetupError
from services.failover.cluster import Cluster
from services.failover.effects.step import Action, Step
from services.failover.links import Link, Unreachable
from services.failover.view import View
from services.slots import Connection, read_received, read_replication

POLL_S = 0.02
_DRAIN_S = 5.0
_SETTLED_S = 0.3
"""A walreceiver that still holds its connection, yet got nothing for so long, gets no more."""


def perform(step: Step, cluster: Cluster, deadline_s: float) -> View:
    """Do it, and return the view in which its postcondition holds.

    Raises Retryable (SERVER_UNREACHABLE, DEADLINE) and SetupError (PRIVILEGE_MISSING).
    """
    deadline = time.monotonic() + deadline_s
    try:
        if step.action is Action.PROMOTE:
            _promote(step, cluster.nodes[step.server], deadline)
        elif step.action is Action.RESET:
            cluster.nodes[step.server].order(lambda c: _run_each(c, step.sql))
        elif step.action is not Action.FLOW:
            cluster.subscribers[step.server].order(lambda c: _run_together(c, step.sql))
    except Unreachable as error:
        raise Retryable(
            f"{step.server} stopped answering: {error.detail}",
            operation=step.text,
            subject=step.server,
            hint="run this command again; it goes on where it stopped",
        ) from error
    while not step.holds(view := cluster.observe()):
        if time.monotonic() > deadline:
            raise _late(step, deadline_s)
        time.sleep(POLL_S)
    return view


def _promote(step: Step, link: Link, deadline: float) -> None:
    """Let the standby take in what its dead primary had sent, then promote it.

    The promotion replays everything received. It does not read what is still in the walreceiver's
    socket: so wait until that is empty, i.e. the receiver is gone or gets nothing more.
    """
    drained = _watch_drain(link)
    drain_until = min(deadline, time.monotonic() + _DRAIN_S)
    while time.monotonic() < drain_until and not drained():
        time.sleep(POLL_S)
    if link.ask(_in_recovery):
        link.order(lambda c: _run_promotion(c, step))
    while link.ask(_in_recovery):
        if time.monotonic() > deadline:
            raise _late(step, deadline - time.monotonic())
        time.sleep(POLL_S)


def _watch_drain(link: Link) -> Callable[[], bool]:
    """A function that tells whether the walreceiver has nothing more to give."""
    last = [-1, 0.0]

    def drained() -> bool:
        state = link.ask(read_replication)
        received = link.ask(read_received) or 0
        if received != last[0]:
            last[:] = [received, time.monotonic()]
        settled = time.monotonic() - last[1] > _SETTLED_S
        return state.replay_waits and (not state.receiver_streaming or settled)

    return drained


def _in_recovery(connection: Connection) -> bool:
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    return bool(row and row[0])


def _run_promotion(connection: Connection, step: Step) -> None:
    row = connection.execute(step.sql[0]).fetchone()
    if not (row and row[0]):
        raise SetupError(
            "the server did not take the order to promote",
            operation=step.text,
            subject=step.server,
            hint=f"read the log of {step.server}",
        )


def _run_each(connection: Connection, sql: tuple[str, ...]) -> None:
    for statement in sql:
        connection.execute(statement)


def _run_together(connection: Connection, sql: tuple[str, ...]) -> None:
    with connection.transaction():
        _run_each(connection, sql)


def _late(step: Step, deadline_s: float) -> Retryable:
    return Retryable(
        f"not done after {abs(deadline_s):.0f} s: {step.after}",
        operation=step.text,
        subject=step.server,
        hint=f"read the log of {step.server}; run this command again to go on",
        exit_code=ExitCode.DEADLINE,
    )
