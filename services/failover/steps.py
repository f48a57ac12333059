"""One step, performed on its server and verified by observing again until the step's deadline."""

import time
from collections.abc import Callable

from schemas.errors import ExitCode, Retryable, SetupError
from services.failover import machines, statements
from services.failover.address import Conninfo
from services.failover.bridging import marker_in_kafka, send_to
from services.failover.cluster import Cluster
from services.failover.effects.step import Action, Step
from services.failover.effects.topology import upstream_of
from services.failover.links import Link, Unreachable, parse_conninfo
from services.failover.quiet import hush, speak
from services.failover.rejoining import rejoin
from services.failover.replication import read_replication
from services.failover.sessions import end_sessions_before_reload, sessions_before_reload
from services.failover.view import FENCE, View
from services.slots import (
    Connection,
    read_received,
    read_slots,
    setting,
)

POLL_S = 0.02
TELL_S = 1.0
_DRAIN_S = 5.0
_SETTLED_S = 0.3
"""A walreceiver that still holds its connection, yet got nothing for so long, gets no more."""


def perform(
    step: Step,
    cluster: Cluster,
    deadline_s: float,
    tell: Callable[[str], None] = lambda _text: None,
) -> View:
    """Do it, and return the view in which its postcondition holds; `tell` gets its progress.

    Raises Retryable (SERVER_UNREACHABLE, DEADLINE) and SetupError (PRIVILEGE_MISSING).
    """
    if step.action is Action.REJOIN:
        deadline_s = cluster.rejoin_deadline_s
    deadline = time.monotonic() + deadline_s
    before = 0
    try:
        if step.action is Action.BRIDGE:
            before = cluster.nodes[step.server].ask(read_replication).written_lsn or 0
        lsn = _order(step, cluster, deadline, tell)
    except Unreachable as error:
        raise Retryable(
            f"{step.server} stopped answering: {error.detail}",
            operation=step.text,
            subject=step.server,
            hint="go on once it answers: slotfailover resume",
        ) from error
    told = time.monotonic()
    while True:
        view = cluster.observe()
        confirmed = step.holds(view) and _confirmed(step, view, lsn)
        if confirmed and _published(step, cluster, before):
            break
        progress = "the marker is not in Kafka" if confirmed else step.progress(view)
        now = time.monotonic()
        if now > deadline:
            raise _late(step, deadline_s, progress)
        if now - told > TELL_S:
            told = now
            tell(progress or f"not yet: {step.after}")
            if step.action is Action.READY:
                _hasten(step, cluster)
        time.sleep(POLL_S)
    return view


def _order(step: Step, cluster: Cluster, deadline: float, tell: Callable[[str], None]) -> int:
    """Order it done; returns the position of the marker message of a step that writes one."""
    left_s = max(1.0, deadline - time.monotonic())
    match step.action:
        case Action.SETTLE | Action.DRAIN:
            pass
        case Action.FENCE:
            cluster.nodes[step.server].order(lambda c: _fence(c, step, deadline))
        case Action.MARK:
            cluster.nodes[step.server].order(lambda c: _run_together(c, step.sql))
        case Action.STOP | Action.SHOOT | Action.START | Action.LABEL:
            machines.run_command(
                step.command,
                operation=step.text,
                subject=step.server,
                deadline_s=left_s,
                os_user=cluster.machines[step.server].os_user,
                passed=cluster.machines[step.server].environment,
            )
        case Action.PROMOTE:
            _promote(step, cluster.nodes[step.server], deadline)
        case Action.SEND:
            assert cluster.bridge is not None
            send_to(cluster.bridge, step.sql[0])
        case Action.FLOW | Action.BRIDGE:
            return _send_markers(step, cluster)
        case Action.FOLLOW:
            _follow(step, cluster)
        case Action.REJOIN:
            rejoin(step, cluster, left_s, tell)
        case Action.READY:
            _hasten(step, cluster)
        case Action.RESET | Action.SLOT | Action.CLEAN | Action.UNFENCE:
            cluster.nodes[step.server].order(lambda c: _run_each(c, step.sql))
        case Action.DISABLE | Action.REPOINT | Action.ENABLE:
            cluster.subscribers[step.server].order(lambda c: _run_quietly(c, step.sql))
    return 0


