"""A database snapshot of the source whose place among the commits is known exactly.

    CREATE_REPLICATION_SLOT … TEMPORARY LOGICAL … (SNAPSHOT 'export')
                              the snapshot sees what commits before the slot's LSN, and no more
    SET TRANSACTION SNAPSHOT  keeps it; the slot is dropped at once

The server drops slot and snapshot with the connections, however the audit ends.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SetupError
from schemas.lsn import parse_lsn
from schemas.progress import ProgressRecord
from schemas.settings import SourceSettings
from spark_consumers.verify import postgres
from spark_consumers.verify.source_identity import (
    read_identity,
    require_same_source,
    walsender_of,
)

OPERATION = "audit tables"
_GRANT = "ALTER ROLE … REPLICATION for the role of source.conninfo, and SELECT on the tables"
_MAY_REPLICATE = "SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user"


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """The source as of `lsn`: all that commits before it. `ts_ms`: when (since 1970).

    `progress`: the bridge's record from before.
    """

    connection: psycopg.Connection
    lsn: int
    timeline: int
    ts_ms: int
    progress: ProgressRecord


@contextlib.contextmanager
def source_snapshot(
    settings: SourceSettings, progress: ProgressRecord, *, deadline_ms: int
) -> Iterator[SourceSnapshot]:
    """Open a snapshot of the server that `progress` names.

    Raise OperatorNeeded (WRONG_DATABASE, TIMELINE) for another server, SetupError where a privilege
    or a free slot is missing, Retryable where the server does not answer, can't be shown to be the
    same one, or has a transaction that does not end within `deadline_ms`.
    """
    with _connected(settings) as connection:
        connection.autocommit = True
        connection.execute("SET max_parallel_workers_per_gather = 0")
        _require_source(connection, settings, progress)
        # A new slot waits for open transactions up to `deadline_ms` each.
        waits = {"lock_timeout": f"{deadline_ms}ms"}
        with walsender_of(connection, settings, waits) as replication:
            lsn, name = _create_slot(replication)
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(f"SET TRANSACTION SNAPSHOT '{name}'".encode())
        ts_ms = time.time_ns() // 1_000_000
        yield SourceSnapshot(connection, lsn, progress.server.timeline, ts_ms, progress)
        connection.execute("ROLLBACK")


def _connected(settings: SourceSettings) -> contextlib.AbstractContextManager[psycopg.Connection]:
    return postgres.connected(
        settings.conninfo.get_secret_value(),
        "the source",
        OPERATION,
        hint="check source.conninfo and that one of its hosts accepts connections",
        grant=_GRANT,
        timeout_s=settings.connect_timeout_s,
    )


def _create_slot(replication: psycopg.Connection) -> tuple[int, str]:
    """Make the temporary slot; return its LSN and the name of the snapshot that it exports."""
    name = f"slottables_audit_{uuid.uuid4().hex[:12]}"
    command = f"CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
    try:
        row = replication.execute(command.encode()).fetchone()
    except psycopg.errors.LockNotAvailable as error:
        raise Retryable(
            "a transaction at the source has been open for too long: a snapshot waits for its end",
            operation=OPERATION,
            subject=f"slot {name}",
            hint="see pg_stat_activity.xact_start; audit again, or raise tables.audit_deadline_ms",
            exit_code=ExitCode.NOT_JUDGED,
        ) from error
    except psycopg.errors.ConfigurationLimitExceeded as error:
        raise SetupError(
            "the source has not a slot to spare for the audit",
            operation=OPERATION,
            subject=f"slot {name}",
            hint="raise max_replication_slots by one",
        ) from error
    assert row is not None
    return parse_lsn(row[1]), str(row[2])


def _require_source(
    connection: psycopg.Connection, settings: SourceSettings, progress: ProgressRecord
) -> None:
    """Raise for a server that the bridge does not read from, and where the role may not audit."""
    found = read_identity(connection, settings)
    if found.standby:
        raise OperatorNeeded(
            "the server is a standby: only the primary gives a snapshot with its LSN",
            operation=OPERATION,
            subject="the source",
            hint="source.conninfo must lead to the primary that the bridge reads from",
            exit_code=ExitCode.WRONG_DATABASE,
        )
    require_same_source(progress, found, OPERATION)
    if connection.execute(_MAY_REPLICATE).fetchone() != (True,):
        raise SetupError(
            "the role may not make a temporary slot",
            operation=OPERATION,
            subject="the source",
            hint=f"grant it: {_GRANT}",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
