"""Whole source transactions from Kafka: the topics, partition by partition, put together."""

import json
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas.errors import BadInput, ExitCode, OperatorNeeded, Retryable
from schemas.events import dead_topic, legal_topic, transaction_topic
from schemas.shaping import field_name
from services.kafka.client import kafka_error, make_client, passing
from slotbridge.consumer.assembly import Assembly, Change, End, Refused, Transaction
from slotbridge.consumer.position import Partition, Position

_POLL_S: Final = 0.2
_RECORDS_AT_ONCE: Final = 500
_HELD_MAX: Final = 20_000
"""Records of one partition that wait for their transaction, before it is paused."""
_LOOK_S: Final = 1.0
_REQUEST_S: Final = 10.0
OPERATION: Final = "read transactions"


class Transactions:
    """Yields transactions in commit order, each whole; a context manager. For one thread."""

    def __init__(
        self,
        bootstrap_servers: str,
        prefix: str,
        *,
        position: Position | None = None,
        tables: Collection[str] | None = None,
        topics: Mapping[str, str] | None = None,
        options: Mapping[str, str | int | float | bool] | None = None,
        patience_s: float = 120.0,
    ) -> None:
        """Read the topics of `prefix`, on from `position`; None: from their beginning.

        tables: the `schema.table` to read; None: all. Transactions without their events come too,
        with none. topics: `schema.table` -> its topic, where `shaping.routes` gives it another
        than `prefix.schema.table`. options: of librdkafka, such as for security. patience_s: how
        long an event may be missing that Kafka must have.
        """
        self._prefix = prefix
        self._tables = None if tables is None else frozenset(tables)
        self._routes = dict(topics or {})
        self._patience_s = patience_s
        self._ends_at: Partition = (transaction_topic(prefix), 0)
        self._dead = dead_topic(prefix)
        self._position = position or Position()
        self._assembly = Assembly(self._position, self._ends_at)
        self._assigned: set[Partition] = set()
        self._paused: set[Partition] = set()
        self._looked = 0.0
        self._closing = threading.Event()
        self._consumer = make_client(
            Consumer,
            {
                "bootstrap.servers": bootstrap_servers,
                **(options or {}),
                "group.id": f"slotbridge-consumer-{uuid.uuid4()}",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
            },
        )

    def __enter__(self) -> "Transactions":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Transaction]:
        """Yield transactions until `stop` is called. Raise as `read`."""
        while not self._closing.is_set():
            found = self.read(_POLL_S)
            if found is not None:
                yield found

    def stop(self) -> None:
        """End the iteration soon, from any thread."""
        self._closing.set()

    def close(self) -> None:
        """Disconnect. What was not stored comes again to the next reader."""
        self._closing.set()
        self._consumer.close()

    def read(self, timeout_s: float) -> Transaction | None:
        """Return the next transaction, None where there is none within `timeout_s`.

        Raise Retryable where Kafka does not answer, or does not bring events that belong to a
        transaction within `patience_s`; OperatorNeeded where Kafka has removed what was not read;
        BadInput for a record that is not the bridge's.
        """
        deadline, lacks_since = time.monotonic() + timeout_s, time.monotonic()
        while True:
            found = self._assembly.give()
            if found is not None:
                self._position = found.position
                return found
            now = time.monotonic()
            if now > deadline and not self._assembly.lacking():
                return None
            if now - lacks_since > self._patience_s:
                raise self._missing()
            if self._assembly.lacking() and now > deadline:
                deadline = now + _POLL_S  # what Kafka must have is waited for
            self._look(now)
            for message in self._consumer.consume(
                _RECORDS_AT_ONCE, min(_POLL_S, max(0.0, deadline - now))
            ):
                self._take(message)
            self._pause()

    def _look(self, now: float) -> None:
        """Begin to read partitions that are new: at first, and where something is missing."""
        known = {topic for topic, _ in self._assigned}
        lacking = {self._topic(table) for table in self._assembly.lacking()}
        if lacking <= known and self._assigned and now - self._looked < _LOOK_S:
            return
        if now - self._looked < _LOOK_S / 10:
            return
        self._looked = now
        wanted = known | lacking | {self._ends_at[0], self._dead}
        wanted |= {topic for topic, _ in self._position.offsets}
        new: list[TopicPartition] = []
        for topic in sorted(wanted):
            for number in self._numbers(topic):
                if (topic, number) not in self._assigned:
                    self._assigned.add((topic, number))
                    new.append(TopicPartition(topic, number, self._start(topic, number)))
        if new:
            self._consumer.incremental_assign(new)

    def _start(self, topic: str, number: int) -> int:
        """Return where reading a partition begins: where it was left, or at its first record."""
        low, _ = self._consumer.get_watermark_offsets(
            TopicPartition(topic, number), timeout=_REQUEST_S
        )
        known = self._position.offsets.get((topic, number))
        if known is not None:
            if low > known:
                raise self._removed(topic)
            return known
        return low

    def _numbers(self, topic: str) -> list[int]:
        try:
            found = self._consumer.list_topics(topic, timeout=_REQUEST_S).topics[topic]
        except KafkaException as error:
            raise kafka_error(error, OPERATION, topic) from error
        return [] if found.error is not None else sorted(found.partitions)

    def _pause(self) -> None:
        """Hold back partitions that are far ahead of the transactions' ends."""
        far = {one for one in self._assigned if self._assembly.held(one) > _HELD_MAX}
        for change, moved in (
            (self._consumer.pause, far - self._paused),
            (self._consumer.resume, self._paused - far),
        ):
            if moved:
                change([TopicPartition(topic, number) for topic, number in moved])
        self._paused = far

    def _take(self, message: Message) -> None:
        failure, topic = message.error(), message.topic() or ""
        if failure is not None:
            if failure.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
                raise self._removed(topic)
            if not passing(failure):
                raise kafka_error(KafkaException(failure), OPERATION, topic)
            return
        partition, offset = (topic, message.partition() or 0), message.offset() or 0
        value = message.value()
        if value is None:
            self._assembly.passed(partition, offset)
            return
        document = _parsed(value, topic, partition[1], offset)
        try:
            if partition == self._ends_at:
                self._take_end(document, offset)
            elif topic == self._dead:
                self._take_dead(document, partition, offset)
            else:
                self._take_event(document, message.key(), partition, offset)
        except (KeyError, TypeError) as error:
            raise _foreign(topic, partition[1], offset) from error

    def _take_end(self, document: Mapping[str, Any], offset: int) -> None:
        if document["status"] != "END":
            return
        counts = {
            one["data_collection"]: one["event_count"]
            for one in document["data_collections"]
            if self._chosen(one["data_collection"])
        }
        self._assembly.take_end(
            End(document["id"], document["commit_lsn"], document["ts_ms"], counts, offset)
        )

    def _take_dead(self, document: Mapping[str, Any], partition: Partition, offset: int) -> None:
        refused = Refused(document["table"], document["seq"])
        if document["value"] is None or not self._chosen(refused.table):
            self._assembly.passed(partition, offset)
        else:
            self._assembly.take(partition, offset, document["commit_lsn"], refused)

    def _take_event(
        self, document: Mapping[str, Any], key: bytes | str | None, at: Partition, offset: int
    ) -> None:
        if document.keys() == {"schema", "payload"}:
            document = document["payload"]
        if field_name("commit_lsn") in document:
            raise _flat(at, offset)
        source = document["source"]
        table = f"{source['schema']}.{source['table']}"
        if not self._chosen(table):
            self._assembly.passed(at, offset)
            return
        parsed = None if key is None else _parsed(key, *at, offset)
        if isinstance(parsed, dict) and parsed.keys() == {"schema", "payload"}:
            parsed = parsed["payload"]
        change = Change(table, source["seq"], parsed, document)
        self._assembly.take(at, offset, source["commit_lsn"], change)

    def _chosen(self, table: str) -> bool:
        return self._tables is None or table in self._tables

    def _topic(self, table: str) -> str:
        return self._routes.get(table) or legal_topic(f"{self._prefix}.{table}")

    def _missing(self) -> Retryable:
        end = self._assembly.first
        lacking = ", ".join(self._assembly.lacking())
        return Retryable(
            f"Kafka did not deliver all events of {lacking} within {self._patience_s:.0f} s",
            operation=OPERATION,
            subject=f"prefix {self._prefix}",
            lsn=end.commit_lsn if end is not None else None,
            hint="name the topics of routed tables by `topics`, and the tables that have topics by "
            "`tables`: an outbox has none; else retention has removed the events",
            exit_code=ExitCode.KAFKA_UNREACHABLE,
        )

    def _removed(self, topic: str) -> OperatorNeeded:
        return OperatorNeeded(
            "Kafka has removed records that were not read yet",
            operation=OPERATION,
            subject=topic,
            hint="the topic's retention was too short, or it was made again: begin anew",
        )


def _parsed(value: bytes | str, topic: str, number: int, offset: int) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise _foreign(topic, number, offset) from error


def _flat(at: Partition, offset: int) -> BadInput:
    return BadInput(
        "the record is a flat row, which lacks what whole transactions need",
        operation=OPERATION,
        subject=f"{at[0]}[{at[1]}]@{offset}",
        hint="leave the table out of the bridge's shaping.flat.tables, or name the tables to read, "
        "without it, by `tables`",
        exit_code=ExitCode.RECORD_REFUSED,
    )


def _foreign(topic: str, number: int, offset: int) -> BadInput:
    return BadInput(
        "the record is not one of the bridge, or not in JSON",
        operation=OPERATION,
        subject=f"{topic}[{number}]@{offset}",
        hint="only the bridge may write to its topics; kafka.value_format must be json or "
        "json_schema_envelope, and kafka.cloudevents not structured",
        exit_code=ExitCode.RECORD_REFUSED,
    )
