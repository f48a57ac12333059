"""Reads the copies that are compared: a database's tables, Kafka's committed events."""

import datetime as dt
import json
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import psycopg
import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from psycopg import sql

from schemas.events import table_topic
from services.demo.comparison import Change, Rebuilt, Row, Rows, rebuild

logger = structlog.get_logger(__name__)

_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - a timestamp without time zone
_READ_TIMEOUT_S: Final = 30.0
_MARKERS_S: Final = 2.0
_WHOLE_S: Final = 30.0


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
    """Yield the committed changes of a topic; a truncate once for each partition."""
    for partition, key, value in committed(bootstrap_servers, topic, decided_s=_WHOLE_S):
        if value is None:
            continue
        event = json.loads(value)
        source = event["source"]
        copy = partition if event["op"] == "t" else 0
        row: Row | None = tuple(event["after"].values()) if event["after"] is not None else None
        name = key.decode() if key is not None else None
        yield Change(source["commit_lsn"], source["seq"], copy, event["op"], name, row)


def committed(
    bootstrap_servers: str, topic: str, *, decided_s: float = _MARKERS_S
) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    """Yield (partition, key, value) of all that a read_committed consumer sees up to now."""
    for message in committed_messages(bootstrap_servers, [topic], decided_s=decided_s):
        yield message.partition() or 0, message.key(), message.value()


def committed_messages(
    bootstrap_servers: str, topics: Collection[str], *, decided_s: float = _MARKERS_S
) -> Iterator[Message]:
    """Yield all that a read_committed consumer sees of `topics` up to now.

    Up to the offsets at the call: a topic that is written all the time has no end otherwise. What
    follows a Kafka transaction that is still undecided after `decided_s` is left out, and a warning
    names it. Raises KafkaException if a topic is not there.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"slotbridge-compare-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            # The broker answers at the end of a partition at once, not after half a second.
            "fetch.wait.max.ms": 10,
        }
    )
    try:
        partitions = [one for topic in topics for one in _partitions(consumer, topic)]
        ends = _decided_ends(consumer, bootstrap_servers, partitions, decided_s)
        left = {place for place, end in ends.items() if end > 0}
        consumer.assign([one for one in partitions if (one.topic, one.partition) in left])
        while left:
            for message in consumer.consume(1000, timeout=0.1):
                failure, offset = message.error(), message.offset() or 0
                place = (message.topic() or "", message.partition() or 0)
                if failure is None:
                    if offset < ends[place]:
                        yield message
                elif failure.code() == KafkaError._PARTITION_EOF:
                    left.discard(place)
                else:
                    raise KafkaException(failure)
                if offset >= ends[place] - 1:
                    left.discard(place)
    finally:
        consumer.close()


def _partitions(consumer: Consumer, topic: str) -> list[TopicPartition]:
    metadata = consumer.list_topics(topic, timeout=_READ_TIMEOUT_S).topics[topic]
    if metadata.error is not None:
        raise KafkaException(metadata.error)
    return [TopicPartition(topic, partition, 0) for partition in metadata.partitions]


def _written_ends(
    admin: AdminClient, partitions: Sequence[TopicPartition], deadline: float
) -> dict[TopicPartition, int]:
    """Return the offset after the last record of each partition, decided or not.

    A partition is without a leader for a moment when its broker stood still for its session.
    """
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    while partitions:
        asked = admin.list_offsets(dict.fromkeys(partitions, latest))
        try:
            return {one: end.result(_READ_TIMEOUT_S).offset for one, end in asked.items()}
        except KafkaException as error:
            if error.args[0].code() != KafkaError._NOENT or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    return {}


def _decided_ends(
    consumer: Consumer,
    bootstrap_servers: str,
    partitions: Sequence[TopicPartition],
    decided_s: float,
) -> dict[tuple[str, int], int]:
    """Return the offset up to which a read_committed `consumer` may read each of `partitions`.

    Kafka acknowledges a commit before it writes the markers that make it visible. What was written
    before this call is waited for, but not for ever: it may belong to a transaction that hangs.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    deadline = time.monotonic() + decided_s
    found = {}
    for partition, end in _written_ends(admin, partitions, deadline).items():
        while (
            stable := consumer.get_watermark_offsets(partition, timeout=_READ_TIMEOUT_S)[1]
        ) < end:
            if time.monotonic() > deadline:
                logger.warning(
                    "a Kafka transaction is undecided; what follows it is not read",
                    topic=partition.topic,
                    partition=partition.partition,
                    offset=stable,
                    end=end,
                )
                break
            time.sleep(0.01)
        found[partition.topic, partition.partition] = stable
    return found
