"""Makes the slot, and tells which rows are from before it.

    CREATE_REPLICATION_SLOT … (SNAPSHOT 'export')    what committed before its LSN, and no more
    SET TRANSACTION SNAPSHOT                          that is asked for as text, in a session of SQL

The text goes to Kafka with the first progress record. A bridge that is killed between leaves a slot
of which nothing is known: tables without a key are refused then. The same text of a former slot of
that name is removed.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Final

import psycopg
import structlog

from schemas.errors import SlotbridgeError
from schemas.events import snapshot_topic
from schemas.lsn import format_lsn
from schemas.settings import SourceSettings
from schemas.snapshot import SlotBeginning, SlotBeginningKey, SnapshotSettings
from services.bridge.events.event import Event
from services.bridge.failpoints import reach
from services.bridge.recovery.resume_record import NewSlot
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.visibility import parse_sight
from services.bridge.source.database import Primary
from services.bridge.source.replication_connection import (
    ReplicationConnection,
    cut_off_after,
)
from services.bridge.source.server_errors import session_error
from services.postgres.publications import publishes_all_tables
from services.postgres.published_tables import published_tables
from services.postgres.rows import one_row
from services.postgres.server import Connection
from services.postgres.sessions import NEW_SLOT, open_session

logger = structlog.get_logger(__name__)
_OPERATION: Final = "make the slot"
_FILES: Final = (
    "SELECT oid::bigint, relfilenode::bigint FROM pg_class"
    " WHERE oid = ANY (%s::oid[]) AND relkind = 'r'"
)


def first_slot(
    primary: Primary,
    replication: ReplicationConnection,
    topics: Topics,
    source: SourceSettings,
    snapshot: SnapshotSettings,
    *,
    deadline_s: float,
) -> NewSlot:
    """Return the slot, created if it is missing, and the events of its beginning for Kafka.

    Of a slot that is there already the beginning is not known: that of a former one does not
    count. Raise SlotbridgeError.
    """
    found, prefix = primary.slot(), topics.prefix
    there = topics.there(snapshot_topic(prefix))
    forgotten = [beginning_forgotten(prefix, source.slot)] if there else []
    if found is not None and found.confirmed_flush_lsn is not None:
        return NewSlot(found.confirmed_flush_lsn, forgotten)
    if snapshot.mode == "never" or not snapshot.reads_without_key:
        lsn, _ = replication.create_slot(
            primary.waiter,
            two_phase=source.two_phase,
            export=False,
            deadline_s=deadline_s,
        )
        if not snapshot.reads_all:
            primary.log_rows_before()
        new = NewSlot(lsn, forgotten)
    else:
        topics.prepare_late(snapshot_topic, compacted=True)
        beginning = make_slot(primary, replication, source, deadline_s=deadline_s)
        new = NewSlot(beginning.lsn, [beginning_event(prefix, beginning)])
    logger.info("created slot", slot=source.slot, lsn=format_lsn(new.lsn))
    reach("slot created")
    return new


def make_slot(
    primary: Primary,
    replication: ReplicationConnection,
    source: SourceSettings,
    *,
    deadline_s: float,
) -> SlotBeginning:
    """Make the failover slot; return where it begins. Raise SlotbridgeError."""
    try:
        with open_session(NEW_SLOT, primary.conninfo) as connection:
            lsn, snapshot = replication.create_slot(
                primary.waiter,
                two_phase=source.two_phase,
                export=True,
                deadline_s=deadline_s,
            )
            with (
                _dropped_on_error(replication),
                cut_off_after(deadline_s, connection.fileno()),
            ):
                sight = import_snapshot(connection, snapshot)
                all_tables = publishes_all_tables(connection, source.publication)
                tables = published_tables(connection, source.publication)
                oids = [one.oid for one in tables if not one.key]
                files = connection.execute(_FILES, [oids]).fetchall()
    except psycopg.Error as error:
        raise session_error(error, _OPERATION, f"slot {source.slot}") from error
    return SlotBeginning(
        slot=source.slot,
        lsn=lsn,
        timeline=primary.server.timeline,
        sight=sight,
        all_tables=all_tables,
        files=dict(files),
        ts_ms=time.time_ns() // 1_000_000,
    )


@contextlib.contextmanager
def _dropped_on_error(replication: ReplicationConnection) -> Iterator[None]:
    """Drop the new slot where the block fails: nobody could tell later where it begins."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(SlotbridgeError, psycopg.Error, OSError):
            replication.drop_slot()
        raise


def import_snapshot(connection: Connection, name: str) -> str:
    """Begin a transaction under the database snapshot of a new slot; return that as text.

    The text is stored: what no later start could read is refused here.
    """
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    connection.execute(f"SET TRANSACTION SNAPSHOT '{name}'".encode())
    sight: str = one_row(connection.execute("SELECT pg_current_snapshot()::text"))[0]
    parse_sight(sight)
    return sight


def beginning_event(prefix: str, beginning: SlotBeginning) -> Event:
    """Make the record of `beginning`, for the Kafka transaction with the first progress record."""
    return _event(prefix, beginning.slot, beginning.model_dump_json().encode())


def beginning_forgotten(prefix: str, slot: str) -> Event:
    """Make the record that removes where a former slot of that name began."""
    return _event(prefix, slot, None)


def _event(prefix: str, slot: str, value: bytes | None) -> Event:
    key = SlotBeginningKey(slot=slot).model_dump_json().encode()
    return Event(snapshot_topic(prefix), key, value)
