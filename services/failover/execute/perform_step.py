"""One step, performed on its server and verified by observing again until the step's deadline."""

import contextlib
import errno
import getpass
import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SetupError
from services.failover.execute import host_programs
from services.failover.execute.data_folder import DataFolder
from services.failover.execute.interruption import Interruption
from services.failover.execute.promotion_order import in_recovery, order_promotion
from services.failover.execute.rejoin_node import perform_rejoin
from services.failover.execute.unlogged_statements import hush, speak
from services.failover.model import statements
from services.failover.model.conninfo import Conninfo
from services.failover.model.host_commands import Machine
from services.failover.model.receiver import cut_off, reconnected
from services.failover.model.view import FENCE_MARK, View
from services.failover.observe.bridge_client import marker_in_kafka, send_to
from services.failover.observe.client_sessions import (
    end_sessions_before_reload,
    sessions_before_reload,
)
from services.failover.observe.cluster import Cluster
from services.failover.observe.replication import read_replication
from services.failover.observe.server_link import LOCK_SHARE, Unreachable, parse_conninfo
from services.failover.plan.steps.fencing import in_words, unconfirmed
from services.failover.plan.steps.step import SEEN_TO_THE_END, Action, Step
from services.failover.plan.steps.topology import upstream_of
from services.postgres.server import Connection, read_server, setting
from services.postgres.slots import read_slots

POLL_S = 0.02
REPORT_EVERY_S = 1.0
REPEAT_S = 10.0
"""How often the same progress is told."""
_OFF = (
    "mend it, then run this again. If {0} has no power or is destroyed, so that the command can't "
    "reach it, make sure of that, and run slotfailover failover without --fence: its refusal has "
    "the token that says so. {0} counts as off then: were it alive, there would be two primaries"
)
ASK_S = 3.0
"""A live server accepts a connection within this time."""
LOOKS_MIN = 25
"""So often is looked as well, before time proves anything: the machine may have stood still."""


def perform(
    step: Step,
    cluster: Cluster,
    deadline_s: float,
    report: Callable[[str], None] = lambda _text: None,
    *,
    interruption: Interruption | None = None,
) -> View:
    """Perform a step; return the view in which its postcondition holds.

    `report` gets its progress. Raise Retryable (SERVER_UNREACHABLE, DEADLINE), SetupError
    (PRIVILEGE_MISSING), what its guard raises, and Interrupted.
    """
    interruption = interruption or Interruption()
    if step.action is Action.REJOIN:
        deadline_s = cluster.rejoin_deadline_s
    deadline = time.monotonic() + deadline_s
    before = 0
    try:
        if step.action is Action.BRIDGE:
            before = cluster.nodes[step.server].ask(read_replication).written_lsn or 0
        lsn = _order(step, cluster, deadline, report, interruption)
    except Unreachable as error:
        raise Retryable(
            f"{step.server} stopped answering: {error.detail}",
            operation=step.text,
            subject=step.server,
            hint="once the server answers: slotfailover resume",
        ) from error
    except OSError as error:  # of a file on this machine
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise SetupError(
            f"{error.filename or 'a file'} can't be used: {error.strerror}",
            operation=step.text,
            subject=step.server,
            hint="free space on this machine, then: slotfailover resume"
            if full
            else host_programs.GO_ON,
            exit_code=ExitCode.DISK_FULL if full else ExitCode.SERVER_SETTING,
        ) from error
    waits = Waits(report, time.monotonic())
    while True:
        if step.action not in SEEN_TO_THE_END:
            interruption.check()
        view = cluster.observe()
        holds, late = step.holds(view), unconfirmed(view, step.server, step.slots, lsn)
        if holds and not late and _published(step, cluster, before):
            break
        progress = (
            step.progress(view) if not holds else in_words(late) or "the marker is not in Kafka"
        )
        now = time.monotonic()
        if now > deadline:
            raise _late(step, deadline_s, progress)
        if (
            waits.report_at(now, progress or f"not yet: {step.after}")
            and step.action is Action.READY
        ):
            _hasten(step, cluster)
        time.sleep(POLL_S)
    return view


class Waits:
    """Tells of a wait in words: where they change, at most each TELL_S, else each REPEAT_S."""

    def __init__(self, report: Callable[[str], None], began: float) -> None:
        self._report = report
        self._began = self._looked = self._reported_s = began
        self._text = ""

    def report_at(self, now: float, text: str) -> bool:
        """Tell what is waited for if it is time to; return whether TELL_S has passed."""
        if now - self._looked <= REPORT_EVERY_S:
            return False
        self._looked = now
        if text != self._text or now - self._reported_s >= REPEAT_S:
            self._report(f"{text} (for {now - self._began:.0f} s)" if text == self._text else text)
            self._text, self._reported_s = text, now
        return True


