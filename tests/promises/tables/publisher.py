"""A stand-in for the bridge: writes events of its contract to a real broker, transaction-wise."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from confluent_kafka import KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.events import (
    DataCollection,
    DeadLetter,
    DivergenceRecord,
    Envelope,
    Source,
    TransactionEvent,
    dead_topic,
    divergence_topic,
    progress_topic,
    schema_topic,
    transaction_topic,
)
from schemas.naming import Naming
from schemas.progress import ProgressRecord
from schemas.schema_events import Column, SchemaEvent, SchemaKey
from schemas.settings import KafkaSettings
from schemas.shaping import ShapingSettings
from services.bridge.sink.options import IN_FLIGHT
from spark_consumers.kafka.reader import TopicOffsets
from tests.providers.progress_records import progress_record
from tests.providers.waiting import eventually, patient

PARTITIONS = 3
SEEN = 150
"""How far rows of a snapshot may be ahead of their place: into the next transaction."""
_ANY_PARTITION = -1
_TIMEOUT_S = patient(10)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class SourceTable:
    """A table at the source: column -> (PostgreSQL type, typmod), and the key's columns.

    `missing`, `unsent`, `attnums`: as in SchemaEvent.
    """

    name: str
    columns: Mapping[str, tuple[str, int]]
    key: Sequence[str] = ("id",)
    schema: str = "public"
    identity: Literal["default", "nothing", "full", "index"] = "default"
    oid: int = 0
    missing: Mapping[str, Any] = field(default_factory=dict)
    unsent: Sequence[str] = ()
    attnums: Sequence[int] = ()

    def shape_event(self, commit_lsn: int, seq: int = 0) -> SchemaEvent:
        """The schema event that announces it."""
        columns = [
            Column(name=name, type=kind, type_oid=0, typmod=typmod, key=name in self.key)
            for name, (kind, typmod) in self.columns.items()
        ]
        return SchemaEvent(
            schema=self.schema,
            table=self.name,
            oid=self.oid,
            commit_lsn=commit_lsn,
            seq=seq,
            ts_ms=0,
            replica_identity=self.identity,
            before=None,
            after=columns,
            missing=dict(self.missing),
            unsent=list(self.unsent),
            attnums=list(self.attnums),
        )


class Transaction:
    """One source transaction inside one Kafka transaction; its events are numbered and counted."""

    def __init__(self, publisher: "Publisher", commit_lsn: int) -> None:
        self._publisher = publisher
        self.commit_lsn = commit_lsn
        self._ts_ms = int(time.time() * 1000)
        self.seq = 0
        self.counts: Counter[str] = Counter()

    def refuse(self, table: str, seq: int) -> None:
        """An event that Kafka refuses: a dead letter takes its place."""
        self._publisher.refuse(table, seq)
        if table:
            self.counts[table] += 1

    def insert(self, table: SourceTable, row: Row, **at: int) -> None:
        """An insert; `partition`, `commit_lsn`, `seq` can be given to plant disorder."""
        self._send(table, "c", None, row, self._key(table, row), **at)

    def update(self, table: SourceTable, row: Row, **at: int) -> None:
        """An update that leaves the key as it is."""
        self._send(table, "u", None, row, self._key(table, row), **at)

    def delete(self, table: SourceTable, row: Row, **at: int) -> None:
        """A delete and its tombstone; `before` has the key alone, as with identity default."""
        before = {name: row[name] if name in table.key else None for name in table.columns}
        key = self._key(table, row)
        self._send(table, "d", before, None, key, **at)
        self._publisher.produce(table, key, None, at.get("partition"))

    def read(self, table: SourceTable, row: Row) -> None:
        """A row of a snapshot, which may show the next transaction already."""
        self._send(table, "r", None, row, self._key(table, row))

    def change_key(self, table: SourceTable, old: Row, new: Row) -> None:
        """An update of the key: a delete, its tombstone, an insert."""
        self.delete(table, old)
        self.insert(table, new)

    def truncate(self, table: SourceTable, partitions: Sequence[int] | None = None) -> None:
        """A truncate: the same event in every partition, or in some of them."""
        seq = self.seq
        for partition in range(PARTITIONS) if partitions is None else partitions:
            self._send(table, "t", None, None, None, seq=seq, partition=partition)
            self.counts[f"{table.schema}.{table.name}"] -= 1
        self.counts[f"{table.schema}.{table.name}"] += 1
        self.seq = seq + 1

    def raw(self, table: SourceTable, value: str, partition: int = 0) -> None:
        """Any text as a record's value."""
        self._publisher.produce(table, "{}", value, partition)
        self.counts[f"{table.schema}.{table.name}"] += 1

    def _key(self, table: SourceTable, row: Row) -> str | None:
        if not table.key:
            return None
        return json.dumps({name: row[name] for name in table.key}, separators=(",", ":"))

    def _send(
        self,
        table: SourceTable,
        op: Literal["c", "u", "d", "t", "r"],
        before: Row | None,
        after: Row | None,
        key: str | None,
        *,
        partition: int | None = None,
        commit_lsn: int | None = None,
        seq: int | None = None,
    ) -> None:
        lsn = self.commit_lsn if commit_lsn is None else commit_lsn
        number = self.seq if seq is None else seq
        value = envelope(self._publisher.prefix, table, op, before, after, lsn, number, self._ts_ms)
        text = value.model_dump_json(by_alias=True)
        if (lsn == self.commit_lsn and seq is None) or op == "t":
            self.counts[f"{table.schema}.{table.name}"] += 1
        self._publisher.produce(table, key, text, partition)
        self.seq += 1


