"""The SQL about servers, slots, publications and origins, as typed rows.

Source: PostgreSQL documentation 53.20 pg_replication_slots, 9.28.6 Replication Management
Functions, 54.4 Streaming Replication Protocol.
"""

from dataclasses import dataclass
from typing import Any, LiteralString, cast

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from schemas.lsn import parse_lsn

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Server:
    """A server as seen through one connection. `version` as in server_version_num (180006)."""

    system_identifier: str
    timeline: int
    version: int
    database: str
    in_recovery: bool
    wal_level: str
    synchronized_standby_slots: str
    wal_sender_timeout_ms: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of pg_replication_slots; positions in bytes, None where the server has none."""

    slot_name: str
    plugin: str | None
    slot_type: str
    database: str | None
    temporary: bool
    active_pid: int | None
    restart_lsn: int | None
    confirmed_flush_lsn: int | None
    wal_status: str | None
    two_phase: bool
    failover: bool
    synced: bool
    invalidation_reason: str | None

    @property
    def ready(self) -> bool:
        """True on a standby when the slot would survive its promotion."""
        return self.synced and not self.temporary and self.invalidation_reason is None


_SLOTS: LiteralString = """
    SELECT slot_name::text, plugin::text, slot_type, database::text, temporary, active_pid,
           (restart_lsn - '0/0')::bigint AS restart_lsn,
           (confirmed_flush_lsn - '0/0')::bigint AS confirmed_flush_lsn,
           wal_status, two_phase, failover, synced, invalidation_reason
      FROM pg_replication_slots
"""


def read_server(connection: Connection) -> Server:
    """Identity, timeline and the settings that replication depends on, from any server >= 9.6.

    The timeline is that of the WAL being written (primary) or replayed (standby).
    """
    row = connection.execute(
        """
        SELECT (SELECT system_identifier::text FROM pg_control_system()),
               CASE WHEN pg_is_in_recovery()
                    THEN (SELECT timeline_id FROM pg_control_checkpoint())
                    ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))
                         ::bit(32)::int
               END,
               current_setting('server_version_num')::int,
               current_database()::text,
               pg_is_in_recovery(),
               current_setting('wal_level'),
               coalesce(current_setting('synchronized_standby_slots', true), ''),
               (SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout')
        """
    ).fetchone()
    assert row is not None
    return Server(*row)


def read_slots(connection: Connection) -> list[Slot]:
    """Every slot of the server, by name (PostgreSQL 17 or newer)."""
    with connection.cursor(row_factory=class_row(Slot)) as cursor:
        return cursor.execute(_SLOTS + " ORDER BY slot_name").fetchall()


def read_slot(connection: Connection, slot: str) -> Slot | None:
    """One slot, or None where there is none of that name."""
    with connection.cursor(row_factory=class_row(Slot)) as cursor:
        return cursor.execute(_SLOTS + " WHERE slot_name = %s", [slot]).fetchone()


def create_failover_slot(connection: Connection, slot: str) -> int:
    """Create a permanent pgoutput slot with failover on; return its confirmed_flush_lsn (bytes).

    The connection must be in autocommit: the function can't run in a transaction that has written.
    """
    row = connection.execute(
        "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput', false, false, true)",
        [slot],
    ).fetchone()
    assert row is not None
    return parse_lsn(row[0])


def origin_exists(connection: Connection, origin: str) -> bool:
    """Whether the replication origin is known to the server."""
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_replication_origin WHERE roname = %s)", [origin]
    ).fetchone()
    return bool(row and row[0])


def create_origin(connection: Connection, origin: str) -> None:
    """Create the replication origin; it travels to standbys in the WAL."""
    connection.execute("SELECT pg_replication_origin_create(%s)", [origin])


def origin_progress(connection: Connection, origin: str) -> int | None:
    """The origin's position in bytes, None where it has never been moved."""
    row = connection.execute(
        "SELECT (pg_replication_origin_progress(%s, true) - '0/0')::bigint", [origin]
    ).fetchone()
    return int(row[0]) if row is not None and row[0] else None


def publication_exists(connection: Connection, publication: str) -> bool:
    """Whether the publication is there."""
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = %s)", [publication]
    ).fetchone()
    return bool(row and row[0])


def create_publication(connection: Connection, publication: str, tables: tuple[str, ...]) -> None:
    """Create the publication for `tables` (`schema.table` each), or for all tables when empty."""
    name = sql.Identifier(publication)
    if tables:
        parts = sql.SQL(", ").join(sql.Identifier(*table.split(".")) for table in tables)
        statement = sql.SQL("CREATE PUBLICATION {} FOR TABLE {}").format(name, parts)
    else:
        statement = sql.SQL("CREATE PUBLICATION {} FOR ALL TABLES").format(name)
    connection.execute(statement)


def setting(connection: Connection, name: str) -> str:
    """A server setting's value, empty where the server does not know it."""
    row = connection.execute("SELECT current_setting(%s, true)", [name]).fetchone()
    return cast("str", row[0]) if row is not None and row[0] is not None else ""
