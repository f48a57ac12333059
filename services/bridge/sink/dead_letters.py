"""Records that Kafka refuses: which ones are known, and their dead letters. Pure.

    refused by the client       known at once: its dead letter goes into the same Kafka transaction
    refused by the broker       the transaction is lost. The next session sends record by record
                                ("careful"), so that only the culprit is refused; that session is
                                lost too. The one after it has the culprit's dead letter instead.

What is known lives as long as the process; another process learns it again in the same way.
"""

import codecs
import hashlib
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from schemas.errors import BadInput, ExitCode, Retryable, SetupError, SlotbridgeError
from schemas.events import Content, DeadLetter, message_topic, own_topics
from schemas.lsn import format_lsn
from services.bridge.events.event import REASON_HEADER, Event
from services.bridge.transactions.assembler import EventBatch
from services.kafka.client import INVALID_RECORD, TopicRefused

Identity = tuple[str, str, int | bytes, int, bool]
"""(topic, table, commit_lsn, seq, whether it is a tombstone): several tables may have one topic.

Of a row that a snapshot has read, the key instead of commit_lsn: it is read at another place again.
"""
_OVERHEAD_BYTES: Final = 512
_CONTENT_BYTES_MIN: Final = 16
_PIECE_BYTES: Final = 2**20
_AWAITED_S: Final = 60.0


class RefusalLearned(Retryable):
    """The session ends, having learned which record Kafka refuses; the next one starts at once."""


class KnownRefusal(NamedTuple):
    """Why Kafka has refused a record of `size_bytes`."""

    reason: str
    size_bytes: int


class Origin(NamedTuple):
    """The source transaction of a record; `end_lsn` None: not known yet."""

    xid: int
    commit_lsn: int
    end_lsn: int | None


@dataclass(slots=True)
class Sent:
    """The extent of what a session has sent: up to the commit_lsn `last_lsn`.

    `read_rows`: the open Kafka transaction has rows that a snapshot has read. `awaited_since`: the
    session waits for some since then (time.monotonic).
    """

    last_lsn: int = 0
    read_rows: bool = False
    awaited_since: float | None = None

    def add(self, events: Sequence[Event], origins: "Origins") -> None:
        """Add events of `origins`."""
        self.last_lsn = max(self.last_lsn, origins.last_lsn)
        if events and not origins.of(0).xid:
            self.read_rows = self.read_rows or any(event.table for event in events)


@dataclass(slots=True)
class Refused:
    """The records that Kafka refuses, as earlier sessions of this process have learned.

    `careful_until`: send record by record until the transaction of this commit_lsn is through; with
    `in_read_rows`, until one with rows of a snapshot is, which are read at another place each time.
    A session waits `awaited_s` for these rows, and twice as long after each wait in vain.
    """

    careful_until: int | None = None
    in_read_rows: bool = False
    awaited_s: float = _AWAITED_S
    records: dict[Identity, KnownRefusal] = field(default_factory=dict)
    topics: set[str] = field(default_factory=set)
    """Topics that have refused something: their limits and permissions are asked for at start."""

    def note(self, event: Event, origin: Origin, reason: str) -> None:
        """Note that Kafka has refused the record."""
        self.topics.add(event.topic)
        self.records[identity(event, origin)] = KnownRefusal(reason, record_bytes(event))

    def reason(self, event: Event, origin: Origin) -> str | None:
        """Return why Kafka has refused the record before, None if it has not.

        A record that is smaller than the refused one is a row that was changed since.
        """
        known = self.records.get(identity(event, origin)) if self.records else None
        if known is None or record_bytes(event) < known.size_bytes:
            return None
        return known.reason

    def take_care(self, sent: Sent) -> None:
        """Let the next session send what was `sent` record by record."""
        self.careful_until = max(self.careful_until or 0, sent.last_lsn)
        self.in_read_rows = self.in_read_rows or sent.read_rows

    def passed(self, commit_lsn: int, sent: Sent, now: float) -> bool:
        """Tell whether a careful session is done: everything up to `commit_lsn` is in Kafka.

        `sent`: with the Kafka transaction that was committed just now, at `now` (time.monotonic).
        Forget the refused records: those that come later are learned again.
        """
        if self.careful_until is None or commit_lsn < self.careful_until:
            return False
        if self.in_read_rows and not sent.read_rows:
            sent.awaited_since = now if sent.awaited_since is None else sent.awaited_since
            if now < sent.awaited_since + self.awaited_s:
                return False
            self.awaited_s *= 2
        elif self.in_read_rows:
            self.awaited_s = _AWAITED_S
        self.careful_until, self.in_read_rows = None, False
        self.records.clear()
        return True


