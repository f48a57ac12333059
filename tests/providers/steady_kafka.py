"""A Kafka to be stopped (SIGSTOP) in the middle of its work."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.testbed.kafka import KafkaBroker
from services.testbed.processes import Processes
from services.testbed.users import server_user


@contextmanager
def steady_kafka(folder: Path) -> Iterator[KafkaBroker]:
    """A broker of its own that leads its partitions again at once after a pause.

    Its session lasts longer than it stands still: else it would lead nothing for a moment after,
    and what it had decided just before might lack its markers (tests/promises/bridge/faults).
    """
    settings: dict[str, str | int] = {"broker.session.timeout.ms": 60_000}
    with Processes(folder, server_user()) as processes:
        broker = KafkaBroker(folder / "kafka", processes=processes, settings=settings)
        broker.start()
        yield broker
