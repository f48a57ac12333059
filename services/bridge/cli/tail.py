"""`slotbridge tail`: prints committed events of the topics as JSON lines, of every format."""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from schemas.errors import ExitCode, OperatorNeeded
from schemas.events import own_topics, transaction_topic
from schemas.settings import KafkaSettings
from services.kafka.client import client_options, kafka_error, make_client, passing
from services.kafka.records import REQUEST_TIMEOUT_S
from services.kafka.schema_registry import SchemaRegistry
from spark_consumers.formats.decoder import Decoder, WriterSchema

_POLL_S: Final = 0.2
_REFRESH_S: Final = 5.0


def tail(
    settings: KafkaSettings,
    registry: SchemaRegistry | None = None,
    *,
    topics: Iterable[str],
    from_beginning: bool,
    is_over: Callable[[int, float], bool],
) -> Iterator[dict[str, Any]]:
    """Yield committed records as they come; topics that are made meanwhile join from their start.

    `topics`: their names; empty: those of the prefix, without the bridge's own but with
    transactions' beginnings and ends. `is_over` is asked with the number of records so far and the
    seconds since the last one. Records of one partition come in order, others' in between. What a
    schema of `registry` describes is decoded; without one it stays text.
    """
    decode = _decoder(registry) if registry is not None else lambda data: data
    consumer = make_client(
        Consumer,
        {
            **client_options(settings),
            "group.id": f"slotbridge-tail-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest" if from_beginning else "latest",
        },
    )
    wanted = frozenset(topics)
    assigned: dict[tuple[str, int], TopicPartition] = {}
    count, refreshed, last = 0, 0.0, time.monotonic()
    try:
        while not is_over(count, time.monotonic() - last):
            if (now := time.monotonic()) - refreshed > _REFRESH_S or not assigned:
                new = _partitions(consumer, settings.topic_prefix, wanted) - assigned.keys()
                _assign(consumer, assigned, new, first=not refreshed)
                refreshed = now
            message = consumer.poll(_POLL_S)
            if message is None:
                continue
            failure = message.error()
            if failure is None:
                count, last = count + 1, time.monotonic()
                yield as_json(message, decode)
            elif not passing(failure):
                raise kafka_error(KafkaException(failure), "read the topic", message.topic() or "")
    finally:
        consumer.close()


def _assign(
    consumer: Consumer,
    assigned: dict[tuple[str, int], TopicPartition],
    new: Iterable[tuple[str, int]],
    *,
    first: bool,
) -> None:
    """Read the new partitions too: from their beginning, but for those that are there at first."""
    added = [TopicPartition(topic, number) for topic, number in sorted(new)]
    if not added:
        return
    if not first:
        for partition in added:
            partition.offset = 0
    consumer.incremental_assign(added)
    assigned |= {(partition.topic, partition.partition): partition for partition in added}


def _partitions(consumer: Consumer, prefix: str, wanted: frozenset[str]) -> set[tuple[str, int]]:
    """Return the partitions of the wanted topics; of all topics of events, if none is named.

    Raise OperatorNeeded for a topic that does not exist.
    """
    try:
        there = consumer.list_topics(timeout=REQUEST_TIMEOUT_S).topics
    except KafkaException as error:
        raise kafka_error(error, "list topics", prefix) from error
    if missing := wanted - there.keys():
        raise OperatorNeeded(
            f"there is no topic {', '.join(sorted(missing))}",
            operation="read topics",
            hint=f"topics of tables are named {prefix}.<schema>.<table>; they are made at the "
            "first change",
            exit_code=ExitCode.SETTINGS,
        )
    internal = own_topics(prefix) - {transaction_topic(prefix)}
    chosen = wanted or {
        name for name in there if name.startswith(f"{prefix}.") and name not in internal
    }
    return {(name, number) for name in chosen for number in there[name].partitions}


def _decoder(registry: SchemaRegistry) -> Callable[[bytes], bytes]:
    """Return the function from a key or value to its JSON, in the form that JSON topics have.

    Raise Retryable where the registry does not answer. What it can't read becomes a document that
    says so.
    """

    def schema_of(schema_id: int) -> WriterSchema | None:
        found = registry.schema(schema_id)
        return None if found is None else WriterSchema(*found)

    decoder = Decoder(schema_of)
    return lambda data: decoder.decoded(None, data)[1]


def as_json(message: Message, decode: Callable[[bytes], bytes]) -> dict[str, Any]:
    """Return a record as one document; a key or value that is not JSON is shown as text."""
    key, value = message.key(), message.value()
    return {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "key": _shown(decode(key) if isinstance(key, bytes) else key),
        "value": _shown(decode(value) if isinstance(value, bytes) else value),
        **_headers(dict(message.headers() or ())),
    }


def _headers(headers: Mapping[str, str | bytes | None]) -> dict[str, Any]:
    return {"headers": {name: _shown(value) for name, value in headers.items()}} if headers else {}


def _shown(value: str | bytes | None) -> Any:
    """Return a key or value as JSON reads it, as text where it is not JSON."""
    if value is None:
        return None
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    try:
        return json.loads(text)
    except ValueError:
        return text
