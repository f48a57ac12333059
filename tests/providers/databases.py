"""Databases of a server that several tests share: made, and removed with all that hangs on them."""

import contextlib
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from tests.providers.interface import Server
from tests.providers.waiting import eventually

Connection = psycopg.Connection[tuple[Any, ...]]

REMOVED: Final = "a test's, over"
"""The comment on a database whose test has ended."""


def connect(server: Server, dbname: str = "postgres") -> Connection:
    """Connect as the superuser, in autocommit mode."""
    return psycopg.connect(server.conninfo(dbname), autocommit=True, client_encoding="UTF8")


def origins(server: Server) -> set[str]:
    """Names of all replication origins: they belong to the server, not to a database."""
    with connect(server) as connection:
        rows = connection.execute("SELECT roname FROM pg_replication_origin").fetchall()
    return {row[0] for row in rows}


def create(server: Server, dbname: str) -> None:
    """CREATE DATABASE."""
    with connect(server) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(dbname)))


def await_copy(standby: Server, dbname: str) -> None:
    """Wait until the standby has replayed the creation of `dbname`.

    Else its slot synchronization may fail on a slot of that database, and pause for 10 s.
    """
    query = "SELECT 1 FROM pg_database WHERE datname = %s"
    with connect(standby) as connection:
        eventually(
            lambda: connection.execute(query, [dbname]).fetchone() is not None,
            what=f"the standby has database {dbname}",
        )


def remove(server: Server, dbname: str, *, keep_origins: set[str]) -> None:
    """Drop what hangs on `dbname`: subscriptions, slots, prepared transactions, new origins.

    The database itself stays until `drop_removed`: were its slot still being synchronized, the
    replay of DROP DATABASE would end the standby ("replication slot is active for PID", FATAL in
    the startup process).
    """
    with connect(server, dbname) as connection:
        _drop_subscriptions(connection)
        for (gid,) in _names(connection, "SELECT gid FROM pg_prepared_xacts WHERE database = %s"):
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
        _drop_slots(connection)
    with connect(server) as connection:
        for name in origins(server) - keep_origins:
            once_free(connection, "SELECT pg_replication_origin_drop(%s)", name)
        comment = sql.SQL("COMMENT ON DATABASE {} IS {}")
        connection.execute(comment.format(sql.Identifier(dbname), REMOVED))


def once_free(connection: Connection, query: LiteralString, name: str, *values: object) -> None:
    """Execute a query on the slot or origin `name`, which a client has left just now.

    The server's process for that client may have it a moment longer, more on a busy machine.
    """

    def executed() -> bool:
        try:
            connection.execute(query, [name, *values])
        except psycopg.errors.ObjectInUse:
            return False
        return True

    eventually(executed, what=f"{name} is free")


def drop_removed(server: Server, standby: Server | None = None) -> None:
    """Drop the removed databases that have no slot left on the standby: each takes 8 MB twice."""
    query = "SELECT datname FROM pg_database WHERE shobj_description(oid, 'pg_database') = %s"
    with connect(server) as connection:
        removed = {name for (name,) in connection.execute(query, [REMOVED])}
        for name in removed - (_with_slots(standby) if standby else set()):
            drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                connection.execute(drop)


def _with_slots(server: Server) -> set[str]:
    with connect(server) as connection:
        rows = connection.execute(
            "SELECT database FROM pg_replication_slots WHERE slot_type = 'logical'"
        )
        return {row[0] for row in rows}


def _drop_subscriptions(connection: Connection) -> None:
    """Without asking the publisher, which may be gone; its slots are dropped where they are."""
    query = (
        "SELECT subname FROM pg_subscription JOIN pg_database d ON d.oid = subdbid"
        " WHERE datname = %s"
    )
    for (name,) in _names(connection, query):
        for command in ("DISABLE", "SET (slot_name = NONE)"):
            connection.execute(
                sql.SQL("ALTER SUBSCRIPTION {} {}").format(sql.Identifier(name), sql.SQL(command))
            )
        connection.execute(sql.SQL("DROP SUBSCRIPTION {}").format(sql.Identifier(name)))


def _drop_slots(connection: Connection) -> None:
    """Drop the database's slots, ending what still streams from them."""
    mine = "FROM pg_replication_slots WHERE database = %s AND NOT temporary"

    def none_left() -> bool:
        _names(connection, f"SELECT pg_terminate_backend(active_pid) {mine} AND active")
        for (slot,) in _names(connection, f"SELECT slot_name {mine} AND NOT active"):
            try:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            except psycopg.errors.ObjectInUse:  # a client has come back in between
                return False
        return not _names(connection, f"SELECT slot_name {mine}")

    eventually(none_left, what="all slots of the database are dropped")


def _names(connection: Connection, query: str) -> list[tuple[str, ...]]:
    return connection.execute(query.encode(), [connection.info.dbname]).fetchall()
