"""Row filters and column lists as the settings want them, checked against replica identities."""

from collections.abc import Iterable, Mapping

import psycopg
from psycopg import sql

from schemas.errors import ExitCode, SettingsError, SetupError
from schemas.settings import SourceSettings
from services.postgres.publication_options import (
    WHOLE,
    ReplicaIdentity,
    TableName,
    TableOptions,
    replica_identities,
    server_filter,
)
from services.postgres.publications import publication_statement
from services.postgres.server import Connection

_WRONG_CONDITION = ("0A", "22", "42")
_NOT_PERMITTED = "42501"


def wanted_options(
    connection: Connection,
    source: SourceSettings,
    tables: Iterable[TableName],
    published: Mapping[TableName, TableOptions],
) -> dict[TableName, TableOptions]:
    """Return (schema, table) -> the options of each of `tables`, which are all there.

    `published`: the publication's options; a kind of option that no setting speaks of stays.
    Raise SettingsError for a condition that the server does not understand.
    """
    wanted = {}
    for table in tables:
        options = published.get(table, WHOLE)
        condition, columns = options.condition, options.columns
        if source.row_filters is not None:
            condition = source.of_table(source.row_filters, table) or ""
        if source.column_lists is not None:
            columns = source.of_table(source.column_lists, table)
        row_filter, used = "", frozenset[str]()
        if condition:
            row_filter, used = _server_filter(connection, table, condition)
        wanted[table] = TableOptions(condition, columns, row_filter, used)
    return wanted


def _server_filter(
    connection: Connection, table: TableName, condition: str
) -> tuple[str, frozenset[str]]:
    """Return a row filter as the server writes it, and its columns.

    Raise SettingsError for one that it does not understand.
    """
    try:
        return server_filter(connection, table, condition)
    except psycopg.Error as error:
        state, name = error.sqlstate or "", ".".join(table)
        text = error.diag.message_primary or str(error)
        if state == _NOT_PERMITTED:
            raise SetupError(
                f"the row filter can't be compared with the publication's: {text}",
                operation="read the row filter",
                subject=f"table {name}",
                hint="grant the role SELECT on the table, and TEMPORARY on the database",
                exit_code=ExitCode.PRIVILEGE_MISSING,
            ) from error
        if not state.startswith(_WRONG_CONDITION):
            raise
        raise SettingsError(
            f"the server does not understand the row filter ({condition}): {text}",
            operation="read the row filter",
            subject=f"table {name}",
            hint="correct source.row_filters: a condition as after WHERE, of the table's columns",
        ) from error


def require_covered(
    publication: str,
    options: Mapping[TableName, TableOptions],
    identities: Mapping[TableName, Iterable[ReplicaIdentity]],
) -> None:
    """Raise SetupError if the server would refuse UPDATE and DELETE for filters or lists.

    For publications with updates or deletes. A filter may use columns of the replica identity
    alone, and a list must have them all; with REPLICA IDENTITY FULL there may be no list.
    Sources: publicationcmds.c, pub_rf_contains_invalid_column and pub_contains_invalid_column.
    """
    for table, wanted in options.items():
        for identity in identities[table]:
            if unknown := sorted({*(wanted.columns or ())} - {*identity.columns}):
                raise SettingsError(
                    f"the table has no column {', '.join(unknown)}",
                    operation="read the column list",
                    subject=f"table {'.'.join(table)}",
                    hint="correct source.column_lists",
                )
            if not identity.partitioned:
                _require_covered(publication, wanted, identity)


def _require_covered(publication: str, options: TableOptions, identity: ReplicaIdentity) -> None:
    """Raise where the table's UPDATE and DELETE would fail by filter, column list and identity."""
    name, columns = ".".join(identity.table), ", ".join(identity.identity) or "nothing"
    is_full = identity.kind == "full"
    inserts = f"publish inserts alone: ALTER PUBLICATION {publication} SET (publish = 'insert')"
    if not is_full and (beyond := sorted(options.filter_columns - {*identity.identity})):
        _refuse(
            f"the row filter uses {', '.join(beyond)}, which the replica identity "
            f"({columns}) does not have",
            name,
            f"set source.replica_identity {{{name}: full}} (ALTER TABLE {name} REPLICA IDENTITY "
            f"FULL), or a unique index with these columns; or {inserts}",
        )
    if options.columns is None:
        if unsent := sorted({*identity.identity} & {*identity.unsent}):
            _refuse(
                f"its replica identity has the generated columns {', '.join(unsent)}, which the "
                "publication does not send",
                name,
                "set publish_generated_columns = stored, which sends those that are STORED (CREATE "
                "or ALTER PUBLICATION); or choose another source.replica_identity",
            )
        return
    if is_full:
        _refuse(
            "a column list can't go with REPLICA IDENTITY FULL",
            name,
            "leave the table out of source.column_lists (shaping.columns leaves columns out, too); "
            f"or set source.replica_identity {{{name}: default}}; or {inserts}",
        )
    if lacking := sorted({*identity.identity} - {*options.columns}):
        _refuse(
            f"the column list lacks {', '.join(lacking)} of the replica identity",
            name,
            f"add {', '.join(lacking)} to source.column_lists; or {inserts}",
        )


def _refuse(reason: str, table: str, hint: str) -> None:
    raise SetupError(
        f"UPDATE and DELETE on {table} would fail: {reason}",
        operation="check the publication's row filters and column lists",
        subject=f"table {table}",
        hint=hint,
        exit_code=ExitCode.SERVER_SETTING,
    )


def creation_statement(connection: Connection, source: SourceSettings) -> sql.Composed:
    """Return the statement that creates the publication as the settings want it.

    Raise SetupError where UPDATE and DELETE of a filtered table would fail from then on.
    """
    tables = dict.fromkeys(source.single_tables, WHOLE)
    if source.row_filters or source.column_lists:
        identities = replica_identities(connection, source.publication, tables)
        there = {table: options for table, options in tables.items() if table in identities}
        tables |= wanted_options(connection, source, there, {})
        require_covered(source.publication, {t: tables[t] for t in there}, identities)
    return publication_statement(source.publication, tables, source.whole_schemas)
