"""Writes events as the bridge does, transaction by transaction."""

import hashlib
import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.events import UNAVAILABLE, schema_topic, transaction_topic
from services.bridge.sink.options import IN_FLIGHT

PREFIX = "bench"
TABLE = "accounts"
TOPIC = f"{PREFIX}.public.{TABLE}"
PARTITIONS = 2
ROWS_A_TRANSACTION = 10
Serialize = Callable[[str], bytes]
_FILLER = "x" * 40


class Form(NamedTuple):
    """The rows of the source's tables: (aid int4 or uuid, bid int4, abalance int4, filler text).

    `toast_bytes`: the length of a filler that PostgreSQL stores out of line, so that updates leave
    it out; 0: 40 bytes, which they have.
    """

    uuid: bool = False
    toast_bytes: int = 0

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """The columns' names and PostgreSQL types."""
        key = "uuid" if self.uuid else "int4"
        return ("aid", key), ("bid", "int4"), ("abalance", "int4"), ("filler", "text")

    def key(self, number: int) -> str:
        """The JSON of the row's key; uuids of successive rows are in no order."""
        if not self.uuid:
            return str(number)
        return f'"{uuid.UUID(bytes=hashlib.md5(str(number).encode()).digest())}"'

    def filler(self, op: str, source: random.Random) -> str:
        """The filler of a row in an event."""
        if not self.toast_bytes:
            return _FILLER
        return source.randbytes(self.toast_bytes // 2).hex() if op == "c" else UNAVAILABLE


_NARROW = Form()


class Source:
    """A bridge and its source: transactions of ten rows, each in one table, the tables in turn."""

    def __init__(
        self,
        servers: str,
        tables: Sequence[str] = (TABLE,),
        *,
        form: Form = _NARROW,
        key: Serialize = str.encode,
        value: Serialize = str.encode,
    ) -> None:
        """`key`, `value`: from JSON to what is written."""
        self._key, self._value = key, value
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "transactional.id": PREFIX,
                "linger.ms": 20,
                "compression.type": "lz4",
                "queue.buffering.max.messages": 1_000_000,
                "partitioner": "murmur2_random",
                "max.in.flight": IN_FLIGHT,
            }
        )
        self._producer.init_transactions(30)
        self._tables = [_Table(name, form) for name in tables]
        own = {schema_topic(PREFIX): 1, transaction_topic(PREFIX): 1}
        own |= {table.topic: PARTITIONS for table in self._tables}
        self._admin = AdminClient({"bootstrap.servers": servers})
        made = self._admin.create_topics(
            [NewTopic(name, num_partitions=count) for name, count in own.items()]
        )
        for future in made.values():
            future.result(30)
        self._producer.begin_transaction()
        for table in self._tables:
            self._producer.produce(schema_topic(PREFIX), _shape(table.name, form), "{}")
        self._producer.commit_transaction(30)
        self.commit_lsn = 1000

    def make_topics(self, count: int) -> None:
        """Topics that are nobody's, of four partitions each."""
        new = [NewTopic(f"other.{number}", num_partitions=4) for number in range(count)]
        for future in self._admin.create_topics(new).values() if new else ():
            future.result(120)

    def write(self, load: str, events: int, among: int | None = None) -> None:
        """So many events of a load, in one Kafka transaction per 10,000; `among`: in so many of
        the tables, else in all."""
        done = 0
        while done < events:
            self._producer.begin_transaction()
            for _ in range(min(10_000, events - done) // ROWS_A_TRANSACTION):
                self._transaction(load, among or len(self._tables))
                done += ROWS_A_TRANSACTION
            self._producer.commit_transaction(60)

    def _transaction(self, load: str, among: int) -> None:
        self.commit_lsn += 100
        table = self._tables[self.commit_lsn // 100 % among]
        for seq in range(ROWS_A_TRANSACTION):
            value, key = table.event(load, self.commit_lsn, seq)
            self._producer.produce(table.topic, self._value(value), self._key(key))
        counts = f'[{{"data_collection":"public.{table.name}","event_count":{ROWS_A_TRANSACTION}}}]'
        end = (
            f'{{"status":"END","id":"1:{self.commit_lsn}","ts_ms":{int(time.time() * 1000)},'
            f'"commit_lsn":{self.commit_lsn},"event_count":{ROWS_A_TRANSACTION},'
            f'"data_collections":{counts}}}'
        )
        self._producer.produce(transaction_topic(PREFIX), end, "{}")
        self._producer.poll(0)


class _Table:
    """A table's rows, and the next change of one."""

    def __init__(self, name: str, form: Form) -> None:
        self.name, self._form = name, form
        self.topic = f"{PREFIX}.public.{name}"
        self._next = 0
        self._live: list[int] = []
        self._random = random.Random(1)

    def event(self, load: str, commit_lsn: int, seq: int) -> tuple[str, str]:
        """Value and key of an event of a load."""
        op, number = self._change({"insert": "c", "update": "u"}.get(load) or "ucud")
        aid = self._form.key(number)
        row = (
            f'{{"aid":{aid},"bid":{number // 100_000},"abalance":{self._random.randrange(10**6)},'
            f'"filler":"{self._form.filler(op, self._random)}"}}'
        )
        before, after = (row, "null") if op == "d" else ("null", row)
        now_us = int(time.time() * 1_000_000)
        value = (
            f'{{"before":{before},"after":{after},"source":{{"version":"1","connector":'
            f'"postgresql","name":"{PREFIX}","ts_ms":{now_us // 1000},"ts_us":{now_us},"snapshot":'
            f'"false","db":"bench","sequence":"[]","schema":"public","table":"{self.name}",'
            f'"txId":1,"lsn":{commit_lsn + seq},"commit_lsn":{commit_lsn},"seq":{seq},'
            f'"timeline":1}},"transaction":null,"op":"{op}","ts_ms":{now_us // 1000}}}'
        )
        return value, f'{{"aid":{aid}}}'

    def _change(self, operations: str) -> tuple[str, int]:
        op = self._random.choice(operations) if self._live else "c"
        if op == "c":
            self._live.append(self._next)
            self._next += 1
            return op, self._next - 1
        place = self._random.randrange(len(self._live))
        aid = self._live[place]
        if op == "d":
            self._live[place] = self._live[-1]
            self._live.pop()
        return op, aid


def _shape(table: str, form: Form) -> str:
    columns = [
        {"name": name, "type": kind, "type_oid": 0, "typmod": -1, "key": name == "aid"}
        for name, kind in form.columns
    ]
    event = {
        "schema": "public",
        "table": table,
        "oid": 1,
        "commit_lsn": 1000,
        "seq": 0,
        "ts_ms": 0,
        "replica_identity": "default",
        "before": None,
        "after": columns,
    }
    return json.dumps(event)
