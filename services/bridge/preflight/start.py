"""Looks what a start of the bridge would do on the primary and in Kafka, or why it is refused.

The checks are the start's own (`StartCheck.before_fencing`, `Primary.slot`). Nothing is owned,
fenced or made: a bridge may run meanwhile.
"""

import contextlib
from collections.abc import Iterator
from typing import Final, LiteralString

import psycopg

from schemas.errors import ExitCode, SettingsError, SetupError, SlotbridgeError
from schemas.events import progress_topic
from schemas.findings import Finding
from schemas.lsn import format_lsn
from schemas.settings import Settings, SourceSettings
from services.bridge.preflight.finding import not_judged, start_refusal, would
from services.bridge.preflight.gather import denied
from services.bridge.progress.ledger import check_beginning
from services.bridge.recovery.start_check import StartCheck
from services.bridge.sink.topics import Topics
from services.bridge.source.database import Primary
from services.bridge.source.replication_connection import ReplicationConnection
from services.bridge.source.server_errors import session_error
from services.bridge.source.table_options import creation_statement
from services.bridge.source.witness import witness_of
from services.postgres.identifiers import identifier
from services.postgres.publications import publication_oid, rows_before
from services.postgres.server import Connection
from services.postgres.witness_sequences import sequence_rights

_POSITIONS: Final = "whether slot, database and Kafka agree where Kafka is"
_LACKING: LiteralString = """
    SELECT oid::regprocedure::text FROM pg_proc
     WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY (%s)
       AND NOT has_function_privilege(oid, 'EXECUTE') ORDER BY 1
"""
_FUNCTIONS: Final = [
    f"pg_replication_origin_{name}"
    for name in ("create", "session_setup", "xact_setup", "progress")
]
_MISSING: LiteralString = """
    SELECT name FROM unnest(%s::text[], %s::text[]) AS wanted (schema, relation),
           concat(schema, '.', relation) AS name
     WHERE NOT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                        WHERE n.nspname = schema AND c.relname = relation) ORDER BY 1
"""
_STRANGE: LiteralString = """
    SELECT schema || '.' || relation
      FROM unnest(%s::text[], %s::text[]) AS wanted (schema, relation)
      JOIN pg_namespace n ON n.nspname = schema
      JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = relation
     WHERE NOT pg_has_role(c.relowner, 'USAGE') ORDER BY 1
"""


def start(
    settings: Settings, source: SourceSettings, topics: Topics | None, connection: Connection
) -> Iterator[Finding]:
    """Yield what a start does or is refused for; `connection`: to the primary, by its role."""
    try:
        yield from _rights(connection, source, settings)
        yield from _publication(connection, source)
        yield from _rows(connection, source, settings)
    except psycopg.Error as error:
        yield start_refusal(
            "start-refused", session_error(error, "read the catalogs", "the primary")
        )
    try:
        yield from _positions(settings, source, topics)
    except SlotbridgeError as error:
        yield start_refusal("start-refused", error)


def _positions(
    settings: Settings, source: SourceSettings, topics: Topics | None
) -> Iterator[Finding]:
    """Compare slot, witness and record as a start does before it fences. Raise its error."""
    bridge = settings.bridge
    with contextlib.ExitStack() as resources:
        primary = Primary(
            source,
            sql_deadline_ms=bridge.sql_deadline_ms,
            idle_timeout_ms=bridge.origin_idle_timeout_ms,
        )
        resources.callback(primary.close)
        slot = primary.slot()
        if slot is None:
            yield would(f"slot {source.slot}", "made, with failover, on the primary")
        elif slot.confirmed_flush_lsn is not None:
            where = format_lsn(slot.confirmed_flush_lsn)
            yield would(f"slot {source.slot}", f"streamed from {where} or later")
        if topics is None:
            yield not_judged(_POSITIONS, "Kafka does not answer")
            return
        replication = ReplicationConnection(
            primary.conninfo,
            source.slot,
            wal_sender_timeout_ms=bridge.wal_sender_timeout_ms,
            sql_deadline_ms=bridge.sql_deadline_ms,
            name="slotbridge preflight",
        )
        resources.callback(replication.close)
        check = StartCheck(primary, replication, topics, source.slot, bridge)
        if not topics.has(progress_topic(topics.prefix)):
            check_beginning(check.witnesses(), source.slot)
        elif topics.planned():
            yield not_judged(_POSITIONS, "some of the bridge's own topics are missing")
        else:
            check.before_fencing()
            yield would("Kafka", "continued by its last record, which fits the primary")


