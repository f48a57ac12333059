"""Proxies, a database with a load; a broker behind a proxy, and a cluster, to be destroyed."""

from collections.abc import Iterator

import psycopg
import pytest

from services.testbed.kafka import KafkaBroker
from services.testbed.processes import Processes
from services.testbed.users import server_user
from tests.promises.bridge.faults.load import TABLE, Load
from tests.providers.interface import Provider
from tests.providers.kafka_cluster import KafkaCluster
from tests.providers.proxy import Proxy


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    """A database with the table of the load."""
    found = pair.primary.conninfo(fresh_database)
    with psycopg.connect(found, autocommit=True) as connection:
        connection.execute(TABLE)
    return found


@pytest.fixture
def load(conninfo: str) -> Iterator[Load]:
    """The load on it, straight to the server."""
    with Load(conninfo) as running:
        yield running


@pytest.fixture
def to_server(pair: Provider) -> Iterator[Proxy]:
    """A proxy before the primary."""
    proxy = Proxy(pair.primary.port)
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def _own_kafka(
    servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[KafkaBroker, Proxy]]:
    folder = tmp_path_factory.mktemp("kafka")
    proxy = Proxy()
    with Processes(folder, server_user()) as processes:
        broker = KafkaBroker(folder / "kafka", processes=processes, proxy_port=proxy.port)
        proxy.target_port = broker.proxied_port
        broker.start()
        yield broker, proxy
    proxy.close()


@pytest.fixture
def own_kafka(_own_kafka: tuple[KafkaBroker, Proxy]) -> KafkaBroker:
    """A broker to be stopped and killed."""
    broker, _proxy = _own_kafka
    if not broker.running:
        broker.start()
    return broker


@pytest.fixture
def to_kafka(_own_kafka: tuple[KafkaBroker, Proxy], own_kafka: KafkaBroker) -> Iterator[Proxy]:
    """A proxy before it: who comes through it is sent back through it."""
    proxy = _own_kafka[1]
    yield proxy
    proxy.heal()


@pytest.fixture(scope="session")
def _kafka_cluster(
    servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with (
        Processes(folder, server_user()) as processes,
        KafkaCluster(folder / "kafka", processes=processes) as cluster,
    ):
        yield cluster


@pytest.fixture
def kafka_cluster(_kafka_cluster: KafkaCluster) -> KafkaCluster:
    """Three brokers to be stopped, killed and wiped; all run."""
    _kafka_cluster.start()
    return _kafka_cluster
