"""Read what `slotbridge preflight` examines: the primary, Kafka, and the bridge's own /metrics.

Reads only: nothing is owned, fenced or made, so that it can run beside the bridge at any time. To
compare row filters, the server makes a temporary table in a transaction that is rolled back.
"""

import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Final, LiteralString, TypeVar

import psycopg
from confluent_kafka import KafkaException

from schemas.errors import SettingsError, SetupError, SlotbridgeError
from schemas.naming import Naming, table_matches
from schemas.settings import BridgeSettings, KafkaSettings, Settings, SourceSettings
from schemas.shaping import ShapingSettings
from services.bridge import compiled
from services.bridge.events.shaping.tables import Shaping
from services.bridge.preflight.facts import (
    Facts,
    Kafka,
    PartitionedTable,
    Primary,
    Publication,
    Sample,
    SnapshotStandby,
    Table,
)
from services.bridge.recovery.fit import unfit
from services.bridge.sink.compaction import Compacted, refused_by_compaction
from services.bridge.sink.options import MESSAGE_BYTES_MAX
from services.bridge.sink.topic_configs import Configs
from services.bridge.sink.topic_differences import differences
from services.bridge.sink.topic_requirements import Topic
from services.bridge.sink.topics import CLEANUP_POLICY, Topics
from services.bridge.snapshot.row_reader import NotNow, shape_of
from services.bridge.snapshot.standby import is_database_of
from services.bridge.snapshot.standby_state import StandbyState, read_state, require_timeline
from services.bridge.source.candidates import Candidate, connect
from services.bridge.source.hosts import host_name, standby_conninfo
from services.bridge.source.publication_drift import (
    PublicationDifference,
    PublicationSeen,
    publication_differences,
)
from services.bridge.source.publication_reader import read_publication, without_waiting
from services.bridge.source.server_errors import session_error
from services.kafka.client import kafka_error
from services.kafka.records import REQUEST_TIMEOUT_S
from services.postgres.partitions import Partition, partitions
from services.postgres.publications import published_columns
from services.postgres.published_tables import PublishedTable, published_tables
from services.postgres.server import Connection, Server, read_settings, setting, written_lsn
from services.postgres.slots import read_slot_statistics, read_slots

SETTINGS: Final = [
    *("logical_decoding_work_mem", "max_slot_wal_keep_size", "max_wal_size", "wal_keep_size"),
    *("idle_replication_slot_timeout", "max_replication_slots", "wal_level", "effective_wal_level"),
]
Found = TypeVar("Found")
_Read = tuple[PublicationSeen | None, list[PublishedTable], dict[int, tuple[Partition, ...]]]
_TRANSACTIONS: Final = "slotbridge_transactions_total"
_HTTP_TIMEOUT_S: Final = 10.0
_TABLES: LiteralString = """
    SELECT n.nspname::text, c.relname::text, c.relreplident::text,
           EXISTS (SELECT FROM pg_index i
                    WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p') ORDER BY 1, 2
"""
_FOLLOWERS: LiteralString = """
    SELECT r.application_name FROM pg_stat_replication r
     WHERE NOT EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid)
       AND state IN ('streaming', 'catchup') ORDER BY 1
"""
_DENIED: LiteralString = """
    SELECT n.nspname || '.' || c.relname
      FROM pg_publication_tables t JOIN pg_namespace n ON n.nspname = t.schemaname
      JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
     WHERE t.pubname = %s
       AND NOT (has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'))
     ORDER BY 1
"""


def gather(
    source: SourceSettings,
    kafka: KafkaSettings,
    settings: Settings,
    sample_s: float,
    candidate: Candidate,
    topics: Topics | None,
) -> Facts:
    """Read all facts, and note what could not be read. Raise SlotbridgeError.

    `candidate`: the primary, `topics`: refreshed, None where Kafka does not answer.
    """
    unread: list[tuple[str, str]] = []
    connection = candidate.connection
    try:
        primary = _primary(connection, candidate.server.version, source, settings.shaping, unread)
        sample = _sample(connection, source, settings.bridge, sample_s, unread)
    except psycopg.Error as error:
        raise session_error(error, "examine the primary", f"slot {source.slot}") from error
    found: Kafka | None = None
    try:
        found = _kafka(topics, settings.shaping, primary) if topics is not None else None
    except SlotbridgeError as error:
        unread.append(("Kafka's topics", str(error)))
    standby = None
    if settings.snapshot.conninfo is not None:
        conninfo = standby_conninfo(settings.snapshot.conninfo, source.connect_timeout_s)
        standby = _standby(conninfo, candidate.server, source.publication, primary.wal_lsn, unread)
    return Facts(
        slot=source.slot,
        prefix=kafka.topic_prefix,
        servers=kafka.bootstrap_servers,
        streaming=settings.bridge.streaming,
        partitions_wanted=kafka.partitions,
        compiled=compiled.engine is not None,
        primary=primary,
        kafka=found,
        sample=sample,
        unread=tuple(unread),
        standby=standby,
    )


