"""The tables of schema slotfailover: used only where no weaker role can have prepared them.

A trigger, a rule, a view or a default expression runs with the rights of whoever touches the table.
So a table is used only where a superuser owns it and its schema (sql/roles.sql makes it so), and
where nothing hangs on it that could run. A role that is not a superuser may also use its own.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal, LiteralString

from schemas.errors import ExitCode, SetupError
from services.postgres.server import Connection

Name = Literal["journal", "watch"]
_DEFINITIONS: dict[Name, LiteralString] = {
    "journal": """
        CREATE SCHEMA IF NOT EXISTS slotfailover;
        CREATE TABLE IF NOT EXISTS slotfailover.journal (
            run text, number int, at timestamptz, by text, command text, step text, server text,
            sql jsonb, outcome text, seen jsonb, seconds float8, intent jsonb,
            PRIMARY KEY (run, number))
    """,
    "watch": """
        CREATE SCHEMA IF NOT EXISTS slotfailover;
        CREATE TABLE IF NOT EXISTS slotfailover.watch (
            one bool PRIMARY KEY DEFAULT true,
            paused bool NOT NULL, at text NOT NULL, by text NOT NULL, reason text NOT NULL,
            version bigint NOT NULL DEFAULT 0)
    """,
}
"""As sql/roles.sql makes them."""
_JUDGE: LiteralString = """
    SELECT CASE
           WHEN c.relkind <> 'r' THEN 'it is not a table'
           WHEN NOT (SELECT rolsuper FROM pg_roles WHERE oid = c.relowner)
                AND (me.rolsuper OR c.relowner <> me.oid)
           THEN format('its owner %%s is not a superuser', c.relowner::regrole)
           WHEN NOT (SELECT rolsuper FROM pg_roles WHERE oid = n.nspowner)
                AND (me.rolsuper OR n.nspowner <> me.oid)
           THEN format('the owner %%s of its schema is not a superuser', n.nspowner::regrole)
           WHEN EXISTS (SELECT FROM pg_trigger WHERE tgrelid = c.oid) THEN 'it has a trigger'
           WHEN EXISTS (SELECT FROM pg_rewrite WHERE ev_class = c.oid) THEN 'it has a rule'
           WHEN c.relrowsecurity THEN 'it has row level security'
           WHEN EXISTS (SELECT FROM pg_constraint WHERE conrelid = c.oid
                           AND contype NOT IN ('p', 'u', 'n'))
           THEN 'it has a constraint that is evaluated'
           WHEN EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid
                           AND (indexprs IS NOT NULL OR indpred IS NOT NULL))
           THEN 'it has an index on an expression'
           WHEN EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid OR inhrelid = c.oid)
           THEN 'it inherits, or is inherited from'
           WHEN EXISTS (SELECT FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
                         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                           AND (t.typnamespace <> 'pg_catalog'::regnamespace
                                OR a.attgenerated <> ''))
           THEN 'it has a column of a type that is not PostgreSQL''s own'
           ELSE '' END
      FROM pg_class c
      JOIN pg_namespace n ON n.oid = c.relnamespace
      JOIN pg_roles me ON me.rolname = current_user
     WHERE n.nspname = 'slotfailover' AND c.relname = %s
"""


class PublishesAllTables(Exception):
    """The database publishes all its tables: its subscribers would fail on ours."""


@contextlib.contextmanager
def reading(connection: Connection, name: Name) -> Iterator[bool]:
    """Open a transaction in which the table can be read; yield False where there is no such table.

    Raise SetupError where the table is not safe to use.
    """
    with connection.transaction():
        there = _exists(connection, name)
        if there:
            _lock(connection, name, "ACCESS SHARE")
        yield there


@contextlib.contextmanager
def writing(connection: Connection, name: Name) -> Iterator[None]:
    """Open a transaction in which rows can be added; create the table where it is missing.

    The commit does not wait for standbys: the primary may have none at the moment. Raise Published;
    raise SetupError where the table is not safe to use, or may not be created.
    """
    row = connection.execute("SELECT FROM pg_publication WHERE puballtables").fetchone()
    if row is not None:
        raise PublishesAllTables
    with connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = local")
        if not _exists(connection, name):
            connection.execute(_DEFINITIONS[name])
        _lock(connection, name, "ROW EXCLUSIVE")
        if connection.execute(
            "SELECT FROM pg_roles WHERE rolname = current_user AND rolsuper"
        ).fetchone():
            connection.execute("SET LOCAL session_replication_role = replica")
        yield


def _exists(connection: Connection, name: Name) -> bool:
    """Look up the table in the catalog: without USAGE on the schema its name can't be asked."""
    row = connection.execute(
        "SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = 'slotfailover' AND c.relname = %s",
        [name],
    ).fetchone()
    return row is not None


def _lock(connection: Connection, name: Name, mode: LiteralString) -> None:
    """Lock a table, so that nobody can attach anything to it, then judge whether it is safe."""
    judged = connection.execute(_JUDGE, [name]).fetchone()
    if judged == ("",):
        tables: dict[Name, LiteralString] = {
            "journal": "slotfailover.journal",
            "watch": "slotfailover.watch",
        }
        connection.execute("LOCK TABLE ONLY " + tables[name] + " IN " + mode + " MODE")
        judged = connection.execute(_JUDGE, [name]).fetchone()
    if judged != ("",):
        reason = judged[0] if judged is not None else "it is gone"
        raise SetupError(
            f"the table {_full(name)} is not used: {reason}",
            operation="use our own tables",
            subject=_full(name),
            hint="find out who created the table; then, as a superuser, DROP SCHEMA slotfailover "
            "CASCADE there, and run sql/roles.sql",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )


def _full(name: Name) -> str:
    return f"slotfailover.{name}"