def _order(
    step: Step,
    cluster: Cluster,
    deadline: float,
    report: Callable[[str], None],
    interruption: Interruption,
) -> int:
    """Order a step done; return the position of the marker message of a step that writes one."""
    left_s = max(1.0, deadline - time.monotonic())
    match step.action:
        case Action.REPLAY | Action.DRAIN:
            pass
        case Action.CHECKPOINT:
            _checkpoint(step, cluster)
        case Action.FENCE:
            cluster.nodes[step.server].order(lambda c: _fence(c, cluster, deadline, interruption))
        case Action.MARK:
            cluster.nodes[step.server].order(lambda c: _run_together(c, step.sql))
        case Action.STOP | Action.SHOOT | Action.START | Action.LABEL:
            with contextlib.suppress(Unreachable):  # it is not needed then
                if step.sql:
                    cluster.nodes[step.server].order(lambda c: _run_each(c, step.sql))
            _run_on_machine(step, cluster.machines[step.server], left_s)
        case Action.PROMOTE:
            _promote(step, cluster, deadline, interruption)
        case Action.ASK:
            _ask_upstream(step, cluster, interruption)
        case Action.CUT | Action.RECONNECT:
            _lead(step, cluster, away=step.action is Action.CUT)
        case Action.SEND:
            if cluster.bridge is None:
                raise LookupError(f"{step.text}: no bridge is configured")
            send_to(cluster.bridge, step.sql[0])
        case Action.SETTLE | Action.FLOW | Action.BRIDGE:
            return _send_markers(step, cluster)
        case Action.FOLLOW:
            _follow(step, cluster)
        case Action.REJOIN:
            with interruption.ends_what_runs():
                perform_rejoin(step, cluster, left_s, report)
        case Action.READY:
            _hasten(step, cluster)
        case Action.RESET | Action.SLOT | Action.CLEAN | Action.UNFENCE:
            cluster.nodes[step.server].order(lambda c: _run_each(c, step.sql))
        case Action.DISABLE:
            wait = f"SET LOCAL lock_timeout = {int(left_s * LOCK_SHARE * 1000)}"
            _change_subscription(step, cluster, wait, *step.sql)
        case Action.REPOINT | Action.ENABLE:
            _change_subscription(step, cluster, *step.sql)
    return 0


def _run_on_machine(step: Step, machine: Machine, deadline_s: float) -> None:
    """Run a step's command; pg_ctl can't stop a server that is off, which then is fenced."""
    by_pg_ctl = step.command[:2] == (machine.program("pg_ctl"), "stop")
    fences = step.action is Action.SHOOT
    if fences and by_pg_ctl and machine.data_folder and DataFolder(machine, step.text).is_off():
        return
    host_programs.run_command(
        step.command,
        operation=step.text,
        subject=step.server,
        deadline_s=deadline_s,
        os_user=machine.os_user,
        passed=machine.environment,
        remedy=_OFF.format(step.server) if fences else host_programs.GO_ON,
    )


def _fence(
    connection: Connection, cluster: Cluster, deadline: float, interruption: Interruption
) -> None:
    """Set the fence; once the server has read it, end every session that began before.

    The fence's mark names its owner and stands in the same file: a server that has read the mark
    has read both.
    """
    slot = cluster.bridge.slot if cluster.bridge is not None else None
    timeline = read_server(connection).timeline
    by_whom = f"timeline {timeline} by {_us()} since {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    _run_each(connection, statements.fenced(by_whom))
    while setting(connection, FENCE_MARK) != by_whom and time.monotonic() < deadline:
        interruption.check()
        time.sleep(POLL_S)
    while sessions_before_reload(connection, slot) and time.monotonic() < deadline:
        interruption.check()
        end_sessions_before_reload(connection, slot)
        time.sleep(POLL_S)


def _checkpoint(step: Step, cluster: Cluster) -> None:
    """Run a CHECKPOINT before the fence, so that the stop after it is short."""
    try:
        cluster.nodes[step.server].order(lambda c: _run_each(c, step.sql))
    except Retryable as error:
        error.hint = (
            "its stop would take as long, with writes fenced: raise failover.step_deadline_ms, or "
            f"run CHECKPOINT on {step.server}, then this again"
        )
        raise


def _us() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"{os.getuid()}@{socket.gethostname()}"


