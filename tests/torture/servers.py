"""The servers of runs outside of pytest: brokers behind proxies; a pair is made for each run."""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from services.testbed.bed import Bed
from services.testbed.jars import TLS_POSTGRES
from services.testbed.kafka import KafkaBroker
from services.testbed.pair import Pair
from services.testbed.postgres import PostgresServer
from tests.providers.kafka_cluster import BROKERS, KafkaCluster
from tests.providers.proxy import Proxy
from tests.providers.secured import SASL_PASSWORD, Certificates, scram_options, scram_settings
from tests.torture.brokers import Brokers

_START_S: Final = 300.0
_FAKETIME: Final = "/usr/lib/*-linux-gnu/faketime/libfaketimeMT.so.1"
"""Debian's package libfaketime."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kafka:
    """What Kafka is in a run: 1 broker or 3; `secured`: the bridge comes by SASL_SSL with SCRAM,
    and to PostgreSQL by TLS; `skew_h`: the clocks of three brokers are right, so many hours fast,
    and as many slow.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Tls:
    """PostgreSQL's: settings of the servers, and what the bridge's conninfo has for it."""

    settings: Mapping[str, str]
    conninfo: Mapping[str, str]


class Servers(NamedTuple):
    """A bed, and brokers whose clients come through proxies. `tls`: None where there is none."""

    bed: Bed
    brokers: Brokers
    tls: Tls | None

    def new_pair(self) -> contextlib.AbstractContextManager[tuple[Pair, PostgresServer]]:
        """As that of the bed, with TLS where it is asked for."""
        return self.bed.new_pair(settings=self.tls.settings if self.tls is not None else None)


@contextlib.contextmanager
def servers(folder: Path, postgres: str = "", kafka: Kafka | None = None) -> Iterator[Servers]:
    """Start them. `postgres`: see Bed."""
    kafka = kafka or Kafka()
    postgres = postgres or (TLS_POSTGRES if kafka.secured else "")
    proxies = [Proxy() for _ in range(kafka.brokers)]
    with contextlib.ExitStack() as stack:
        for proxy in proxies:
            stack.callback(proxy.close)
        bed = stack.enter_context(Bed(folder, lazy=True, postgres=postgres))
        secured, options, tls = _secured(bed) if kafka.secured else ({}, {}, None)
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
        yield Servers(bed, Brokers(made, proxies, options), tls)


def _secured(bed: Bed) -> tuple[dict[str, Any], dict[str, str], Tls]:
    """What a broker takes for it, the options of its clients, and PostgreSQL's TLS."""
    certificates = Certificates(bed.folder / "certificates")
    certificates.make()
    key = Path(shutil.copy(certificates.path("server.key"), certificates.path("postgres.key")))
    key.chmod(0o600)
    bed.run_as.own(key)
    tls = Tls(
        {
            "ssl": "on",
            "ssl_cert_file": str(certificates.path("server.pem")),
            "ssl_key_file": str(key),
        },
        {"sslmode": "verify-full", "sslrootcert": str(certificates.path("authority.pem"))},
    )
    return (
        {
            "settings": scram_settings(certificates, "proxied"),
            "users": {"bridge": SASL_PASSWORD},
            "proxy_protocol": "SASL_SSL",
        },
        scram_options(certificates),
        tls,
    )


def _clocks(skew_h: float) -> list[Mapping[str, str]]:
    """Environments of three brokers. Raises FileNotFoundError without libfaketime."""
    found = sorted(Path("/").glob(_FAKETIME.removeprefix("/")))
    if not found:
        raise FileNotFoundError(f"no {_FAKETIME}; Debian: apt-get install libfaketime")
    fake = {"LD_PRELOAD": str(found[0]), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return [{}, *({**fake, "FAKETIME": f"{sign}{skew_h}h"} for sign in "+-")]
