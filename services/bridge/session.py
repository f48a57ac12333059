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

from schemas.errors import Retryable
from schemas.events import ProgressRecord
from schemas.lsn import format_lsn
from schemas.settings import BridgeSettings, KafkaSettings, SourceSettings
from schemas.shaping import ShapingSettings
from services.bridge import metrics
from services.bridge.connection import Data, Keepalive, ReplicationConnection
from services.bridge.database import Primary
from services.bridge.decoder import Decoder
from services.bridge.envelope import Envelope
from services.bridge.messages import STREAM_MESSAGES
from services.bridge.producer import TransactionalProducer
from services.bridge.progress import Ledger, Position, Witnesses, check_witnesses, position_of
from services.bridge.relations import Relations
from services.bridge.shaping.tables import Shaping
from services.bridge.spool import Spool
from services.bridge.streams import Streams
from services.bridge.topics import Topics
from services.bridge.transactions import Assembler, Portion
from services.process import Stop

logger = structlog.get_logger(__name__)

WAIT_MAX_S: Final = 0.2
FEEDBACK_INTERVAL_S: Final = 1.0


class Session:
    """Built by `open`, used by `stream`, ended by `close`; never reused."""

    def __init__(
        self,
        source: SourceSettings,
        kafka: KafkaSettings,
        bridge: BridgeSettings,
        shaping: ShapingSettings,
        *,
        streaming: bool,
    ) -> None:
        self._streaming = streaming
        self._source = source
        self._kafka = kafka
        self._bridge = bridge
        self._shaping = shaping
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kafka-commit")
        self._primary: Primary | None = None
        self._producer: TransactionalProducer | None = None
        self._connection: ReplicationConnection | None = None
        self._spool: Spool | None = None
        self._portion_bytes = 0
        self._events = 0
        self._counts: Mapping[str, int] = {}
        self._commit_due = 0.0
        self._feedback_due = 0.0
        self._heartbeat_due = 0.0
        self._now_us = 0
        self._heard = time.monotonic()
        self.beat = time.monotonic()
        """When the loop last turned (time.monotonic), for the liveness probe."""

    def open(self) -> None:
        """Connect, compare the witnesses and start streaming. Raises SlotbridgeError."""
        primary = self._primary = Primary(
            self._source, sql_deadline_ms=self._bridge.sql_deadline_ms
        )
        primary.prepare()
        topics = self._topics = Topics(self._kafka)
        topics.prepare()
        slot = self._source.slot
        producer = self._producer = TransactionalProducer(self._kafka, self._bridge, topics, slot)
        producer.begin_session()
        record = topics.last_progress(slot)
        connection = self._connection = ReplicationConnection(
            primary.conninfo,
            slot,
            wal_sender_timeout_ms=self._bridge.wal_sender_timeout_ms,
            sql_deadline_ms=self._bridge.sql_deadline_ms,
        )
        self._timeline = self._check(primary, connection, record)
        if record is None:
            record = self._begin(primary, producer)
        start = position_of(record)
        server = primary.server
        self._ledger = Ledger(start)
        self._decoder = Decoder()
        prefix = self._kafka.topic_prefix
        shaping = Shaping(self._shaping, prefix)
        self._warn_of_unmatched(shaping, primary)
        relations = Relations(prefix, topics, primary, topics.shapes(), shaping)
        envelope = Envelope(
            prefix,
            server.database,
            self._timeline,
            relations.describe,
            tombstones=self._bridge.tombstones,
            transaction_metadata=self._bridge.transaction_metadata,
        )
        self._counts = record.counts
        self._assembler = Assembler(
            envelope, start, self._bridge.transaction_bytes_max, record.counts
        )
        spool = self._spool = Spool(
            self._bridge.spool_folder / f"slotbridge-{prefix}-{slot}.spool",
            memory_bytes_max=self._bridge.spool_memory_bytes_max,
            bytes_max=self._bridge.spool_bytes_max,
        )
        self._streams = Streams(spool, self._assembler, self._decoder)
        connection.start(
            start.end_lsn,
            self._source.publication,
            streaming=self._streaming,
            origin=self._source.origin,
        )
        metrics.TIMELINE.set(self._timeline)
        metrics.STREAMING.set(1)
        logger.info(
            "streaming",
            slot=slot,
            lsn=format_lsn(start.end_lsn),
            timeline=self._timeline,
            system_identifier=server.system_identifier,
        )

    def stream(self, stop: Stop) -> None:
        """Stream until `stop` is set, then finish the open Kafka transaction and confirm."""
        assert self._connection is not None
        while not stop.is_set():
            now = self.beat = time.monotonic()
            self._connection.wait(min(WAIT_MAX_S, self._next_deadline() - now))
            self._now_us = time.time_ns() // 1000
            for item in self._connection.read():
                self._heard = now
                if isinstance(item, Data):
                    self._data(item)
                else:
                    self._keepalive(item)
            self._perform_due(time.monotonic())
        self._finish()

    def close(self) -> None:
        """Drop everything; what Kafka has not committed comes again in the next session."""
        metrics.STREAMING.set(0)
        self._pool.shutdown(wait=True)
        if self._producer is not None:
            self._producer.abandon()
        if self._connection is not None:
            self._connection.close()
        if self._spool is not None:
            self._spool.close()
        if self._primary is not None:
            self._primary.close()

    def _check(
        self,
        primary: Primary,
        connection: ReplicationConnection,
        record: ProgressRecord | None,
    ) -> int:
        """Compare all witnesses; return the server's timeline."""
        system_identifier, timeline = connection.identify()
        server = primary.server
        if (system_identifier, timeline) != (server.system_identifier, server.timeline):
            raise Retryable("the server changed while connecting", operation="connect")
        seen = Witnesses(
            record,
            primary.slot(),
            primary.origin_lsn(),
            server,
            connection.switch_points(timeline),
        )
        check_witnesses(seen, self._source.slot)
        return timeline

    def _warn_of_unmatched(self, shaping: Shaping, primary: Primary) -> None:
        if self._shaping == ShapingSettings():
            return
        for pattern in shaping.unmatched(primary.published()):
            logger.warning("shaping matches nothing that is published", pattern=pattern)

    def _begin(self, primary: Primary, producer: TransactionalProducer) -> ProgressRecord:
        """The very first start: make the slot, and put its position into Kafka and the origin."""
        found = primary.slot()
        lsn = found.confirmed_flush_lsn if found is not None else None
        if lsn is None:
            lsn = primary.create_slot()
        record = self._record(Position(0, lsn, 0), primary)
        producer.commit(record)
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
        )

    def _data(self, item: Data) -> None:
        if self._streams.holds(item.payload):
            self._streams.hold(item.payload, item.lsn)
            return
        message = self._decoder.decode(item.payload, item.lsn)
        if isinstance(message, STREAM_MESSAGES):
            for portion in self._streams.feed(message, item.lsn, self._now_us):
                if portion is not None:
                    self._take(portion)
                elif time.monotonic() >= self._feedback_due:
                    self._feedback()
            return
        part = self._assembler.feed(message, item.lsn, self._now_us)
        if part is not None:
            self._take(part)

    def _keepalive(self, item: Keepalive) -> None:
        self._ledger.receive(item.wal_end)
        portion = self._assembler.advance(item.wal_end)
        if portion is not None:
            self._take(portion)
        if item.reply:
            self._feedback_due = 0.0
            if self._ledger.outstanding:
                self._commit_due = 0.0

    def _take(self, portion: Portion) -> None:
        """Put a portion into the open Kafka transaction; part of a large one closes it at once."""
        assert self._producer is not None
        if not self._ledger.outstanding:
            self._commit_due = time.monotonic() + self._bridge.commit_interval_ms / 1000
        if not portion.position.seq:
            metrics.TRANSACTIONS.inc()
        if portion.dropped:
            metrics.DROPPED.inc(portion.dropped)
        if portion.events:
            self._producer.send(portion.events)
        self._events += len(portion.events)
        self._portion_bytes += portion.bytes
        if portion.counts is not None:
            self._counts = portion.counts
        self._ledger.publish(portion.position)
        if portion.position.seq or self._portion_bytes >= self._bridge.commit_bytes_max:
            self._commit()

    def _next_deadline(self) -> float:
        due = min(self._feedback_due, self._heartbeat_due)
        return min(due, self._commit_due) if self._ledger.outstanding else due

    def _perform_due(self, now: float) -> None:
        if self._ledger.outstanding and now >= self._commit_due:
            self._commit()
        if now >= self._feedback_due:
            self._feedback()
        if now >= self._heartbeat_due:
            self._heartbeat()

    def _commit(self) -> None:
        """Commit the open Kafka transaction with its progress record, then tell the slot.

        Kafka may take its time: the server hears from us meanwhile.
        """
        assert self._producer is not None and self._primary is not None
        record = self._record(self._ledger.published, self._primary)
        started = time.monotonic()
        future: Future[None] = self._pool.submit(self._producer.commit, record)
        while True:
            try:
                future.result(FEEDBACK_INTERVAL_S)
                break
            except StillRunning:
                self._heard = time.monotonic()
                self._feedback()
        self._ledger.commit()
        self._heard = time.monotonic()  # we did not listen meanwhile
        metrics.COMMIT_SECONDS.observe(time.monotonic() - started)
        metrics.EVENTS.inc(self._events)
        metrics.EVENT_BYTES.inc(self._portion_bytes)
        metrics.DURABLE_LSN.set(self._ledger.durable.end_lsn)
        self._events = 0
        self._portion_bytes = 0
        self._feedback()

    def _feedback(self) -> None:
        assert self._connection is not None
        self.beat = time.monotonic()
        silence_s = self.beat - self._heard
        timeout_s = self._bridge.wal_sender_timeout_ms / 1000
        if silence_s > timeout_s:
            raise Retryable(
                f"the server has been silent for {silence_s:.0f} s",
                operation="stream",
                subject=f"slot {self._source.slot}",
                hint="the bridge reconnects by itself",
            )
        self._connection.feedback(
            self._ledger.received, self._ledger.report(), ask=silence_s > timeout_s / 3
        )
        self._feedback_due = self.beat + FEEDBACK_INTERVAL_S
        metrics.RECEIVED_LSN.set(self._ledger.received)

    def _heartbeat(self) -> None:
        assert self._primary is not None
        lsn = self._ledger.mark_origin()
        self._primary.move_origin(lsn)
        metrics.ORIGIN_LSN.set(lsn)
        self._heartbeat_due = time.monotonic() + self._bridge.heartbeat_interval_ms / 1000

    def _finish(self) -> None:
        """A clean stop: commit what is whole, confirm it, and leave the origin where Kafka is."""
        if self._ledger.outstanding:
            self._commit()
        self._heartbeat()
        self._feedback()
        logger.info("stopped", lsn=format_lsn(self._ledger.durable.end_lsn))
