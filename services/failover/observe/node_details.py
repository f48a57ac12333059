"""Node state that only `check` queries: read once, not at every step.

Source: PostgreSQL documentation 53.9 pg_hba_file_rules, 27.2.4 pg_stat_replication, 9.28.4 Recovery
Control Functions.
"""

from dataclasses import replace
from typing import Any, cast

from psycopg.conninfo import conninfo_to_dict

from schemas.errors import ExitCode, SetupError
from services.failover.model.conninfo import Conninfo
from services.failover.model.node_details import (
    Consumer,
    Elsewhere,
    Follower,
    HbaRule,
    NodeDetails,
    OpenTransaction,
)
from services.failover.model.view import FENCE
from services.failover.observe.server_link import parse_conninfo
from services.postgres.rows import one_row
from services.postgres.server import Connection, SettingValue, read_settings


def may_look(connection: Connection) -> bool:
    """Tell whether our role sees others' settings and activity; if not, hidden ones look absent."""
    row = connection.execute(
        "SELECT pg_has_role('pg_read_all_settings', 'MEMBER')"
        " AND pg_has_role('pg_read_all_stats', 'MEMBER')"
    ).fetchone()
    return bool(row and row[0])


def look(connection: Connection, name: str) -> tuple[NodeDetails, SettingValue | None]:
    """Return the node's details, and primary_conninfo if set. Raise SetupError without rights."""
    if not may_look(connection):
        raise SetupError(
            "our role may not see the settings and activity of others, so nothing can be judged",
            operation="check",
            subject=name,
            hint=f"connect to {name} as a superuser, or GRANT pg_monitor to the role",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
    found = read_settings(connection, ["primary_conninfo"]).get("primary_conninfo")
    around = read_surroundings(connection)
    if found is None or not found.value:
        return around, None
    upstream = parse_conninfo(found.value, subject=f"primary_conninfo of {name}")
    return replace(around, upstream=upstream), found


def read_surroundings(connection: Connection) -> NodeDetails:
    """Read the details of a node (PostgreSQL 17 or newer)."""
    row = one_row(
        connection.execute(
            """
        SELECT ARRAY(SELECT datname::text FROM pg_database WHERE datallowconn)
        """
        )
    )
    return NodeDetails(
        databases=frozenset(row[0]),
        followers=_followers(connection),
        hba=_hba(connection),
        oldest=_oldest(connection),
        consumers=_consumers(connection),
        read_only=_read_only(connection),
    )


def read_elsewhere(connection: Connection) -> tuple[Elsewhere, ...]:
    """Return the subscriptions of the server's other databases; all share pg_subscription."""
    rows = connection.execute(
        """
        SELECT d.datname::text, s.subname::text, s.subconninfo
          FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid
         WHERE d.datname <> current_database() ORDER BY 1, 2
        """
    ).fetchall()
    return tuple(
        Elsewhere(database, name, None if text is None else Conninfo.of(conninfo_to_dict(text)))
        for database, name, text in rows
    )


def _consumers(connection: Connection) -> tuple[Consumer, ...]:
    """Return the connected consumers of logical slots."""
    rows = connection.execute(
        """
        SELECT s.slot_name::text, s.database::text, r.usename::text,
               coalesce(host(r.client_addr), ''), coalesce(l.ssl, false)
          FROM pg_stat_replication r
          JOIN pg_replication_slots s ON s.active_pid = r.pid AND s.slot_type = 'logical'
          LEFT JOIN pg_stat_ssl l ON l.pid = r.pid
         ORDER BY 1
        """
    ).fetchall()
    return tuple(Consumer(*row) for row in rows)


def _read_only(connection: Connection) -> bool | None:
    """Tell whether transactions of others are read-only by default, None if that is unknown.

    Our own session overrides the setting, so that reset_val tells, unless our role or database has
    a setting of its own.
    """
    row = connection.execute(
        """
        SELECT reset_val = 'on', EXISTS (
                 SELECT FROM pg_db_role_setting, unnest(setconfig) item
                  WHERE lower(split_part(item, '=', 1)) = name
                    AND setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = current_user))
                    AND setdatabase IN (0, (SELECT oid FROM pg_database
                                             WHERE datname = current_database())))
          FROM pg_settings WHERE name = %s
        """,
        [FENCE],
    ).fetchone()
    return None if row is None or row[1] else bool(row[0])


def _followers(connection: Connection) -> tuple[Follower, ...]:
    """Return the connected standbys that use physical slots."""
    rows = connection.execute(
        """
        SELECT r.application_name, s.slot_name::text, r.usename::text,
               coalesce(host(r.client_addr), ''), coalesce(l.ssl, false)
          FROM pg_stat_replication r
          JOIN pg_replication_slots s ON s.active_pid = r.pid AND s.slot_type = 'physical'
          LEFT JOIN pg_stat_ssl l ON l.pid = r.pid
         ORDER BY s.slot_name
        """
    ).fetchall()
    return tuple(Follower(*row) for row in rows)


def _hba(connection: Connection) -> tuple[HbaRule, ...] | None:
    """Return the rules of pg_hba.conf, None where our role may not read them."""
    may = connection.execute(
        "SELECT has_function_privilege('pg_hba_file_rules()', 'EXECUTE')"
    ).fetchone()
    if not (may and may[0]):
        return None
    rows: list[tuple[Any, ...]] = connection.execute(
        """
        SELECT line_number, coalesce(type, ''), coalesce(database, '{}'), coalesce(user_name, '{}'),
               coalesce(address, ''), coalesce(netmask, ''), coalesce(auth_method, ''),
               error IS NOT NULL
          FROM pg_hba_file_rules ORDER BY rule_number NULLS LAST, line_number
        """
    ).fetchall()
    return tuple(HbaRule(row[0], row[1], tuple(row[2]), tuple(row[3]), *row[4:]) for row in rows)


def _oldest(connection: Connection) -> OpenTransaction | None:
    """Return the primary's oldest transaction that has an xid, also a prepared one."""
    row = connection.execute(
        """
        SELECT pid, gid, to_char(since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') FROM (
            SELECT pid, '' AS gid, xact_start AS since FROM pg_stat_activity
             WHERE backend_xid IS NOT NULL AND xact_start IS NOT NULL
             UNION ALL
            SELECT 0, gid, prepared FROM pg_prepared_xacts
        ) open WHERE NOT pg_is_in_recovery() ORDER BY since LIMIT 1
        """
    ).fetchone()
    return OpenTransaction(*cast("tuple[int, str, str]", row)) if row is not None else None
