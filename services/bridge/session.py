"""One connection from start to end: agree on the position, stream, commit, confirm.

    open    probe hosts -> own the origin -> is this server that of the visible records?
            -> fence in Kafka -> end what hangs there -> read progress -> compare witnesses
            -> note what is new about the server -> START_REPLICATION
    stream  read -> decode -> assemble -> send -> (commit -> feedback) -> (move origin)
    close   abandon the open Kafka transaction, drop both connections

The origin is owned before Kafka is fenced, so that a second bridge waits instead of fencing a
healthy first one; and nothing is fenced, decided or made before the server has been shown to be the
right one, so that a bridge which sees another server leaves the right one's alone. Whatever fails
ends the session; the next one starts from the last committed progress record, as after a crash.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol

import structlog

from schemas.events import PreparedRecord, ProgressRecord, prepared_topic, schema_topic
from schemas.lsn import format_lsn
from schemas.settings import BridgeSettings, KafkaSettings, SourceSettings
from schemas.shaping import ShapingSettings
from schemas.snapshot import READ_ALL, SnapshotSettings
from services.bridge import compiled, metrics
from services.bridge.events.envelope import Envelope
from services.bridge.events.formats.table_format import Formats, encoders_for
from services.bridge.events.relations import Relations, warn_of_unmatched
from services.bridge.events.shaping.tables import Shaping
from services.bridge.failpoints import reach
from services.bridge.progress.consistency import Witnesses
from services.bridge.progress.errors import Diverged
from services.bridge.progress.ledger import Ledger, Position, resume_at
from services.bridge.recovery.accept_divergence import accept
from services.bridge.recovery.hanging_transactions import require_told
from services.bridge.recovery.republish import settle_all
from services.bridge.recovery.resume_record import Records
from services.bridge.recovery.staged_transactions import load_staged
from services.bridge.recovery.start_check import StartCheck
from services.bridge.sink.dead_letters import Refused
from services.bridge.sink.group_commit import GroupCommit
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.snapshot.opening import open_snapshot
from services.bridge.snapshot.progress import Owner
from services.bridge.snapshot.snapshotter import Snapshotter
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Heartbeat
from services.bridge.source.replication_connection import Keepalive, ReplicationConnection
from services.bridge.source.standby_status import Feedback
from services.bridge.transactions.assembler import Assembler
from services.bridge.transactions.pipeline import Pipeline
from services.bridge.transactions.spool import Spool, SpoolFull, prepared_exceed_spool
from services.kafka.schema_registry import SchemaRegistry
from services.postgres.server import Server

logger = structlog.get_logger(__name__)

WAIT_MAX_S: Final = 0.2


class Ending(Protocol):
    """What tells a session to end in order."""

    def is_set(self) -> bool: ...


class Session:
    """Built by `open`, used by `stream`, ended by `close`; never reused."""

    def __init__(
        self,
        source: SourceSettings,
        kafka: KafkaSettings,
        bridge: BridgeSettings,
        shaping: ShapingSettings,
        refused: Refused,
        snapshot: SnapshotSettings,
        *,
        streaming: bool,
        registry: SchemaRegistry | None = None,
    ) -> None:
        self._registry = registry
        self._streaming = streaming
        self._snapshot_settings = snapshot
        self._snapshot: Snapshotter | None = None
        self._source = source
        self._kafka = kafka
        self._bridge = bridge
        self._shaping = shaping
        self._refused = refused
        self._primary: Primary | None = None
        self._producer: TransactionalProducer | None = None
        self._connection: ReplicationConnection | None = None
        self._spool: Spool | None = None
        self._pipeline: Pipeline | None = None
        self._group_commit: GroupCommit | None = None
        self._feedback = Feedback(
            wal_sender_timeout_ms=bridge.wal_sender_timeout_ms, subject=f"slot {source.slot}"
        )
        self.heartbeat = Heartbeat(
            source.slot,
            interval_ms=bridge.heartbeat_interval_ms,
            patience_ms=bridge.connect_deadline_ms,
        )
        self._turned = time.monotonic()
        self._records = Records(source.slot, self.heartbeat)

    @property
    def beat(self) -> float:
        """When the loop last turned (time.monotonic), for the liveness probe."""
        return max(self._turned, self._feedback.beat)

    @property
    def server(self) -> Server:
        """The primary that it is connected to."""
        assert self._primary is not None
        return self._primary.server

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: all that was wanted is a snapshot, and it is done."""
        return self._snapshot is not None and self._snapshot.over

    @property
    def durable(self) -> Position:
        """The position up to which Kafka has all events."""
        return self._ledger.durable

    def open(self) -> None:
        """Connect, compare the witnesses and start streaming. Raise SlotbridgeError."""
        if self._registry is not None:
            self._registry.require()
        primary = self._primary = Primary(
            self._source,
            sql_deadline_ms=self._bridge.sql_deadline_ms,
            idle_timeout_ms=self._bridge.origin_idle_timeout_ms,
        )
        primary.reads_rows = READ_ALL[self._snapshot_settings.mode]
        primary.prepare()
        reach("owned")
        waiting = self._feedback.while_waiting
        topics = Topics(self._kafka, self._shaping, while_waiting=waiting)
        topics.prepare()
        topics.check_clocks(primary.clock_ms())
        reach("topics ready")
        slot = self._source.slot
        connection = self._connection = ReplicationConnection(
            *(primary.conninfo, slot),
            wal_sender_timeout_ms=self._bridge.wal_sender_timeout_ms,
            sql_deadline_ms=self._bridge.sql_deadline_ms,
        )
        check = StartCheck(primary, connection, topics, slot, self._bridge)
        check.before_fencing()
        primary.establish()
        reach("shown")
        producer, group_commit = self._make_group_commit(topics, check)
        producer.begin_session()
        reach("fenced")
        record, seen = self._agree(check, topics, primary, producer)
        start = resume_at(record, seen.slot)
        self._ledger = Ledger(start, record.end_lsn, record.ahead_lsn)
        group_commit.begin(self._ledger, record)
        self._pipeline = self._build(primary, topics, start, record.counts)
        connection.start(
            start.end_lsn,
            self._source.publication,
            streaming=self._streaming,
            origin=self._source.origin,
            two_phase=self._source.two_phase,
        )
        primary.streams = True
        reach("resumed inside" if start.seq else "started")
        self._feedback.connect(connection, self._ledger)
        self._announce(start, primary)

    def _make_group_commit(
        self, topics: Topics, check: StartCheck
    ) -> tuple[TransactionalProducer, GroupCommit]:
        slot, waiting = self._source.slot, self._feedback.while_waiting
        producer = self._producer = TransactionalProducer(
            *(self._kafka, self._bridge, topics, slot, self._refused),
            while_waiting=waiting,
            on_disturbance=partial(require_told, topics, slot, waiting),
            former_ids=check.former_ids,
        )
        group_commit = self._group_commit = GroupCommit(
            *(producer, self._bridge, self._feedback, self.heartbeat, self._records.at),
            subject=f"slot {slot}",
            schema_topic=schema_topic(self._kafka.topic_prefix),
        )
        return producer, group_commit

    def _agree(
        self, check: StartCheck, topics: Topics, primary: Primary, producer: TransactionalProducer
    ) -> tuple[ProgressRecord, Witnesses]:
        """End what hangs; the last record, where all witnesses agree, as it is to go on from."""
        slot = self._source.slot
        settle_all(topics, producer, primary, slot, self._feedback.while_waiting, check)
        record = topics.last_progress(slot)
        producer.follow(record)
        try:
            seen = check.compare(record)
        except Diverged as error:
            policy, points = self._bridge.on_divergence, check.switch_points
            record = accept(error, record, policy, primary, points, producer, topics)
            seen = check.compare(record)
        reach("agreed")
        self._records.seen = seen
        return self._records.resume(record, primary, producer), seen

    def _announce(self, start: Position, primary: Primary) -> None:
        """Say, in metrics and log, that changes flow from here."""
        metrics.TIMELINE.set(self._records.timeline)
        metrics.LIVE.connect()
        logger.info(
            "streaming",
            slot=self._source.slot,
            lsn=format_lsn(start.end_lsn),
            timeline=self._records.timeline,
            system_identifier=primary.server.system_identifier,
            compiled=compiled.hot is not None,
        )

    def _build(
        self, primary: Primary, topics: Topics, start: Position, counts: Mapping[str, int]
    ) -> Pipeline:
        """Build the pipeline from pgoutput's bytes to portions, for what comes after `start`."""
        prefix, slot = self._kafka.topic_prefix, self._source.slot
        waiting = self._feedback.while_waiting
        shaping = Shaping(self._shaping, prefix)
        warn_of_unmatched(shaping, primary)
        encoders = encoders_for(self._kafka)(self._bridge, money_digits=primary.money_digits())
        relations = Relations(
            *(prefix, primary, topics.shapes(), shaping, encoders),
            Formats(self._kafka, shaping.naming, encoders, self._registry, waiting),
            while_waiting=waiting,
        )
        envelope = Envelope(
            prefix,
            primary.server.database,
            self._records.timeline,
            relations.describe,
            tombstones=self._bridge.tombstones,
            transaction_metadata=self._bridge.transaction_metadata,
            encoders=encoders,
        )
        spool = self._spool = Spool(
            self._bridge.spool_folder / f"slotbridge-{prefix}-{slot}.spool",
            memory_bytes_max=self._bridge.spool_memory_bytes_max,
            bytes_max=self._bridge.spool_bytes_max,
        )
        self.heartbeat.held = spool.held
        assert self._group_commit is not None
        take = self._group_commit.take
        if self._snapshot_settings.mode != "never":
            self._snapshot = open_snapshot(
                *(self._snapshot_settings, self._source, self._kafka, self._bridge, shaping),
                primary=primary,
                topics=topics,
                owner=self._owner(start),
                describe=relations.describe,
                encoders=encoders,
                take=take,
                breathe=self._work_while_held,
            )
            take = self._snapshot.emit
        return Pipeline(
            spool,
            Assembler(envelope, start, self._bridge.transaction_bytes_max, counts),
            emit=take,
            breathe=self._breathe,
            prepared_topic=prepared_topic(prefix),
            slot=slot,
            staged=self._load_staged(topics, spool),
        )

    def stream(self, stop: Ending) -> None:
        """Stream until `stop` is set, then finish the open Kafka transaction and confirm."""
        connection, group_commit, pipeline = self._connection, self._group_commit, self._pipeline
        assert connection is not None and group_commit is not None and pipeline is not None
        while not (stop.is_set() or self.over):
            now = self._turned = time.monotonic()
            due = min(self._feedback.due, self.heartbeat.due, group_commit.next_due())
            connection.wait(min(WAIT_MAX_S, due - now), group_commit.wakes)
            now_us = time.time_ns() // 1000
            spoken = False
            for received in connection.read():
                spoken = True
                if isinstance(received, Keepalive):
                    self._keepalive(received, pipeline, group_commit)
                else:
                    pipeline.take_all(received, now_us)
            if spoken:  # now, not before: nobody listened while that was worked on
                self._feedback.heard(time.monotonic())
            self._perform_due(group_commit, time.monotonic(), behind=connection.behind)
        self._finish(group_commit)

    def close(self) -> BaseException | None:
        """Drop everything; what Kafka has not committed comes again in the next session.

        Return what a commit that was in progress failed with: that Kafka has fenced us may be
        known only now.
        """
        reach("closing")
        failure = None
        metrics.LIVE.disconnect()
        self._pipeline = None  # it refers to this session: without the cycle all is freed at once
        if self._group_commit is not None:
            failure = self._group_commit.close()
            self._group_commit = None
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
        if self._connection is not None:
            self._connection.close()
        if self._spool is not None:
            self._spool.close()
        if self._primary is not None:
            self._primary.close()
        return failure

    def _load_staged(self, topics: Topics, spool: Spool) -> list[PreparedRecord]:
        with topics.reader(prepared_topic(self._kafka.topic_prefix)) as reader:
            try:
                staged = load_staged(reader, self._source.slot, spool)
            except SpoolFull as error:
                raise prepared_exceed_spool(error) from error
        if staged:
            gids = ", ".join(sorted(record.gid for record in staged)[:5])
            logger.info("prepared transactions wait", count=len(staged), gids=gids)
            reach("staging loaded")
        return staged

    def _keepalive(self, item: Keepalive, pipeline: Pipeline, group_commit: GroupCommit) -> None:
        self._ledger.receive(item.wal_end)
        pipeline.advance(item.wal_end)
        if item.reply:
            self._feedback.due = 0.0
            group_commit.hurry()

    def _breathe(self) -> None:
        """Answer the server in the middle of long work, and keep the origin's session alive."""
        reach("breathing")
        self._feedback.while_waiting()
        self._beat(time.monotonic())

    def _owner(self, start: Position) -> Owner:
        """Name whose snapshot progress counts, and up to where Kafka has everything."""
        records = self._records
        history = records.seen.switch_points
        return Owner(self._source.slot, records.timeline, start.end_lsn, history)

    def _work_while_held(self) -> None:
        """Commit to Kafka and tell the server while the stream stands still for a chunk of rows.

        What the chunk waits for may be a commit that waits for the bridge.
        """
        assert self._group_commit is not None
        reach("breathing")
        self._feedback.heard(time.monotonic())  # nobody listens meanwhile
        self._group_commit.perform(time.monotonic(), behind=False)
        self._tell_server(self._group_commit)

    def _beat(self, now: float) -> None:
        if now >= self.heartbeat.due:
            assert self._primary is not None
            self.heartbeat.perform(self._primary, self._ledger)
            self._feedback.commits_wait = self.heartbeat.commits_wait

    def _perform_due(self, group_commit: GroupCommit, now: float, *, behind: bool) -> None:
        group_commit.perform(now, behind=behind)
        if self._snapshot is not None:
            self._snapshot.perform(now)
        self._tell_server(group_commit)

    def _tell_server(self, group_commit: GroupCommit) -> None:
        """Confirm what is to be confirmed by now, and do what the heartbeat has to."""
        now = time.monotonic()
        if self.heartbeat.commits_wait:  # also of what had to wait until Kafka had committed
            self._feedback.tell_news(follow=group_commit.settled)
        if now >= self._feedback.due:
            group_commit.report()
        self._beat(now)

    def _finish(self, group_commit: GroupCommit) -> None:
        """Stop cleanly: commit what is whole, confirm it, and leave the origin where Kafka is."""
        assert self._primary is not None
        reach("stopping")
        self.heartbeat.commits_wait = False
        group_commit.finish()
        self.heartbeat.perform(self._primary, self._ledger)
        self.heartbeat.commits_wait = False
        group_commit.note()
        logger.info("stopped", lsn=format_lsn(self._ledger.durable.end_lsn))
