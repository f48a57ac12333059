"""Servers of its own for a command that drills the tables."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.testbed.java import find_java_home
from tests.providers.embedded import embedded
from tests.providers.interface import Broker, Trio


@contextmanager
def own_servers(name: str, *, synchronous: bool) -> Iterator[tuple[Trio, Broker, Path]]:
    """Servers of PostgreSQL and a Kafka, and a folder that stays; `name`: of the folder."""
    os.environ["JAVA_HOME"] = str(find_java_home())
    folder = Path(tempfile.mkdtemp(prefix=f"slotbridge-{name}-"))
    folder.chmod(0o755)
    with embedded(folder) as servers:
        servers.start("kafka")
        with servers.new_trio(synchronous=synchronous, settings={}) as trio:
            yield trio, servers.kafka, folder