def _standby(
    conninfo: str, primary: Server, publication: str, written: int, unread: list[tuple[str, str]]
) -> SnapshotStandby | None:
    """Return what is known of the standby that snapshots read; None, and a note, on errors."""
    found = connect(conninfo)
    try:
        if isinstance(found, SlotbridgeError):
            raise found
        with found.connection as connection:
            server = found.server
            same = is_database_of(server, primary)
            state = read_state(connection) if server.in_recovery and same else None
            waits, hidden = "", False
            if state is not None:
                try:
                    waits = _waits(state, primary, written)
                except SetupError:
                    hidden = True
            return SnapshotStandby(
                host=host_name(conninfo),
                same_database=same,
                recovers=server.in_recovery,
                feedback=setting(connection, "hot_standby_feedback") == "on",
                waits=waits,
                denied=() if state is None else denied(connection, publication),
                hidden=hidden,
            )
    except (SlotbridgeError, psycopg.Error) as error:
        unread.append(("the standby of snapshot.conninfo", str(error)))
        return None


def _waits(state: StandbyState, primary: Server, written: int) -> str:
    """Return why the bridge reads no rows there now; `written`: what the primary had before."""
    try:
        require_timeline(state, "it", primary)
    except NotNow as reason:
        return str(reason)
    behind = written - state.replayed
    if behind <= 0 and not state.kept_by:
        return ""
    return f"it is {max(0, behind)} bytes of WAL behind{state.kept_by}"


def denied(connection: Connection, publication: str) -> tuple[str, ...]:
    """Return the published tables that the session's role may not read."""
    rows = connection.execute(_DENIED, [publication]).fetchall()
    return tuple(row[0] for row in rows)


def _primary(
    connection: Connection,
    version: int,
    source: SourceSettings,
    shaping: ShapingSettings,
    unread: list[tuple[str, str]],
) -> Primary:
    """Return what the primary's catalogs and settings say."""
    naming = Naming("", shaping)
    published = published_columns(connection, source.publication)
    rows = connection.execute(_TABLES).fetchall()
    needing_old_values = {*shaping.filters, *shaping.keys, *shaping.partition_by}.union(
        shaping.skip_unchanged
    )
    tables = tuple(
        Table(
            schema=schema,
            name=name,
            identity=identity,
            primary_key=key,
            included=naming.included(schema, name),
            keyed=any(table_matches(pattern, schema, name) for pattern in shaping.keys),
            full_wanted=source.of_table(source.replica_identity, (schema, name)) == "full"
            or any(table_matches(pattern, schema, name) for pattern in needing_old_values),
        )
        for schema, name, identity, key in rows
        if (schema, name) in published
    )
    drift, unfitting, below = _against_settings(connection, source, shaping, unread)
    return Primary(
        version=version,
        settings={name: found.value for name, found in read_settings(connection, SETTINGS).items()},
        wal_lsn=written_lsn(connection),
        slots=tuple(read_slots(connection)),
        statistics=read_slot_statistics(connection, source.slot),
        publication=_publication(connection, source.publication),
        tables=tables,
        followers_without_slot=tuple(row[0] for row in connection.execute(_FOLLOWERS).fetchall()),
        differences=drift,
        unfit=unfitting,
        partitioned=below,
    )


def _against_settings(
    connection: Connection,
    source: SourceSettings,
    settings: ShapingSettings,
    unread: list[tuple[str, str]],
) -> tuple[
    tuple[PublicationDifference, ...], tuple[SettingsError, ...], tuple[PartitionedTable, ...]
]:
    """Compare publication and tables with the settings.

    Return the differences, the errors of settings that do not fit, the partitioned tables. Add to
    `unread` what somebody's lock on a table hides, and what a missing package does.
    """
    try:
        shaping = Shaping(settings, "")
    except SettingsError as error:
        unread.append(("the settings' expressions", str(error)))
        return (), (), ()

    def read(connection: Connection) -> _Read:
        tables = published_tables(connection, source.publication)
        below = partitions(connection, [table.oid for table in tables if table.partitioned])
        return read_publication(connection, source), tables, below

    found = without_waiting(connection, read)
    if found is None:
        unread.append(
            ("the publication", "the server refused, or somebody has locked a table of it")
        )
        return (), (), ()
    seen, tables, below = found
    if seen is None:
        return (), (), ()
    unread += (("row filters", f"{table}: {why}") for table, why in seen.unjudged)
    relations = [shape_of(table).relation for table in tables]
    return (
        tuple(publication_differences(source, settings, "", seen)),
        tuple(unfit(shaping, relations, below)),
        tuple(PartitionedTable(one, below[one.oid]) for one in relations if one.oid in below),
    )


