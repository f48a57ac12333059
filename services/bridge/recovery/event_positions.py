"""The position of a Kafka record in the order of all events, by the record alone. Pure.

message of an outbox       headers: commit_lsn, seq; whatever its value looks like
flat row                   value: __op, __commit_lsn, __seq, __timeline, or headers of these names
table's event, message     value, or its payload: op, source.commit_lsn, source.seq, source.timeline
BEGIN, END, schema event,  value: commit_lsn, seq; an END stands behind all events of its
dead letter                transaction; only in the bridge's own topics
staging, part 0            value: prepare_lsn; only there, too
removal of a staging       headers: end_lsn, of the decision
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from schemas import wire
from schemas.errors import OperatorNeeded
from schemas.events import SETTLED_KEY, SETTLING_KEY_PREFIX, PreparedKey, own_topics, prepared_topic
from schemas.progress import ProgressRecord
from schemas.shaping import POSITION, field_name
from services.bridge.events.shaping.outbox import Headers
from services.bridge.transactions.staging import DECIDED_AT

LAST_SEQ: Final = 2**63 - 1
_OPERATIONS: Final = ("c", "r", "u", "d", "t", "m")
_NOT_OURS: Final = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
    *(EOFError, MemoryError, AssertionError),
)
NO_STAGING_KEY: Final = PreparedKey(slot="", gid="", part=0).model_dump_json().encode()
"""As SETTLED_KEY, in the topic of stagings, whose keys all are PreparedKeys."""
AnyHeaders = Headers | dict[str, str | bytes | None] | None


class EventPosition(NamedTuple):
    """An event's position in the order of all those of its timeline; 0: it does not tell which."""

    commit_lsn: int
    seq: int
    timeline: int = 0


class KafkaRecord(NamedTuple):
    """The fields of a Kafka record by which the bridge judges it."""

    topic: str
    offset: int
    key: bytes | str | None
    value: bytes | None
    headers: AnyHeaders = None


class Message(Protocol):
    """The methods of confluent_kafka.Message that are used here."""

    def topic(self) -> str | None: ...
    def offset(self) -> int | None: ...
    def key(self) -> bytes | str | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> AnyHeaders: ...


def record_of(message: Message) -> KafkaRecord:
    """Convert a consumer's message to a KafkaRecord."""
    topic, offset = message.topic() or "", message.offset() or 0
    return KafkaRecord(topic, offset, message.key(), message.value(), message.headers())


SchemaText = Callable[[int], str]
"""Returns the schema that the registry has by an id."""


def position_of_record(
    record: KafkaRecord, prefix: str, *, outbox: bool, schema_text: SchemaText | None = None
) -> EventPosition | None:
    """Return the position of a record, None if it is not of `prefix` or has no position.

    `outbox`: messages of an outbox may be in its topic. Raise as `position_of`.
    """
    position = position_in_headers(record.headers) if outbox else None
    if position is None:
        position = position_of_row(dict(record.headers or []))
    if position is None:
        own = record.topic in own_topics(prefix)
        try:
            position = position_of(record.value, prefix, own=own, schema_text=schema_text)
        except OperatorNeeded as error:
            error.subject = f"topic {record.topic}, offset {record.offset}"
            raise
    if position is None and record.topic == prepared_topic(prefix):
        position = position_of_removal(record.headers)
    return position


Lost = Callable[[int, int], bool]
"""Tells by (timeline or 0, commit_lsn) whether the server's history does not have an event."""


def remaining(position: EventPosition | None, lost: Lost) -> EventPosition | None:
    """Return `position`, or None where its event never happened on the server's present history.

    An accepted divergence leaves events of the lost timeline in the topics, beyond the record. They
    tell nothing of what was decided since, and no record of the present timeline covers them.
    """
    return None if position is None or lost(position.timeline, position.commit_lsn) else position


def has(last: ProgressRecord | None, position: EventPosition) -> bool:
    """Tell whether the event at `position` is among what the record covers."""
    if last is None:
        return False
    known = last.position
    in_part = position.commit_lsn == known.commit_lsn and position.seq < known.seq
    return position.commit_lsn < known.end_lsn or in_part


