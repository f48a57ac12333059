"""Continues in Debezium's topics: publishes the changes that the slot decodes and Kafka lacks.

    fence    end what Debezium's transactional producer, or a killed run, has open in Kafka
    plan     take the slot; which transactions does it decode from where it is confirmed?
             read the topics' tails; encode the changes up to the last one that Kafka has, to see
             that all of its records are met
    run      are the topics as they were read? make the slot a failover slot; encode again, into
             one Kafka transaction with the first progress record; move the origin

Killed before that transaction is committed, nothing has changed but that the slot may be a failover
slot: it is run again. Killed after it, the bridge goes on.
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

import structlog
from confluent_kafka import KafkaException, Producer

from schemas.errors import ExitCode, OperatorNeeded
from schemas.events import transaction_topic
from schemas.lsn import format_lsn
from schemas.progress import ProgressRecord
from schemas.settings import Settings, require
from services.adoption.connector import Connector
from services.adoption.decoding import Decode, decode_json, decoder
from services.adoption.forms import unlike
from services.adoption.last_records import OPERATION, Beyond, Tails, Transaction
from services.adoption.lists import of_other_case
from services.adoption.offsets import Offset
from services.adoption.overlap import LeftOut
from services.adoption.overlap_batches import OverlapBatches
from services.adoption.registry_look import RegistryLook
from services.adoption.slot_reader import SlotReader
from services.adoption.tails import (
    await_stable,
    ends_of,
    late_records,
    read_tails,
    require_unchanged,
    table_partitions,
)
from services.bridge.events.shaping.tables import Shaping
from services.bridge.failpoints import reach
from services.bridge.hanging import settle_all
from services.bridge.progress.ledger import Position
from services.bridge.progress.wal_commit import NO_COMMIT, WalCommit
from services.bridge.recovery.placement import placement_of, with_keyless_spread
from services.bridge.recovery.resume_record import Records
from services.bridge.recovery.start_check import StartCheck
from services.bridge.recovery.visible_record import read_visible
from services.bridge.sink.dead_letters import Origins, Refused
from services.bridge.sink.offsets import Partition
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Heartbeat
from services.bridge.transactions.assembler import EventBatch
from services.kafka.client import client_options, kafka_error, make_client
from services.kafka.schema_registry import SchemaRegistry
from services.postgres.slots import Slot

logger = structlog.get_logger(__name__)

KAFKA_DEADLINE_MS: Final = 600_000
"""How long the Kafka transaction with the missing events may take."""
_FENCE_S: Final = 60.0
_TAIL_RECORDS: Final = 20
_NAMED: Final = 5


@dataclass(frozen=True)
class AdoptionPlan:
    """The plan of one adoption: what was read, and what to publish; positions in bytes."""

    slot_lsn: int
    wal_lsn: int
    beyond: Beyond
    ends: dict[Partition, int]
    transactions: dict[int, Transaction]
    records_read: Counter[str]
    left_out: Counter[str]
    published: Counter[str]
    lacking: Counter[str]
    failover: bool
    """Whether the slot is a failover slot already."""

    @property
    def end_lsn(self) -> int:
        """Where the bridge goes on."""
        return self.beyond.end_lsn

    @property
    def overlap(self) -> int:
        """How many transactions, of which Kafka has something or nothing, come before that."""
        return sum(one.end_lsn <= self.end_lsn for one in self.transactions.values())


class Adoption:
    """One run. `primary` and `topics` are prepared as for a start of the bridge."""

    def __init__(
        self,
        settings: Settings,
        primary: Primary,
        topics: Topics,
        check: StartCheck,
        connector: Connector,
        offset: Offset | None,
        margin_ms: int,
    ) -> None:
        self._source = require(settings.source, "source")
        self._kafka = require(settings.kafka, "kafka")
        longest_ms = max(KAFKA_DEADLINE_MS, settings.bridge.transaction_timeout_ms)
        self._registry = (
            SchemaRegistry(require(settings.registry, "registry"))
            if self._kafka.needs_registry
            else None
        )
        self._look = None if self._registry is None else RegistryLook(self._registry)
        self._bridge = settings.bridge.model_copy(update={"transaction_timeout_ms": longest_ms})
        self._primary = primary
        self._topics = topics
        self._check = check
        self._connector = connector
        self._offset = offset
        self._margin_ms = margin_ms
        self._shaping_settings = settings.shaping
        self._placement = placement_of(settings.shaping, self._bridge, self._kafka)
        self._shaping = Shaping(settings.shaping, self._kafka.topic_prefix)
        self._reading = SlotReader(primary, self._source, self._bridge)
        self._batches = OverlapBatches(settings, primary, topics, self._shaping, self._reading)
        self._producer = TransactionalProducer(
            self._kafka,
            self._bridge,
            topics,
            self._source.slot,
            Refused(),
        )

    def close(self) -> None:
        """Abort an open Kafka transaction, end the producer, and leave the registry."""
        self._producer.abandon()
        if self._registry is not None:
            self._registry.close()

    def plan(self) -> AdoptionPlan:
        """Read slot and topics, and plan; change nothing. Raise SlotbridgeError for a refusal."""
        if self._registry is not None:
            self._registry.require()
        slot_lsn, found = self._slot()
        self._require_beginning()
        self._require_same_tables()
        self._require_own_transactions()
        until = self._primary.wal_lsn()
        transactions, messages = self._reading.transactions(slot_lsn, until)
        now_us = time.time_ns() // 1000
        first_us = min((one.commit_time_us for one in transactions.values()), default=now_us)
        partitions = table_partitions(self._topics, self._own_topics())
        await_stable(self._topics, partitions)
        ends = ends_of(self._topics, partitions)
        since_ms = min(first_us, now_us) // 1000 - self._margin_ms
        prefix = self._connector.prefix
        tails = Tails(prefix, self._margin_ms, self._decode())
        read_tails(self._topics, ends, since_ms, tails)
        self._require_same_forms(tails)
        complete_lsn = self._complete_lsn()
        beyond = tails.beyond(slot_lsn, transactions, messages, complete_lsn)
        left_out = LeftOut(beyond, transactions, complete_lsn, self._decode())
        for _ in self._batches.between(slot_lsn, beyond.end_lsn, left_out, self._look):
            pass
        left_out.finish()
        return AdoptionPlan(
            slot_lsn,
            until,
            beyond,
            ends,
            transactions,
            tails.records,
            left_out.left_out,
            left_out.published,
            +left_out.lacking,
            found.failover,
        )

    def run(self, plan: AdoptionPlan) -> list[str]:
        """Do it. Return where Debezium has written meanwhile. Raise SlotbridgeError.

        Such records are there twice; where it is gone, there are none.
        """
        reach("adopt planned")
        producer = self._producer
        require_unchanged(self._topics, plan.ends)
        self._make_failover(plan)
        reach("adopt failover")
        complete_lsn = self._complete_lsn()
        left_out = LeftOut(plan.beyond, plan.transactions, complete_lsn, self._decode())
        last: EventBatch | None = None
        for batch in self._batches.between(plan.slot_lsn, plan.end_lsn, left_out, self._registry):
            if batch.events:
                producer.send(batch.events, Origins(batch))
            last = batch if batch.stamp is not None else last
        left_out.finish()
        if left_out.published != plan.published:
            raise self._changed()
        reach("adopt sent")
        position = last.position if last is not None else Position(0, plan.end_lsn, 0)
        producer.commit(self._record(position, last))
        reach("adopt committed")
        self._primary.move_origin(position.end_lsn)
        logger.info(
            "adopted: start the bridge", slot=self._source.slot, lsn=format_lsn(position.end_lsn)
        )
        return late_records(self._topics, plan.ends, self._connector.prefix, self._decode())

    def _slot(self) -> tuple[int, Slot]:
        """Return where the slot is confirmed. Raise OperatorNeeded where it can't be taken over."""
        found = self._primary.slot()
        if found is None or found.confirmed_flush_lsn is None:
            raise self._refused("there is no such slot", "correct source.slot")
        if found.invalidation_reason is not None:
            raise self._refused(
                f"the slot is invalidated ({found.invalidation_reason}): changes are lost",
                "begin with a new slot and prefix, and a snapshot (docs/guides/snapshots.md)",
            )
        if found.two_phase or self._source.two_phase:
            raise self._refused(
                "the slot decodes at PREPARE, or source.two_phase is true",
                "adopt it with source.two_phase: false",
            )
        offset, lsn = self._offset, found.confirmed_flush_lsn
        if offset is None and not self._connector.takes_no_snapshot:
            raise self._refused(
                "Kafka Connect has no offset of the connector: its snapshot is not finished, or "
                "--worker is another worker's",
                "let Debezium finish, or check --worker and the connector's name",
            )
        if offset is not None and offset.unfinished:
            raise self._refused(
                f"{offset.unfinished} of Debezium is not finished",
                "let Debezium finish it; then stop it, and run this again",
            )
        ahead = offset is not None and lsn > max(offset.commit_lsn, offset.lsn)
        if offset is not None and ahead and not self._connector.driver_moves_slot:
            raise self._refused(
                f"the slot is confirmed up to {format_lsn(lsn)}, Debezium's offset is "
                f"{format_lsn(max(offset.commit_lsn, offset.lsn))}: changes between may be lost",
                "check --worker and the connector's name; if somebody has moved the slot, begin "
                "with a new slot and prefix, and a snapshot",
            )
        return lsn, found

    def _require_beginning(self) -> None:
        """Raise where the prefix is a bridge's, or consumers could not tell its records apart."""
        visible = read_visible(self._topics, self._source.slot)
        if visible.record is not None or self._primary.origin_lsn() is not None:
            raise self._refused(
                "a bridge has used this slot and prefix: it is adopted already",
                "start the bridge",
            )
        if visible.others:
            raise self._refused(
                f"the prefix belongs to slot {', '.join(visible.others)}",
                "one prefix is one slot's",
            )

    def _require_own_transactions(self) -> None:
        """Raise OperatorNeeded where Debezium has written to the topic of transactions."""
        topic = transaction_topic(self._topics.prefix)
        with self._topics.reader(topic) as reader:
            records = reader.last(_TAIL_RECORDS, time.monotonic() + _FENCE_S)
            if any(value is not None and b'"commit_lsn":' not in value for _, _, value in records):
                raise OperatorNeeded(
                    "the topic has Debezium's transaction metadata, which name no commit LSN",
                    operation=OPERATION,
                    subject=topic,
                    hint="delete the topic once its consumers have read it, then run this again",
                )

    def _require_same_tables(self) -> None:
        """Raise OperatorNeeded where a list means other tables or columns for Debezium."""
        found = [*of_other_case(self._shaping_settings, self._primary.published())]
        if found:
            raise self._refused(
                f"Debezium's lists do not regard upper and lower case: {', '.join(found[:_NAMED])}",
                "write these names in the connector's file as the database has them, and "
                "translate it anew",
            )

    def _require_same_forms(self, tails: Tails) -> None:
        """Raise OperatorNeeded where the bridge would write other keys, or in another format."""
        tables = self._primary.published_tables()
        naming, decode = self._shaping.naming, self._decode()
        found = [*unlike(tails.samples, tables, naming, self._kafka, decode)]
        if found:
            raise self._refused(
                f"Debezium writes these topics otherwise: {'; '.join(found[:_NAMED])}",
                "name Debezium's key in shaping.keys, or correct the format; a key whose order is "
                "not that of the table's columns has no counterpart",
            )
        if self._kafka.key_bytes == "own" and self._look is None:
            return
        moved = [*self._batches.other_keys(self._look)]
        if moved:
            raise self._refused(
                f"the last key has another schema than the keys that would follow, in topics "
                f"{', '.join(moved[:_NAMED])}: rows would go on under other keys",
                "was the key altered meanwhile? Let Debezium write a record of the table, stop it, "
                "and run this again; else begin anew with another prefix",
            )

    def _own_topics(self) -> set[str]:
        return self._topics.own() - {f"{self._topics.prefix}.message"}

    def _complete_lsn(self) -> int:
        return self._offset.commit_lsn if self._offset is not None else 0

    def _decode(self) -> Decode:
        return decode_json if self._look is None else decoder(self._look.schema_text)

    def fence(self) -> None:
        """End open transactions of Debezium's transactional producer and of a killed run.

        Raise SlotbridgeError for a slot or prefix that can't be taken over.
        """
        self._slot()
        self._require_beginning()
        reach("adopt looked")
        producer = self._producer
        if self._connector.transactional_id:
            options = {
                **client_options(self._kafka),
                "transactional.id": self._connector.transactional_id,
            }
            try:
                make_client(Producer, options).init_transactions(_FENCE_S)
            except KafkaException as error:
                raise kafka_error(error, "fence Debezium", options["transactional.id"]) from error
        producer.begin_session()
        reach("adopt fenced")
        settle_all(self._topics, producer, self._primary, self._source.slot, self._check)
        record = self._topics.last_progress(self._source.slot)
        if record is not None:
            raise self._refused("the slot is adopted already", "start the bridge")
        producer.follow(None, self._check.accepted)

    def _make_failover(self, plan: AdoptionPlan) -> None:
        if plan.failover:
            return
        self._reading.make_failover_slot()
        logger.info("made the slot a failover slot", slot=self._source.slot)

    def _record(self, position: Position, last: EventBatch | None) -> ProgressRecord:
        """Return the progress record that lets the bridge go on after the last transaction."""
        heartbeat = Heartbeat(
            self._source.slot,
            interval_ms=self._bridge.heartbeat_interval_ms,
            patience_ms=self._bridge.connect_deadline_ms,
        )
        witnesses = self._check.witnesses()
        records = Records(
            self._source.slot, heartbeat, witnesses, with_keyless_spread(self._placement)
        )
        stamp = last.stamp if last is not None else None
        commit = (
            WalCommit(stamp.xid, stamp.commit_time_us)
            if stamp is not None and stamp.xid
            else NO_COMMIT
        )
        return records.at(position, {}, commit)

    def _changed(self) -> OperatorNeeded:
        return self._refused("the slot has decoded something else than before", "run this again")

    def _refused(self, message: str, hint: str) -> OperatorNeeded:
        return OperatorNeeded(
            message,
            operation=OPERATION,
            subject=f"slot {self._source.slot}",
            hint=hint,
            exit_code=ExitCode.WITNESSES_DISAGREE,
        )