def _ask_upstream(step: Step, cluster: Cluster, interruption: Interruption) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) if the standby can connect anew to what feeds it."""
    link = cluster.nodes[step.server]
    _lead(step, cluster, away=True)
    until = time.monotonic() + ASK_S
    while link.ask(_receives) and time.monotonic() < until:
        time.sleep(POLL_S)
    _lead(step, cluster, away=False)
    until, looks = time.monotonic() + ASK_S, 0
    while time.monotonic() < until or looks < LOOKS_MIN:
        looks += 1
        interruption.check()
        if link.ask(_receives):
            raise OperatorNeeded(
                f"a primary is still alive: {step.server} has just connected anew to it",
                operation=step.text,
                subject=step.server,
                hint="the old primary is not off: find it, and fence or stop it",
                exit_code=ExitCode.SPLIT_BRAIN,
            )
        time.sleep(POLL_S)


def _receives(connection: Connection) -> bool:
    row = connection.execute("SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming'")
    return row.fetchone() is not None


def _lead(step: Step, cluster: Cluster, *, away: bool) -> None:
    """Let primary_conninfo lead nowhere, or where it led before."""
    link = cluster.nodes[step.server]
    given = parse_conninfo(link.ask(lambda c: setting(c, "primary_conninfo")), subject=step.server)
    changed = cut_off(given) if away else reconnected(given)
    if changed != given:
        link.order(lambda c: _set_upstream(c, changed))


def _follow(step: Step, cluster: Cluster) -> None:
    """Lead a standby to another server: change host and port of primary_conninfo.

    A dbname is added where primary_conninfo has none; all else stays.
    """
    link = cluster.nodes[step.server]
    given = parse_conninfo(link.ask(lambda c: setting(c, "primary_conninfo")), subject=step.server)
    upstream = upstream_of(cluster.address(step.node), reconnected(given), step.subject)
    link.order(lambda c: _set_upstream(c, upstream))


def _set_upstream(connection: Connection, upstream: Conninfo) -> None:
    """Set primary_conninfo, and keep the statement out of the server's log.

    ALTER SYSTEM can't run in a transaction, so the whole session is hushed meanwhile. At the reload
    the postmaster logs the new value nevertheless, with a password that is in it.
    """
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
    """Write a message in each slot's database; return the WAL position after the last message."""
    link = cluster.nodes[step.server]
    found = link.ask(read_slots)
    for dbname in sorted({s.database for s in found if s.slot_name in step.slots and s.database}):
        with cluster.in_database(step.server, dbname) as there:
            there.order(lambda c: _run_together(c, step.sql))
    return link.ask(read_replication).written_lsn or 0


def _published(step: Step, cluster: Cluster, since: int) -> bool:
    """Tell whether the bridge's marker is in Kafka; true where there is no Kafka to ask."""
    bridge = cluster.bridge
    if step.action is not Action.BRIDGE or bridge is None or bridge.kafka is None:
        return True
    return marker_in_kafka(bridge.kafka, since)


def _promote(
    step: Step,
    cluster: Cluster,
    deadline: float,
    interruption: Interruption,
) -> None:
    """Promote; ignore signals until the node is a primary. Raise Retryable at `deadline`."""

    def ordered() -> None:
        interruption.check()
        interruption.no_way_back = True

    link = cluster.nodes[step.server]
    order_promotion(step, cluster, deadline, ordered)
    while link.ask(in_recovery):
        if time.monotonic() > deadline:
            raise _late(step, deadline - time.monotonic(), "")
        time.sleep(POLL_S)


def _run_each(connection: Connection, sql: tuple[str, ...]) -> None:
    for statement in sql:
        connection.execute(statement)


def _change_subscription(step: Step, cluster: Cluster, *sql: str) -> None:
    cluster.subscribers[step.server].order_under_lock(lambda c: _run_quietly(c, sql))


def _run_quietly(connection: Connection, sql: tuple[str, ...]) -> None:
    """Run statements with passwords in one transaction, without a trace in the log where we may."""
    hush(connection)
    try:
        _run_together(connection, sql)
    finally:
        speak(connection)


def _run_together(connection: Connection, sql: tuple[str, ...]) -> None:
    with connection.transaction():
        _run_each(connection, sql)


def _late(step: Step, deadline_s: float, progress: str) -> Retryable:
    """Return the error of a step that was not reached in time; `progress`: what it waits for."""
    detail = f" ({progress})" if progress else ""
    whose = "the bridge" if step.action is Action.BRIDGE else step.server
    whose = "each consumer that is behind" if step.slots else whose
    return Retryable(
        f"not reached after {abs(deadline_s):.0f} s: {step.after}{detail}",
        operation=step.text,
        subject=step.server,
        hint=f"read the log of {whose}; go on with: slotfailover resume",
        exit_code=ExitCode.DEADLINE,
    )
