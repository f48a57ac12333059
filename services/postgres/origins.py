"""Replication origins and their progress."""

from services.postgres.server import Connection


def origin_exists(connection: Connection, origin: str) -> bool:
    """Tell whether the server knows the replication origin."""
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_replication_origin WHERE roname = %s)", [origin]
    ).fetchone()
    return bool(row and row[0])


def create_origin(connection: Connection, origin: str) -> None:
    """Create the replication origin; it travels to standbys in the WAL."""
    connection.execute("SELECT pg_replication_origin_create(%s)", [origin])


def drop_own_origin(connection: Connection, origin: str) -> None:
    """Drop the origin that this session has set up for itself."""
    connection.execute("SELECT pg_replication_origin_session_reset()")
    connection.execute("SELECT pg_replication_origin_drop(%s)", [origin])


def may_read_progress(connection: Connection) -> bool:
    """Tell whether our role may read the position of an origin that it has not set up."""
    row = connection.execute(
        "SELECT has_function_privilege('pg_replication_origin_progress(text, boolean)', 'EXECUTE')"
    ).fetchone()
    return row == (True,)


def origin_progress(connection: Connection, origin: str) -> int | None:
    """Return the origin's position in bytes, None where it has never been moved."""
    row = connection.execute(
        "SELECT (pg_replication_origin_progress(%s, true) - '0/0')::bigint", [origin]
    ).fetchone()
    return int(row[0]) if row is not None and row[0] else None


def read_origins(connection: Connection) -> dict[str, int]:
    """Return every replication origin that has been moved -> its position in bytes."""
    rows = connection.execute(
        "SELECT external_id, (remote_lsn - '0/0')::bigint FROM pg_replication_origin_status"
        " WHERE external_id IS NOT NULL AND remote_lsn > '0/0'"
    ).fetchall()
    return {name: int(lsn) for name, lsn in rows}
