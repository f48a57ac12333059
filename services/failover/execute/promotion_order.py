"""The promotion: the waits before it, the order, and the evidence that it was given."""

import time
from collections.abc import Callable, Mapping

import psycopg

from schemas.acceptance import Token, options
from schemas.errors import ExitCode, OperatorNeeded, SetupError
from services.failover.observe.cluster import Cluster
from services.failover.observe.replication import read_replication
from services.failover.observe.server_link import ServerLink, Unreachable
from services.failover.plan.steps.step import Step
from services.postgres.server import Connection, read_received

POLL_S = 0.02
_DRAIN_S = 5.0
_SETTLED_S = 0.3
"""A walreceiver that got nothing for this long gets no more, though its connection is open."""


def order_promotion(
    step: Step, cluster: Cluster, deadline: float, ordered: Callable[[], None]
) -> None:
    """Let the standby receive all that its dead primary had sent; observe anew; promote it.

    The promotion replays everything received. It does not read what is still in the walreceiver's
    socket: so wait until that is empty, i.e. the receiver is gone or gets nothing more. Not after
    a fenced primary, of which the final LSN is known (`step.lsn`) and has been received.

    Raise what `step.guard` raises, and SetupError. `ordered` is called right before the order.
    """
    link = cluster.nodes[step.server]
    if step.lsn is None:
        drained = _watch_drain(link)
        drain_until = min(deadline, time.monotonic() + _DRAIN_S)
        while time.monotonic() < drain_until and not drained():
            time.sleep(POLL_S)
    for each in (*cluster.nodes.values(), *cluster.subscribers.values()):
        each.ask_anew()
    step.guard(cluster.observe())
    ordered()
    if link.ask(in_recovery):
        link.order(lambda connection: _order(connection, step))


def in_recovery(connection: Connection) -> bool:
    """Tell whether the server is, or still is, a standby."""
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    return bool(row and row[0])


def promotion_ordered(link: ServerLink) -> bool | None:
    """Tell whether a standby has an order to promote itself, None if that is unknown.

    The order is a file until the startup process takes it up; from then on the server refuses to
    resume its replay. Source: xlogrecovery.c, CheckForStandbyTrigger; xlogfuncs.c.
    """
    try:
        return link.ask(_ordered)
    except (Unreachable, SetupError):
        return None


class MayBePromoted(OperatorNeeded):
    """A standby has, or may have, an order to promote itself."""


def require_nothing_ordered(
    cluster: Cluster, standbys: Mapping[str, Token | None], *, known: bool = False
) -> None:
    """Raise MayBePromoted (SPLIT_BRAIN) where one of these may be about to be a primary.

    With `known`, the caller knows of all orders: what can't be told is then no refusal.
    `standbys`: names, with the token by which somebody vouches that there is none, if any may.
    """
    for name, token in standbys.items():
        ordered = promotion_ordered(cluster.nodes[name])
        accept = f"; or, if nobody has told it so: {options([token])}" if token else ""
        if ordered or (ordered is None and not known):
            what = "has been told to promote itself" if ordered else "may have been told to promote"
            raise MayBePromoted(
                f"{name} {what}: nothing goes back to an older primary",
                operation="look for an order to promote",
                subject=name,
                hint="wait until it is the primary, then slotfailover resume"
                if ordered
                else f"connect to {name} as a superuser, who can see it{accept}",
                exit_code=ExitCode.SPLIT_BRAIN,
            )


def _ordered(connection: Connection) -> bool:
    """Tell whether a promotion was ordered: its signal file waits, or resuming is refused."""
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_stat_file('promote', true) s WHERE s.size IS NOT NULL),"
        " pg_get_wal_replay_pause_state() = 'not paused'"
    ).fetchone()
    waits, plays = row if row is not None else (False, False)
    if waits:
        return True
    if plays:  # then this changes nothing
        try:
            connection.execute("SELECT pg_wal_replay_resume()")
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return True
    return False


def _watch_drain(link: ServerLink) -> Callable[[], bool]:
    """Return a function that tells whether the walreceiver has nothing more to give."""
    last = [-1, 0.0]

    def drained() -> bool:
        state = link.ask(read_replication)
        received = link.ask(read_received) or 0
        if received != last[0]:
            last[:] = [received, time.monotonic()]
        settled = time.monotonic() - last[1] > _SETTLED_S
        return state.replay_waits and (not state.receiver_streaming or settled)

    return drained


def _order(connection: Connection, step: Step) -> None:
    row = connection.execute(step.sql[0]).fetchone()
    if not (row and row[0]):
        raise SetupError(
            "the server refused the order to promote",
            operation=step.text,
            subject=step.server,
            hint=f"read the log of {step.server}",
        )
