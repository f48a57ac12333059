"""Signals of Debezium's formats -> requests, which are kept in Kafka beside the progress. Pure.

    INSERT INTO signal_table (id, type, data)                          request
    execute-snapshot  {"data-collections": ["public.t"],               read
                       "additional-conditions": [{"data-collection": "public.t", "filter": "…"}]}
    stop-snapshot     {"data-collections": ["public.t"]}, or none      stop, of these or of all
    pause-snapshot    the same                                         pause
    resume-snapshot   the same                                         resume

A record of the signal topic is {"id": …, "type": …, "data": {…}}; its key is the topic prefix.

A request goes to Kafka with the transaction of its insert, or with the position behind its record:
exactly once, through kills and failovers. Progress from before a request counts for nothing.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from schemas.errors import SettingsError
from schemas.events import snapshot_topic
from schemas.naming import table_matches
from schemas.shaping import TablePattern, field_name
from schemas.snapshot import (
    Condition,
    SignalPosition,
    SignalPositionKey,
    SnapshotRequest,
    SnapshotRequestKey,
)
from services.bridge.events.event import Event, Stamp
from services.bridge.snapshot.signal_conditions import forbidden_part
from services.bridge.transactions.assembler import EventBatch

EVERY_TABLE: Final = "*.*"
_TYPES: Final = {
    "execute-snapshot": "read",
    "stop-snapshot": "stop",
    "pause-snapshot": "pause",
    "resume-snapshot": "resume",
}
_PATTERN: Final[TypeAdapter[str]] = TypeAdapter(TablePattern)
_CONDITION: Final[TypeAdapter[str]] = TypeAdapter(Condition)


class Signal(NamedTuple):
    """A row that was inserted into the signal table."""

    id: str
    type: str
    data: str


class BadSignal(ValueError):
    """A signal that asks for nothing that is known; the text says why."""


def signals(events: Iterable[Event], table: str) -> Iterable[tuple[Signal, int]]:
    """Yield the signals among a transaction's events, each with its seq."""
    for event in events:
        if event.table == table and event.op == "c" and event.value is not None:
            document = json.loads(event.value, parse_int=str)  # of any number of digits
            document = document.get("payload", document)
            row = document if field_name("op") in document else document.get("after")
            if isinstance(row, dict):
                texts = (row.get(name) for name in Signal._fields)
                yield Signal(*(text if isinstance(text, str) else "" for text in texts)), event.seq


def topic_signal(key: bytes | None, value: bytes | None, prefix: str) -> Signal:
    """Read a record of the signal topic. Raise BadSignal for one that asks this bridge nothing."""
    named = (key or b"").decode("utf-8", "replace")
    if named != prefix:
        raise BadSignal(f"its key {named!r} is not {prefix!r}")
    try:
        document = json.loads(value or b"")
        data = document.get("data") or {}
        text = data if isinstance(data, str) else json.dumps(data)
        return Signal(str(document.get("id") or ""), str(document.get("type") or ""), text)
    except (AttributeError, ValueError, RecursionError) as error:
        raise BadSignal(f"its value is not a document ({type(error).__name__})") from error


def asked_by(
    batch: EventBatch, table: str, slot: str, timeline: int
) -> tuple[list[SnapshotRequest], list[tuple[str, str]]]:
    """Return the requests of a batch's signals, and (id, reason) of signals that ask nothing."""
    asked: list[SnapshotRequest] = []
    ignored: list[tuple[str, str]] = []
    if all(event.table != table for event in batch.events):
        return asked, ignored
    for events, stamp in batch.transactions():
        for signal, seq in signals(events, table):
            try:
                asked += requests(signal, slot, timeline, stamp, seq)
            except BadSignal as error:
                ignored.append((signal.id, str(error)))
    return asked, ignored


def check_signal(signal: Signal) -> None:
    """Raise SettingsError where the signal would ask nothing."""
    try:
        requests(signal, "", 0, Stamp(0, 0, 0, 0, 0), 0)
    except BadSignal as error:
        raise SettingsError(
            f"the signal is not understood: {error}",
            operation="send a signal",
            hint="name tables as schema.table; a condition compares columns, without functions "
            "(docs/guides/snapshots.md)",
        ) from error


