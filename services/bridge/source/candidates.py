"""The hosts of `source.conninfo`, asked all at once, and which of them is the primary.

A revived old primary accepts writes as well: the newest timeline is chosen, not the first host.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psycopg
import structlog

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SlotbridgeError
from schemas.settings import SourceSettings
from services.bridge.source.hosts import host_name, single_hosts
from services.bridge.source.replication_connection import cut_off_after
from services.bridge.source.server_errors import connect_error, session_error
from services.postgres.server import Server, read_server, setting
from services.postgres.sessions import BRIDGE, Session, open_session

logger = structlog.get_logger(__name__)

_PROBE_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A reachable host. `read_only`: it takes no writes."""

    conninfo: str
    server: Server
    connection: Session
    read_only: bool


class AStandby(Retryable):
    """The host answers, and is a standby."""


def find_primary(settings: SourceSettings) -> Candidate:
    """Return the writable host on the newest timeline. Raise SlotbridgeError when there is none."""
    return _choose(_probe_all(settings))


def _probe_all(settings: SourceSettings) -> list[Candidate | SlotbridgeError]:
    """Try every host at once: one result each, in the order of the connection setting."""
    hosts = single_hosts(settings)
    with ThreadPoolExecutor(len(hosts), thread_name_prefix="probe") as pool:
        return list(pool.map(_probe, hosts))


def writable_servers(settings: SourceSettings) -> list[Server]:
    """Return the hosts that accept writes now, asked at the same time; leave out all others."""
    found = [result for result in _probe_all(settings) if isinstance(result, Candidate)]
    for candidate in found:
        candidate.connection.close()
    return [candidate.server for candidate in found]


def require_one_writable(settings: SourceSettings, operation: str) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) where several hosts accept writes."""
    if len(writable_servers(settings)) > 1:
        raise OperatorNeeded(
            "two hosts of source.conninfo accept writes",
            operation=operation,
            subject=f"slot {settings.slot}",
            hint="name only the primary in source.conninfo, and stop the old one",
            exit_code=ExitCode.SPLIT_BRAIN,
        )


def _probe(conninfo: str) -> Candidate | SlotbridgeError:
    """Connect to a host that accepts writes, or tell why not."""
    found = connect(conninfo)
    if isinstance(found, SlotbridgeError) or not found.read_only:
        return found
    found.connection.close()
    if found.server.in_recovery:
        return AStandby(
            "the server is read-only (a standby)",
            operation="connect",
            subject=host_name(conninfo),
            hint="name the primary in source.conninfo, or promote the standby",
        )
    return Retryable(
        "the server is read-only, and not a standby",
        operation="connect",
        subject=host_name(conninfo),
        hint="end the switchover that fences it (slotfailover status), or reset "
        "default_transaction_read_only where it is set: for the server, the database or the role",
    )


def connect(conninfo: str) -> Candidate | SlotbridgeError:
    """Open the SQL session with one host, or tell why it can't be opened."""
    subject = host_name(conninfo)
    try:
        connection = open_session(BRIDGE, conninfo)
    except psycopg.Error as error:
        return connect_error(error, subject)
    try:
        with cut_off_after(_PROBE_DEADLINE_S, connection.fileno()):
            server = read_server(connection)
            read_only = setting(connection, "transaction_read_only") == "on"
    except psycopg.Error as error:
        connection.close()
        return session_error(error, "probe", subject)
    return Candidate(conninfo, server, connection, read_only)


def _choose(results: list[Candidate | SlotbridgeError]) -> Candidate:
    """Return the writable host on the newest timeline: a revived old primary is on an older one.

    Raise the most telling error when there is none.
    """
    candidates = [result for result in results if isinstance(result, Candidate)]
    errors = [result for result in results if isinstance(result, SlotbridgeError)]
    if not candidates:
        raise _no_primary(errors)
    chosen = max(candidates, key=lambda candidate: candidate.server.timeline)
    for other in candidates:
        if other is not chosen:
            other.connection.close()
            logger.warning(
                "two hosts accept writes: using the one on the newer timeline",
                timeline=chosen.server.timeline,
                other_timeline=other.server.timeline,
            )
    return chosen


def _no_primary(errors: list[SlotbridgeError]) -> SlotbridgeError:
    """Return one error of all hosts' errors; the host's own error if there is one host.

    An operator is needed only where all hosts need one: a standby may refuse our role for good
    while the primary restarts. Only where all are standbys no primary is left to be repaired.
    """
    if len(errors) == 1 or not any(isinstance(error, Retryable) for error in errors):
        return errors[0]
    reasons = "; ".join(f"{error.subject}: {_short(error.message)}" for error in errors)
    closed = [error for error in errors if not isinstance(error, AStandby)]
    hints = dict.fromkeys(error.hint for error in (closed or errors[:1]))
    return Retryable(
        f"no host accepts writes: {reasons}",
        operation="connect",
        hint="; ".join(hints),
        exit_code=ExitCode.SERVER_UNREACHABLE,
    )


def _short(message: str) -> str:
    """Shorten libpq's text: leave out the repeated address and libpq's question."""
    for part in ("Connection refused", "timeout expired", "No route to host"):
        if part in message:
            return part.lower()
    return message
