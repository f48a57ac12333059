"""The cluster of three brokers: what it takes, what it refuses, and that it comes again."""

from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from services.testbed.processes import Processes
from services.testbed.users import server_user
from tests.providers.kafka_cluster import KafkaCluster
from tests.providers.waiting import patient


@pytest.fixture(scope="module")
def cluster(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with (
        Processes(folder, server_user()) as processes,
        KafkaCluster(folder / "kafka", processes=processes) as started,
    ):
        yield started


def produced(cluster: KafkaCluster, topic: str, *, timeout_s: float = patient(40)) -> int:
    """How many of three records were acknowledged by all replicas in sync."""
    acknowledged: list[bool] = []
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "acks": "all",
            "message.timeout.ms": int(timeout_s * 1000),
        }
    )
    for _ in range(3):
        producer.produce(topic, b"x", on_delivery=lambda error, _: acknowledged.append(not error))
    producer.flush(timeout_s + 5)
    return sum(acknowledged)


@pytest.mark.long
def test_one_broker_may_be_lost_with_its_disk_and_two_may_not(cluster: KafkaCluster) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_topics([NewTopic("t", num_partitions=3)])["t"].result(patient(30))
    cluster.await_in_sync()
    partitions = admin.list_topics("t", timeout=patient(60)).topics["t"].partitions
    assert {len(one.replicas) for one in partitions.values()} == {3}
    assert produced(cluster, "t") == 3
    lost = cluster.leader("t")
    assert lost is not None
    cluster.lose_disk(lost)
    assert produced(cluster, "t") == 3
    lost.start()
    cluster.await_in_sync()
    two = cluster.brokers[:2]
    for broker in two:
        broker.kill()
    assert produced(cluster, "t", timeout_s=3) == 0
    cluster.start()
    assert produced(cluster, "t") == 3
