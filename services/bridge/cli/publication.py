"""The command `slotbridge publication`: publication and identities become what `source` says."""

import json as json_module
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Annotated

import psycopg
import typer
from psycopg import sql

from schemas.config_option import ConfigFile
from schemas.errors import ExitCode, Retryable, SettingsError, SetupError
from schemas.naming import schema_and_table
from schemas.settings import Settings, SourceSettings, load_settings, require
from services.bridge import failpoints
from services.bridge.publication.plan import OPERATION, Changes, changes
from services.bridge.publication.row_requests import RowRequest, row_request
from services.bridge.snapshot.signal_sending import require_signals
from services.bridge.source.candidates import find_primary, require_one_writable
from services.bridge.source.server_errors import server_error
from services.bridge.source.table_options import wanted_options
from services.postgres.publication_options import (
    ReplicaIdentity,
    TableName,
    TableOptions,
    replica_identities,
)
from services.postgres.publications import (
    Members,
    TableFacts,
    members,
    schema_tables,
    table_facts,
)
from services.postgres.server import Connection
from services.runtime.process import configure_logging, exit_codes

_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '3s'"
"""Short: UPDATEs queue behind whoever waits for the lock of ALTER TABLE … REPLICA IDENTITY."""
_ROWS: dict[str | None, str] = {
    None: "the bridge sends rows that they have already, unless its topics began without a "
    "snapshot (slotbridge snapshot status)",
    "never": "rows that they have already are not sent: snapshot.mode is never",
    "on_request": "rows that they have already are sent on request: slotbridge snapshot start",
    "initial_only": "rows that they have already are sent by a start with snapshot.mode: initial",
}
_BY_ITSELF = (
    "the bridge sends the rows that they have already by itself, without those of snapshot.exclude"
)


def publication(
    config: ConfigFile,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the statements, for psql.")
    ] = False,
    identity_full: Annotated[
        bool,
        typer.Option(
            "--identity-full", help="Set REPLICA IDENTITY FULL on added tables without an identity."
        ),
    ] = False,
    read_rows: Annotated[
        bool,
        typer.Option(
            "--read-rows",
            help="Ask the bridge for the rows of tables with another row filter or column list, "
            "or none any more (needs snapshot.signal_table or signal_topic).",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Answer with one JSON document on stdout.")
    ] = False,
) -> None:
    """Change the publication to what source.tables, row_filters and column_lists say.

    It adds tables and whole schemas, leaves them out, and sets the replica identities of
    source.replica_identity. The bridge may run meanwhile. Exit codes: 0 the publication is as the
    settings say; 1 you said no; 13 a table is locked; 20 the role does not own publication or
    tables; 25 the change would make UPDATE and DELETE fail, or the publication is for all tables.
    """
    configure_logging(json_lines=False)
    with exit_codes():
        failpoints.arm()
        settings = load_settings(config)
        source = require(settings.source, "source")
        wanted = _wanted(settings, source)
        if read_rows:
            _require_readable(settings)
        require_one_writable(source, OPERATION)
        with find_primary(source).connection as connection:
            try:
                found = members(connection, source.publication)
                schemas = _schemas(connection, source)
                facts = table_facts(connection, {*wanted, *chain(*schemas.values())})
                planned = _planned(
                    connection, source, wanted, schemas, found, facts, identity_full=identity_full
                )
                rows = row_request(connection, settings, planned, asked=read_rows)
                composed = [*planned.statements(), *rows.statements()]
                statements = [one.as_string(connection) for one in composed]
                _print_plan(planned, statements, settings, facts, json=json)
                rows.print_notes(config, dry_run=dry_run)
                idle = not (statements or rows.tables)
                if not (idle or dry_run or yes or typer.confirm("Do it?", err=True)):
                    raise SystemExit(int(ExitCode.CHECK_FAILED))
                if not dry_run:
                    _execute(connection, composed, rows)
                    rows.finish(connection)
            except psycopg.Error as error:
                raise _failed(error, source) from error
        if json:
            document = _document(planned, statements, rows.tables, dry_run=dry_run)
            typer.echo(json_module.dumps(document))
        elif idle:
            typer.echo("nothing to change", err=True)


def _planned(
    connection: Connection,
    source: SourceSettings,
    wanted: frozenset[TableName],
    schemas: Mapping[str, Collection[TableName]],
    found: Members | None,
    facts: Mapping[TableName, TableFacts],
    *,
    identity_full: bool,
) -> Changes:
    """Read what the settings speak of, and return the changes."""
    asked: dict[TableName, str] = {}
    for table in facts:
        if kind := source.of_table(source.replica_identity, table):
            asked[table] = kind
    options: dict[TableName, TableOptions] = {}
    present: dict[TableName, tuple[ReplicaIdentity, ...]] = {}
    filtered = source.row_filters is not None or source.column_lists is not None
    if asked or filtered or identity_full:
        published = found.tables if found is not None else {}
        single = [table for table in facts if table in wanted]
        options = wanted_options(connection, source, single, published)
        present = replica_identities(connection, source.publication, facts)
    return changes(
        source.publication,
        wanted,
        found,
        facts,
        identity_full=identity_full,
        options=options,
        present=present,
        identities_wanted=asked,
        schemas=schemas,
    )


