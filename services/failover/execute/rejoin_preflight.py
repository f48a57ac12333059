"""Checks that a rejoin makes before it stops a server and changes its data folder.

The folder is that of the node, and of no other; its programs run; the new primary lets us in by the
way that will be used, with the rights that are needed; and a copy that is allowed has room.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psycopg

from schemas.errors import ExitCode, Retryable, SettingsError, SetupError
from schemas.lsn import format_lsn
from services.failover.execute import host_programs
from services.failover.execute.data_folder import DataFolder, Postmaster
from services.failover.model.conninfo import Conninfo
from services.failover.model.host_commands import Machine
from services.failover.model.timelines import History, left_at
from services.failover.observe.cluster import Cluster
from services.failover.observe.provenance import read_history
from services.failover.observe.server_link import Unreachable, expanded, parse_conninfo
from services.failover.plan.request import Plan
from services.failover.plan.steps.step import Action, Step
from services.postgres.rows import one_row
from services.postgres.server import Connection, read_server, setting
from services.postgres.sessions import BASE_BACKUP, open_session

_NEVER = frozenset({"service", "servicefile", "target_session_attrs", "load_balance_hosts"})
"""Keywords that are not passed to a program which must reach this very server."""
_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Source:
    """The server that a node is rebuilt from."""

    conninfo: Conninfo
    """By which pg_rewind and pg_basebackup connect."""
    replication: Conninfo
    """By which the standby will connect; its address is replaced."""
    size_bytes: int
    identity: str = ""
    """Its cluster, timeline and where that began; "" where that can't be told."""
    timeline: int = 0
    history: History | None = None
    """The timelines before its own, None where they can't be told."""


@dataclass(frozen=True, slots=True)
class _Primary:
    """The state of the new primary."""

    system_identifier: str
    size_bytes: int
    tablespaces: int
    upstream: str
    identity: str
    timeline: int
    history: History | None


def require_rejoinable(cluster: Cluster, plan: Plan) -> list[str]:
    """Check the rejoins of a plan before anything is done; return notes on what they discard.

    Raise what `preflight` raises.
    """
    notes = []
    for step in plan.steps:
        if step.action is Action.REJOIN and step.command:
            notes.append(
                f"not judged: which WAL of {step.server} the rejoin discards, as a command of "
                "failover.machines does it"
            )
        elif step.action is Action.REJOIN:
            try:
                source = preflight(step, cluster)
                notes.append(discarded(step, cluster.machines[step.server], source))
            except Unreachable as error:
                raise Retryable(
                    f"{step.node} stopped answering: {error.detail}",
                    operation=step.text,
                    subject=step.server,
                ) from error
    return list(filter(None, notes))


def preflight(step: Step, cluster: Cluster) -> Source:
    """Check everything that a rejoin needs; return the source that the node is rebuilt from.

    Raise SettingsError (another server's folder), SetupError, Unreachable.
    """
    machine = cluster.machines[step.server]
    folder = DataFolder(machine, step.text)
    folder.require_user()
    _require_own(step, cluster, folder)
    primary = cluster.nodes[step.node].ask(_primary)
    running = folder.postmaster()
    if running is not None:
        _require_node(step, cluster, folder, running)
    if folder.exists and folder.control().system_identifier != primary.system_identifier:
        raise _foreign(step, folder, f"it holds another cluster than {step.node}")
    program = machine.program("pg_rewind")
    host_programs.run_command(
        (program, "--version"),
        operation=step.text,
        subject=step.server,
        deadline_s=_TIMEOUT_S,
        os_user=machine.os_user,
    )
    source = expanded(cluster.nodes[step.node].conninfo)
    source = Conninfo(tuple(pair for pair in source.pairs if pair[0] not in _NEVER))
    if step.copies:
        folder.require_swappable(primary.size_bytes)
        _require_copyable(step, primary)
        _require_replication(step, source)
    replication = _replication(step, cluster, folder, primary)
    return Source(
        source,
        replication,
        primary.size_bytes,
        primary.identity,
        primary.timeline,
        primary.history,
    )


def discarded(step: Step, machine: Machine, source: Source) -> str:
    """Say which WAL of the node the source never had: the rejoin discards it; "" without a folder.

    The WAL is read where it is; what can't be read is said to be not judged.
    """
    node, primary, folder = step.server, step.node, DataFolder(machine, step.text)
    if not folder.exists:
        return ""
    unknown = f"not judged: which WAL of {node} the rejoin discards, as"
    timeline = folder.control().timeline
    if source.history is None:
        return f"{unknown} nobody can read the history of timeline {source.timeline} of {primary}"
    if timeline == source.timeline:
        return ""
    fork = left_at(source.history, timeline)
    if fork is None:
        return f"{unknown} timeline {source.timeline} of {primary} did not come from {timeline}"
    try:
        end, commits = folder.wal_after(fork, timeline)
    except (SetupError, Retryable) as error:
        return f"{unknown} {error.message}"
    where = f"{format_lsn(fork)}, where {primary} left timeline {timeline}"
    if end <= fork:
        return f"{node} has no WAL after {where}: the rejoin discards nothing"
    return (
        f"the rejoin discards {end - fork} bytes of WAL of {node}, with {commits} commits, from "
        f"{where}, to {format_lsn(end)}: {primary} never had them"
    )


