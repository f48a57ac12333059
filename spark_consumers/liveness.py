"""Signs of work between Spark's jobs: a step that this process has done, if only in a catalog.

Commits of many tables, their maintenance or a start may be long work of Java's alone, which neither
Spark's tasks nor this process' time show. Who does it calls `tick` after each table and each step.
Work beside the epochs (audits) does not, so that it hides no query that hangs.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class UnderWay:
    """How far the epoch is that this process works on; all zero between epochs.

    `events`, `tables`: how many it brings and writes. `events_read`: how many records Spark's
    running tasks have read of them.
    """

    events: int = 0
    events_read: int = 0
    tables: int = 0
    tables_written: int = 0

    def begin(self, events: int) -> None:
        """Note that an epoch of `events` events begins; 0: that none is under way."""
        self.events, self.events_read, self.tables, self.tables_written = events, 0, 0, 0

    def read(self, records: int) -> None:
        """Note how many records were read: it is at least so many as before."""
        self.events_read = max(self.events_read, min(records, self.events))


under_way = UnderWay()
_listeners: list[Callable[[], None]] = []


def tick() -> None:
    """Tell all listeners that a step of the tables' work is done; any thread may call this."""
    for listener in tuple(_listeners):
        listener()


@contextlib.contextmanager
def heard_by(listener: Callable[[], None]) -> Iterator[None]:
    """Let `listener` be called at each step until the block ends."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
