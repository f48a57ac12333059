"""The servers of runs outside of pytest: a broker behind a proxy; a pair is made for each run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from services.local.bed import Bed
from services.local.kafka import KafkaBroker
from tests.providers.proxy import Proxy


@contextlib.contextmanager
def servers(folder: Path, postgres: str = "") -> Iterator[tuple[Bed, Proxy]]:
    """A bed, and the proxy through which its broker's clients come. `postgres`: see Bed."""
    proxy = Proxy()
    with contextlib.closing(proxy), Bed(folder, lazy=True, postgres=postgres) as bed:
        bed.kafka = KafkaBroker(
            bed.folder / "kafka", processes=bed.processes, proxy_port=proxy.port
        )
        proxy.target_port = bed.kafka.proxied_port
        bed.start("kafka")
        yield bed, proxy
