"""Signs of work between Spark's jobs: a step that this process has done, if only in a catalog.

Commits of many tables, their maintenance or a start may be long work of Java's alone, which neither
Spark's tasks nor this process' time show. Who does it calls `tick` after each table and each step.
Work beside the epochs (audits) does not, so that it hides no query that hangs.
"""

import contextlib
from collections.abc import Callable, Iterator

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
