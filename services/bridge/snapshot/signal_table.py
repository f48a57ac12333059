"""Inserts signals into the signal table, so that they come in the stream as any change does."""

from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg import sql

from schemas.errors import SettingsError
from schemas.naming import schema_and_table
from schemas.settings import SourceSettings
from services.bridge.snapshot.requests import Signal
from services.bridge.source.candidates import find_primary
from services.bridge.source.server_errors import session_error
from services.postgres.published_tables import published_tables
from services.postgres.server import Connection
from services.postgres.sessions import names_as_meant

DDL = "CREATE TABLE {} (id varchar(42) PRIMARY KEY, type varchar(32) NOT NULL, data varchar(2048))"
DATA_MAX: Final = 2048
"""Characters of a signal's data."""
_OPERATION = "send a signal"


def insert_signal(source: SourceSettings, table: str, signal: Signal) -> None:
    """Insert the signal on the primary. Raise SettingsError for a table that is not published."""
    with find_primary(source).connection as connection:
        try:
            connection.execute("SET synchronous_commit TO DEFAULT")
            require_published(connection, source.publication, table)
            with connection.transaction(), names_as_meant(connection):  # also in its triggers
                connection.execute(insert_statement(table, [signal]))
        except psycopg.Error as error:
            raise session_error(error, _OPERATION, table) from error


def require_published(connection: Connection, publication: str, table: str) -> None:
    """Raise SettingsError if the stream of the publication does not have the signal table."""
    found = published_tables(connection, publication)
    if schema_and_table(table) not in [(one.schema, one.table) for one in found]:
        raise SettingsError(
            f"publication {publication} does not have the table",
            operation=_OPERATION,
            subject=table,
            hint=f"{DDL.format(table)}; ALTER PUBLICATION … ADD TABLE {table}",
        )


def insert_statement(table: str, signals: Sequence[Signal]) -> sql.Composed:
    """Return the statement that inserts `signals`, in order."""
    rows = (sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, one))) for one in signals)
    into = sql.SQL("INSERT INTO {} (id, type, data) VALUES {}")
    return into.format(sql.Identifier(*schema_and_table(table)), sql.SQL(", ").join(rows))
