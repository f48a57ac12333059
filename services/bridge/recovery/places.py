"""Where a record of Kafka stands in the order of all events, told by the record alone. Pure.

table's event, message     value, or its payload: source.commit_lsn, source.seq, source.timeline
flat row                   value: __commit_lsn, __seq, __timeline, or headers of these names
BEGIN, END, schema event,  value: commit_lsn, seq; an END stands behind all events of its
dead letter                transaction
message of an outbox       headers: commit_lsn, seq
staging, part 0            value: prepare_lsn
removal of a staging       headers: end_lsn, of the decision
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from schemas.events import SETTLED_KEY, PreparedKey, ProgressRecord, prepared_topic
from schemas.shaping import field_name
from services.bridge.events.shaping.outbox import Headers
from services.bridge.transactions.staging import DECIDED_AT

LAST_SEQ: Final = 2**63 - 1
_NOT_OURS: Final = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
    *(EOFError, MemoryError, AssertionError),
)
NO_STAGING_KEY: Final = PreparedKey(slot="", gid="", part=0).model_dump_json().encode()
"""As SETTLED_KEY, in the topic of stagings, whose keys all are PreparedKeys."""
AnyHeaders = Headers | dict[str, str | bytes | None] | None


class Place(NamedTuple):
    """An event's place in the order of all those of its timeline; 0: it does not tell which."""

    commit_lsn: int
    seq: int
    timeline: int = 0


class Record(NamedTuple):
    """A record of Kafka, as far as anything is judged by it."""

    topic: str
    offset: int
    key: bytes | str | None
    value: bytes | None
    headers: AnyHeaders = None


class Message(Protocol):
    """confluent_kafka.Message, as far as it is needed here."""

    def topic(self) -> str | None: ...
    def offset(self) -> int | None: ...
    def key(self) -> bytes | str | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> AnyHeaders: ...


def record_of(message: Message) -> Record:
    """Convert a consumer's message to a Record."""
    topic, offset = message.topic() or "", message.offset() or 0
    return Record(topic, offset, message.key(), message.value(), message.headers())


def place_of_record(record: Record, prefix: str, *, outbox: bool) -> Place | None:
    """Return where a record stands, None if it is not of `prefix` or does not tell its place.

    `outbox`: messages of an outbox may be in its topic.
    """
    place = place_of_row(dict(record.headers or [])) or place_of(record.value, prefix)
    if place is None and record.topic == prepared_topic(prefix):
        place = place_of_removal(record.headers)
    if place is None and outbox:
        place = place_in_headers(record.headers)
    return place


Lost = Callable[[int, int], bool]
"""Tells by (timeline or 0, commit_lsn) whether the server's history does not have an event."""


def remaining(place: Place | None, lost: Lost) -> Place | None:
    """Return `place`, or None where its event never happened on the server's present history.

    An accepted divergence leaves events of the lost timeline in the topics, beyond the record. They
    tell nothing of what was decided since, and no record of the present timeline covers them.
    """
    return None if place is None or lost(place.timeline, place.commit_lsn) else place


def has(last: ProgressRecord | None, place: Place) -> bool:
    """Tell whether the event at `place` is among what the record covers."""
    if last is None:
        return False
    in_part = place.commit_lsn == last.commit_lsn and place.seq < last.seq
    return place.commit_lsn < last.end_lsn or in_part


def place_of(value: bytes | None, prefix: str) -> Place | None:
    """Return where a record's event, or a PREPARE, stands; None if it is not of `prefix`."""
    try:
        document = _document(value or b"null")
        if document.keys() == {"payload", "schema"}:
            document = document["payload"]
        if place := place_of_row(document):
            return place
        said = document.get("source", document)
        if said.get("name", prefix) != prefix:
            return None
        lsn = said["commit_lsn"] if "commit_lsn" in said else said["prepare_lsn"]
        seq = LAST_SEQ if said.get("status") == "END" else said.get("seq", 0)
        return Place(int(lsn), int(seq), int(said.get("timeline", 0)))
    except _NOT_OURS:
        return None  # anybody's record


def place_of_row(told: Mapping[str, Any]) -> Place | None:
    """Return the place that fields of a flat row, or its headers, tell; None for anything else."""
    try:
        found = [int(told[field_name(name)]) for name in ("commit_lsn", "seq", "timeline")]
    except _NOT_OURS:
        return None
    return Place(*found)


def _document(value: bytes) -> Any:
    """Return what an event says of its place: a value in JSON, or the first fields of Avro."""
    if value[:1] != b"\0":
        return json.loads(value)
    from services.bridge.events.formats.avro import first_fields

    return first_fields(value)


def place_in_headers(headers: AnyHeaders) -> Place | None:
    """Return where a message of an outbox stands, None for any other message."""
    told = dict(headers or [])
    try:
        return Place(int(told["commit_lsn"] or b""), int(told["seq"] or b""))
    except (KeyError, ValueError):
        return None


def place_of_removal(headers: AnyHeaders) -> Place | None:
    """Return where a staging's removal stands: a record that reaches the decision covers it."""
    try:
        return Place(int(dict(headers or [])[DECIDED_AT] or b"") - 1, LAST_SEQ)
    except (KeyError, ValueError):
        return None


def is_settling(key: bytes | str | None, value: bytes | str | None) -> bool:
    """Tell whether a record only ends a transaction that hung, of whichever bridge."""
    return value is None and key in (SETTLED_KEY, NO_STAGING_KEY)