class Publisher:
    """Publishes to topics of its own prefix; LSNs grow by 100 with every transaction."""

    def __init__(
        self, bootstrap_servers: str, prefix: str, shaping: ShapingSettings | None = None
    ) -> None:
        self.prefix = prefix
        self._naming = Naming(prefix, shaping or ShapingSettings())
        self.commit_lsn = 1000
        kafka = KafkaSettings(bootstrap_servers=bootstrap_servers, topic_prefix=prefix)
        self._offsets = TopicOffsets(kafka, patience_s=_TIMEOUT_S)
        self._servers: dict[str, str | int | float | bool] = {
            "bootstrap.servers": bootstrap_servers
        }
        self._marked = self._unshown = -1
        """The offset of the last record of a transaction's end, and of one yet to be shown."""
        self._producer = Producer(
            self._servers
            | {
                "transactional.id": prefix,
                "transaction.timeout.ms": 900_000,
                "partitioner": "murmur2_random",
                "max.in.flight": IN_FLIGHT,
            }
        )
        self._producer.init_transactions(_TIMEOUT_S)

    def announce(self, *tables: SourceTable) -> None:
        """Make the tables' topics and publish their shapes."""
        own = (schema_topic, dead_topic, transaction_topic, divergence_topic)
        names = {topic(self.prefix): 1 for topic in own}
        names |= {self._topic(table): PARTITIONS for table in tables}
        admin = AdminClient(self._servers)
        there = admin.list_topics(timeout=_TIMEOUT_S).topics
        new = [NewTopic(n, num_partitions=p) for n, p in names.items() if n not in there]
        for future in admin.create_topics(new).values() if new else ():
            future.result(_TIMEOUT_S)
        self.reshape(*tables)

    def reshape(self, *tables: SourceTable) -> None:
        """Publish the tables' shapes, in force from the next transaction on."""
        self._producer.begin_transaction()
        for table in tables:
            self.shape_at(table, self.commit_lsn + 100, 0)
        self._producer.commit_transaction(_TIMEOUT_S)

    def shape_at(self, table: SourceTable, commit_lsn: int, seq: int) -> None:
        """Inside the open Kafka transaction: the table's shape from an event on."""
        key = SchemaKey(schema=table.schema, table=table.name)
        self._producer.produce(
            schema_topic(self.prefix),
            table.shape_event(commit_lsn, seq).model_dump_json(by_alias=True),
            key.model_dump_json(by_alias=True),
        )

    @contextlib.contextmanager
    def transaction(self, *, commit: bool = True) -> Iterator[Transaction]:
        """A source transaction, committed to Kafka at the end, or aborted."""
        self.commit_lsn += 100
        self._producer.begin_transaction()
        transaction = Transaction(self, self.commit_lsn)
        self._mark("BEGIN", None)
        yield transaction
        self._mark("END", transaction.counts)
        if commit:
            self._producer.commit_transaction(_TIMEOUT_S)
            self._unshown = self._marked
        else:
            self._producer.flush(_TIMEOUT_S)
            self._producer.abort_transaction(_TIMEOUT_S)

    def _mark(self, status: Literal["BEGIN", "END"], counts: Mapping[str, int] | None) -> None:
        """The record of a transaction's beginning or end."""
        found = [
            DataCollection(data_collection=name, event_count=count)
            for name, count in (counts or {}).items()
        ]
        event = TransactionEvent(
            status=status,
            id=f"1:{self.commit_lsn}",
            ts_ms=int(time.time() * 1000),
            commit_lsn=self.commit_lsn,
            event_count=None if counts is None else sum(counts.values()),
            data_collections=None if counts is None else found,
        )
        topic = transaction_topic(self.prefix)
        key = json.dumps({"id": event.id})
        self._producer.produce(topic, event.model_dump_json(), key, on_delivery=self._delivered)

    def _delivered(self, error: KafkaError | None, record: Message) -> None:
        if error is None:
            self._marked = record.offset() or 0

    def await_shown(self) -> None:
        """Wait until Kafka shows the last transaction: a moment after it has taken the commit."""
        if self._unshown >= 0:
            self._await_shown(transaction_topic(self.prefix), 0, self._unshown)
            self._unshown = -1

    def _await_shown(self, topic: str, partition: int, offset: int) -> None:
        place = {topic: (partition,)}
        eventually(
            lambda: self._offsets.stable(place)[topic][partition] > offset,
            what=f"Kafka shows what is committed in {topic}",
        )

    def produce(
        self,
        table: SourceTable,
        key: str | None,
        value: str | None,
        partition: int | None,
        ts_ms: int = 0,
    ) -> None:
        """One record inside the open Kafka transaction; `ts_ms`: Kafka's time stamp, 0 for now."""
        topic = self._topic(table)
        place = _ANY_PARTITION if partition is None else partition
        self._producer.produce(topic, value, key, place, timestamp=ts_ms)
        self._producer.poll(0)

    def hidden(self, table: SourceTable, row: Row) -> Callable[[], None]:
        """One more insert of this transaction, which Kafka shows once the answer is called."""
        producer = Producer(
            self._servers
            | {"transactional.id": f"{self.prefix}-late", "transaction.timeout.ms": 900_000}
        )
        producer.init_transactions(_TIMEOUT_S)
        producer.begin_transaction()
        value = envelope(self.prefix, table, "c", None, row, self.commit_lsn, 1_000)
        key = json.dumps({name: row[name] for name in table.key}, separators=(",", ":"))
        sent: list[int] = []
        producer.produce(
            self._topic(table),
            value.model_dump_json(by_alias=True),
            key,
            1,
            on_delivery=lambda _, record: sent.append(record.offset() or 0),
        )
        producer.flush(_TIMEOUT_S)

        def show() -> None:
            producer.commit_transaction(_TIMEOUT_S)
            self._await_shown(self._topic(table), 1, sent[0])

        return show

    def diverge(self, switch_lsn: int) -> None:
        """An accepted divergence."""
        record = DivergenceRecord(
            slot="s",
            system_identifier="1",
            lost_timeline=1,
            timeline=2,
            switch_lsn=switch_lsn,
            reached_lsn=self.commit_lsn,
            count=3,
            transactions=[],
            ts_ms=1,
        )
        self._producer.begin_transaction()
        self._producer.produce(divergence_topic(self.prefix), record.model_dump_json(), "s")
        self._producer.commit_transaction(_TIMEOUT_S)

    def progress(self, end_lsn: int) -> ProgressRecord:
        """The bridge's record that Kafka has all up to an LSN, in a topic of its own."""
        record = progress_record(
            slot="slotbridge",
            system_identifier="1",
            timeline=1,
            commit_lsn=self.commit_lsn,
            end_lsn=end_lsn,
            seq=0,
            ts_ms=0,
        )
        topic, admin = progress_topic(self.prefix), AdminClient(self._servers)
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(_TIMEOUT_S)
        self._producer.begin_transaction()
        self._producer.produce(topic, record.model_dump_json(), record.slot)
        self._producer.commit_transaction(_TIMEOUT_S)
        return record

    def forget(self, table: SourceTable) -> None:
        """Delete all records of a table's topic, as retention does."""
        topic = self._topic(table)
        ends = [TopicPartition(topic, number, -1) for number in range(PARTITIONS)]
        admin = AdminClient(self._servers)
        for future in admin.delete_records(ends).values():
            future.result(_TIMEOUT_S)

    def refuse(self, table: str, seq: int) -> None:
        """A dead letter inside the open Kafka transaction."""
        letter = DeadLetter(
            reason="Message size too large",
            topic=f"{self.prefix}.{table}",
            table=table,
            commit_lsn=self.commit_lsn,
            end_lsn=None,
            lsn=1,
            seq=seq,
            xid=1,
            ts_ms=1,
            key=None,
            value=None,
            headers={},
        )
        self._producer.produce(dead_topic(self.prefix), letter.model_dump_json(), "{}")

    def _topic(self, table: SourceTable) -> str:
        return self._naming.table(table.schema, table.name).name


def envelope(
    prefix: str,
    table: SourceTable,
    op: Literal["c", "u", "d", "t", "r"],
    before: Row | None,
    after: Row | None,
    commit_lsn: int,
    seq: int,
    ts_ms: int = 0,
) -> Envelope:
    """An event as the bridge writes it; its transaction was committed at `ts_ms`."""
    times = {"ts_ms": ts_ms, "ts_us": ts_ms * 1000, "ts_ns": ts_ms * 1_000_000}
    source = Source(
        version="0",
        connector="postgresql",
        name=prefix,
        snapshot="true" if op == "r" else "false",
        db="db",
        sequence="[]",
        schema=table.schema,
        table=table.name,
        txId=commit_lsn,
        lsn=commit_lsn + SEEN if op == "r" else commit_lsn,
        xmin=None,
        commit_lsn=commit_lsn,
        seq=seq,
        timeline=1,
        **times,
    )
    return Envelope(
        before=None if before is None else dict(before),
        after=None if after is None else dict(after),
        source=source,
        transaction=None,
        op=op,
        **times,
    )
