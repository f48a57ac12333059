"""One row by its compiled writer, as the stream and a snapshot have it encoded: by take_rows."""

from typing import Final

from services.bridge import compiled
from services.bridge.events.event import Event
from services.bridge.events.row_encoders import Write
from services.bridge.events.rows import Writer
from services.bridge.events.transaction_texts import Counter

_VALUES_AT: Final = 8
"""Kind, relation, N and the number of columns stand before them."""


def encoded(write: Write, message: bytes) -> Event | None:
    """Return the event of an Insert message, None where the writer leaves it to others."""
    assert compiled.engine is not None
    messages = compiled.engine.messages.Messages()
    messages.append((9, message))
    events: list[Event] = []
    writers = {message[:_VALUES_AT]: Writer(write, Counter("s.t", '"s.t"'), 1)}
    texts = "head", "order", "tail", ""
    compiled.engine.transactions.take_rows(
        messages, 0, 1, _VALUES_AT, writers, events, [], 9, 2, 0, 2**40, 0, *texts
    )
    return events[0] if events else None
