"""The servers of runs outside of pytest: brokers behind proxies; a pair is made for each run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from services.local.bed import Bed
from services.local.kafka import KafkaBroker
from services.local.kafka_cluster import BROKERS, KafkaCluster
from tests.providers.proxy import Proxy
from tests.torture.brokers import Brokers

_START_S: Final = 300.0


@contextlib.contextmanager
def servers(folder: Path, postgres: str = "", brokers: int = 1) -> Iterator[tuple[Bed, Brokers]]:
    """A bed, and one broker or three whose clients come through proxies. `postgres`: see Bed.

    Raises ValueError for another number of brokers.
    """
    if brokers not in (1, BROKERS):
        raise ValueError(f"{brokers} brokers; there are 1 or {BROKERS}")
    proxies = [Proxy() for _ in range(brokers)]
    ports = [proxy.port for proxy in proxies]
    with contextlib.ExitStack() as stack:
        for proxy in proxies:
            stack.callback(proxy.close)
        bed = stack.enter_context(Bed(folder, lazy=True, postgres=postgres))
        kafka: KafkaBroker | KafkaCluster
        if brokers == 1:
            kafka = bed.kafka = KafkaBroker(
                bed.folder / "kafka", processes=bed.processes, proxy_port=ports[0]
            )
        else:
            kafka = KafkaCluster(bed.folder / "cluster", processes=bed.processes, proxy_ports=ports)
            stack.callback(kafka.kill)
        each = [kafka] if isinstance(kafka, KafkaBroker) else kafka.brokers
        for proxy, broker in zip(proxies, each, strict=True):
            proxy.target_port = broker.proxied_port
        kafka.start(timeout_s=_START_S)
        yield bed, Brokers(kafka, proxies)