def position_of(
    value: bytes | None, prefix: str, *, own: bool = True, schema_text: SchemaText | None = None
) -> EventPosition | None:
    """Return the position of a record's event or PREPARE, None if it is not of `prefix`.

    `own`: it is of one of the bridge's own topics, which also have records without a source. Raise
    OperatorNeeded for a value in Avro that begins as a flat row, if there is no `schema_text`: only
    the registry tells it from one of Debezium. Raise what `schema_text` raises.
    """
    try:
        document = _document(value or b"null", schema_text)
        if position := position_of_row(document):  # a table may have a column `specversion`
            return position
        if "specversion" in document:
            document = document["data"]  # a structured CloudEvent
        if document.keys() == {"payload", "schema"}:
            document = document["payload"]
        if position := position_of_row(document):
            return position
        source = document.get("source", document)
        if "source" in document:
            if document["op"] not in _OPERATIONS or source["name"] != prefix:
                return None
        elif not own:
            return None
        lsn = source["commit_lsn"] if "commit_lsn" in source else source["prepare_lsn"]
        seq = LAST_SEQ if source.get("status") == "END" else source.get("seq", 0)
        return _position(lsn, seq, source.get("timeline", 0))
    except _NOT_OURS:
        return None  # anybody's record


def position_of_row(fields: Mapping[str, Any]) -> EventPosition | None:
    """Return the position in a flat row's fields or headers, None for other records."""
    try:
        op, *numbers = [fields[field_name(name)] for name in POSITION]
        known = (op.decode() if isinstance(op, bytes) else op) in _OPERATIONS
        return _position(*numbers) if known else None
    except _NOT_OURS:
        return None


def _position(lsn: Any, seq: Any, timeline: Any = 0) -> EventPosition | None:
    """Return the position of these numbers or their texts; None where no event has it."""
    found = EventPosition(int(lsn), int(seq), int(timeline))
    return found if found.commit_lsn > 0 and found.seq >= 0 else None


def _document(value: bytes, schema_text: SchemaText | None) -> Any:
    """Return what an event says of its position: a value in JSON, or the first binary fields."""
    if value[:1] != wire.MAGIC:
        return json.loads(value)
    content = value[wire.HEAD_BYTES :]
    if content[:1] == b"{":
        return json.loads(content)
    if content[:1] == b"\0":
        from services.bridge.events.formats import protobuf

        return protobuf.first_fields(content)
    from services.bridge.events.formats import avro

    found = avro.first_fields(content)
    if position_of_row(found) is None or _is_flat_row(value, schema_text):
        return found
    return {}


def _is_flat_row(value: bytes, schema_text: SchemaText | None) -> bool:
    """Tell whether a value with the first fields of a flat row is one, by its writer's schema.

    Debezium's values begin with columns, whose values may look like these fields.
    """
    from services.bridge.events.formats import avro

    if schema_text is None:
        raise OperatorNeeded(
            "a record may be a flat row of this bridge, or an event of Debezium: only the schema "
            "registry tells, and none is set",
            operation="read the position of a record",
            hint="set registry.url, and kafka.value_format as it was when the record was written",
        )
    return avro.begins_flat_rows(schema_text(wire.schema_id(value) or 0))


def position_in_headers(headers: AnyHeaders) -> EventPosition | None:
    """Return the position of an outbox message, None for any other message."""
    values = dict(headers or [])
    try:
        return _position(values["commit_lsn"] or b"", values["seq"] or b"")
    except (KeyError, ValueError):
        return None


def position_of_removal(headers: AnyHeaders) -> EventPosition | None:
    """Return the position of a staging's removal; a record that reaches the decision covers it."""
    try:
        return EventPosition(int(dict(headers or [])[DECIDED_AT] or b"") - 1, LAST_SEQ)
    except (KeyError, ValueError):
        return None


def is_settling(key: bytes | str | None, value: bytes | str | None) -> bool:
    """Tell whether a record only ends a transaction that hung, of whichever bridge."""
    return value is None and key in (SETTLED_KEY, NO_STAGING_KEY)


def is_note(key: bytes | str | None) -> bool:
    """Tell whether a key of the progress topic is a note's, of any slot."""
    return isinstance(key, bytes) and key.startswith(SETTLING_KEY_PREFIX)
