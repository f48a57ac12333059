"""Sequences that hold a bridge's position where it has no replication origin (source.witness).

A sequence is an ordinary object, so that any owner of a database can grant it. Its value is in the
WAL as an origin's position is: standbys have it, and a server that is set back loses it. The stream
of a publication never has it, not even FOR ALL TABLES. It is reached by its oid, which needs no
right on the schema. Source: sequence.c, pg_sequence_last_value (PostgreSQL 18: null without SELECT
or USAGE, 17 refuses the call), do_setval.
"""

from typing import LiteralString

from psycopg import sql

from services.postgres.server import Connection

SCHEMA = "slotbridge"
_PREFIX = "witness_"
_OF_SCHEMA: LiteralString = """
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
   WHERE n.nspname = 'slotbridge' AND c.relkind = 'S'
"""
_READABLE: LiteralString = "has_sequence_privilege(c.oid, 'SELECT')"
_LAST: LiteralString = f"CASE WHEN {_READABLE} THEN pg_sequence_last_value(c.oid) END"


def sequence_name(slot: str) -> str:
    """Return the sequence of a slot, within SCHEMA."""
    return _PREFIX + slot


def sequence_rights(connection: Connection, slot: str) -> tuple[bool, bool] | None:
    """Tell whether our role may read and move the slot's sequence; None where there is none."""
    row = connection.execute(
        f"SELECT {_READABLE}, has_sequence_privilege(c.oid, 'UPDATE')"
        + _OF_SCHEMA
        + " AND c.relname = %s",
        [sequence_name(slot)],
    ).fetchone()
    return (bool(row[0]), bool(row[1])) if row is not None else None


def create_sequence(connection: Connection, slot: str) -> None:
    """Create the slot's sequence, and SCHEMA where it is missing."""
    with connection.transaction():
        found = connection.execute(
            "SELECT FROM pg_namespace WHERE nspname = %s", [SCHEMA]
        ).fetchone()
        if found is None:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(SCHEMA)))
        connection.execute(sql.SQL("CREATE SEQUENCE {}").format(_identifier(slot)))


def drop_statement(slot: str) -> sql.Composed:
    """Return the statement that drops the slot's sequence; SCHEMA stays."""
    return sql.SQL("DROP SEQUENCE {}").format(_identifier(slot))


def sequence_position(connection: Connection, slot: str) -> int | None:
    """Return the sequence's position in bytes, None where it was never moved or is not there."""
    row = connection.execute(
        "SELECT " + _LAST + _OF_SCHEMA + " AND c.relname = %s",
        [sequence_name(slot)],
    ).fetchone()
    return int(row[0]) if row is not None and row[0] is not None else None


def move_sequence(connection: Connection, slot: str, lsn: int) -> bool:
    """Move the sequence to `lsn`, never back; False where there is none.

    The value is set at once, whether or not the transaction commits; its commit flushes the WAL.
    """
    row = connection.execute(
        "SELECT setval(c.oid, greatest(%s, pg_sequence_last_value(c.oid)))"
        + _OF_SCHEMA
        + " AND c.relname = %s",
        [lsn, sequence_name(slot)],
    ).fetchone()
    return row is not None


def forget_position(connection: Connection, slot: str) -> None:
    """Make the sequence one that was never moved."""
    connection.execute(
        "SELECT setval(c.oid, 1, false)" + _OF_SCHEMA + " AND c.relname = %s",
        [sequence_name(slot)],
    )


def read_sequences(connection: Connection) -> dict[str, int | None]:
    """Return slot -> position of every sequence in this database; None where we may not read it."""
    rows = connection.execute(
        f"SELECT substr(c.relname, 9), {_LAST}, {_READABLE}"
        + _OF_SCHEMA
        + " AND starts_with(c.relname, 'witness_')"
    ).fetchall()
    return {
        str(slot): None if not readable else int(lsn)
        for slot, lsn, readable in rows
        if lsn is not None or not readable
    }


def _identifier(slot: str) -> sql.Identifier:
    return sql.Identifier(SCHEMA, sequence_name(slot))
