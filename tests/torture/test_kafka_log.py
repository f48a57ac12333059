"""A broker's own log says which Kafka transaction each record is in."""

from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from services.testbed.bed import Bed
from tests.promises.bridge.reading import read_committed
from tests.torture.kafka_log import batches_of, read_partitions


def test_two_producers_in_turns_in_one_partition(local_bed: Bed) -> None:
    """The marker of one lies between two records of the other's transaction."""
    local_bed.start("kafka")
    broker = local_bed.kafka
    topic = "kafka-log"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic(topic, num_partitions=1)])[topic].result(30)
    producers = []
    for name in ("one", "two"):
        producer = Producer(
            {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": f"{topic}-{name}"}
        )
        producer.init_transactions(30)
        producers.append(producer)
    one, two = producers

    def send(producer: Producer, value: str) -> None:
        producer.produce(topic, value, partition=0)
        producer.flush(30)

    one.begin_transaction()
    send(one, "one")
    two.begin_transaction()
    send(two, "two, first")
    one.commit_transaction(30)
    send(two, "two, second")
    two.commit_transaction(30)
    one.begin_transaction()
    send(one, "one, its next")
    one.commit_transaction(30)

    records = read_committed(broker.bootstrap_servers, [topic])
    log = read_partitions(broker.folder / "data", {topic})[topic, 0]
    found = {record.value: log.transaction_at(record.offset) for record in records}
    assert len(found) == 4
    assert found[b"two, first"] == found[b"two, second"]
    assert found[b"one"].producer_id == found[b"one, its next"].producer_id
    assert len(set(found.values())) == 3
    with pytest.raises(LookupError):
        log.transaction_at(-1)


def test_a_file_that_is_not_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format"):
        list(batches_of(b"\x01" * 200))
