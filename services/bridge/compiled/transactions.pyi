"""Rows of an open transaction, and whole small transactions; transactions.pyx has them."""

from services.bridge.compiled import Messages
from services.bridge.events.event import Ended, Event
from services.bridge.events.rows import Writer
from services.bridge.events.transaction_texts import Counter

def take_rows(
    messages: Messages,
    index: int,
    end: int,
    at: int,
    writers: dict[bytes, Writer],
    events: list[Event],
    touched: list[Counter],
    lsn: int,
    seq: int,
    total: int,
    room_bytes: int,
    overhead_bytes: int,
    head: str,
    order: str,
    tail: str,
) -> tuple[int, int, int, int]:
    """Append the events of messages[index:end] to `events`, up to the first needing another way.

    Their values begin at `at`. Ends when they exceed `room_bytes`, with `overhead_bytes` for each.
    `lsn`: that of all events; 0: each has its message's.
    Returns the index of the first that was not taken, the next `seq`, the new `total` and the
    bytes. Counts in the writers' counters; appends to `touched` those that were 0.
    """

class Transactions:
    """One connection's. The texts are Envelope's, around what each transaction has of its own."""

    def __init__(
        self,
        event: type,
        stamp: type,
        ended: type,
        topic: str,
        source: str,
        source_db: str,
        source_timeline: str,
        overhead_bytes: int,
    ) -> None: ...
    def take(
        self,
        messages: Messages,
        index: int,
        at: int,
        writers: dict[bytes, Writer],
        previous_lsn: int,
        floor_lsn: int,
        now_us: int,
        room_bytes: int,
        bytes_max: int,
    ) -> tuple[int, list[Event], list[Ended], int]:
        """As Envelope.transactions. All counters are 0 before and after."""