class Origins:
    """The source transactions of a batch's events; only a whole one knows its end."""

    def __init__(self, batch: EventBatch) -> None:
        self._batch = batch

    @property
    def last_lsn(self) -> int:
        """The commit_lsn of the batch's last transaction."""
        return self._batch.stamp.commit_lsn if self._batch.stamp is not None else 0

    def of(self, index: int) -> Origin:
        """Return the origin of the batch's event with this index."""
        batch = self._batch
        if batch.ended:
            at = bisect_right(batch.ended, index, key=lambda ended: ended.events)
            _, stamp, end_lsn = batch.ended[at]
            return Origin(stamp.xid, stamp.commit_lsn, end_lsn)
        if batch.stamp is None:
            raise ValueError("a batch with events is of a transaction")
        last = batch.position.end_lsn if batch.counts is None else None
        return Origin(batch.stamp.xid, batch.stamp.commit_lsn, last)


class OneOrigin(Origins):
    """The origin of a batch whose events are all of one transaction."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    @property
    def last_lsn(self) -> int:
        """Return the commit_lsn of that transaction."""
        return self._origin.commit_lsn

    def of(self, _index: int) -> Origin:
        """Return the one origin."""
        return self._origin


def identity(event: Event, origin: Origin) -> Identity:
    """Return the identity of a record, which stays when it is encoded again."""
    if _is_read(event, origin):
        return event.topic, event.table, event.key or b"", 0, event.value is None
    return event.topic, event.table, origin.commit_lsn, event.seq, event.value is None


def _is_read(event: Event, origin: Origin) -> bool:
    """Tell whether a record is a row that a snapshot or a repair has read."""
    return not origin.xid and bool(event.table)


def may_be_known(event: Event, origin: Origin, prefix: str) -> bool:
    """Tell whether a refused record may be a dead letter when it comes again, and is known then."""
    again = event.key is not None or not _is_read(event, origin)
    return again and may_be_dead(event, prefix)


def may_be_dead(event: Event, prefix: str) -> bool:
    """Tell whether the bridge can go on without this record, which is never one of its own."""
    return event.seq >= 0 and (
        event.topic == message_topic(prefix) or event.topic not in own_topics(prefix)
    )


def record_bytes(event: Event) -> int:
    """Return the bytes of a record's key, value and headers."""
    size = len(event.key or b"") + len(event.value or b"")
    return size + sum(len(name) + len(value or b"") for name, value in event.headers or ())


def _no_topic(event: Event) -> TopicRefused:
    """Return the error of an event without a topic: an outbox message, or a row without a value."""
    reason = dict(event.headers or ()).get(REASON_HEADER)
    if isinstance(reason, str):
        return TopicRefused(reason, hint="correct the expression")
    return TopicRefused(
        "the outbox message does not name a topic",
        hint="its aggregate type must name a topic that is not the bridge's own; a logical message "
        "must be a JSON object with the members that shaping.outbox names as aggregate_type, "
        "aggregate_id and payload; bridge.on_refused: dead_letter goes on without it",
        exit_code=ExitCode.RECORD_REFUSED,
    )


def no_place(event: Event, partitions: Mapping[str, int]) -> TopicRefused | None:
    """Return the error of an event without a topic, or with a partition that its topic lacks.

    `partitions`: how many partitions each topic has. Return None for other events.
    """
    if not event.topic:
        return _no_topic(event)
    if not isinstance(event.placed_by, int) or 0 <= event.placed_by < partitions[event.topic]:
        return None
    last = partitions[event.topic] - 1
    return TopicRefused(
        f"the outbox message's partition is not one of the topic's, 0 to {last}",
        hint="correct what writes the column shaping.outbox.partition, or add partitions to the "
        "topic; bridge.on_refused: dead_letter goes on without the message",
        exit_code=ExitCode.RECORD_REFUSED,
    )


