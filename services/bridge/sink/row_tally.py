"""Count the rows that go into a Kafka transaction, by table and operation, once per batch. Pure.

event                          counts as
{"op":"c", …}                  its table, its operation
value of an outbox message     its table, c
tombstone, schema event,       nothing
BEGIN, END, logical message
"""

from collections.abc import Callable, Sequence
from typing import Final

from services.bridge import compiled
from services.bridge.events.event import Event

Counts = dict[tuple[str, str], list[int]]
"""(table, operation) -> [rows, bytes of their keys and values]."""
_AVRO_OP: Final = 6
"""Where `op`, the first field, is in Avro: behind a zero byte, the schema's id, its length 1."""
_OPERATIONS: Final = frozenset("crudt")
_OPENINGS: Final = (b'{"op":"', b'{"payload":{"op":"')


def plain_count(events: Sequence[Event], schema_topic: str, counts: Counts) -> None:
    """Add the events to `counts`; leave out those of `schema_topic`, which describe tables."""
    for event in events:
        table, value = event.table, event.value
        if value is None or not table:
            continue
        opening = next((one for one in _OPENINGS if value.startswith(one)), None)
        if opening is not None:
            operation = chr(value[len(opening)])
        elif value[:1] == b"\0" and value[_AVRO_OP - 1 : _AVRO_OP] == b"\2":
            found_op = value[_AVRO_OP : _AVRO_OP + 1].decode("latin-1")
            operation = found_op if found_op in _OPERATIONS else "c"
        elif event.topic == schema_topic:
            continue
        else:
            operation = "c"
        found = counts.setdefault((table, operation), [0, 0])
        found[0] += 1
        found[1] += len(value) + len(event.key or b"")


count: Callable[[Sequence[Event], str, Counts], None] = (
    plain_count if compiled.hot is None else compiled.hot.tally.count
)
