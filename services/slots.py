"""The SQL about servers, slots, publications and origins, as typed rows.

Source: PostgreSQL documentation 53.20 pg_replication_slots, 9.28.6 Replication Management
Functions, 54.4 Streaming Replication Protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, LiteralString, cast

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from schemas.lsn import parse_lsn

Connection = psycopg.Connection[tuple[Any, ...]]


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


@dataclass(frozen=True, slots=True)
class PrimaryKey:
    """A table's primary key as it is now, `columns` empty where there is none; xids of 32 bits.

    `made_by` has made its index, `table_made_by` the table, `next_xid` is not yet given out.
    """

    columns: Sequence[str]
    made_by: int
    table_made_by: int
    next_xid: int


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

    @property
    def ready(self) -> bool:
        """True on a standby when the slot would survive its promotion."""
        return self.synced and not self.temporary and self.invalidation_reason is None


_SLOTS: LiteralString = """
    SELECT slot_name::text, plugin::text, slot_type, database::text, temporary, active_pid,
           (restart_lsn - '0/0')::bigint AS restart_lsn,
           (confirmed_flush_lsn - '0/0')::bigint AS confirmed_flush_lsn,
           wal_status, two_phase, failover, synced, invalidation_reason, safe_wal_size,
           to_char(inactive_since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
           AS inactive_since,
           age(xmin) AS xmin_age, age(catalog_xmin) AS catalog_xmin_age
      FROM pg_replication_slots
"""


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
           AS wal_sender_timeout_ms
"""


def read_server(connection: Connection) -> Server:
    """Identity, timeline and the settings that replication depends on, from any server >= 9.6.

    The timeline is that of the WAL being written (primary) or received (standby).
    """
    with connection.cursor(row_factory=class_row(Server)) as cursor:
        server = cursor.execute(_SERVER).fetchone()
    assert server is not None
    return server


def read_slots(connection: Connection) -> list[Slot]:
    """Every slot of the server, by name (PostgreSQL 17 or newer)."""
    with connection.cursor(row_factory=class_row(Slot)) as cursor:
        return cursor.execute(_SLOTS + " ORDER BY slot_name").fetchall()


def read_slot(connection: Connection, slot: str) -> Slot | None:
    """One slot, or None where there is none of that name."""
    with connection.cursor(row_factory=class_row(Slot)) as cursor:
        return cursor.execute(_SLOTS + " WHERE slot_name = %s", [slot]).fetchone()


def create_failover_slot(connection: Connection, slot: str, *, two_phase: bool = False) -> int:
    """Create a permanent pgoutput slot with failover on; return its confirmed_flush_lsn (bytes).

    The connection must be in autocommit: the function can't run in a transaction that has written.
    """
    row = connection.execute(
        "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput', false, %s, true)",
        [slot, two_phase],
    ).fetchone()
    assert row is not None
    return parse_lsn(row[0])


def origin_exists(connection: Connection, origin: str) -> bool:
    """Whether the replication origin is known to the server."""
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_replication_origin WHERE roname = %s)", [origin]
    ).fetchone()
    return bool(row and row[0])


def is_synchronous_standby(connection: Connection, application_name: str) -> bool:
    """Whether commits wait, or may come to wait, for the walsender of that name."""
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_stat_replication"
        " WHERE application_name = %s AND sync_state <> 'async')",
        [application_name],
    ).fetchone()
    return bool(row and row[0])


def withheld_by(connection: Connection, application_name: str) -> tuple[str, ...]:
    """Why the walsender of that name sends no commits: `slot: state` of the standbys it awaits.

    Empty while it awaits none. Those that are only behind are told where no other is the cause.
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


def create_origin(connection: Connection, origin: str) -> None:
    """Create the replication origin; it travels to standbys in the WAL."""
    connection.execute("SELECT pg_replication_origin_create(%s)", [origin])


def origin_progress(connection: Connection, origin: str) -> int | None:
    """The origin's position in bytes, None where it has never been moved."""
    row = connection.execute(
        "SELECT (pg_replication_origin_progress(%s, true) - '0/0')::bigint", [origin]
    ).fetchone()
    return int(row[0]) if row is not None and row[0] else None


def publication_oid(connection: Connection, publication: str) -> int | None:
    """The publication's oid, which another one of the same name has not; None: there is none."""
    row = connection.execute(
        "SELECT oid::bigint FROM pg_publication WHERE pubname = %s", [publication]
    ).fetchone()
    return int(row[0]) if row is not None else None


def create_publication(connection: Connection, publication: str, tables: tuple[str, ...]) -> None:
    """Create the publication for `tables` (`schema.table` each), or for all tables when empty."""
    name = sql.Identifier(publication)
    if tables:
        parts = sql.SQL(", ").join(sql.Identifier(*table.split(".")) for table in tables)
        statement = sql.SQL("CREATE PUBLICATION {} FOR TABLE {}").format(name, parts)
    else:
        statement = sql.SQL("CREATE PUBLICATION {} FOR ALL TABLES").format(name)
    connection.execute(statement)


def published_columns(
    connection: Connection, publication: str
) -> dict[tuple[str, str], tuple[str, ...]]:
    """(schema, table) -> its published columns, of every table in the publication.

    As pg_publication_tables has it, but from the catalogs alone: that view opens every table, and
    so waits for whoever has locked one, who may wait for the bridge (synchronous_standby_names).
    Source: pg_publication.c, pg_get_publication_tables.
    """
    rows = connection.execute(_PUBLISHED, [publication]).fetchall()
    return {(schema, table): tuple(columns) for schema, table, columns in rows}