def refusal(
    event: Event,
    origin: Origin,
    reason: str,
    cause: SlotbridgeError | None = None,
    *,
    avoidable: bool,
) -> SlotbridgeError:
    """Return the error that names the record, with the hint and exit code of `cause`, if any.

    `avoidable`: with `bridge.on_refused: dead_letter` the bridge would go on without the record.
    """
    what = [
        f"topic {event.topic or '(none)'}",
        f"table {event.table}" if event.table else "",
        f"transaction {format_lsn(origin.commit_lsn)} (xid {origin.xid})",
        f"seq {event.seq}" if event.seq >= 0 else "",
        f"{record_bytes(event)} bytes",
    ]
    hint = cause.hint if cause is not None else _hint(event, reason)
    if avoidable:
        hint += (
            "; or set bridge.on_refused: dead_letter, which puts such records into <prefix>.dead"
        )
    kind = SetupError if isinstance(cause, SetupError) else BadInput
    return kind(
        f"Kafka refuses the record: {reason}",
        operation="produce",
        subject=", ".join(filter(None, what)),
        lsn=event.lsn or origin.commit_lsn,
        hint=hint,
        exit_code=cause.exit_code if cause is not None else ExitCode.RECORD_REFUSED,
    )


def _hint(event: Event, reason: str) -> str:
    """Return how the broker would take the record; `reason`: what it says of it."""
    if reason != INVALID_RECORD:
        return "raise max.message.bytes of the topic and message.max.bytes in kafka.options"
    if event.key is not None:
        return "the broker's log names the check that the record fails (InvalidRecordException)"
    delete = f"set cleanup.policy=delete on topic {event.topic}"
    if event.broadcast:
        return (
            "a compacted topic takes no record without a key, as a TRUNCATE's is: leave it out by "
            f"shaping.skip: {{{event.table}: [t]}}, or {delete}"
        )
    return (
        f"a compacted topic takes no record without a key: {delete}, or give the table a key "
        "(shaping.keys) for its later changes"
    )


def letter(
    event: Event, origin: Origin, reason: str, *, topic: str, bytes_max: int, now_ms: int
) -> Event:
    """Return the dead letter of `event` for `topic`, cut down to `bytes_max` if needed."""
    key = f'{{"commit_lsn":{origin.commit_lsn},"seq":{event.seq}}}'.encode()
    limit = bytes_max - _OVERHEAD_BYTES
    content_max = max(min(record_bytes(event), limit), _CONTENT_BYTES_MIN)
    own_key, own_value = _Whole.of(event.key), _Whole.of(event.value)
    headers = {name: _Whole.of(value) for name, value in event.headers or ()}
    while True:
        found = DeadLetter(
            reason=reason,
            topic=event.topic,
            table=event.table,
            commit_lsn=origin.commit_lsn,
            end_lsn=origin.end_lsn,
            lsn=event.lsn,
            seq=event.seq,
            xid=origin.xid,
            ts_ms=now_ms,
            key=own_key and own_key.content(content_max),
            value=own_value and own_value.content(content_max),
            headers={name: one and one.content(content_max) for name, one in headers.items()},
        )
        value = found.model_dump_json().encode()
        if len(value) <= limit or content_max <= _CONTENT_BYTES_MIN:
            return Event(topic, key, value)
        content_max = max(_CONTENT_BYTES_MIN, content_max * 3 // 4)


class _Whole(NamedTuple):
    """A key, a value or a header as it is, and what is the same of each part of it."""

    data: bytes
    sha256: str
    is_text: bool

    @classmethod
    def of(cls, value: bytes | str | None) -> Self | None:
        if value is None:
            return None
        data = value.encode() if isinstance(value, str) else value
        return cls(data, hashlib.sha256(data).hexdigest(), _is_text(data))

    def content(self, bytes_max: int) -> Content:
        """Return the first `bytes_max` of the data, with the size and hash of all."""
        part = self.data[:bytes_max]
        return Content(
            text=part.decode("utf-8", "ignore") if self.is_text else None,
            base64=None if self.is_text else b64encode(part).decode("ascii"),
            bytes=len(self.data),
            sha256=self.sha256,
            truncated=len(part) < len(self.data),
        )


def _is_text(data: bytes) -> bool:
    """Tell whether the bytes are UTF-8; a record may be too large to be copied as a whole."""
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(data)
    try:
        for since in range(0, len(data), _PIECE_BYTES):
            decoder.decode(view[since : since + _PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True
