"""Whether the source that tables are compared with is the server whose events Kafka has.

The bridge's last progress record names that server: its system identifier, its timeline, the
publication. A server that can't be shown to be the same one is compared all the same, and
told as not judged: rows that are equal to those of another server prove nothing.
"""

from typing import Final, NamedTuple

import psycopg

from schemas.errors import SlotbridgeError
from schemas.events import ProgressRecord
from schemas.settings import KafkaSettings, SourceSettings
from spark_consumers.kafka.progress import ProgressTail
from spark_consumers.kafka.reader import TopicOffsets

# A standby's control file has the timeline of its last restart point: after a failover it lags.
_IDENTITY: Final = """
    SELECT (SELECT system_identifier::text FROM pg_control_system()), pg_is_in_recovery(),
           CASE WHEN pg_is_in_recovery() THEN (SELECT received_tli FROM pg_stat_wal_receiver)
           ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int
           END,
           (SELECT oid::bigint FROM pg_publication WHERE pubname = %s)
"""


class SourceIdentity(NamedTuple):
    """The server and database behind source.conninfo.

    `timeline`: of the WAL that a primary writes or a standby receives; None: not to be seen.
    `publication_oid`: of source.publication, None without it.
    """

    system_identifier: str
    standby: bool
    timeline: int | None
    publication_oid: int | None


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
        return not_judged(record, read_identity(connection, source.publication))
    except psycopg.errors.InsufficientPrivilege as error:
        return f"the role can't see which server it is: {error.diag.message_primary}"


def read_identity(connection: psycopg.Connection, publication: str) -> SourceIdentity:
    """Read which server and database a connection leads to, in a transaction of its own."""
    with connection.transaction():
        row = connection.execute(_IDENTITY, [publication]).fetchone()
    assert row is not None
    return SourceIdentity(*row)


def not_judged(record: ProgressRecord, found: SourceIdentity) -> str:
    """Return why a server can't be shown to be the one of a progress record, "" if it can. Pure."""
    if found.system_identifier != record.system_identifier:
        return (
            f"the server has another system identifier ({found.system_identifier}) than that of "
            f"Kafka's events ({record.system_identifier}): correct source.conninfo"
        )
    if record.publication_oid and found.publication_oid != record.publication_oid:
        return (
            "the database lacks the publication that Kafka's events are of: correct "
            "source.conninfo and source.publication"
        )
    if found.timeline is None:
        return (
            "the timeline of the standby can't be seen: it receives no WAL from a primary, or its "
            "role lacks pg_read_all_stats (pg_stat_wal_receiver)"
        )
    if found.timeline != record.timeline:
        what = "the standby receives" if found.standby else "the server is on"
        return (
            f"{what} timeline {found.timeline}, and Kafka's events are of timeline "
            f"{record.timeline}: wait until the bridge streams from the new primary, or correct "
            "source.conninfo"
        )
    return ""


def _progress(source: SourceSettings, kafka: KafkaSettings) -> ProgressRecord:
    tail = ProgressTail(kafka, TopicOffsets(kafka), source.slot)
    try:
        return tail.last()
    finally:
        tail.close()
