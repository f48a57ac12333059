"""The oracle sees what it is there for: planted losses, repetitions and lies."""

import json

import pytest
from confluent_kafka import Producer

from schemas.events import schema_topic
from tests.promises.bridge.oracle import assert_rebuilt
from tests.promises.bridge.reading import Record, read_committed
from tests.promises.bridge.scenarios.conftest import Scene
from tests.providers.waiting import patient


def test_the_oracle_finds_planted_faults(scene: Scene) -> None:
    scene.run("CREATE TABLE t (id int PRIMARY KEY, note text)")
    scene.start()
    scene.run("INSERT INTO t VALUES (1, 'x'), (2, 'x')", "UPDATE t SET note = 'y' WHERE id = 2")
    scene.finish()
    scene.run("INSERT INTO t VALUES (3, 'lost')")
    with pytest.raises(AssertionError, match="not in Kafka"):
        assert_rebuilt(scene.bridge)
    scene.run("DELETE FROM t WHERE id > 1")
    with pytest.raises(AssertionError, match="is not in the database"):
        assert_rebuilt(scene.bridge)
    topic = f"{scene.bridge.prefix}.public.t"
    records = read_committed(scene.bridge.kafka.bootstrap_servers, [topic])
    last = max(records, key=lambda record: _position(record))
    produce(scene, last)
    with pytest.raises(AssertionError, match="comes twice"):
        assert_rebuilt(scene.bridge)


@pytest.mark.long
def test_the_oracle_finds_a_repeated_schema_event(scene: Scene) -> None:
    scene.run("CREATE TABLE t (id int PRIMARY KEY)")
    scene.start()
    scene.run("INSERT INTO t VALUES (1)")
    scene.finish()
    topic = schema_topic(scene.bridge.prefix)
    (record,) = read_committed(scene.bridge.kafka.bootstrap_servers, [topic])
    assert record.value is not None
    shape = json.loads(record.value)
    shape |= {"before": shape["after"], "seq": shape["seq"] + 1}
    produce(scene, record._replace(value=json.dumps(shape).encode()))
    with pytest.raises(AssertionError, match="the same shape is announced twice"):
        assert_rebuilt(scene.bridge)


def produce(scene: Scene, record: Record) -> None:
    producer = Producer({"bootstrap.servers": scene.bridge.kafka.bootstrap_servers})
    producer.produce(record.topic, record.value, record.key, record.partition)
    assert producer.flush(patient(30)) == 0


def _position(record: Record) -> tuple[int, int]:
    source = json.loads(record.value or b"{}")["source"]
    return source["commit_lsn"], source["seq"]
