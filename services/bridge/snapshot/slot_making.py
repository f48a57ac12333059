"""Makes the slot, and tells which rows are from before it.

    CREATE_REPLICATION_SLOT … (SNAPSHOT 'export')    what committed before its LSN, and no more
    SET TRANSACTION SNAPSHOT                          that is asked for as text, in a session of SQL

The text goes to Kafka with the first progress record. A bridge that is killed between leaves a slot
of which nothing is known: tables without a key are refused then.
"""

import time
from collections.abc import Callable
from typing import Final

import psycopg
import structlog

from schemas.events import snapshot_topic
from schemas.lsn import format_lsn
from schemas.settings import SourceSettings
from schemas.snapshot import SlotBeginning, SlotBeginningKey
from services.bridge.events.event import Event
from services.bridge.source.database import Primary
from services.bridge.source.replication_connection import ReplicationConnection
from services.bridge.source.server_errors import connect_error, server_error
from services.postgres.published_tables import published_tables
from services.postgres.rows import one_row

logger = structlog.get_logger(__name__)

_OPERATION: Final = "make the slot"
_APPLICATION: Final = "slotbridge_slot"
_STATEMENT_MS: Final = 60_000
_SIGHT: Final = (
    "SELECT pg_current_snapshot()::text, puballtables FROM pg_publication WHERE pubname = %s"
)
_FILES: Final = (
    "SELECT oid::bigint, relfilenode::bigint FROM pg_class"
    " WHERE oid = ANY (%s::oid[]) AND relkind = 'r'"
)


def make_slot(
    primary: Primary,
    replication: ReplicationConnection,
    source: SourceSettings,
    *,
    deadline_s: float,
    while_waiting: Callable[[], None],
) -> SlotBeginning:
    """Make the failover slot; return where it begins. Raise SlotbridgeError."""
    lsn, snapshot = replication.create_slot(
        two_phase=source.two_phase, deadline_s=deadline_s, while_waiting=while_waiting
    )
    try:
        with psycopg.connect(
            primary.conninfo,
            autocommit=True,
            application_name=_APPLICATION,
            options=f"-c statement_timeout={_STATEMENT_MS}",
        ) as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'".encode())
            sight, all_tables = one_row(connection.execute(_SIGHT, [source.publication]))
            tables = published_tables(connection, source.publication)
            oids = [one.oid for one in tables if not one.key]
            files = connection.execute(_FILES, [oids]).fetchall()
    except psycopg.Error as error:
        message = " ".join((error.diag.message_primary or str(error)).split())
        subject = f"slot {source.slot}"
        if error.sqlstate is None:
            raise connect_error(message, subject) from error
        raise server_error(error.sqlstate, message, _OPERATION, subject) from error
    logger.info("created slot", slot=source.slot, lsn=format_lsn(lsn))
    return SlotBeginning(
        slot=source.slot,
        lsn=lsn,
        timeline=primary.server.timeline,
        sight=sight,
        all_tables=all_tables,
        files=dict(files),
        ts_ms=time.time_ns() // 1_000_000,
    )


def beginning_event(prefix: str, told: SlotBeginning) -> Event:
    """Make the record of `told`, for the Kafka transaction with the first progress record."""
    key = SlotBeginningKey(slot=told.slot).model_dump_json().encode()
    return Event(snapshot_topic(prefix), key, told.model_dump_json().encode())
