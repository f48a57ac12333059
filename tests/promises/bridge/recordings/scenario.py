"""What the recordings show: every kind of message of protocol version 4, in one short history.

`play` runs it step by step; after each step it calls `drain`, which returns when every reader has
received what the step wrote, so that blocks of transactions in progress come in one known order.
"""

from collections.abc import Callable

import psycopg

from tests.providers.databases import Connection

TABLES = ("items", "whole", "logged", "parents", "children")
STREAMED_ALWAYS = "-c debug_logical_replication_streaming=immediate"
ORIGIN = "recorded_origin"

_SCHEMA = (
    "CREATE TYPE mood AS ENUM ('sad', 'happy')",
    "CREATE TABLE items (id int PRIMARY KEY, note text, mood mood, price numeric(10, 2))",
    "ALTER TABLE items ALTER COLUMN note SET STORAGE EXTERNAL",
    "CREATE TABLE whole (id int PRIMARY KEY, note text)",
    "ALTER TABLE whole REPLICA IDENTITY FULL",
    "CREATE TABLE logged (id int, note text)",
    "ALTER TABLE logged REPLICA IDENTITY NOTHING",
    "CREATE TABLE parents (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name varchar(20))",
    "CREATE TABLE children (id int PRIMARY KEY, parent int REFERENCES parents)",
)
_CHANGES = (
    "INSERT INTO items VALUES (1, NULL, 'sad', 1.50), (2, repeat('t', 2200), 'happy', NULL)",
    "INSERT INTO items VALUES (3, 'Zürich \\ ''quoted''', NULL, -0.01), (4, '', NULL, 0)",
    "UPDATE items SET mood = 'happy' WHERE id = 1",
    "UPDATE items SET price = 7 WHERE id = 2",
    "UPDATE items SET id = 30 WHERE id = 3",
    "DELETE FROM items WHERE id = 4",
    "INSERT INTO whole VALUES (1, 'a'), (2, NULL), (3, 'c')",
    "UPDATE whole SET note = 'b' WHERE id = 1",
    "DELETE FROM whole WHERE id = 2",
    "INSERT INTO logged VALUES (1, 'never changed'), (NULL, NULL)",
    "INSERT INTO parents (name) VALUES ('one'), ('two')",
    "INSERT INTO children VALUES (1, 1), (2, 2)",
    "SELECT pg_logical_emit_message(true, 'within', 'transactional')",
)


def prepare(connection: Connection) -> None:
    """Make the tables and the publication `recorded`."""
    for statement in _SCHEMA:
        connection.execute(statement.encode())
    for table in TABLES:  # an ANALYZE in between would describe the relations anew
        connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)".encode())
    connection.execute("CREATE PUBLICATION recorded FOR ALL TABLES")


def play(conninfo: str, drain: Callable[[], None]) -> None:
    """The whole history, on the tables of `prepare`."""
    with psycopg.connect(conninfo) as one, psycopg.connect(conninfo) as two:
        _every_change(one, drain)
        _truncates(one, drain)
        _interleaved(one, two, drain)
        _replicated(one, drain)
        _prepared(one, drain)
        _altered(one, drain)


def contents(connection: Connection) -> dict[str, list[list[str | None]]]:
    """The rows of every table, each value in its text form, in order."""
    result = {}
    for table in TABLES:
        row = connection.execute(f"SELECT * FROM {table} LIMIT 0".encode())
        columns = ", ".join(f"{column.name}::text" for column in row.description or ())
        query = f"SELECT {columns} FROM {table} ORDER BY 1 NULLS LAST, 2"
        result[table] = [list(values) for values in connection.execute(query.encode())]
    return result


def _every_change(one: Connection, drain: Callable[[], None]) -> None:
    for statement in _CHANGES:
        one.execute(statement.encode())
    drain()
    one.commit()
    drain()
    one.execute("SELECT pg_logical_emit_message(false, 'outside', 'not transactional', true)")
    one.commit()
    drain()


def _truncates(one: Connection, drain: Callable[[], None]) -> None:
    one.execute("TRUNCATE parents, logged RESTART IDENTITY CASCADE")
    one.commit()
    drain()
    one.execute("INSERT INTO parents (name) VALUES ('anew')")
    one.execute("TRUNCATE logged")
    one.execute("INSERT INTO logged VALUES (2, 'after')")
    one.commit()
    drain()


def _interleaved(one: Connection, two: Connection, drain: Callable[[], None]) -> None:
    """Two transactions at once, with savepoints; then one that is rolled back whole."""
    one.execute("INSERT INTO items VALUES (101, 'one', NULL, 1)")
    drain()
    two.execute("INSERT INTO items VALUES (201, 'two', NULL, 2)")
    drain()
    one.execute("SAVEPOINT s1")
    one.execute("UPDATE items SET note = 'undone' WHERE id = 101")
    one.execute("SAVEPOINT s2")
    one.execute("INSERT INTO items VALUES (102, 'undone too', NULL, 1)")
    drain()
    one.execute("ROLLBACK TO s1")
    drain()
    two.execute("SAVEPOINT s1")
    two.execute("INSERT INTO items VALUES (202, 'kept', 'sad', 2)")
    two.execute("RELEASE s1")
    drain()
    one.execute("DELETE FROM items WHERE id = 101")
    one.execute("INSERT INTO items VALUES (103, 'last', NULL, 1)")
    drain()
    two.commit()
    drain()
    one.commit()
    drain()
    one.execute("INSERT INTO items VALUES (104, 'never', NULL, 1)")
    drain()
    one.rollback()
    drain()


def _replicated(one: Connection, drain: Callable[[], None]) -> None:
    """A transaction that was applied from elsewhere."""
    one.execute("SELECT pg_replication_origin_create(%s)", [ORIGIN])
    one.execute("SELECT pg_replication_origin_session_setup(%s)", [ORIGIN])
    one.commit()
    one.execute("SELECT pg_replication_origin_xact_setup('0/ABCDEF', '2026-01-02 03:04:05Z')")
    one.execute("INSERT INTO whole VALUES (50, 'from elsewhere')")
    drain()
    one.commit()
    one.execute("SELECT pg_replication_origin_session_reset()")
    one.execute("SELECT pg_replication_origin_drop(%s)", [ORIGIN])
    one.commit()
    drain()


def _prepared(one: Connection, drain: Callable[[], None]) -> None:
    for number, end in ((1, "COMMIT"), (2, "ROLLBACK")):
        one.execute(f"UPDATE whole SET note = 'prepared {number}' WHERE id = 3".encode())
        one.execute(f"INSERT INTO items VALUES ({300 + number}, 'prepared', NULL, 3)".encode())
        drain()
        one.execute(f"PREPARE TRANSACTION 'gid {number}'".encode())
        one.commit()
        drain()
        one.autocommit = True
        one.execute(f"{end} PREPARED 'gid {number}'".encode())
        one.autocommit = False
        drain()


def _altered(one: Connection, drain: Callable[[], None]) -> None:
    one.execute("ALTER TABLE whole ADD COLUMN more date")
    one.execute("INSERT INTO whole VALUES (60, 'wider', '2026-02-03')")
    drain()
    one.commit()
    drain()
