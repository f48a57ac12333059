"""Inserts a signal into the signal table, so that it comes in the stream as any change does."""

import psycopg
from psycopg import sql

from schemas.errors import SettingsError
from schemas.naming import schema_and_table
from schemas.settings import SourceSettings
from services.bridge.snapshot.requests import Signal
from services.bridge.source.candidates import find_primary
from services.bridge.source.server_errors import server_error
from services.postgres.published_tables import published_tables

DDL = "CREATE TABLE {} (id varchar(42) PRIMARY KEY, type varchar(32) NOT NULL, data varchar(2048))"
_OPERATION = "send a signal"


def insert_signal(source: SourceSettings, table: str, signal: Signal) -> None:
    """Insert the signal on the primary. Raise SettingsError for a table that is not published."""
    parts = schema_and_table(table)
    primary = find_primary(source)
    with primary.connection as connection:
        try:
            connection.execute("SET synchronous_commit TO DEFAULT")
            found = published_tables(connection, source.publication)
            if parts not in [(one.schema, one.table) for one in found]:
                raise SettingsError(
                    f"publication {source.publication} does not have the table",
                    operation=_OPERATION,
                    subject=table,
                    hint=f"{DDL.format(table)}; ALTER PUBLICATION … ADD TABLE {table}",
                )
            query = sql.SQL("INSERT INTO {} (id, type, data) VALUES (%s, %s, %s)")
            connection.execute(query.format(sql.Identifier(*parts)), [*signal])
        except psycopg.Error as error:
            message = " ".join((error.diag.message_primary or str(error)).split())
            raise server_error(error.sqlstate or "", message, _OPERATION, table) from error