def _wanted(settings: Settings, source: SourceSettings) -> frozenset[TableName]:
    """Return source.tables as (schema, table). Raise SettingsError where a needed one lacks."""
    signals = settings.snapshot.signal_table
    schema = schema_and_table(signals or "")[0]
    listed = signals in source.tables or schema in source.whole_schemas
    if source.tables and signals is not None and not listed:
        raise SettingsError(
            f"snapshot.signal_table {signals} is not in source.tables",
            operation=OPERATION,
            hint="add it: the bridge reads signals from the publication",
        )
    return frozenset(source.single_tables)


def _schemas(connection: Connection, source: SourceSettings) -> dict[str, tuple[TableName, ...]]:
    """Return the schemas to publish whole, with their tables. Raise SettingsError for others."""
    found = schema_tables(connection, source.whole_schemas)
    if missing := sorted({*source.whole_schemas} - found.keys()):
        raise SettingsError(
            f"there is no schema {', '.join(missing)}",
            operation=OPERATION,
            subject=f"publication {source.publication}",
            hint="create it, or correct source.tables",
        )
    return found


def _require_readable(settings: Settings) -> None:
    """Raise SettingsError where the bridge would not read the rows that are asked for."""
    require_signals(settings)
    if settings.snapshot.mode == "never":
        raise SettingsError(
            "snapshot.mode is never: the bridge reads no rows",
            operation=OPERATION,
            hint="set snapshot.mode to on_request, or leave out --read-rows",
        )


def _execute(connection: Connection, statements: Sequence[sql.Composed], rows: RowRequest) -> None:
    with connection.transaction():
        connection.execute(_LOCK_TIMEOUT)
        for statement in statements:
            connection.execute(statement)
        rows.keep(connection)


def _print_plan(
    planned: Changes,
    statements: list[str],
    settings: Settings,
    facts: Mapping[TableName, TableFacts],
    *,
    json: bool,
) -> None:
    """Print the statements on stdout, and what they mean on stderr."""
    if statements:
        for statement in ("BEGIN", _LOCK_TIMEOUT, *statements, "COMMIT"):
            typer.echo(f"{statement};", err=json)
    if planned.add or planned.add_schemas:
        rows = _ROWS.get(settings.snapshot.mode, _BY_ITSELF)
        typer.echo(f"tables that are added: {rows}", err=True)
        if rows is not _ROWS["never"]:
            typer.echo(
                "but those that the bridge has read before, and that were left out since, are read "
                "again on request alone: slotbridge snapshot start",
                err=True,
            )
        keyless = [".".join(table) for table in planned.add if not facts[table].keyed]
        if keyless and rows is not _ROWS["never"]:
            names = ", ".join(keyless)
            typer.echo(f"but those of {names} are not sent: no primary key", err=True)
    if planned.leave_out or planned.leave_out_schemas:
        typer.echo("tables that are left out: their topics keep what they have", err=True)


def _document(
    planned: Changes, statements: list[str], rows: Sequence[str], *, dry_run: bool
) -> dict[str, object]:
    """Return the planned or made changes as the command's JSON."""
    return {
        "publication": planned.publication,
        "created": planned.create,
        "added": [".".join(table) for table in planned.add],
        "left_out": [".".join(table) for table in planned.leave_out],
        "added_schemas": [*planned.add_schemas],
        "left_out_schemas": [*planned.leave_out_schemas],
        "replaced": [".".join(table) for table in planned.replace],
        "unfiltered": [".".join(table) for table in planned.unfiltered],
        "rows_asked_for": [*rows],
        "replica_identity": {".".join(one.table): one.kind for one in planned.identities},
        "identity_full": [".".join(table) for table in planned.identity_full],
        "statements": statements,
        "dry_run": dry_run,
    }


def _failed(error: psycopg.Error, source: SourceSettings) -> Exception:
    """Return our error for what PostgreSQL answered to a statement of the plan."""
    state, text = error.sqlstate or "08", error.diag.message_primary or str(error)
    subject = f"publication {source.publication}"
    if state == "42501":
        return SetupError(
            text,
            operation=OPERATION,
            subject=subject,
            hint="give what --dry-run prints to the owner of publication and tables, for psql",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
    if state == "55P03":
        return Retryable(
            text,
            operation=OPERATION,
            subject=subject,
            hint="a transaction holds a lock on a table: end it (pg_locks), or run this again",
            exit_code=ExitCode.DEADLINE,
        )
    if error.diag.message_detail:
        text = f"{text} ({error.diag.message_detail})"
    return server_error(state, text, OPERATION, subject)
