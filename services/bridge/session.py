"""One connection from start to end: agree on the position, stream, commit, confirm.

    open    probe hosts -> own the origin -> fence in Kafka -> read progress -> compare witnesses
            -> START_REPLICATION
    stream  read -> decode -> assemble -> send -> (commit -> feedback) -> (move origin)
    close   abandon the open Kafka transaction, drop both connections

The origin is owned before Kafka is fenced, so that a second bridge waits instead of fencing a
healthy first one. Whatever fails ends the session; the next one starts from the last committed
progress record, exactly as after a crash.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from typing import Final

import structlog

from schemas.events import PreparedRecord, ProgressRecord, prepared_topic
from schemas.lsn import format_lsn
from schemas.settings import BridgeSettings, KafkaSettings, SourceSettings
from schemas.shaping import ShapingSettings
from services.bridge import metrics
from services.bridge.events.envelope import Envelope
from services.bridge.events.relations import Relations, warn_of_unmatched
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.values.encoders import Encoders
from services.bridge.failpoints import reach
from services.bridge.kafka.producer import TransactionalProducer
from services.bridge.kafka.refused import RefusalLearned, Refused, origin_of
from services.bridge.kafka.staged import load_staged
from services.bridge.kafka.topics import Topics
from services.bridge.postgres.connection import Data, Keepalive, ReplicationConnection
from services.bridge.postgres.database import Primary
from services.bridge.postgres.feedback import Feedback
from services.bridge.postgres.heartbeat import Heartbeat
from services.bridge.progress.acceptance import accept
from services.bridge.progress.agreement import Diverged, Ledger, Position, resume_at
from services.bridge.progress.witnesses import compare_witnesses
from services.bridge.transactions.assembler import Assembler, Portion
from services.bridge.transactions.pipeline import Pipeline
from services.bridge.transactions.spool import Spool, SpoolFull, prepared_exceed_spool
from services.process import Stop

logger = structlog.get_logger(__name__)

WAIT_MAX_S: Final = 0.2
AHEAD_BYTES: Final = 16 * 2**20
"""How much WAL without events the slot may be confirmed ahead of Kafka's record."""


