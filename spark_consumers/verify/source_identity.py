"""Whether the source that tables are compared with is the server whose events Kafka has.

    at the source                               must be that
    system identifier   pg_control_system()     of the bridge's last progress record
    timeline, history   TIMELINE_HISTORY        of that record: two servers may be promoted to one
                                                number
    publication         pg_publication.oid      of that record
    database            current_database()      of the bridge's slot: CREATE DATABASE … TEMPLATE
                                                copies the publication's oid, and no slot

Rows that are equal to those of another server prove nothing, so a witness that is not to be had
never counts as agreement: `verify` compares all the same, and tells the source as not judged;
`audit` refuses.
Source: PostgreSQL documentation 54.4 TIMELINE_HISTORY; CREATE DATABASE.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import psycopg
from psycopg.conninfo import make_conninfo

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SlotbridgeError
from schemas.progress import ProgressRecord
from schemas.settings import KafkaSettings, SourceSettings
from schemas.timelines import switch_points
from services.postgres.sessions import AUDIT, open_session
from spark_consumers.kafka.progress import ProgressTail
from spark_consumers.kafka.reader import TopicOffsets

_FIRST_TIMELINE: Final = 1
"""It has not an ancestor: the history is known without a file."""
# A standby's control file has the timeline of its last restart point: after a failover it lags.
# Of a standby, only a slot that is synchronized from the primary counts.
_IDENTITY: Final = """
    SELECT (SELECT system_identifier::text FROM pg_control_system()), pg_is_in_recovery(),
           CASE WHEN pg_is_in_recovery() THEN (SELECT received_tli FROM pg_stat_wal_receiver)
           ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int
           END,
           (SELECT oid::bigint FROM pg_publication WHERE pubname = %s),
           (SELECT database::text FROM pg_replication_slots
             WHERE slot_name = %s AND (synced OR NOT pg_is_in_recovery())),
           current_database()::text
"""
# A function of somebody else would run with the rights of our role.
_MAY_CALL: Final = """
    SELECT r.rolsuper AND has_schema_privilege(n.oid, 'USAGE')
           AND has_function_privilege(p.oid, 'EXECUTE')
      FROM pg_proc p
      JOIN pg_roles r ON r.oid = p.proowner
      JOIN pg_namespace n ON n.oid = p.pronamespace
     WHERE n.nspname = 'slotfailover' AND p.proname = 'timeline_history'
       AND p.pronargs = 1 AND p.proargtypes[0] = 'int4'::regtype
"""
_THE_BRIDGES: Final = "source.conninfo must lead to the database that the bridge reads from"


class SourceIdentity(NamedTuple):
    """The server and database behind source.conninfo.

    `timeline`: of the WAL that a primary writes or a standby receives; None: not to be seen.
    `history`: each ancestor of `timeline` -> the LSN at which it was left; None: not to be read.
    `publication_oid`: of source.publication, None without it. `slot_database`: of the slot
    `slot` (source.slot), None where the server has not that slot.
    """

    system_identifier: str
    standby: bool
    timeline: int | None
    history: Mapping[int, int] | None
    publication_oid: int | None
    slot: str
    slot_database: str | None
    database: str


def source_not_judged(
    connection: psycopg.Connection, source: SourceSettings, kafka: KafkaSettings
) -> str:
    """Return why the source can't be shown to be the server of Kafka's events, "" if it can.

    Leave no transaction open, so that rows which are read afterwards have a snapshot of their own.
    """
    try:
        record = _progress(source, kafka)
    except SlotbridgeError as error:
        where = f" ({error.subject})" if error.subject else ""
        return f"which server Kafka's events are of is not known: {error.message}{where}"
    try:
        return not_judged(record, read_identity(connection, source))
    except psycopg.errors.InsufficientPrivilege as error:
        return f"the role can't see which server it is: {error.diag.message_primary}"


def not_judged(record: ProgressRecord, source: SourceIdentity) -> str:
    """Return why a server can't be shown to be the one of a progress record, "" if it can. Pure."""
    try:
        require_same_source(record, source, "compare tables")
    except SlotbridgeError as error:
        return f"{error.message}: {error.hint}"
    return ""


def read_identity(connection: psycopg.Connection, source: SourceSettings) -> SourceIdentity:
    """Read which server and database a connection leads to, in a transaction of its own."""
    with connection.transaction():
        row = connection.execute(_IDENTITY, [source.publication, source.slot]).fetchone()
        assert row is not None
        identifier, standby, timeline, publication_oid, slot_database, database = row
        history = None if timeline is None else _history(connection, source, timeline)
    return SourceIdentity(
        system_identifier=identifier,
        standby=standby,
        timeline=timeline,
        history=history,
        publication_oid=publication_oid,
        slot=source.slot,
        slot_database=slot_database,
        database=database,
    )