_PUBLISHED: LiteralString = """
    WITH RECURSIVE chosen AS (
      SELECT oid, puballtables, pubviaroot,
             coalesce(to_jsonb(p) ->> 'pubgencols', 'n') = 's' AS generated
        FROM pg_publication p WHERE pubname = %s
    ), listed (relid, columns) AS (
      SELECT r.prrelid, r.prattrs::int2[] FROM pg_publication_rel r JOIN chosen p ON p.oid = prpubid
       UNION ALL
      SELECT c.oid, NULL FROM chosen p JOIN pg_publication_namespace n ON n.pnpubid = p.oid
        JOIN pg_class c ON c.relnamespace = n.pnnspid
       UNION ALL
      SELECT c.oid, NULL FROM chosen p JOIN pg_class c ON p.puballtables
    ), below (relid, columns, root) AS (
      SELECT relid, columns, relid FROM listed
       UNION ALL
      SELECT i.inhrelid, b.columns, b.root FROM below b
        JOIN pg_class parent ON parent.oid = b.relid AND parent.relkind = 'p'
        JOIN pg_inherits i ON i.inhparent = b.relid
    )
    SELECT DISTINCT ON (c.oid) n.nspname::text, c.relname::text,
           ARRAY(SELECT a.attname::text FROM pg_attribute a
                  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                    AND CASE WHEN b.columns IS NOT NULL THEN a.attnum = ANY (b.columns)
                             ELSE a.attgenerated = '' OR p.generated AND a.attgenerated = 's' END
                  ORDER BY a.attnum)
      FROM chosen p, below b JOIN pg_class c ON c.oid = b.relid
      JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
       AND CASE WHEN p.pubviaroot THEN NOT EXISTS (
                     SELECT FROM below other WHERE other.relid = c.oid AND other.root <> c.oid)
                ELSE c.relkind = 'r' END
     ORDER BY c.oid, b.root <> c.oid
"""


def primary_key(connection: Connection, relation_oid: int) -> PrimaryKey | None:
    """The primary key of a table as it is now, None when there is no such table.

    One that is DEFERRABLE is none: two rows may have it at a time, within a transaction.
    pg_attribute's rows of `ctid` and of an index's column are written once, with the relation.
    """
    with connection.cursor(row_factory=class_row(PrimaryKey)) as cursor:
        cursor.execute(
            """
            SELECT coalesce(k.columns, '{}') AS columns,
                   coalesce(made.xmin::text::bigint, 0) AS made_by,
                   born.xmin::text::bigint AS table_made_by,
                   (pg_snapshot_xmax(pg_current_snapshot())::text::numeric %% 4294967296)::bigint
                     AS next_xid
              FROM pg_attribute born
              LEFT JOIN pg_index i ON i.indrelid = born.attrelid AND i.indisprimary
                                  AND i.indimmediate
              LEFT JOIN pg_attribute made ON made.attrelid = i.indexrelid AND made.attnum = 1
              LEFT JOIN LATERAL (
                    SELECT array_agg(a.attname::text) AS columns
                      FROM pg_attribute a
                     WHERE a.attrelid = i.indrelid
                       AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])) k ON true
             WHERE born.attrelid = %s::oid AND born.attname = 'ctid' AND born.attnum < 0
            """,
            [relation_oid],
        )
        return cursor.fetchone()


def setting(connection: Connection, name: str) -> str:
    """A server setting's value, empty where the server does not know it."""
    row = connection.execute("SELECT current_setting(%s, true)", [name]).fetchone()
    return cast("str", row[0]) if row is not None and row[0] is not None else ""


@dataclass(frozen=True, slots=True)
class SettingValue:
    """A setting and where it came from (`pg_settings.source`, e.g. `command line`)."""

    value: str
    source: str


def read_received(connection: Connection) -> int | None:
    """The WAL that a standby has (bytes), None on a primary: cheaper than read_slots."""
    row = connection.execute(
        "SELECT greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) - '0/0'"
        " WHERE pg_is_in_recovery()"
    ).fetchone()
    return int(row[0]) if row is not None and row[0] is not None else None


def written_lsn(connection: Connection) -> int:
    """The WAL that a primary has flushed (bytes)."""
    row = connection.execute("SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint").fetchone()
    assert row is not None
    return int(row[0])


def read_settings(connection: Connection, names: list[str]) -> dict[str, SettingValue]:
    """The settings of these names; one that the server lacks or hides from this role is absent."""
    rows = connection.execute(
        "SELECT name, setting, source FROM pg_settings WHERE name = ANY(%s)", [names]
    ).fetchall()
    return {name: SettingValue(value, source) for name, value, source in rows}


def read_origins(connection: Connection) -> dict[str, int]:
    """Every replication origin that has been moved -> its position in bytes."""
    rows = connection.execute(
        "SELECT external_id, (remote_lsn - '0/0')::bigint FROM pg_replication_origin_status"
        " WHERE external_id IS NOT NULL AND remote_lsn > '0/0'"
    ).fetchall()
    return {name: int(lsn) for name, lsn in rows}
