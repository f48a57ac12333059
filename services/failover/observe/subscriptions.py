"""The SQL about subscriptions, as typed rows; the role must be a superuser."""

from dataclasses import dataclass
from typing import Any, Final

from services.failover.model.conninfo import Endpoint, is_private
from services.failover.model.subscription import Subscription
from services.failover.observe.foreign_servers import ForeignServer, read_foreign_servers
from services.failover.observe.server_link import parse_conninfo
from services.postgres.server import Connection

_JUST_STARTED_S: Final = 10.0
"""Twice the default of wal_retrieve_retry_interval, which the launcher waits between workers."""


@dataclass(frozen=True, slots=True, repr=False)
class SubscriptionRow:
    """A subscription of the connected database. `subconninfo` may hold a password: no repr."""

    oid: int
    subname: str
    subenabled: bool
    subconninfo: str | None
    """None where it connects by a foreign server."""
    subslotname: str | None
    subfailover: bool
    comment: str | None
    remote_lsn: int | None
    """How far its origin `pg_<oid>` has come: the end of the last transaction applied."""
    worker_pid: int | None
    sync_slots: tuple[str, ...]
    """Slots of initial table copies that still have to catch up (state `f`)."""
    copying: tuple[tuple[str, str], ...]
    """(table, srsubstate) of every initial copy that is not finished."""
    fed: bool
    """The worker has had a message since it was started: it is connected, or was until now."""
    heard_age_s: float | None
    """Seconds since the apply worker's last message."""
    as_marked: bool
    """One transaction wrote both its row and its comment, and nobody has written either since."""
    worker_age_s: float | None
    """Seconds since the apply worker was started, 0 if it has just ended; None without one, or
    where it is hidden."""
    errors: int
    """Apply workers that ended with an error since the statistics were reset."""
    changeable: bool
    """We have its owner's rights; without password_required, only a superuser may change it."""
    server: ForeignServer | None
    """The foreign server by which it connects."""


def may_read_subscriptions(connection: Connection) -> bool:
    """Tell whether this role may see where subscriptions lead, and who last changed them."""
    row = connection.execute(
        "SELECT has_column_privilege('pg_subscription', 'subconninfo', 'SELECT')"
        " AND has_column_privilege('pg_subscription', 'xmin', 'SELECT')"
        " AND has_function_privilege('pg_show_replication_origin_status()', 'EXECUTE')"
    ).fetchone()
    return bool(row and row[0])


def read_subscriptions(connection: Connection) -> list[SubscriptionRow]:
    """Read every subscription of the connected database, by name (PostgreSQL 17 or newer).

    Source: PostgreSQL documentation 52.54 pg_subscription, 29.3 Logical Replication Failover. The
    role must be a superuser (see `may_read_subscriptions`).
    """
    rows = connection.execute(
        """
        SELECT s.oid::bigint, s.subname::text, s.subenabled, s.subconninfo, s.subslotname::text,
               s.subfailover, obj_description(s.oid, 'pg_subscription'),
               nullif((o.remote_lsn - '0/0')::bigint, 0),
               (SELECT pid FROM pg_stat_subscription
                 WHERE subid = s.oid AND worker_type = 'apply' LIMIT 1),
               ARRAY(SELECT format('pg_%s_sync_%s_%s', r.srsubid, r.srrelid, c.system_identifier)
                       FROM pg_subscription_rel r, pg_control_system() c
                      WHERE r.srsubid = s.oid AND r.srsubstate = 'f'),
               ARRAY(SELECT ARRAY[r.srrelid::regclass::text, r.srsubstate::text]
                       FROM pg_subscription_rel r
                      WHERE r.srsubid = s.oid AND r.srsubstate NOT IN ('r', 'f') ORDER BY 1),
               EXISTS (SELECT FROM pg_stat_subscription
                        WHERE subid = s.oid AND worker_type = 'apply' AND pid IS NOT NULL
                          AND received_lsn IS NOT NULL),
               (SELECT extract(epoch FROM clock_timestamp() - last_msg_receipt_time)::float8
                  FROM pg_stat_subscription
                 WHERE subid = s.oid AND worker_type = 'apply' AND pid IS NOT NULL LIMIT 1),
               EXISTS (SELECT FROM pg_description d
                        WHERE d.classoid = 'pg_subscription'::regclass AND d.objoid = s.oid
                          AND d.xmin = s.xmin),
               (SELECT CASE WHEN b.pid IS NULL THEN 0
                       ELSE extract(epoch FROM clock_timestamp() - b.backend_start)::float8 END
                  FROM pg_stat_subscription w LEFT JOIN pg_stat_activity b USING (pid)
                 WHERE w.subid = s.oid AND w.worker_type = 'apply' AND w.pid IS NOT NULL LIMIT 1),
               coalesce(e.apply_error_count, 0),
               pg_has_role(s.subowner, 'USAGE')
               AND (s.subpasswordrequired OR current_setting('is_superuser') = 'on')
          FROM pg_subscription s
          LEFT JOIN pg_replication_origin_status o ON o.external_id = 'pg_' || s.oid
          LEFT JOIN pg_stat_subscription_stats e ON e.subid = s.oid
         WHERE s.subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
         ORDER BY s.subname
        """
    ).fetchall()
    servers = read_foreign_servers(connection)
    found: list[list[Any]] = [
        [*row[:9], tuple(row[9]), tuple(map(tuple, row[10])), *row[11:], servers.get(row[0])]
        for row in rows
    ]
    return [SubscriptionRow(*values) for values in found]


def subscription_of(
    row: SubscriptionRow,
    subscriber: str,
    *,
    local: bool,
    node_endpoints: frozenset[Endpoint],
    other_endpoints: frozenset[Endpoint],
) -> Subscription:
    """Return a row as a fact of the view.

    `node_endpoints`: the advertised addresses, `other_endpoints`: those of other clusters.
    """
    server = row.server
    if server is not None:
        conninfo = server.conninfo
    else:
        conninfo = parse_conninfo(row.subconninfo or "", subject=f"{subscriber}/{row.subname}")
    return Subscription(
        name=row.subname,
        enabled=row.subenabled,
        conninfo=conninfo,
        slot_name=row.subslotname,
        failover=row.subfailover,
        comment=row.comment or "",
        remote_lsn=row.remote_lsn,
        sync_slots=row.sync_slots,
        foreign_system="another, by failover.others" if conninfo.names(other_endpoints) else "",
        worker=row.worker_pid is not None,
        copying=row.copying,
        fed=row.fed,
        private=not local and is_private(conninfo.address) and not conninfo.names(node_endpoints),
        heard_age_s=row.heard_age_s,
        as_marked=row.as_marked,
        worker_age_s=row.worker_age_s,
        changeable=row.changeable and (server is None or server.changeable),
        foreign_server=server.name if server is not None else "",
        failing=_failing(row),
    )


def _failing(row: SubscriptionRow) -> str | None:
    """Return the evidence that the worker was restarted after a failure, "" without any.

    None: workers have failed, and our role may not see since when this one runs.
    """
    if not row.errors or row.worker_pid is None:
        return ""
    if row.worker_age_s is None:
        return None
    if row.worker_age_s > _JUST_STARTED_S:
        return ""
    return (
        f"the worker was started {row.worker_age_s:.1f} s ago,"
        f" apply_error_count = {row.errors} in pg_stat_subscription_stats"
    )