def require_same_source(record: ProgressRecord, source: SourceIdentity, operation: str) -> None:
    """Return normally if the server is shown to be the one of a progress record. Pure.

    Raise OperatorNeeded (WRONG_DATABASE, TIMELINE) for another one, Retryable (NOT_JUDGED) where
    that can't be told.
    """
    if source.system_identifier != record.server.system_identifier:
        raise _another(
            operation,
            f"the server has another system identifier ({source.system_identifier}) than that of "
            f"Kafka's events ({record.server.system_identifier})",
        )
    _require_same_timeline(record, source, operation)
    if source.publication_oid != record.settings.publication_oid:
        raise _another(
            operation,
            "the database lacks the publication that Kafka's events are of",
            f"{_THE_BRIDGES}, and source.publication must be the bridge's",
        )
    if source.slot_database is None and source.standby:
        raise _unknown(
            operation,
            f"the standby has not the slot {source.slot}, which tells the bridge's database",
            "switch sync_replication_slots on, or let source.conninfo lead to the primary",
        )
    if source.slot_database is None:
        raise _unknown(
            operation,
            f"the server has not the slot {source.slot}, which tells the bridge's database",
            "slotbridge status tells what became of the bridge's slot",
        )
    if source.slot_database != source.database:
        raise _another(
            operation,
            f"the bridge's slot {source.slot} is of the database {source.slot_database}, not "
            f"{source.database}",
        )


@contextlib.contextmanager
def walsender_of(
    connection: psycopg.Connection,
    source: SourceSettings,
    settings: Mapping[str, str] | None = None,
) -> Iterator[psycopg.Connection]:
    """Open a replication connection to the server and database that `connection` leads to.

    source.conninfo may name several hosts: only the one of `connection` is asked.
    """
    info = connection.info
    conninfo = source.conninfo.get_secret_value()
    with open_session(
        AUDIT,
        make_conninfo(conninfo, host=info.host, hostaddr=info.hostaddr or None, port=info.port),
        settings,
        connect_timeout=source.connect_timeout_s,
    ) as walsender:
        yield walsender


def _require_same_timeline(record: ProgressRecord, source: SourceIdentity, operation: str) -> None:
    """Raise unless the source has the timeline of Kafka's record, with the same history."""
    number = source.timeline
    if number is None:
        raise _unknown(
            operation,
            "the timeline of the standby can't be seen",
            "let the standby receive WAL from a primary, and grant pg_read_all_stats to the role "
            "(pg_stat_wal_receiver)",
        )
    noted = record.server.timeline
    if number != noted:
        what = "the standby receives" if source.standby else "the server is on"
        raise OperatorNeeded(
            f"{what} timeline {number}, and Kafka's events are of timeline {noted}",
            operation=operation,
            subject="the source",
            hint="wait until the bridge streams from the new primary, or correct source.conninfo",
            exit_code=ExitCode.TIMELINE,
        )
    if number == _FIRST_TIMELINE:
        return
    if source.history is None:
        raise _unknown(
            operation,
            f"the history of timeline {number} can't be read, and another server may have been "
            "promoted to that number",
            "run sql/roles.sql again, which lets the role call slotfailover.timeline_history(), or "
            "give the role REPLICATION and a free walsender",
        )
    if source.history != record.server.history:
        raise OperatorNeeded(
            f"the server is on another timeline of the same number {number} than that of Kafka's "
            "events: two servers were promoted",
            operation=operation,
            subject="the source",
            hint=_THE_BRIDGES,
            exit_code=ExitCode.TIMELINE,
        )


def _another(operation: str, message: str, hint: str = _THE_BRIDGES) -> OperatorNeeded:
    return OperatorNeeded(
        message,
        operation=operation,
        subject="the source",
        hint=hint,
        exit_code=ExitCode.WRONG_DATABASE,
    )


def _unknown(operation: str, message: str, hint: str) -> Retryable:
    return Retryable(
        message,
        operation=operation,
        subject="the source",
        hint=hint,
        exit_code=ExitCode.NOT_JUDGED,
    )


def _history(
    connection: psycopg.Connection, source: SourceSettings, timeline: int
) -> dict[int, int] | None:
    """Return each ancestor of `timeline` -> where it was left, None where that can't be read.

    Superusers and roles with REPLICATION read it from the walsender, others by the function that
    sql/roles.sql grants.
    """
    if timeline == _FIRST_TIMELINE:
        return {}
    row = connection.execute(_MAY_CALL).fetchone()
    if row is not None and row[0]:
        query = "SELECT slotfailover.timeline_history(%s)"
        row = connection.execute(query, [timeline]).fetchone()
        return None if row is None or row[0] is None else switch_points(row[0])
    with contextlib.suppress(psycopg.Error), walsender_of(connection, source) as walsender:
        row = walsender.execute(f"TIMELINE_HISTORY {timeline}".encode()).fetchone()
        return None if row is None else switch_points(row[1])
    return None


def _progress(source: SourceSettings, kafka: KafkaSettings) -> ProgressRecord:
    tail = ProgressTail(kafka, TopicOffsets(kafka), source.slot)
    try:
        return tail.last()
    finally:
        tail.close()
