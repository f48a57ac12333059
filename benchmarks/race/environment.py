"""Where it is raced: one PostgreSQL server and one broker that a long run has warmed up."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from services.testbed.bed import Bed
from services.testbed.kafka import KafkaBroker
from services.testbed.postgres import PostgresServer

_SETTINGS: Final[dict[str, str | int]] = {
    "shared_buffers": "512MB",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
    "max_locks_per_transaction": 512,  # a publication of thousands of tables locks them at once
}


class Environment(NamedTuple):
    """Both are running."""

    bed: Bed
    server: PostgresServer


@contextlib.contextmanager
def environment(**settings: str | int) -> Iterator[Environment]:
    """Servers of its own in a temporary folder; Java's compiler works as in a long run.

    `settings` are added to PostgreSQL's.
    """
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        Path(name).chmod(0o755)
        with Bed(Path(name), lazy=True, synchronous=False) as bed:
            kafka = bed.folder / "kafka"
            bed.kafka = KafkaBroker(kafka, processes=bed.processes, short_lived=False)
            bed.start("kafka")
            server = bed.server("source")
            server.create(_SETTINGS | settings)
            server.start()
            yield Environment(bed, server)


def say(line: str) -> None:
    """What is being done, on standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
