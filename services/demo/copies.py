"""Reads the copies that are compared: a database's tables, Kafka's committed events."""

import datetime as dt
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from psycopg import sql

from schemas.events import table_topic
from services.demo.comparison import Change, Rebuilt, Row, Rows, rebuild

_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - a timestamp without time zone
_READ_TIMEOUT_S: Final = 30.0
_MARKERS_S: Final = 2.0


def database_rows(conninfo: str, tables: tuple[str, ...]) -> dict[str, Rows]:
    """Read every row of `tables` in one snapshot, with values in the envelope's JSON forms."""
    result = {}
    with psycopg.connect(conninfo) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for table in tables:
            query = sql.SQL("SELECT * FROM {}").format(sql.Identifier(table))
            result[table] = Counter(
                tuple(map(_json_form, row)) for row in connection.execute(query)
            )
    return result


def kafka_tables(
    bootstrap_servers: str, prefix: str, tables: tuple[str, ...]
) -> dict[str, Rebuilt]:
    """Rebuild each table from the committed events of its topic."""
    return {
        table: rebuild(_changes(bootstrap_servers, table_topic(prefix, "public", table)))
        for table in tables
    }


def _json_form(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return (value - _EPOCH) // dt.timedelta(microseconds=1)
    return value


def _changes(bootstrap_servers: str, topic: str) -> Iterator[Change]:
    for partition, key, value in committed(bootstrap_servers, topic):
        if value is None:
            continue
        event = json.loads(value)
        source = event["source"]
        copy = partition if event["op"] == "t" else 0
        row: Row | None = tuple(event["after"].values()) if event["after"] is not None else None
        name = key.decode() if key is not None else None
        yield Change(source["commit_lsn"], source["seq"], copy, event["op"], name, row)


def decided_ends(
    consumer: Consumer, bootstrap_servers: str, partitions: Sequence[TopicPartition]
) -> dict[tuple[str, int], int]:
    """Return the offset up to which a read_committed `consumer` may read each of `partitions`.

    Kafka acknowledges a commit before it writes the markers that make it visible. What was written
    before this call is waited for, but not for long: it may belong to a transaction that hangs.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    asked = admin.list_offsets(dict.fromkeys(partitions, latest)) if partitions else {}
    deadline = time.monotonic() + _MARKERS_S
    found = {}
    for partition, written in asked.items():
        end = written.result(_READ_TIMEOUT_S).offset
        while (
            stable := consumer.get_watermark_offsets(partition, timeout=_READ_TIMEOUT_S)[1]
        ) < end:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        found[partition.topic, partition.partition] = stable
    return found


def committed(
    bootstrap_servers: str, topic: str
) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    """Yield (partition, key, value) of all that a read_committed consumer sees up to now.

    Up to the offsets at the call: a topic that is written all the time has no end otherwise.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"slotbridge-compare-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        metadata = consumer.list_topics(topic, timeout=_READ_TIMEOUT_S).topics[topic]
        if metadata.error is not None:
            raise KafkaException(metadata.error)
        partitions = [TopicPartition(topic, partition, 0) for partition in metadata.partitions]
        found = decided_ends(consumer, bootstrap_servers, partitions)
        ends = {partition: end for (_, partition), end in found.items()}
        left = {partition for partition, end in ends.items() if end > 0}
        consumer.assign(partitions)
        while left:
            for message in consumer.consume(1000, timeout=0.1):
                failure, partition = message.error(), message.partition() or 0
                offset = message.offset() or 0
                if failure is None:
                    if offset < ends[partition]:
                        yield partition, message.key(), message.value()
                elif failure.code() == KafkaError._PARTITION_EOF:
                    left.discard(partition)
                else:
                    raise KafkaException(failure)
                if offset >= ends[partition] - 1:
                    left.discard(partition)
    finally:
        consumer.close()
