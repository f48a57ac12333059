"""How far each key is in Kafka, by the last records of Debezium's topics. Pure.

Debezium repeats events after a crash, so that a topic may show 8, 9, 10, 8, 9: a consumer that
folds it has 9. What counts is therefore the last record of each key, not the highest: the events of
a key go on right behind it. A record without a key (a truncate, a table without a primary key, a
logical message) is remembered as such, and how often it is there.

A record names its transaction (source.txId) and its change (source.lsn); both are what pgoutput
sends, and the bridge's as well. It does not tell where its transaction commits: that tells the
slot, which decodes it again (`beyond`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from schemas.errors import ExitCode, OperatorNeeded
from schemas.events import HEARTBEAT_PREFIX, SETTLED_KEY
from schemas.lsn import format_lsn
from schemas.shaping import FIELDS, field_name
from schemas.snapshot import SNAPSHOT_PREFIX
from services.adoption.decoding import Decode, decode_json
from services.bridge.events.fields import DELETED

OPERATION: Final = "adopt"
_BRIDGES: Final = (HEARTBEAT_PREFIX, SNAPSHOT_PREFIX)
_NO_ROWS: Final = ("m", "t")
_OP: Final = field_name("op")
_XID, _SOURCE_XID = field_name("txId"), field_name("source.txId")
_LSN, _SOURCE_LSN = field_name("lsn"), field_name("source.lsn")
_FIELDS: Final = frozenset({DELETED, *map(field_name, FIELDS)})
_NOT_AN_EVENT: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class DebeziumRecord(NamedTuple):
    """A record of a topic; `time_ms`: Kafka's timestamp."""

    topic: str
    partition: int
    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None

    @property
    def where(self) -> str:
        """The record as messages name it: topic[partition]@offset."""
        return f"{self.topic}[{self.partition}]@{self.offset}"


class Said(NamedTuple):
    """The parsed fields of an event of Debezium. `ours`: a bridge published it."""

    xid: int
    lsn: int
    op: str
    commit_ms: int
    images: str
    ours: bool = False


class Last(NamedTuple):
    """The last event of a key; `removed`: its tombstone is there as well."""

    xid: int
    lsn: int
    op: str
    where: str
    removed: bool = False


class Keyless(NamedTuple):
    """An event without a key; `images` is a digest of `before` and `after`."""

    topic: str
    xid: int
    lsn: int
    op: str
    images: str


class Transaction(NamedTuple):
    """A transaction that the slot decodes."""

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_time_us: int


def said(value: bytes, prefix: str, decode: Decode = decode_json) -> Said | None:
    """Parse an event; `decode`: of its format.

    None for a row that a snapshot has read, and for a logical message that a bridge has written to
    the WAL (its heartbeat), which no bridge publishes.

    Raise ValueError for a record that is not an event of the connector with this prefix.
    """
    try:
        event = decode(value)
        if _OP in event:
            return _of_flat_row(event)
        source, op = event["source"], event["op"]
        if source["connector"] != "postgresql" or source["name"] != prefix:
            raise ValueError("another connector's")
        if op == "r" or source.get("snapshot") not in (None, "false", False):
            return None
        if op == "m" and event["message"]["prefix"] in _BRIDGES:
            return None
        images = digest(event.get("before"), event.get("after")) if op != "m" else ""
        return Said(
            int(source.get("txId") or 0),
            int(source["lsn"]),
            str(op),
            int(source["ts_ms"]),
            images,
            bool(source.get("commit_lsn")),
        )
    except _NOT_AN_EVENT as error:
        raise ValueError(f"it is not an event of {prefix}") from error


def _of_flat_row(event: Mapping[str, Any]) -> Said | None:
    """Return what a flat row says. It does not name its connector."""
    if event[_OP] == "r":
        return None
    return Said(
        int(event[_XID if _XID in event else _SOURCE_XID]),
        int(event[_LSN if _LSN in event else _SOURCE_LSN]),
        str(event[_OP]),
        int(event[field_name("source.ts_ms")]),
        digest(None, row_of(event)),
        bool(event.get(field_name("commit_lsn"))),
    )


