"""Partitions that are added to a topic while the bridge runs."""

import json
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from schemas.settings import BridgeSettings
from services.bridge.events.event import Event
from services.bridge.sink import transactional_producer as module
from services.bridge.sink.offsets import count_partitions
from services.bridge.sink.transactional_producer import TransactionalProducer
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.test_topics import prepared
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient

OPTIONS = {"topic.metadata.refresh.interval.ms": 200}


@pytest.mark.long
def test_a_truncate_reaches_them(
    pair: Provider, fresh_database: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo, options=OPTIONS).start().streaming()
        topic = f"{bridge.prefix}.public.t"
        connection.execute("INSERT INTO t SELECT generate_series(1, 20)")
        bridge.caught_up()
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_partitions([NewPartitions(topic, 6)])[topic].result(patient(60))
        number = 20

        def all_written() -> bool:
            nonlocal number
            connection.execute(
                "INSERT INTO t SELECT generate_series(%s, %s::int)", [number + 1, number + 20]
            )
            number += 20
            bridge.caught_up()
            found = read_committed(kafka.bootstrap_servers, [topic])
            return {record.partition for record in found} == set(range(6))

        eventually(all_written, what="rows are in all partitions")
        connection.execute("TRUNCATE t")
        bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    found = read_committed(kafka.bootstrap_servers, [topic])
    truncates = [r.partition for r in found if r.value and json.loads(r.value)["op"] == "t"]
    assert sorted(truncates) == list(range(6))


@pytest.mark.long
def test_truncates_one_after_another_ask_once_and_breathe(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question blocks: a server that hears nothing meanwhile would end the connection."""
    did: list[str] = []

    def count(*arguments: Any) -> int:
        did.append("ask")
        return count_partitions(*arguments)

    monkeypatch.setattr(module, "count_partitions", count)
    settings, topics = prepared(kafka, topic_prefix)
    producer = TransactionalProducer(settings, BridgeSettings(), topics, "mine")
    topics.waiter.work = lambda: did.append("breathe")
    producer.begin_session()
    names = [f"{topic_prefix}.{name}" for name in "ab"]
    truncates = [Event(name, None, b"{}", broadcast=True) for name in names for _ in range(20)]
    producer.send(truncates)
    assert did == ["breathe", "ask"] * len(names)
    did.clear()
    producer.send([Event(names[0], b"key", b"{}"), *truncates[:2]])
    assert did == ["breathe", "ask"], "a row may be in a partition that was added since"
    producer.abandon()
