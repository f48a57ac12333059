"""Sessions that may write on a fenced primary: those that a fence ends, and those that it can't.

A fence is `default_transaction_read_only`. It binds every transaction that begins after it, but not
sessions that are in one, or have set it for themselves: those are ended. It does not bind what
`read_leaks` lists; a primary with such must be stopped before another is promoted.
"""

from typing import LiteralString

from services.failover.model.view import FENCE, FENCE_MARK
from services.postgres.server import Connection

COMMAND_LOCK = 0x510_7FA_110
"""The number of the advisory lock that keeps two commands apart."""
_BEFORE: LiteralString = """
      FROM pg_stat_activity a
     WHERE (backend_type = 'client backend' AND backend_start <= pg_conf_load_time()
            OR datid IS NOT NULL AND xact_start <= pg_conf_load_time() AND backend_type NOT IN
               ('client backend', 'walsender', 'parallel worker', 'autovacuum worker',
                'logical replication apply worker', 'logical replication tablesync worker',
                'logical replication parallel worker', 'slotsync worker'))
       AND pid <> pg_backend_pid()
       AND NOT (a.xact_start IS NULL AND EXISTS (
                SELECT FROM pg_locks l
                 WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.granted
                   AND (l.classid::bigint << 32) + l.objid::bigint = %(lock)s))
       AND NOT (a.application_name = 'slotbridge'
                AND (a.xact_start IS NULL OR a.xact_start > pg_conf_load_time())
                AND EXISTS (SELECT FROM pg_stat_activity w
                              JOIN pg_replication_slots s ON s.active_pid = w.pid
                             WHERE s.slot_name = %(slot)s AND w.usesysid = a.usesysid
                               AND w.client_addr IS NOT DISTINCT FROM a.client_addr))
"""
_LEAKS: LiteralString = """
    SELECT CASE WHEN setrole = 0 THEN 'the database ' || d.datname
                WHEN setdatabase = 0 THEN 'the role ' || r.rolname
                ELSE 'the role ' || r.rolname || ' in the database ' || d.datname END
           || ' has a ' || split_part(item, '=', 1) || ' of its own'
      FROM pg_db_role_setting s
      CROSS JOIN unnest(setconfig) item
      LEFT JOIN pg_roles r ON r.oid = setrole
      LEFT JOIN pg_database d ON d.oid = setdatabase
     WHERE lower(split_part(item, '=', 1)) = %(mark)s
        OR (lower(split_part(item, '=', 1)) = %(fence)s
            AND lower(split_part(item, '=', 2)) NOT IN ('on', 'true', 'yes', '1', 't', 'y'))
    UNION ALL
    SELECT 'the prepared transaction ' || gid || ' in ' || database FROM pg_prepared_xacts
    UNION ALL
    SELECT 'the subscription ' || subname || ' in ' || datname
      FROM pg_subscription JOIN pg_database d ON d.oid = subdbid WHERE subenabled
"""

_FENCE: LiteralString = """
    SELECT CASE WHEN (reset_val = 'on' OR EXISTS (
                        SELECT FROM pg_db_role_setting, unnest(setconfig) item
                         WHERE lower(split_part(item, '=', 1)) = %(fence)s
                           AND setrole IN (0, (SELECT oid FROM pg_roles
                                                WHERE rolname = current_user))
                           AND setdatabase IN (0, (SELECT oid FROM pg_database
                                                    WHERE datname = current_database()))))
                 AND NOT EXISTS (
                        SELECT FROM pg_db_role_setting, unnest(setconfig) item
                         WHERE lower(split_part(item, '=', 1)) = %(mark)s)
                THEN coalesce(current_setting(%(mark)s, true), '') ELSE '' END,
           reset_val = 'on' AND NOT EXISTS (
                        SELECT FROM pg_db_role_setting, unnest(setconfig) item
                         WHERE lower(split_part(item, '=', 1)) = %(fence)s),
           CASE WHEN NOT pg_is_in_recovery()
                THEN pg_snapshot_xmax(pg_current_snapshot())::text::bigint END,
           (SELECT s.source  -- as it is without our session's own value, which NULL takes away
              FROM (SELECT set_config(%(fence)s, NULL, true)) r (given), LATERAL (
                   SELECT source FROM pg_settings WHERE name = %(fence)s AND given IS NOT NULL) s)
      FROM pg_settings WHERE name = %(fence)s
"""


def sessions_before_reload(connection: Connection, slot: str | None = None) -> int:
    """Count the client sessions that began before the settings were last read: they may write.

    Two kinds are not counted, told by what they hold and not by their names: sessions of commands
    that have the lock; and the bridge's, of the role and address that use its `slot`, between
    transactions.
    """
    row = connection.execute("SELECT count(*)" + _BEFORE, _given(slot)).fetchone()
    return int(row[0]) if row else 0


def end_sessions_before_reload(connection: Connection, slot: str | None = None) -> None:
    """Terminate what `sessions_before_reload` counts."""
    connection.execute("SELECT pg_terminate_backend(pid)" + _BEFORE, _given(slot))


def read_leaks(connection: Connection) -> tuple[str, ...]:
    """Return the sessions and settings that could write in spite of a fence of this primary."""
    rows = connection.execute(_LEAKS, {"mark": FENCE_MARK, "fence": FENCE}).fetchall()
    return tuple(sorted(row[0] for row in rows))


def read_fence(connection: Connection) -> tuple[str, bool, int | None, str]:
    """Return our fence's mark, whether one is in effect, the next transaction id, and the source.

    The mark is "" without a fence of ours. The second value tells whether the server's own
    configuration makes transactions read-only, whoever set it. The third is None on a standby.

    The mark counts only while the setting beside it is in effect, and where no role or database has
    a mark of its own. Our own sessions override the setting, so that its reset_val tells: unless
    our own role or database sets it. What other roles have says nothing of the server.
    """
    row = connection.execute(_FENCE, {"mark": FENCE_MARK, "fence": FENCE}).fetchone()
    return (row[0], row[1], row[2], row[3]) if row is not None else ("", False, None, "")


def _given(slot: str | None) -> dict[str, object]:
    return {"lock": COMMAND_LOCK, "slot": slot or ""}
