"""The broker: transactions, and what survives its end."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from services.testbed.java import packaged_java_home
from services.testbed.kafka import KafkaBroker
from services.testbed.processes import Processes
from services.testbed.users import server_user
from tests.providers.interface import Broker
from tests.providers.waiting import patient


@pytest.fixture
def own_broker(servers: None, tmp_path: Path) -> Iterator[KafkaBroker]:
    """A broker on the packaged Java, to be killed."""
    with Processes(tmp_path, server_user()) as processes:
        yield KafkaBroker(tmp_path / "kafka", processes=processes, java_home=packaged_java_home())


@pytest.mark.long
def test_a_transaction_on_the_sessions_broker(kafka: Broker, topic_prefix: str) -> None:
    _create(kafka, topic_prefix)
    _publish(kafka, topic_prefix, [b"a", b"b"])
    assert _read(kafka, topic_prefix, 2) == [b"a", b"b"]


@pytest.mark.long
def test_committed_records_survive_sigkill_and_the_port_stays(own_broker: KafkaBroker) -> None:
    own_broker.start()
    servers = own_broker.bootstrap_servers
    _create(own_broker, "t")
    _publish(own_broker, "t", [b"a"])
    own_broker.kill()
    assert not own_broker.running
    own_broker.start()
    assert own_broker.bootstrap_servers == servers
    _publish(own_broker, "t", [b"b"])
    assert _read(own_broker, "t", 2) == [b"a", b"b"]
    own_broker.stop()
    own_broker.stop()
    assert not own_broker.running


def _create(broker: Broker, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1)])[topic].result(patient(30))


def _publish(broker: Broker, topic: str, values: list[bytes]) -> None:
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": f"{topic}-writer"}
    )
    producer.init_transactions(patient(60))
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    producer.commit_transaction(patient(60))


def _read(broker: Broker, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": f"{topic}-reader",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    with contextlib.closing(consumer):
        consumer.subscribe([topic])
        return [message.value() for message in consumer.consume(count, timeout=patient(60))]
