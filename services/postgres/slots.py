"""Replication slots and their statistics, as typed rows.

Source: PostgreSQL documentation 53.20 pg_replication_slots, 9.28.6 Replication Management
Functions, 54.4 Streaming Replication Protocol.
"""

from dataclasses import dataclass
from typing import LiteralString

from psycopg.rows import class_row

from services.postgres.server import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
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
    safe_wal_size: int | None = None
    """Bytes that can be written before the slot may be lost; None without a limit."""
    inactive_since: str | None = None
    """UTC. Of a synchronized copy: when it was last synchronized."""
    xmin_age: int | None = None
    """How many transactions ago the oldest row version began that VACUUM keeps for the slot."""
    catalog_xmin_age: int | None = None
    """The same for rows of system catalogs."""
    slotsync_skip_reason: str | None = None
    """Of a copy: why it was not synchronized the last time (PostgreSQL 19)."""

    @property
    def ready(self) -> bool:
        """True on a standby when the slot would survive its promotion."""
        return self.synced and not self.temporary and self.invalidation_reason is None

    @property
    def of_repack(self) -> bool:
        """True for the slot of a REPACK (CONCURRENTLY), read by its own session (PostgreSQL 19).

        Source: repack.c; the slot is temporary and named pg_repack_PID.
        """
        return self.plugin == "pgrepack"

    @property
    def of_server(self) -> bool:
        """True for a slot of the server's own, which no standby or consumer moves (PostgreSQL 19).

        `pg_conflict_detection` is kept for retain_dead_tuples of subscriptions: its name is
        reserved, and nobody may drop it (slot.c).
        """
        return self.of_repack or self.slot_name == "pg_conflict_detection"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatistics:
    """A row of pg_stat_replication_slots: what decoding for a slot took since `reset_s`."""

    spill_txns: int
    spill_count: int
    spill_bytes: int
    stream_txns: int
    stream_count: int
    stream_bytes: int
    total_txns: int
    total_bytes: int
    reset_s: float | None
    """Unix time; None where the statistics were never reset."""


_SLOTS: LiteralString = """
    SELECT slot_name::text, plugin::text, slot_type, database::text, temporary, active_pid,
           (restart_lsn - '0/0')::bigint AS restart_lsn,
           (confirmed_flush_lsn - '0/0')::bigint AS confirmed_flush_lsn,
           wal_status, two_phase, failover, synced, invalidation_reason, safe_wal_size,
           to_char(inactive_since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
           AS inactive_since,
           age(xmin) AS xmin_age, age(catalog_xmin) AS catalog_xmin_age,
           to_jsonb(s) ->> 'slotsync_skip_reason' AS slotsync_skip_reason
      FROM pg_replication_slots s
"""


def read_slots(connection: Connection) -> list[Slot]:
    """Read every slot of the server, by name (PostgreSQL 17 or newer)."""
    with connection.cursor(row_factory=class_row(Slot)) as cursor:
        return cursor.execute(_SLOTS + " ORDER BY slot_name").fetchall()


def read_slot(connection: Connection, slot: str) -> Slot | None:
    """Read one slot, None where there is none of that name."""
    with connection.cursor(row_factory=class_row(Slot)) as cursor:
        return cursor.execute(_SLOTS + " WHERE slot_name = %s", [slot]).fetchone()


def read_slot_statistics(connection: Connection, slot: str) -> SlotStatistics | None:
    """Return the server's statistics of a logical slot, None where it has none of that name."""
    with connection.cursor(row_factory=class_row(SlotStatistics)) as cursor:
        return cursor.execute(
            "SELECT spill_txns, spill_count, spill_bytes, stream_txns, stream_count, stream_bytes,"
            " total_txns, total_bytes, extract(epoch FROM stats_reset)::float8 AS reset_s"
            " FROM pg_stat_replication_slots WHERE slot_name = %s",
            [slot],
        ).fetchone()


def withheld_by(connection: Connection, application_name: str) -> tuple[str, ...]:
    """Return why a walsender sends no commits: `slot: state` of the standbys that it awaits.

    Empty while it awaits none. A standby that is only behind is named if no other is the cause.
    Source: slot.c, StandbySlotsHaveCaughtup; the event is WaitForStandbyConfirmation.
    """
    rows = connection.execute(
        """
        SELECT listed.name, s.slot_name IS NOT NULL AND s.active AND s.slot_type = 'physical',
               CASE WHEN s.slot_name IS NULL THEN 'there is no such slot'
                    WHEN s.slot_type <> 'physical' THEN 'it is not a physical slot'
                    WHEN s.invalidation_reason IS NOT NULL THEN 'it is invalidated'
                    WHEN NOT s.active THEN 'no standby is connected'
                    ELSE 'the standby is behind' END
          FROM pg_stat_activity a,
               unnest(string_to_array(current_setting('synchronized_standby_slots'), ',')) entry,
               trim(entry, ' "') listed (name)
          LEFT JOIN pg_replication_slots s ON s.slot_name = listed.name
         WHERE a.application_name = %s AND a.wait_event = 'WaitForStandbyConfirmation'
        """,
        [application_name],
    ).fetchall()
    causes = [row for row in rows if not row[1]] or rows
    return tuple(f"{name}: {state}" for name, _connected, state in causes)
