"""The entry points of the three commands.

What the imports make stays: to look through it for garbage, again and again while it grows, would
be a fourth of the time that a command takes to start.
"""

import contextlib
import gc
from collections.abc import Iterator


def slotbridge() -> None:
    """The bridge (services/bridge)."""
    with _importing():
        from services.bridge.command import app
    app()


def slotfailover() -> None:
    """The failover manager (services/failover)."""
    with _importing():
        from services.failover.command import app
    app()


def slottables() -> None:
    """The Spark consumers (spark_consumers)."""
    with _importing():
        from spark_consumers.command import app
    app()


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """What is made inside is never looked through."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