def _require_own(step: Step, cluster: Cluster, folder: DataFolder) -> None:
    for name, other in cluster.machines.items():
        same = other.data_folder is not None and other.data_folder.resolve() == folder.path
        if name != step.server and same:
            raise _foreign(step, folder, f"failover.machines.{name} has it, too")


def _require_node(step: Step, cluster: Cluster, folder: DataFolder, running: Postmaster) -> None:
    """Raise where the server that runs in the folder is not the node."""
    for name in (step.node, *(name for name in cluster.nodes if name != step.node)):
        with contextlib.suppress(Unreachable, SetupError):
            pid = cluster.nodes[name].ask(_backend)
            if _parent(pid) == running.pid:
                if name == step.server:
                    return
                raise _foreign(step, folder, f"the server of {name} runs in it")
    ports = {port for _, port in cluster.endpoints(step.server)}
    if running.port not in ports:
        raise _foreign(
            step,
            folder,
            f"a server runs in it on port {running.port}, {step.server} is on "
            f"{', '.join(sorted(ports))}",
        )


def _foreign(step: Step, folder: DataFolder, why: str) -> SettingsError:
    return SettingsError(
        f"{folder.path} is not the data folder of {step.server}: {why}",
        operation=step.text,
        subject=step.server,
        hint=f"correct failover.machines.{step.server}.data_folder",
    )


def _require_copyable(step: Step, primary: _Primary) -> None:
    if primary.tablespaces:
        raise SetupError(
            f"{step.node} has {primary.tablespaces} tablespace(s) outside its data folder, which "
            "a base backup would put into the places of the old ones",
            operation=step.text,
            subject=step.server,
            hint=f"rebuild {step.server} by hand, with pg_basebackup --tablespace-mapping",
        )


def _require_replication(step: Step, source: Conninfo) -> None:
    """Raise SetupError where a base backup would not be let in."""
    try:
        with open_session(BASE_BACKUP, source.text, connect_timeout=_TIMEOUT_S) as connection:
            connection.execute("IDENTIFY_SYSTEM")
    except psycopg.Error as error:
        lines = str(error).strip().splitlines()
        raise SetupError(
            f"{step.node} does not let us in for a base backup: {lines[0] if lines else error}",
            operation=step.text,
            subject=step.server,
            hint=f"add a line for `replication` to pg_hba.conf of {step.node}, and let the role of "
            f"failover.nodes.{step.node} have REPLICATION",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        ) from error


def _replication(step: Step, cluster: Cluster, folder: DataFolder, primary: _Primary) -> Conninfo:
    """Return the role, password and certificates that the standby will connect with.

    Raise SettingsError where the role is unknown.
    """
    if primary.upstream:  # how the other node streamed, whose name this one may not have
        given = parse_conninfo(primary.upstream, subject="primary_conninfo")
        return Conninfo(tuple(pair for pair in given.pairs if pair[0] != "application_name"))
    with host_programs.acting_as(cluster.machines[step.server].os_user):
        own = _own_upstream(folder)
    if own:
        return parse_conninfo(own, subject="primary_conninfo")
    if cluster.replication is not None:
        return cluster.replication
    raise SettingsError(
        f"the role by which {step.server} is to stream from {step.node} is unknown: neither node "
        "has a former primary_conninfo",
        operation=step.text,
        subject=step.server,
        hint='set failover.replication: "user=… passfile=…" (a role with REPLICATION)',
    )


def _own_upstream(folder: DataFolder) -> str:
    """Return primary_conninfo of the folder's postgresql.auto.conf, as ALTER SYSTEM writes it."""
    found = ""
    for kept in (folder.path, folder.path.with_name(folder.path.name + ".rejoining")):
        auto = kept / "postgresql.auto.conf"
        try:
            text = auto.read_text(encoding="utf-8")
        except OSError:  # it is not there, or a link to a file that the user may not read
            continue
        for line in text.splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "primary_conninfo":
                text = value.strip().removeprefix("'").removesuffix("'")
                found = text.replace("''", "'").replace("\\\\", "\\")
    return found


def _backend(connection: Connection) -> int:
    row = one_row(connection.execute("SELECT pg_backend_pid()"))
    return int(row[0])


def _parent(pid: int) -> int:
    """Return the parent of a process on this machine, 0 where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def _primary(connection: Connection) -> _Primary:
    """Return what a rebuilding needs to know of its source: identity, size, history."""
    row = one_row(
        connection.execute(
            """
        SELECT (SELECT system_identifier::text FROM pg_control_system()),
               (SELECT coalesce(sum(pg_database_size(oid)), 0)::bigint FROM pg_database),
               (SELECT count(*) FROM pg_tablespace
                 WHERE spcname NOT IN ('pg_default', 'pg_global'))
        """
        )
    )
    system, size_bytes, tablespaces = row
    timeline = read_server(connection).timeline
    _, history = read_history(connection, timeline)
    start = format_lsn(history[-1][1]) if history else "the first"
    identity = f"{system} {timeline} {start}" if history is not None else ""
    upstream = setting(connection, "primary_conninfo")
    return _Primary(system, size_bytes, tablespaces, upstream, identity, timeline, history)
