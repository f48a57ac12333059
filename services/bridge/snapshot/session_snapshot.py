"""Opens a session's snapshot: its progress in Kafka, and the server that rows are read from."""

import time
from collections.abc import Callable

from schemas.events import snapshot_topic
from schemas.settings import BridgeSettings, KafkaSettings, SourceSettings
from schemas.snapshot import (
    SignalPosition,
    SlotBeginning,
    SnapshotProgress,
    SnapshotRequest,
    SnapshotSettings,
)
from services.bridge.events.relations import Relations
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.values.encoders import Encoders
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.progress import Known, Owner
from services.bridge.snapshot.reader import SnapshotReader
from services.bridge.snapshot.requests import is_position, is_progress, is_request
from services.bridge.snapshot.row_events import RowEvents
from services.bridge.snapshot.signal_topic import SignalTopic, signal_position
from services.bridge.snapshot.signals import Signals
from services.bridge.snapshot.snapshotter import Snapshotter
from services.bridge.snapshot.standby import Standby
from services.bridge.source.database import Primary
from services.bridge.source.hosts import standby_conninfo
from services.bridge.transactions.assembler import EventBatch
from services.kafka.records import READ_DEADLINE_S, parse_record
from services.postgres.sessions import SNAPSHOT_STATEMENT_MS
from services.waiter import Waiter

CHUNK_BYTES_MAX = 4 * 2**20
STANDBY_DEADLINE_MS = SNAPSHOT_STATEMENT_MS + 1_000
"""When a standby is given up that does not even cancel a statement: the stream stands still."""


def open_snapshot(
    settings: SnapshotSettings,
    source: SourceSettings,
    kafka: KafkaSettings,
    bridge: BridgeSettings,
    shaping: Shaping,
    *,
    primary: Primary,
    topics: Topics,
    owner: Owner,
    relations: Relations,
    encoders: Encoders,
    take: Callable[[EventBatch], None],
    waiter: Waiter,
    durable_lsn: Callable[[], int],
) -> Snapshotter:
    """Connect, and read how far the rows of each table are in Kafka. Raises SlotbridgeError."""
    topics.prepare_late(snapshot_topic, compacted=True)
    found = read_known(topics)
    row_events = RowEvents(
        kafka.topic_prefix,
        primary.server.database,
        owner.timeline,
        relations.describe,
        transaction_metadata=bridge.transaction_metadata,
        encoders=encoders,
        flat=shaping.flat,
        dead_rows=bridge.on_refused == "dead_letter",
        without_partitions=relations.without_partitions,
    )
    reader = SnapshotReader(
        primary.conninfo,
        source.publication,
        source.slot,
        primary.server,
        deadline_ms=bridge.sql_deadline_ms,
        workers=settings.workers,
    )
    standby = None
    if settings.conninfo is not None:
        standby = Standby(
            standby_conninfo(settings.conninfo, source.connect_timeout_s),
            source.publication,
            source.slot,
            primary.server,
            deadline_ms=min(bridge.sql_deadline_ms, STANDBY_DEADLINE_MS),
            workers=settings.workers,
        )
    signals = Signals(settings, kafka.topic_prefix, owner, found.requests)
    if settings.signal_topic is not None:
        position = signal_position(settings.signal_topic, owner.slot, found.positions)
        signals.topic = SignalTopic(topics, settings.signal_topic, position)
    return Snapshotter(
        settings,
        reader,
        standby,
        row_events,
        found,
        shaping,
        owner,
        kafka.topic_prefix,
        signals,
        parked=relations.parked,
        bytes_max=min(CHUNK_BYTES_MAX, bridge.transaction_bytes_max),
        take=take,
        waiter=waiter,
        durable_lsn=durable_lsn,
    )


def look_for_known(topics: Topics) -> Known:
    """Return the state in `<prefix>.snapshot`, an empty one if the topic does not exist."""
    there = topics.there(snapshot_topic(topics.prefix))
    return read_known(topics) if there else Known([], [], [], [])


def read_known(topics: Topics) -> Known:
    """Return the last records of each kind in `<prefix>.snapshot`."""
    topic = snapshot_topic(topics.prefix)
    last: dict[bytes | str | None, tuple[int, bytes]] = {}
    with topics.reader(topic) as reader:
        low, end = reader.bounds()
        for offset, key, value in reader.between(low, end, time.monotonic() + READ_DEADLINE_S):
            last.pop(key, None)
            if value is not None:
                last[key] = offset, value
    known = Known([], [], [], [])
    for key, (offset, value) in last.items():
        if is_request(key):
            known.requests.append(parse_record(SnapshotRequest, topic, offset, value))
        elif is_progress(key):
            known.progress.append(parse_record(SnapshotProgress, topic, offset, value))
        elif is_position(key):
            known.positions.append(parse_record(SignalPosition, topic, offset, value))
        else:
            known.beginnings.append(parse_record(SlotBeginning, topic, offset, value))
    return known
