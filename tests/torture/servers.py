"""The servers of runs outside of pytest: brokers behind proxies; a pair is made for each run."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from services.testbed.bed import Bed
from services.testbed.kafka import KafkaBroker
from services.testbed.kafka_cluster import BROKERS, KafkaCluster
from tests.providers.proxy import Proxy
from tests.providers.secured import SASL_PASSWORD, Certificates, scram_options, scram_settings
from tests.torture.brokers import Brokers

_START_S: Final = 300.0
_FAKETIME: Final = "/usr/lib/*-linux-gnu/faketime/libfaketimeMT.so.1"
"""Debian's package libfaketime."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kafka:
    """What Kafka is in a run: 1 broker or 3; `secured`: the bridge comes by SASL_SSL with SCRAM;
    `skew_h`: the clocks of three brokers are right, so many hours fast, and as many slow.
    """

    brokers: int = 1
    secured: bool = False
    skew_h: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for what can't be had."""
        if self.brokers not in (1, BROKERS):
            raise ValueError(f"{self.brokers} brokers; there are 1 or {BROKERS}")
        if self.skew_h and self.brokers == 1:
            raise ValueError(f"clocks of one broker can't differ; ask for {BROKERS}")


@contextlib.contextmanager
def servers(
    folder: Path, postgres: str = "", kafka: Kafka | None = None
) -> Iterator[tuple[Bed, Brokers]]:
    """A bed, and brokers whose clients come through proxies. `postgres`: see Bed."""
    kafka = kafka or Kafka()
    proxies = [Proxy() for _ in range(kafka.brokers)]
    with contextlib.ExitStack() as stack:
        for proxy in proxies:
            stack.callback(proxy.close)
        bed = stack.enter_context(Bed(folder, lazy=True, postgres=postgres))
        secured, options = _secured(bed.folder) if kafka.secured else ({}, {})
        ports = [proxy.port for proxy in proxies]
        made: KafkaBroker | KafkaCluster
        if kafka.brokers == 1:
            made = bed.kafka = KafkaBroker(
                bed.folder / "kafka", processes=bed.processes, proxy_port=ports[0], **secured
            )
            proxies[0].target_port = made.proxied_port
        else:
            made = KafkaCluster(
                bed.folder / "cluster",
                processes=bed.processes,
                proxy_ports=ports,
                environments=_clocks(kafka.skew_h) if kafka.skew_h else (),
                **secured,
            )
            stack.callback(made.kill)
            for proxy, broker in zip(proxies, made.brokers, strict=True):
                proxy.target_port = broker.proxied_port
        made.start(timeout_s=_START_S)
        yield bed, Brokers(made, proxies, options)


def _secured(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What a broker takes for it, and the options of its clients."""
    certificates = Certificates(folder / "certificates")
    certificates.make()
    return {
        "settings": scram_settings(certificates, "proxied"),
        "users": {"bridge": SASL_PASSWORD},
        "proxy_protocol": "SASL_SSL",
    }, scram_options(certificates)


def _clocks(skew_h: float) -> list[Mapping[str, str]]:
    """Environments of three brokers. Raises FileNotFoundError without libfaketime."""
    found = sorted(Path("/").glob(_FAKETIME.removeprefix("/")))
    if not found:
        raise FileNotFoundError(f"no {_FAKETIME}; Debian: apt-get install libfaketime")
    fake = {"LD_PRELOAD": str(found[0]), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return [{}, *({**fake, "FAKETIME": f"{sign}{skew_h}h"} for sign in "+-")]
