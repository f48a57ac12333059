"""Reads source tables for comparison: their columns, and their rows as JSON lines in files.

A row is one line `{"c0": "…", "c1": null}` with the values of `spark_consumers.forms`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from schemas.errors import ExitCode, Retryable, SetupError, naming
from schemas.settings import SourceSettings
from services.postgres.sessions import TABLES, Session, open_session
from spark_consumers.events.columns import ColumnShape
from spark_consumers.verify.forms import Layer, value_sql

FILE_BYTES_MAX: Final = 64 * 2**20
_PUBLISHED: Final = """
    SELECT schemaname, tablename, attnames::text[], rowfilter
    FROM pg_publication_tables WHERE pubname = %s
"""
_COLUMNS: Final = """
    SELECT a.attname, t.typname, n.nspname, a.atttypmod
    FROM pg_attribute a
    JOIN pg_class c ON c.oid = a.attrelid
    JOIN pg_namespace s ON s.oid = c.relnamespace
    JOIN pg_type t ON t.oid = a.atttypid
    JOIN pg_namespace n ON n.oid = t.typnamespace
    WHERE s.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""
# What each column's type consists of, from the outside in: domains, arrays, then the base type.
_LAYERS: Final = """
    WITH RECURSIVE layer AS (
        SELECT a.attname AS name, 1 AS depth, a.atttypid AS oid, a.atttypmod AS typmod
        FROM pg_attribute a
        JOIN pg_class c ON c.oid = a.attrelid
        JOIN pg_namespace s ON s.oid = c.relnamespace
        WHERE s.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT l.name, l.depth + 1, CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.typelem END,
               CASE WHEN t.typtype = 'd' AND l.typmod < 0 THEN t.typtypmod ELSE l.typmod END
        FROM layer l JOIN pg_type t ON t.oid = l.oid
        WHERE t.typtype = 'd' OR t.typelem <> 0 AND t.typname LIKE '\\_%%' AND t.typlen = -1
    )
    SELECT l.name, t.typname, t.typtype = 'd', t.typelem <> 0 AND t.typname LIKE '\\_%%', l.typmod
    FROM layer l JOIN pg_type t ON t.oid = l.oid ORDER BY l.name, l.depth
"""


@dataclass(frozen=True, slots=True)
class PublishedColumns:
    """A table's part in a publication: its columns, and the condition that rows must meet."""

    columns: tuple[str, ...]
    row_filter: str | None


@contextlib.contextmanager
def connected(
    conninfo: str, server: str, operation: str, *, hint: str, grant: str, timeout_s: int
) -> Iterator[Session]:
    """Connect for one transaction, with the text forms of the bridge's sessions.

    Raise Retryable when no server answers, SetupError when a privilege is missing. `server` is what
    the server is called in these errors.
    """
    try:
        with open_session(TABLES, conninfo, connect_timeout=timeout_s) as connection:
            connection.autocommit = False
            yield connection
    except psycopg.errors.InsufficientPrivilege as error:
        raise SetupError(
            str(error).splitlines()[0],
            operation=operation,
            hint=grant,
            exit_code=ExitCode.PRIVILEGE_MISSING,
        ) from error
    except psycopg.OperationalError as error:
        raise Retryable(f"{server} does not answer", operation=operation, hint=hint) from error


@contextlib.contextmanager
def snapshot(settings: SourceSettings) -> Iterator[psycopg.Connection]:
    """Connect so that all tables are read in one snapshot and nothing is written.

    Raise Retryable when no server answers, SetupError when a privilege is missing.
    """
    with connected(
        settings.conninfo.get_secret_value(),
        "the source",
        "read the source",
        hint="check source.conninfo and that one of its hosts accepts connections",
        grant="grant SELECT on the tables to this role",
        timeout_s=settings.connect_timeout_s,
    ) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        yield connection


def published(connection: psycopg.Connection, publication: str) -> dict[str, PublishedColumns]:
    """Return `schema.table` -> what the publication says of it, {} if there is no publication."""
    rows = connection.execute(_PUBLISHED, [publication]).fetchall()
    return {
        f"{schema}.{table}": PublishedColumns(tuple(columns), row_filter)
        for schema, table, columns, row_filter in rows
    }


def source_columns(
    connection: psycopg.Connection, schema: str, table: str
) -> tuple[ColumnShape, ...]:
    """Return the table's columns, typed as in the schema topic; () if there is no such table."""
    rows = connection.execute(_COLUMNS, [schema, table]).fetchall()
    return tuple(
        ColumnShape(name, kind if place == "pg_catalog" else f"{place}.{kind}", typmod, key=False)
        for name, kind, place, typmod in rows
    )


def export(
    connection: psycopg.Connection,
    table: tuple[str, str],
    columns: tuple[ColumnShape, ...],
    row_filter: str | None,
    folder: Path,
    layers: Mapping[str, Sequence[Layer]] | None = None,
) -> None:
    """Write the rows of `table` (schema, name) to files in `folder`; memory stays bounded.

    `layers`: the layers of each column's type, instead of those in the server's catalog.
    """
    layers = layers or column_layers(connection, table)
    values = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(
            value_sql(column.name, layers[column.name]), sql.Identifier(f"c{number}")
        )
        for number, column in enumerate(columns)
    )
    where = sql.SQL("WHERE {}").format(sql.SQL(row_filter)) if row_filter else sql.SQL("")
    # Neither the quote nor the delimiter can occur in JSON: lines come as they are.
    query = sql.SQL(
        "COPY (SELECT row_to_json(r) FROM (SELECT {} FROM {} {}) r)"
        " TO STDOUT (FORMAT csv, QUOTE E'\\x01', DELIMITER E'\\x02')"
    ).format(values, sql.Identifier(*table), where)
    with connection.cursor() as cursor, cursor.copy(query) as copy:
        lines = iter(copy)
        number = 0
        while _write_file(lines, folder / f"{number:06d}.json"):
            number += 1


def column_layers(connection: psycopg.Connection, table: tuple[str, str]) -> dict[str, list[Layer]]:
    """Return what the type of each column of a table (schema, name) consists of."""
    found: dict[str, list[Layer]] = {}
    for name, *layer in connection.execute(_LAYERS, list(table)).fetchall():
        found.setdefault(name, []).append(Layer(*layer))
    return found


def _write_file(lines: Iterator[bytes | bytearray | memoryview], path: Path) -> bool:
    """Write lines up to FILE_BYTES_MAX; whether there may be more."""
    size = 0
    with naming(path), path.open("wb") as file:
        for line in lines:
            size += file.write(line)
            if size >= FILE_BYTES_MAX:
                return True
    return False
