"""The entry points of the three commands.

The garbage collector is off during the imports: what they make stays, and looking through it
again and again would take a fourth of a command's start.
"""

import contextlib
import gc
from collections.abc import Iterator


def slotbridge() -> None:
    """Run the command `slotbridge` (services/bridge, and services/adoption above it)."""
    with _importing():
        from services.adoption.command import app
    app()


def slotfailover() -> None:
    """Run the command `slotfailover` (services/failover)."""
    with _importing():
        from services.failover.cli.app import app
    app()


def slottables() -> None:
    """Run the command `slottables` (spark_consumers)."""
    with _importing():
        from spark_consumers.command import app
    app()


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Keep the objects made inside out of every garbage collection."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