def _rights(
    connection: Connection, source: SourceSettings, settings: Settings
) -> Iterator[Finding]:
    """Yield which rights the role lacks for the witness, and whether that is made."""
    witness = witness_of(source.witness, source.slot)
    if not witness.exists(connection):
        yield would(f"{source.witness} {witness.name}", "made: it notes how far Kafka is")
    if source.witness == "origin":
        rows = connection.execute(_LACKING, [_FUNCTIONS]).fetchall()
        if names := ", ".join(row[0] for row in rows):
            yield _lacks("EXECUTE", names, f"GRANT EXECUTE ON FUNCTION {names} TO", connection)
    elif (rights := sequence_rights(connection, source.slot)) not in (None, (True, True)):
        statement = f"GRANT SELECT, UPDATE ON SEQUENCE {witness.name} TO"
        yield _lacks(
            "SELECT and UPDATE" if not any(rights or ()) else "UPDATE",
            witness.name,
            statement,
            connection,
        )
    unreadable = ", ".join(denied(connection, source.publication))
    if unreadable and settings.snapshot.mode != "never":
        yield _lacks("SELECT", unreadable, "GRANT pg_read_all_data TO", connection)


def _lacks(right: str, what: str, statement: str, connection: Connection) -> Finding:
    role = connection.info.user
    error = SetupError(
        f"the role {role} lacks {right} on {what}",
        hint=f"{statement} {identifier(role)}; or run sql/roles.sql (`slotbridge sql roles`)",
        exit_code=ExitCode.PRIVILEGE_MISSING,
    )
    return start_refusal("role-lacks-rights", error, f"role {role}")


def _publication(connection: Connection, source: SourceSettings) -> Iterator[Finding]:
    """Yield whether the publication is made, or why the role can't make it."""
    if publication_oid(connection, source.publication) is not None:
        return
    name, tables = f"publication {source.publication}", source.single_tables
    names = [schema for schema, _ in tables], [table for _, table in tables]
    missing = connection.execute(_MISSING, [*names]).fetchall()
    if missing:
        listed = ", ".join(row[0] for row in missing)
        error = SettingsError(
            f"there is no table {listed}", hint="create it, or correct source.tables"
        )
        yield start_refusal("publication-refused", error, name)
        return
    strange = connection.execute(_STRANGE, [*names]).fetchall()
    superuser = connection.info.parameter_status("is_superuser") == "on"
    statement = creation_statement(connection, source).as_string(connection)
    if not superuser and (strange or source.whole_schemas or not tables):
        listed = ", ".join(row[0] for row in strange) or "all tables or whole schemas"
        refused = SetupError(
            f"it does not exist, and the role {connection.info.user} does not own {listed}",
            hint=f"as a superuser: {statement}; or run `slotbridge publication` with "
            "SLOTBRIDGE_SOURCE__CONNINFO set to the owner's connection",
            exit_code=ExitCode.PRIVILEGE_MISSING,
        )
        yield start_refusal("publication-refused", refused, name)
        return
    yield would(name, f"made: {statement}")


def _rows(connection: Connection, source: SourceSettings, settings: Settings) -> Iterator[Finding]:
    before = rows_before(connection, source.publication)
    mode = settings.snapshot.mode
    if not before.tables or mode in ("never", "on_request"):
        return
    what = f"about {before.rows:,} rows (tables: {before.tables}), sent beside the changes"
    yield would("rows from before the slot", f"{what}, unless the topics have them already")
