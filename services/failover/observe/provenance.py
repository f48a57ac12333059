"""The identity of a server and of its WAL, read in one statement.

The history of a timeline is read in the first way that our role has:

    pg_read_file                     superusers
    TIMELINE_HISTORY                 roles with REPLICATION, over a connection of its own
    slotfailover.timeline_history()  made by sql/roles.sql, owned by a superuser

Where it has none the history is unknown, which is never the same as "it did not branch off".
Source: PostgreSQL documentation 27.2.4 pg_stat_replication, 54.4 TIMELINE_HISTORY; walreceiver.c.
"""

import contextlib

import psycopg
from psycopg.generators import execute
from psycopg.pq import ExecStatus

from services.failover.model.timelines import Feeding, History, Provenance, parse_history
from services.postgres.rows import one_row
from services.postgres.server import Connection
from services.postgres.sessions import HISTORY, open_session

_DEADLINE_S = 5.0


def read_provenance(connection: Connection) -> Provenance:
    """Read all of a server's provenance but the history, which `read_history` reads."""
    row = one_row(
        connection.execute(
            """
        SELECT extract(epoch FROM pg_postmaster_start_time())::text,
               ARRAY(SELECT ARRAY[coalesce(s.slot_name, ''), r.application_name]::text[]
                       FROM pg_stat_replication r
                       LEFT JOIN pg_replication_slots s ON s.active_pid = r.pid
                      WHERE r.state IN ('streaming', 'catchup')
                        AND s.slot_type IS DISTINCT FROM 'logical'),
               (SELECT ARRAY[coalesce(w.slot_name, ''), coalesce(w.received_tli, 0)::text,
                             coalesce(w.sender_host, ''), coalesce(w.sender_port, 0)::text]
                  FROM pg_stat_wal_receiver w WHERE w.status = 'streaming'),
               ARRAY(SELECT DISTINCT application_name FROM pg_stat_activity
                      WHERE application_name ILIKE 'patroni%%'
                         OR application_name ILIKE 'cnpg%%'
                         OR application_name ILIKE 'repmgrd%%' ORDER BY 1),
               ARRAY(SELECT rolname::text FROM pg_roles
                      WHERE rolname IN ('streaming_replica', 'rdsadmin', 'cloudsqladmin', 'azuresu',
                                        'repmgr', 'pgautofailover_replicator') ORDER BY 1),
               current_setting('cluster_name')
        """,
            prepare=True,
        )
    )
    started, feeds, fed, applications, roles, cluster = row
    return Provenance(
        started=started,
        feeds=tuple(Feeding(slot, application) for slot, application in feeds),
        fed=None
        if fed is None
        else Feeding(fed[0], cluster, int(fed[1]), fed[2], "" if fed[3] == "0" else fed[3]),
        managers=_managers(applications, roles),
    )


def read_newest_segment(connection: Connection) -> int:
    """Return the newest timeline of which a standby has WAL, 0 where our role can't list it.

    After its primary is gone, a standby tells of no newer timeline than its last restart point's.
    """
    may = connection.execute("SELECT has_function_privilege('pg_ls_waldir()', 'EXECUTE')")
    if may.fetchone() != (True,):
        return 0
    row = connection.execute(
        "SELECT coalesce(max(('x' || substr(name, 1, 8))::bit(32)::int), 0) FROM pg_ls_waldir()"
        " WHERE name ~ '^[0-9A-F]{24}$'"
    ).fetchone()
    return int(row[0]) if row is not None else 0


def read_history(connection: Connection, timeline: int) -> tuple[bool, History | None]:
    """Return whether our role may read histories, and that of `timeline` (None: unavailable)."""
    row = one_row(
        connection.execute(
            """
        SELECT has_function_privilege('pg_read_file(text, boolean)', 'EXECUTE'),
               (SELECT rolreplication FROM pg_roles WHERE rolname = current_user),
               coalesce((SELECT r.rolsuper AND has_function_privilege(p.oid, 'EXECUTE')
                                AND has_schema_privilege(p.pronamespace, 'USAGE')
                           FROM pg_proc p
                           JOIN pg_roles r ON r.oid = p.proowner
                           JOIN pg_namespace n ON n.oid = p.pronamespace
                          WHERE n.nspname = 'slotfailover' AND p.proname = 'timeline_history'
                            AND p.proargtypes[0] = 'int4'::regtype AND p.pronargs = 1), false)
        """
        )
    )
    files, replication, function = row
    may = bool(files or replication or function)
    if timeline == 1:
        return may, ()
    text: str | None = None
    if files:
        text = _value(connection, "SELECT pg_read_file(%s, true)", f"pg_wal/{timeline:08X}.history")
    elif function:
        text = _value(connection, "SELECT slotfailover.timeline_history(%s)", timeline)
    elif replication:
        with contextlib.suppress(psycopg.Error):  # no walsender to be had: the history is unknown
            text = _over_replication(connection, timeline)
    else:
        return False, None
    return may, parse_history(text) if text is not None else None


def _value(connection: Connection, query: str, argument: str | int) -> str | None:
    row = connection.execute(query, [argument]).fetchone()  # type: ignore[arg-type, unused-ignore]
    return row[0] if row is not None else None


def _over_replication(connection: Connection, timeline: int) -> str | None:
    """Read a history by the replication protocol.

    pg_hba.conf judges this connection as one to the same database.
    """
    with open_session(
        HISTORY,
        connection.info.dsn,
        password=connection.info.password or None,
        connect_timeout=3,
    ) as walsender:
        walsender.deadline_s = _DEADLINE_S
        walsender.pgconn.send_query(f"TIMELINE_HISTORY {timeline}".encode())
        results = walsender.wait(execute(walsender.pgconn))
        found = results[0] if results else None
        if found is None or found.status != ExecStatus.TUPLES_OK:
            return None
        content = found.get_value(0, 1)
        return content.decode() if content is not None else None


def _managers(applications: list[str], roles: list[str]) -> tuple[str, ...]:
    """Return the managers that seem to manage this server, each with its evidence."""
    names = {"patroni": "Patroni", "cnpg": "CloudNativePG", "repmgrd": "repmgr"}
    owners = {
        "streaming_replica": "CloudNativePG",
        "rdsadmin": "Amazon RDS",
        "cloudsqladmin": "Google Cloud SQL",
        "azuresu": "Azure Database",
        "repmgr": "repmgr",
        "pgautofailover_replicator": "pg_auto_failover",
    }
    found = {
        manager: f"{manager} (a session of {application})"
        for application in applications
        for start, manager in names.items()
        if application.lower().startswith(start)
    }
    for role in roles:
        found.setdefault(owners[role], f"{owners[role]} (the role {role})")
    return tuple(found.values())
