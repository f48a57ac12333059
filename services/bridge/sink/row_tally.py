"""Count the rows that go into a Kafka transaction, by table and operation, once per batch. Pure.

event                          counts as
{"op":"c", …}, {"__op":"c", …} its table, its operation; also in an envelope or behind an id
Avro, Protobuf                 the same
header __op                    its table, the header
header commit_lsn (an outbox)  its table, c; whatever its value looks like
any other value                its table, c
other tombstone, schema event, nothing
BEGIN, END, logical message
"""

from collections.abc import Callable, Sequence
from typing import Final

from schemas.shaping import field_name
from schemas.wire import HEAD_BYTES, MAGIC
from services.bridge import compiled
from services.bridge.events.event import Event
from services.bridge.events.shaping.outbox import PLACE_HEADER, Headers

Counts = dict[tuple[str, str], list[int]]
"""(table, operation) -> [rows, bytes of their keys and values]."""
_AVRO_OP: Final = 6
"""Where `op`, the first field, is in Avro: behind a zero byte, the schema's id, its length 1. In a
flat row it may be null: which branch it is, 1, precedes its length."""
_OP_HEADER: Final = field_name("op")
_OPERATIONS: Final = frozenset("crudt")
_PROTOBUF: Final = b"\0\x0a\1"
"""The path to the message in its file; the number and type of its first field, `op`; its length."""
_OPENINGS: Final = (
    *(b'{"op":"', b'{"payload":{"op":"', b'{"__op":"', b'{"payload":{"__op":"'),
    _PROTOBUF,
)


def plain_count(events: Sequence[Event], schema_topic: str, counts: Counts) -> None:
    """Add the events to `counts`; leave out those of `schema_topic`, which describe tables."""
    for event in events:
        table, value = event.table, event.value or b""
        if not table:
            continue
        at = HEAD_BYTES if value[:1] == MAGIC else 0
        opening = next((one for one in _OPENINGS if value.startswith(one, at)), None)
        told = _in_headers(event.headers)
        if told:
            operation = told
        elif event.value is None:
            continue
        elif opening is not None:
            found_op = value[at + len(opening) :][:1].decode("latin-1")
            operation = found_op if found_op in _OPERATIONS else "c"
        elif at and value[_AVRO_OP - 1 : _AVRO_OP] == b"\2":
            flat = value[_AVRO_OP : _AVRO_OP + 1] == b"\2"
            found_op = value[_AVRO_OP + flat : _AVRO_OP + flat + 1].decode("latin-1")
            operation = found_op if found_op in _OPERATIONS else "c"
        elif event.topic == schema_topic:
            continue
        else:
            operation = "c"
        found = counts.setdefault((table, operation), [0, 0])
        found[0] += 1
        found[1] += len(value) + len(event.key or b"")


def _in_headers(headers: Headers | None) -> str:
    """Return the operation that headers tell; those of an outbox message tell only what it is."""
    for name, value in headers or ():
        if name == _OP_HEADER:
            return str(value)
        if name == PLACE_HEADER:
            return "c"
    return ""


count: Callable[[Sequence[Event], str, Counts], None] = (
    plain_count if compiled.engine is None else compiled.engine.tally.count
)
