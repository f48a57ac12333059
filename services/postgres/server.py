"""Servers and their settings, as typed rows."""

from dataclasses import dataclass
from typing import Any, Final, LiteralString, cast

import psycopg
from psycopg.rows import class_row

from services.postgres.rows import one_row

Connection = psycopg.Connection[tuple[Any, ...]]
NEWEST_TRIED: Final = 19
"""The newest major version of PostgreSQL that the tests have run on."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    effective_wal_level: str = ""
    """Whether logical slots have raised wal_level (PostgreSQL 19); "" on older servers."""

    @property
    def may_decode(self) -> bool:
        """Whether logical slots can be made and used."""
        return logical_decoding(self.wal_level, self.effective_wal_level)


_SERVER: LiteralString = """
    SELECT (SELECT system_identifier::text FROM pg_control_system()) AS system_identifier,
           CASE WHEN pg_is_in_recovery()
                THEN (SELECT greatest(timeline_id, received_tli) FROM pg_control_checkpoint()
                      LEFT JOIN pg_stat_wal_receiver ON true)
                ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))
                     ::bit(32)::int
           END AS timeline,
           current_setting('server_version_num')::int AS version,
           current_database()::text AS database,
           pg_is_in_recovery() AS in_recovery,
           current_setting('wal_level') AS wal_level,
           coalesce(current_setting('synchronized_standby_slots', true), '')
           AS synchronized_standby_slots,
           (SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout')
           AS wal_sender_timeout_ms,
           coalesce(current_setting('effective_wal_level', true), '') AS effective_wal_level
"""


def logical_decoding(wal_level: str, effective: str) -> bool:
    """Tell whether logical slots can be made and used with these levels; `effective` "": unknown.

    A server that has effective_wal_level (PostgreSQL 19) raises `replica` by itself with its first
    logical slot. A standby takes the level of its primary. Source: logicalctl.c.
    """
    return "logical" in (wal_level, effective) or (effective != "" and wal_level == "replica")


def untried_version(version: int) -> str:
    """Return what to say of a server newer than NEWEST_TRIED, "" for others."""
    major = version // 10000
    if major <= NEWEST_TRIED:
        return ""
    return f"PostgreSQL {major} is newer than {NEWEST_TRIED}, the newest that was tried"


def read_server(connection: Connection) -> Server:
    """Read identity, timeline and settings for replication, from any server >= 9.6.

    The timeline is that of the WAL being written (primary) or received (standby).
    """
    with connection.cursor(row_factory=class_row(Server)) as cursor:
        return one_row(cursor.execute(_SERVER))


def is_synchronous_standby(connection: Connection, application_name: str) -> bool:
    """Tell whether commits wait, or may come to wait, for the walsender of that name."""
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_stat_replication"
        " WHERE application_name = %s AND sync_state <> 'async')",
        [application_name],
    ).fetchone()
    return bool(row and row[0])


def setting(connection: Connection, name: str) -> str:
    """Return a server setting's value, "" where the server does not know it."""
    row = connection.execute("SELECT current_setting(%s, true)", [name]).fetchone()
    return cast("str", row[0]) if row is not None and row[0] is not None else ""


@dataclass(frozen=True, slots=True)
class SettingValue:
    """A setting and where it came from (`pg_settings.source`, e.g. `command line`)."""

    value: str
    source: str


def read_received(connection: Connection) -> int | None:
    """Return how far a standby has the WAL (bytes), None on a primary; cheaper than read_slots."""
    row = connection.execute(
        "SELECT greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) - '0/0'"
        " WHERE pg_is_in_recovery()"
    ).fetchone()
    return int(row[0]) if row is not None and row[0] is not None else None


def written_lsn(connection: Connection) -> int:
    """Return how far a primary has flushed its WAL (bytes)."""
    row = one_row(connection.execute("SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint"))
    return int(row[0])


def read_settings(connection: Connection, names: list[str]) -> dict[str, SettingValue]:
    """Return the settings of these names, without those that the server lacks or hides."""
    rows = connection.execute(
        "SELECT name, setting, source FROM pg_settings WHERE name = ANY(%s)", [names]
    ).fetchall()
    return {name: SettingValue(value, source) for name, value, source in rows}