def _publication(connection: Connection, name: str) -> Publication | None:
    row = connection.execute(
        "SELECT pubname::text, puballtables, pubupdate, pubdelete, pubtruncate"
        " FROM pg_publication"
        " WHERE pubname = %s",
        [name],
    ).fetchone()
    return Publication(*row) if row is not None else None


def _sample(
    connection: Connection,
    source: SourceSettings,
    bridge: BridgeSettings,
    seconds: float,
    unread: list[tuple[str, str]],
) -> Sample | None:
    """Count for `seconds` what the server decodes and what the bridge publishes, by its /metrics.

    Return None, and add the reason to `unread`, where this can't be counted.
    """
    if seconds <= 0:
        unread.append(("empty transactions", "they are counted with --sample SECONDS"))
        return None
    if not bridge.http_port:
        unread.append(("empty transactions", "bridge.http_port does not name a port"))
        return None
    host = "127.0.0.1" if bridge.http_host in ("0.0.0.0", "::") else bridge.http_host  # noqa: S104
    url = f"http://{host}:{bridge.http_port}/metrics"
    try:
        before = _decoded(connection, source.slot), _published(url)
        time.sleep(seconds)
        after = _decoded(connection, source.slot), _published(url)
    except (OSError, ValueError) as error:
        unread.append(("empty transactions", f"{url} can't be read: {error}"))
        return None
    return Sample(seconds, after[0] - before[0], after[1] - before[1])


def _decoded(connection: Connection, slot: str) -> int:
    found = read_slot_statistics(connection, slot)
    return found.total_txns if found is not None else 0


def _published(url: str) -> int:
    """Read how many transactions with events were published. Raise OSError, ValueError."""
    with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S) as answer:  # noqa: S310 - http
        lines = answer.read().decode().splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(_TRANSACTIONS)]
    if not values:
        raise ValueError(f"there is no {_TRANSACTIONS}")
    return int(float(values[0]))


def _kafka(topics: Topics, shaping: ShapingSettings, primary: Primary) -> Kafka:
    """Return the topics that exist, with their partitions, configuration and differences."""
    settings = topics.settings
    written = topics.written()
    names = sorted({name for name, _ in written})
    partitions = {name: sum(topic == name for topic, _ in written) for name in names}
    configs = Configs(topics.admin, settings)
    metadata = _asked(lambda: topics.admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics)
    _asked(lambda: configs.describe(names))
    found = tuple(
        Topic(name, len(metadata[name].partitions[0].replicas), configs.known.get(name))
        for name in names
        if name in metadata and metadata[name].partitions
    )
    of_tables = frozenset(names) - topics.own()
    compared = [(one, partitions[one.name]) for one in found if one.name in of_tables]
    return Kafka(
        topics=found,
        partitions=partitions,
        table_topics=of_tables,
        message_bytes_max=int(settings.options.get("message.max.bytes", MESSAGE_BYTES_MAX)),
        counted=frozenset(name for name in of_tables if settings.of_topic(name).partitions),
        differences=tuple(differences(settings, compared)),
        compacted=tuple(_compacted(settings, shaping, primary, configs.known)),
    )


def _compacted(
    settings: KafkaSettings,
    shaping: ShapingSettings,
    primary: Primary,
    configs: Mapping[str, Mapping[str, str]],
) -> Iterator[Compacted]:
    """Yield the tables some of whose events a topic refuses that is compacted, or would be."""
    if primary.publication is None:
        return
    yield from refused_by_compaction(
        ((one.schema, one.name, one.has_key) for one in primary.tables),
        Naming(settings.topic_prefix, shaping),
        lambda name: str(configs.get(name, settings.of_topic(name).config).get(CLEANUP_POLICY, "")),
        truncates=primary.publication.truncates,
    )


def _asked(ask: Callable[[], Found]) -> Found:
    try:
        return ask()
    except KafkaException as error:
        raise kafka_error(error, "examine the topics", "") from error