def requests(
    signal: Signal,
    slot: str,
    timeline: int,
    stamp: Stamp,
    seq: int,
    topic: str = "",
    offset: int = -1,
) -> list[SnapshotRequest]:
    """Read a signal; return a request for each table that it names. Raise BadSignal.

    `topic`, `offset`: the record of the signal topic that it came by.
    """
    kind = _TYPES.get(signal.type)
    if kind is None:
        raise BadSignal(f"type {signal.type!r} is none of {', '.join(_TYPES)}")
    try:
        found = [
            SnapshotRequest.model_validate(
                {
                    "slot": slot,
                    "id": signal.id,
                    "type": kind,
                    "tables": name,
                    "where": where,
                    "timeline": timeline,
                    "commit_lsn": stamp.commit_lsn,
                    "seq": seq,
                    "ts_ms": stamp.encoded_us // 1000,
                    "topic": topic,
                    "offset": offset,
                }
            )
            for name, where in _conditions_by_table(signal, kind).items()
        ]
        for one in found:
            request_event("", one)  # which fails for what is not Unicode
    except BadSignal:
        raise
    except ValidationError as error:
        raise BadSignal(str(error.errors()[0]["msg"])) from error
    except Exception as error:  # whatever a stranger has written: the stream goes on
        raise BadSignal(f"data is not a document of Debezium's ({type(error).__name__})") from error
    return found


def _conditions_by_table(signal: Signal, kind: str) -> dict[str, str]:
    """Return the tables that a signal names, each with its condition or "". Raise BadSignal."""
    data = json.loads(signal.data or "{}")
    tables = data.get("data-collections") or []
    where = dict(_conditions(data))
    if data.get("type", "incremental").lower() != "incremental":
        raise BadSignal("data.type is not incremental")
    if not tables and kind == "read":
        raise BadSignal("data-collections names no table")
    tables = [_PATTERN.validate_python(name) for name in tables or [EVERY_TABLE]]
    if unknown := where.keys() - {*tables}:
        raise BadSignal(f"a condition is for {min(unknown)!r}, which data-collections lacks")
    for text in where.values():
        if refused := forbidden_part(_CONDITION.validate_python(text)):
            raise BadSignal(f"a condition may only compare columns: {refused} is not allowed")
    return {name: where.get(name, "") for name in tables}


def _conditions(data: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for each in data.get("additional-conditions") or []:
        yield each["data-collection"], each["filter"]


def request_event(prefix: str, request: SnapshotRequest) -> Event:
    """Make the record of a request, for the Kafka transaction with its signal."""
    key = key_of(request).model_dump_json().encode()
    return Event(snapshot_topic(prefix), key, request.model_dump_json().encode())


def key_of(request: SnapshotRequest) -> SnapshotRequestKey:
    """Return the key under which Kafka keeps the request."""
    kind = "read" if request.type in ("read", "stop") else "pause"
    return SnapshotRequestKey.model_validate(
        {"slot": request.slot, "request": kind, "tables": request.tables}
    )


def is_request(key: bytes | str | None) -> bool:
    """Tell whether a record of `<prefix>.snapshot` with this key is a request."""
    return b'"request":' in (key.encode() if isinstance(key, str) else key or b"")


def position_event(prefix: str, position: SignalPosition) -> Event:
    """Make the record of how far the signal topic is taken, with what its records ask."""
    key = SignalPositionKey(slot=position.slot, signals=position.topic).model_dump_json().encode()
    return Event(snapshot_topic(prefix), key, position.model_dump_json().encode())


def is_position(key: bytes | str | None) -> bool:
    """Tell whether a record of `<prefix>.snapshot` with this key is a SignalPosition."""
    return b'"signals":' in (key.encode() if isinstance(key, str) else key or b"")


def is_progress(key: bytes | str | None) -> bool:
    """Tell whether a record of `<prefix>.snapshot` with this key is a SnapshotProgress."""
    return b'"table":' in (key.encode() if isinstance(key, str) else key or b"")


class Asked(NamedTuple):
    """The state of requests for one table: the last to read or stop it, and the pause."""

    read: SnapshotRequest | None
    paused: bool


def asked_of(schema: str, table: str, known: Iterable[SnapshotRequest]) -> Asked:
    """Return the state of a table by the last requests that name it."""
    own = sorted(
        (one for one in known if table_matches(one.tables, schema, table)),
        key=lambda one: (one.commit_lsn, one.offset, one.seq),
    )
    reads = [one for one in own if one.type in ("read", "stop")]
    pauses = [one for one in own if one.type in ("pause", "resume")]
    return Asked(reads[-1] if reads else None, bool(pauses) and pauses[-1].type == "pause")