def _fence(connection: Connection, step: Step, deadline: float) -> None:
    """Set it; once the server has read it, end every session that began before."""
    _run_each(connection, step.sql)
    while setting(connection, FENCE) != "on" and time.monotonic() < deadline:
        time.sleep(POLL_S)
    while sessions_before_reload(connection) and time.monotonic() < deadline:
        end_sessions_before_reload(connection)
        time.sleep(POLL_S)


def _follow(step: Step, cluster: Cluster) -> None:
    """Only host and port of primary_conninfo change, and a dbname is added where it has none."""
    link = cluster.nodes[step.server]
    given = parse_conninfo(link.ask(lambda c: setting(c, "primary_conninfo")), subject=step.server)
    upstream = upstream_of(cluster.address(step.node), given, step.subject)
    link.order(lambda c: _set_upstream(c, upstream))


def _set_upstream(connection: Connection, upstream: Conninfo) -> None:
    """ALTER SYSTEM can't run in a transaction; the session is quiet meanwhile."""
    hush(connection)
    try:
        _run_each(connection, statements.primary_conninfo(upstream.text))
    finally:
        speak(connection)


def _hasten(step: Step, cluster: Cluster) -> None:
    """Wake slot synchronization, and give it the record from which a new copy can decode."""
    cluster.nodes[step.node].order(lambda c: _run_each(c, (statements.SNAPSHOT,)))
    cluster.nodes[step.server].order(lambda c: _run_each(c, (statements.RELOAD,)))


def _send_markers(step: Step, cluster: Cluster) -> int:
    """A message in the database of each slot; returns the WAL position after the last."""
    link = cluster.nodes[step.server]
    found = link.ask(read_slots)
    for dbname in sorted({s.database for s in found if s.slot_name in step.slots and s.database}):
        with cluster.in_database(step.server, dbname) as there:
            there.order(lambda c: _run_together(c, step.sql))
    return link.ask(read_replication).written_lsn or 0


def _confirmed(step: Step, view: View, lsn: int) -> bool:
    """Whether the consumers of the step's slots have what was written with the marker."""
    state = view.node(step.node).state
    found = [state.slot(name) if state is not None else None for name in step.slots] if lsn else []
    return all(slot is not None and (slot.confirmed_flush_lsn or 0) >= lsn for slot in found)


def _published(step: Step, cluster: Cluster, since: int) -> bool:
    """Whether the marker is in Kafka, of the bridge's step, where the settings name Kafka."""
    bridge = cluster.bridge
    if step.action is not Action.BRIDGE or bridge is None or bridge.kafka is None:
        return True
    return marker_in_kafka(bridge.kafka, since)


def _promote(step: Step, link: Link, deadline: float) -> None:
    """Let the standby take in what its dead primary had sent, then promote it.

    The promotion replays everything received. It does not read what is still in the walreceiver's
    socket: so wait until that is empty, i.e. the receiver is gone or gets nothing more. Not after
    a fenced primary, of which the final LSN is known (`step.lsn`) and has been received.
    """
    drained = _watch_drain(link)
    drain_until = 0.0 if step.lsn is not None else min(deadline, time.monotonic() + _DRAIN_S)
    while time.monotonic() < drain_until and not drained():
        time.sleep(POLL_S)
    if link.ask(_in_recovery):
        link.order(lambda c: _run_promotion(c, step))
    while link.ask(_in_recovery):
        if time.monotonic() > deadline:
            raise _late(step, deadline - time.monotonic(), "")
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


def _run_quietly(connection: Connection, sql: tuple[str, ...]) -> None:
    """In one transaction, and where our role may, without a trace of the text: it has passwords."""
    hush(connection)
    try:
        _run_together(connection, sql)
    finally:
        speak(connection)


def _run_together(connection: Connection, sql: tuple[str, ...]) -> None:
    with connection.transaction():
        _run_each(connection, sql)


def _late(step: Step, deadline_s: float, progress: str) -> Retryable:
    detail = f" ({progress})" if progress else ""
    return Retryable(
        f"not done after {abs(deadline_s):.0f} s: {step.after}{detail}",
        operation=step.text,
        subject=step.server,
        hint=f"read the log of {step.server}; go on with: slotfailover resume",
        exit_code=ExitCode.DEADLINE,
    )