def row_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a flat row, without fields of the event."""
    return {name: value for name, value in event.items() if name not in _FIELDS}


def digest(before: Any, after: Any) -> str:
    """Return a digest of two row images that does not depend on the order of their columns."""
    text = json.dumps([before, after], sort_keys=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Tails:
    """Takes the records of each partition in order, from a point before all that may be beyond.

    `prefix`: the connector's. `margin_ms`: how far the clocks of database and broker may differ.
    `decode`: of the values' format.
    """

    prefix: str
    margin_ms: int
    decode: Decode = decode_json
    last: dict[tuple[str, bytes], Last] = field(default_factory=dict)
    keyless: Counter[Keyless] = field(default_factory=Counter)
    messages: dict[tuple[str, int], str] = field(default_factory=dict)
    """(topic, LSN) of logical messages -> where one is."""
    records: Counter[str] = field(default_factory=Counter)
    samples: dict[str, DebeziumRecord] = field(default_factory=dict)
    """Topic -> its last record that is of a row."""
    _begun: set[tuple[str, int]] = field(default_factory=set)
    """Partitions of which a record was met."""
    _gone: set[tuple[str, bytes]] = field(default_factory=set)
    """Keys whose delete was only looked at."""

    def look(self, record: DebeziumRecord) -> None:
        """Take a record from before all that may be beyond, for its form and its time alone.

        What is not an event is passed over. Raise OperatorNeeded for clocks that differ.
        """
        self._begun.add((record.topic, record.partition))
        try:
            event = self._said(record.value) if record.value is not None else None
        except ValueError:
            return
        if event is not None and event.op == "d":
            self._gone.add((record.topic, record.key or b""))
        if record.value is not None:
            self._note(record, event)

    def _said(self, value: bytes) -> Said | None:
        return said(value, self.prefix, self.decode)

    def _note(self, record: DebeziumRecord, event: Said | None) -> None:
        """Keep a row's record as a sample. Raise OperatorNeeded for clocks that differ."""
        if event is None or event.op not in _NO_ROWS:
            self.samples[record.topic] = record
        if (
            event is not None
            and record.time_ms
            and record.time_ms + self.margin_ms < event.commit_ms
        ):
            raise OperatorNeeded(
                "Kafka's time of the record is before its transaction was committed, by "
                f"{(event.commit_ms - record.time_ms) // 1000} s",
                operation=OPERATION,
                subject=record.where,
                hint="the clocks differ, of database, Kafka Connect or broker: give a larger "
                "--clock-margin-s",
            )

    def take(self, record: DebeziumRecord) -> None:
        """Take the next record of a partition. Raise OperatorNeeded where it is not an event."""
        self.records[record.topic] += 1
        topic_key = (record.topic, record.key or b"")
        first = (record.topic, record.partition) not in self._begun
        self._begun.add((record.topic, record.partition))
        if record.value is None:
            last = self.last.get(topic_key)
            if last is not None and last.op == "d":
                self.last[topic_key] = last._replace(removed=True)
            elif not (first or topic_key in self._gone or record.key == SETTLED_KEY):
                raise _compacted(record)
            return
        try:
            event = self._said(record.value)
        except ValueError as error:
            raise OperatorNeeded(
                f"the record is not an event of Debezium: {error}",
                operation=OPERATION,
                subject=record.where,
                hint="another program writes to this topic, or the connector's configuration is "
                "another one",
                exit_code=ExitCode.RECORD_REFUSED,
            ) from error
        self._note(record, event)
        if event is None:
            return
        if event.op == "m":
            self.messages[record.topic, event.lsn] = record.where
        elif record.key is None:
            one = Keyless(record.topic, event.xid, event.lsn, event.op, event.images)
            self.keyless[one] += 1
        else:
            self.last[topic_key] = Last(event.xid, event.lsn, event.op, record.where)

    def beyond(
        self,
        slot_lsn: int,
        transactions: Mapping[int, Transaction],
        messages: Mapping[int, int],
        complete_lsn: int = 0,
    ) -> "Beyond":
        """Return what the slot decodes again from `slot_lsn` on, which Kafka has.

        `transactions`: those that it decodes, by xid; `messages`: LSN of logical messages -> where
        their transaction ends; `complete_lsn`: transactions that end here or before are whole in
        Kafka, Debezium says. Raise OperatorNeeded for an event that the server does not have.
        """
        kept = {topic_key: one for topic_key, one in self.last.items() if one.xid in transactions}
        keyless = {one: count for one, count in self.keyless.items() if one.xid in transactions}
        of_messages = {
            at: where
            for at, where in self.messages.items()
            if at[1] in messages and at[1] > slot_lsn
        }
        lost = [
            *((one.lsn, one.where) for one in self.last.values() if one.xid not in transactions),
            *((one.lsn, one.topic) for one in self.keyless if one.xid not in transactions),
            *((at[1], where) for at, where in self.messages.items() if at[1] not in messages),
        ]
        for lsn, where in sorted(lost, reverse=True)[:1]:
            if lsn > slot_lsn:
                raise OperatorNeeded(
                    f"{where} is of a change that the slot does not decode: the database is "
                    "another, or a failover has lost it",
                    operation=OPERATION,
                    lsn=lsn,
                    hint="check source.conninfo and source.publication; else begin with a new slot "
                    "and prefix, and a snapshot",
                    exit_code=ExitCode.TIMELINE,
                )
        ends = [transactions[one.xid].end_lsn for one in kept.values()]
        ends += [transactions[one.xid].end_lsn for one in keyless]
        ends += [messages[lsn] for _, lsn in of_messages]
        ends += [one.end_lsn for one in transactions.values() if one.end_lsn <= complete_lsn]
        return Beyond(kept, keyless, of_messages, max(ends, default=slot_lsn))


class Beyond(NamedTuple):
    """The changes in Kafka that the slot decodes again; `end_lsn`: after the last one."""

    last: dict[tuple[str, bytes], Last]
    keyless: dict[Keyless, int]
    messages: dict[tuple[str, int], str]
    end_lsn: int


def _compacted(record: DebeziumRecord) -> OperatorNeeded:
    return OperatorNeeded(
        "the delete event before this tombstone is gone: the topic was compacted, or "
        "another program has written it",
        operation=OPERATION,
        subject=record.where,
        hint="let Debezium run until its slot is near the end of the WAL, stop it, and run this "
        "again",
    )


def unmatched(records: Mapping[str, int]) -> OperatorNeeded:
    """Return the error of events in Kafka that the slot decodes as something else."""
    where, lsn = next(iter(records.items()))
    return OperatorNeeded(
        f"{len(records)} records of Debezium are not what the slot decodes at their LSN, such as "
        f"{where} at {format_lsn(lsn)}",
        operation=OPERATION,
        subject=where,
        lsn=lsn,
        hint="the settings differ from the connector's (keys, publication, value modes), or the "
        "table was altered: translate the connector anew with --write, and compare",
    )
