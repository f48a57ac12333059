"""Encodes the changes that the slot decodes again, without those that Kafka has."""

import time
from collections.abc import Iterator
from functools import partial

from schemas.settings import Settings, require
from services.adoption.overlap import LeftOut, OverlapAssembler, OverlapEnvelope
from services.adoption.slot_reader import SlotReader
from services.bridge.events.formats.table_format import Formats, Registry, encoders_for
from services.bridge.events.relations import Relations
from services.bridge.events.shaping.tables import Shaping, TableShaping
from services.bridge.events.topic_owners import TopicOwners
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.progress.ledger import Position
from services.bridge.sink.last_keys import last_key
from services.bridge.sink.table_names import noted_names
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.row_reader import shape_of
from services.bridge.source.database import Primary
from services.bridge.transactions.assembler import EventBatch
from services.postgres.published_tables import PublishedTable


class OverlapBatches:
    """Makes events as the bridge would; `registry` in its methods: where their schemas are."""

    def __init__(
        self,
        settings: Settings,
        primary: Primary,
        topics: Topics,
        shaping: Shaping,
        reading: SlotReader,
    ) -> None:
        self._kafka = require(settings.kafka, "kafka")
        self._bridge = settings.bridge
        self._flat = settings.shaping.flat
        self._primary = primary
        self._topics = topics
        self._shaping = shaping
        self._reading = reading

    def between(
        self, slot_lsn: int, end_lsn: int, left_out: LeftOut, registry: Registry | None
    ) -> Iterator[EventBatch]:
        """Yield what Kafka lacks of the changes that commit in [slot_lsn, end_lsn)."""
        if end_lsn <= slot_lsn:
            return
        encoders = self._encoders()
        relations = Relations(
            self._topics.prefix,
            self._primary,
            self._topics.shapes(),
            self._shaping,
            encoders,
            self._formats(encoders, registry),
            table_names=noted_names(self._topics, self._shaping.naming, self._primary.server),
        )
        envelope = OverlapEnvelope(
            self._topics.prefix,
            self._primary.server.database,
            self._primary.server.timeline,
            relations.describe,
            tombstones=self._bridge.tombstones,
            transaction_metadata=self._bridge.transaction_metadata,
            encoders=encoders,
            flat=self._flat,
            outbox_messages=self._shaping.outbox_messages,
        )
        assembler = OverlapAssembler(
            envelope, Position(0, slot_lsn, 0), self._bridge.transaction_bytes_max, left_out
        )
        decoder, now_us = Decoder(), time.time_ns() // 1000
        for lsn, payload in self._reading.messages(slot_lsn, end_lsn):
            batch = assembler.take(decoder, payload, lsn, now_us)
            if batch is not None:
                yield batch

    def other_keys(self, registry: Registry | None) -> Iterator[str]:
        """Yield the topics whose last key has another schema than the keys that would follow.

        Ask `registry` for the schemas of all published tables; raise what it raises.
        """
        encoders = self._encoders()
        formats = self._formats(encoders, registry)
        naming, tables = self._shaping.naming, self._primary.published_tables()
        owners = TopicOwners(naming, (), apart=self._kafka.key_bytes == "connect")
        owners.require_apart((table.schema, table.table) for table in tables)
        for table in tables:
            if not naming.publishes(table.schema, table.table):
                continue
            plan = self._plan(table)
            if not plan.published:
                continue
            types = [column.type_oid for column in plan.relation.columns]
            encoders.learn(self._primary.types(encoders.unknown(types)))
            formats.of(plan)
            if self._kafka.key_bytes == "own":
                continue
            last = self._last_key(plan.topic.name)
            if last is not None and not formats.keys_are_like(plan, last):
                yield plan.topic.name

    def _plan(self, table: PublishedTable) -> TableShaping:
        shape = shape_of(table)
        relation = shape.keyed([column.name for column in shape.key])
        if self._shaping.naming.key(table.schema, table.table):
            relation = self._shaping.with_key(relation)
        return self._shaping.plan(relation)

    def _encoders(self) -> Encoders:
        return encoders_for(self._kafka)(self._bridge, money_digits=self._primary.money_digits())

    def _formats(self, encoders: Encoders, registry: Registry | None) -> Formats:
        naming = self._shaping.naming
        return Formats(self._kafka, naming, encoders, registry, last_key=self._last_key)

    @property
    def _last_key(self) -> "partial[bytes | None]":
        return partial(last_key, self._topics)
