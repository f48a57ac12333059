"""Rows and bytes of events by table and operation; tally.pyx has it."""

from services.bridge.events.event import Event

DIGEST: str

def count(events: list[Event], counts: dict[tuple[str, str], list[int]]) -> None:
    """Add to `counts`, as services.bridge.sink.row_tally.plain_count has it."""