class Session:
    """Built by `open`, used by `stream`, ended by `close`; never reused."""

    def __init__(
        self,
        source: SourceSettings,
        kafka: KafkaSettings,
        bridge: BridgeSettings,
        shaping: ShapingSettings,
        refused: Refused,
        *,
        streaming: bool,
    ) -> None:
        self._streaming = streaming
        self._source = source
        self._kafka = kafka
        self._bridge = bridge
        self._shaping = shaping
        self._refused = refused
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kafka-commit")
        self._primary: Primary | None = None
        self._producer: TransactionalProducer | None = None
        self._connection: ReplicationConnection | None = None
        self._spool: Spool | None = None
        self._pipeline: Pipeline | None = None
        self._portion_bytes = 0
        self._events = 0
        self._counts: Mapping[str, int] = {}
        self._commit_due = 0.0
        self._feedback = Feedback(
            wal_sender_timeout_ms=bridge.wal_sender_timeout_ms, subject=f"slot {source.slot}"
        )
        self._heartbeat = Heartbeat(source.slot, interval_ms=bridge.heartbeat_interval_ms)
        self._now_us = 0
        self._turned = time.monotonic()

    @property
    def beat(self) -> float:
        """When the loop last turned (time.monotonic), for the liveness probe."""
        return max(self._turned, self._feedback.beat)

    @property
    def durable(self) -> Position:
        """What Kafka has."""
        return self._ledger.durable

    def open(self) -> None:
        """Connect, compare the witnesses and start streaming. Raises SlotbridgeError."""
        primary = self._primary = Primary(
            self._source,
            sql_deadline_ms=self._bridge.sql_deadline_ms,
            idle_timeout_ms=self._bridge.origin_idle_timeout_ms,
        )
        primary.prepare()
        reach("owned")
        topics = Topics(self._kafka, while_waiting=self._feedback.while_waiting)
        topics.prepare()
        reach("topics ready")
        slot = self._source.slot
        producer = self._producer = TransactionalProducer(
            self._kafka,
            self._bridge,
            topics,
            slot,
            self._refused,
            while_waiting=self._feedback.while_waiting,
        )
        producer.begin_session()
        reach("fenced")
        record = topics.last_progress(slot)
        connection = self._connection = ReplicationConnection(
            primary.conninfo,
            slot,
            wal_sender_timeout_ms=self._bridge.wal_sender_timeout_ms,
            sql_deadline_ms=self._bridge.sql_deadline_ms,
        )
        try:
            seen = compare_witnesses(primary, connection, record, slot, topics)
        except Diverged as error:
            record = accept(error, record, self._bridge.on_divergence, primary, producer, topics)
            seen = compare_witnesses(primary, connection, record, slot, topics)
        reach("agreed")
        self._timeline = seen.server.timeline
        if record is None:
            record = self._begin(primary, producer)
        start = resume_at(record, seen.slot)
        self._ledger = Ledger(start)
        self._counts = record.counts
        self._pipeline = self._build(primary, topics, start)
        connection.start(
            start.end_lsn,
            self._source.publication,
            streaming=self._streaming,
            origin=self._source.origin,
            two_phase=self._source.two_phase,
        )
        reach("resumed inside" if start.seq else "started")
        self._feedback.connect(connection, self._ledger)
        metrics.TIMELINE.set(self._timeline)
        metrics.STREAMING.set(1)
        logger.info(
            "streaming",
            slot=slot,
            lsn=format_lsn(start.end_lsn),
            timeline=self._timeline,
            system_identifier=primary.server.system_identifier,
        )

    def _build(self, primary: Primary, topics: Topics, start: Position) -> Pipeline:
        """From pgoutput's bytes to portions, for what comes after `start`."""
        prefix, slot = self._kafka.topic_prefix, self._source.slot
        shaping = Shaping(self._shaping, prefix)
        warn_of_unmatched(shaping, primary)
        encoders = Encoders(self._bridge, money_digits=primary.money_digits())
        relations = Relations(
            *(prefix, primary, topics.shapes(), shaping, encoders),
            while_waiting=self._feedback.while_waiting,
        )
        envelope = Envelope(
            prefix,
            primary.server.database,
            self._timeline,
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
        return Pipeline(
            spool,
            Assembler(envelope, start, self._bridge.transaction_bytes_max, self._counts),
            emit=self._take,
            breathe=self._breathe,
            prepared_topic=prepared_topic(prefix),
            slot=slot,
            staged=self._load_staged(topics, spool),
        )

    def stream(self, stop: Stop) -> None:
        """Stream until `stop` is set, then finish the open Kafka transaction and confirm."""
        assert self._connection is not None and self._pipeline is not None
        while not stop.is_set():
            now = self._turned = time.monotonic()
            self._connection.wait(min(WAIT_MAX_S, self._next_deadline() - now))
            self._now_us = time.time_ns() // 1000
            spoken = False
            for item in self._connection.read():
                spoken = True
                if isinstance(item, Data):
                    self._pipeline.take(item.payload, item.lsn, self._now_us)
                else:
                    self._keepalive(item)
            if spoken:  # now, not before: nobody listened while that was worked on
                self._feedback.heard(time.monotonic())
            self._perform_due(time.monotonic())
        self._finish()

    def close(self) -> None:
        """Drop everything; what Kafka has not committed comes again in the next session."""
        reach("closing")
        metrics.STREAMING.set(0)
        if self._producer is not None:
            self._producer.cancel()
        self._pipeline = None  # it refers to this session: without the cycle all is freed at once
        self._pool.shutdown(wait=True)
        if self._producer is not None:
            self._producer.abandon()
        if self._connection is not None:
            self._connection.close()
        if self._spool is not None:
            self._spool.close()
        if self._primary is not None:
            self._primary.close()

    def _begin(self, primary: Primary, producer: TransactionalProducer) -> ProgressRecord:
        """The very first start: make the slot, and put its position into Kafka and the origin."""
        found = primary.slot()
        lsn = found.confirmed_flush_lsn if found is not None else None
        if lsn is None:
            lsn = primary.create_slot()
            reach("slot created")
        record = self._record(Position(0, lsn, 0), primary)
        producer.commit(record)
        reach("first record")
        primary.move_origin(lsn)
        return record

    def _record(self, position: Position, primary: Primary) -> ProgressRecord:
        return ProgressRecord(
            slot=self._source.slot,
            system_identifier=primary.server.system_identifier,
            timeline=primary.server.timeline,
            commit_lsn=position.commit_lsn,
            end_lsn=position.end_lsn,
            seq=position.seq,
            counts=dict(self._counts) if position.seq else {},
            ts_ms=time.time_ns() // 1_000_000,
            ahead_lsn=position.end_lsn + AHEAD_BYTES if self._heartbeat.commits_wait else 0,
        )

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

    def _keepalive(self, item: Keepalive) -> None:
        assert self._pipeline is not None
        self._ledger.receive(item.wal_end)
        self._pipeline.advance(item.wal_end)
        assert self._producer is not None
        if item.reply:
            self._feedback.due = 0.0
            if self._uncommitted:
                self._commit_due = 0.0
        elif self._heartbeat.commits_wait:
            self._feedback.tell_news(follow=not self._producer.open)

    @property
    def _uncommitted(self) -> bool:
        """Whether Kafka lacks something that was published, or has a transaction open."""
        assert self._producer is not None
        return self._producer.open or self._ledger.outstanding

    def _take(self, portion: Portion) -> None:
        """Put a portion into the open Kafka transaction; part of a large one closes it at once."""
        assert self._producer is not None
        due = time.monotonic() + self._commit_delay_s(portion)
        self._commit_due = min(self._commit_due, due) if self._uncommitted else due
        if not portion.position.seq:
            metrics.TRANSACTIONS.inc()
        if portion.dropped:
            metrics.DROPPED.inc(portion.dropped)
            reach("skipped")
        if portion.events:
            self._producer.send(portion.events, origin_of(portion))
            reach("part sent" if portion.position.seq else "sent")
        if portion.staging:
            self._producer.send(portion.staging)
            reach("decided" if portion.events else "staged")
        self._events += len(portion.events)
        self._portion_bytes += portion.bytes
        if portion.counts is not None:
            self._counts = portion.counts
        self._ledger.publish(portion.position)
        if portion.position.seq or self._portion_bytes >= self._bridge.commit_bytes_max:
            self._commit()
            if portion.position.seq:
                reach("between parts")

    def _commit_delay_s(self, portion: Portion) -> float:
        """How long the portion may wait for others; not at all where commits wait for it."""
        if not self._heartbeat.commits_wait:
            return self._bridge.commit_interval_ms / 1000
        if portion.events or portion.staging or portion.position.end_lsn > self._ledger.ahead:
            return 0.0
        return self._heartbeat.interval_s

    def _next_deadline(self) -> float:
        due = min(self._feedback.due, self._heartbeat.due)
        return min(due, self._commit_due) if self._uncommitted else due

    def _breathe(self) -> None:
        """In the middle of long work: the server hears from us, and keeps the origin for us."""
        reach("breathing")
        self._feedback.while_waiting()
        self._beat(time.monotonic())

    def _beat(self, now: float) -> None:
        if now >= self._heartbeat.due:
            assert self._primary is not None
            self._heartbeat.perform(self._primary, self._ledger)

    def _perform_due(self, now: float) -> None:
        if now >= self._feedback.due:
            self._report()
        if self._uncommitted and now >= self._commit_due:
            self._commit()
        self._beat(now)

    def _commit(self) -> None:
        """Commit the open Kafka transaction with its progress record, then tell the slot.

        Kafka may take its time: the server hears from us meanwhile.
        """
        assert self._producer is not None and self._primary is not None
        record = self._record(self._ledger.published, self._primary)
        started = time.monotonic()
        reach("before kafka commit")
        future: Future[None] = self._pool.submit(self._producer.commit, record)
        reach("committing")
        while True:
            try:
                future.result(self._feedback.interval_s)
                break
            except StillRunning:
                self._feedback.while_waiting()
        reach("after kafka commit")
        self._ledger.commit(record.ahead_lsn)
        self._feedback.heard(time.monotonic())  # we did not listen meanwhile
        metrics.COMMIT_SECONDS.observe(time.monotonic() - started)
        metrics.EVENTS.inc(self._events)
        metrics.EVENT_BYTES.inc(self._portion_bytes)
        metrics.DURABLE_LSN.set(self._ledger.durable.end_lsn)
        self._events = 0
        self._portion_bytes = 0
        self._report()
        if self._producer.done:
            raise RefusalLearned(
                "what Kafka refuses is dealt with; going on with full batches",
                operation="stream",
                subject=f"slot {self._source.slot}",
            )

    def _report(self) -> None:
        assert self._producer is not None
        reach("before feedback")
        self._feedback.send(follow=not self._producer.open)
        reach("after feedback")

    def _finish(self) -> None:
        """A clean stop: commit what is whole, confirm it, and leave the origin where Kafka is."""
        assert self._primary is not None
        reach("stopping")
        self._heartbeat.commits_wait = False
        if self._uncommitted or self._ledger.ahead:
            self._commit()
        self._heartbeat.perform(self._primary, self._ledger)
        self._report()
        logger.info("stopped", lsn=format_lsn(self._ledger.durable.end_lsn))
