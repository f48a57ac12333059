"""Count the rows that go into a Kafka transaction, by table and operation, once per batch. Pure."""

from collections.abc import Callable, Sequence

from services.bridge import compiled
from services.bridge.events.event import Event

Counts = dict[tuple[str, str], list[int]]
"""(table, operation) -> [rows, bytes of their keys and values]."""


def plain_count(events: Sequence[Event], counts: Counts) -> None:
    """Add the events that are rows to `counts`."""
    for event in events:
        if event.op:
            count = counts.setdefault((event.table, event.op), [0, 0])
            count[0] += 1
            count[1] += len(event.value or b"") + len(event.key or b"")


count: Callable[[Sequence[Event], Counts], None] = (
    plain_count if compiled.engine is None else compiled.engine.tally.count
)
