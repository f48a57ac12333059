"""A leader is asked where the noted epoch has ended: lost, kept, or not judged."""

import threading

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.settings import KafkaSettings
from services.bridge.sink import leader_epochs
from services.bridge.sink.leader_epochs import cut_off, end_of_epoch
from services.bridge.sink.offsets import Partition, PartitionEnd
from services.testbed.kafka import KafkaBroker
from tests.promises.bridge.faults.test_lost_records import cut_tail
from tests.providers.proxy import Proxy
from tests.providers.waiting import eventually, patient

PARTITIONS = 4
RECORDS = 10


@pytest.fixture
def topic(own_kafka: KafkaBroker, topic_prefix: str) -> str:
    """RECORDS in each partition, by the leaders' first epoch."""
    admin = AdminClient({"bootstrap.servers": own_kafka.bootstrap_servers})
    admin.create_topics([NewTopic(topic_prefix, num_partitions=PARTITIONS)])[topic_prefix].result(
        60
    )
    write(own_kafka, topic_prefix)
    return topic_prefix


@pytest.mark.long
def test_records_that_were_cut_off_and_overwritten_are_found(
    own_kafka: KafkaBroker, to_kafka: Proxy, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the connection is lost, and comes again, while the leader is asked."""
    monkeypatch.setattr(leader_epochs, "REQUEST_TIMEOUT_S", 60.0)  # on a busy machine
    partition = cut_and_write_on(own_kafka, topic)
    expected = {(topic, number): number == partition for number in range(PARTITIONS)}
    assert cut_off(through(to_kafka), noted(topic)) == expected
    for lose in (to_kafka.cut, to_kafka.stall):
        lose()
        threading.Timer(1.0, to_kafka.heal).start()
        assert cut_off(through(to_kafka), noted(topic)) == expected


@pytest.mark.long
def test_silence_of_the_leader_is_not_an_answer(
    own_kafka: KafkaBroker, to_kafka: Proxy, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has told where its partitions end, and is gone once it is asked for the epoch."""
    monkeypatch.setattr(leader_epochs, "REQUEST_TIMEOUT_S", 15.0)
    cut_and_write_on(own_kafka, topic)
    sought: list[Partition] = []
    seek = leader_epochs._seek

    def then_stall(consumer: Consumer, place: Partition, end: PartitionEnd) -> bool:
        if not seek(consumer, place, end):
            return False
        to_kafka.stall("to_client")
        sought.append(place)
        return True

    monkeypatch.setattr(leader_epochs, "_seek", then_stall)
    to_kafka.delay(0.2)  # the answer is not on its way yet
    assert cut_off(through(to_kafka), noted(topic)) == {}
    assert sought


@pytest.mark.long
def test_records_that_retention_deleted_are_not_cut_off(own_kafka: KafkaBroker, topic: str) -> None:
    own_kafka.restart()  # another epoch
    write(own_kafka, topic)
    admin = AdminClient({"bootstrap.servers": own_kafka.bootstrap_servers})
    places = [TopicPartition(topic, number, 2 * RECORDS) for number in range(PARTITIONS)]
    for future in admin.delete_records(places).values():
        future.result(patient(60))
    found = cut_off(straight(own_kafka), noted(topic))
    assert found == dict.fromkeys(noted(topic), False)


@pytest.mark.long
def test_an_epoch_that_the_leader_never_had_is_cut_off(own_kafka: KafkaBroker, topic: str) -> None:
    """Of a former topic of the name, or of a volume that was set back."""
    found = cut_off(straight(own_kafka), noted(topic, epoch=7))
    assert found == dict.fromkeys(noted(topic), True)


@pytest.mark.parametrize(
    ("code", "text", "end"),
    [
        (KafkaError._AUTO_OFFSET_RESET, "… offset 9 (leader epoch 3): broker end offset is 95 "
         "(offset leader epoch 3). Reset to INVALID.: {}", 95),
        (KafkaError._AUTO_OFFSET_RESET, "No epoch found less or equal to offset 9 (leader epoch 3):"
         " broker end offset is -1 (offset leader epoch -1). Reset: {}", -1),
        (KafkaError._AUTO_OFFSET_RESET, "fetch failed: Broker: Offset out of range", None),
        (KafkaError._AUTO_OFFSET_RESET, "another wording of a later release: {}", None),
        (KafkaError.OFFSET_OUT_OF_RANGE, "broker end offset is 95 (offset leader epoch 3)", None),
    ],
)  # fmt: skip
def test_only_the_leaders_answer_tells_an_end(code: int, text: str, end: int | None) -> None:
    truncated = KafkaError(KafkaError._LOG_TRUNCATION).str()
    assert end_of_epoch(KafkaError(code, text.format(truncated))) == end


def cut_and_write_on(broker: KafkaBroker, topic: str) -> int:
    """Lose the end of one partition; all end beyond what was noted then. Returns its number."""
    broker.kill()
    partition, end = cut_tail(broker, topic, 4)
    assert end < RECORDS
    broker.start()
    write(broker, topic)
    return partition


def write(broker: KafkaBroker, topic: str) -> None:
    """RECORDS in each partition, each a batch."""
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all"})
    for number in range(PARTITIONS):
        for _ in range(RECORDS):
            producer.produce(topic, b"x", partition=number)
            eventually(
                lambda: producer.flush(patient(10)) == 0, what="it is written", timeout_s=120
            )


def noted(topic: str, epoch: int = 0) -> dict[Partition, PartitionEnd]:
    return {(topic, number): PartitionEnd(RECORDS, epoch) for number in range(PARTITIONS)}


def through(proxy: Proxy) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=f"127.0.0.1:{proxy.port}", topic_prefix="p")


def straight(broker: KafkaBroker) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=broker.bootstrap_servers, topic_prefix="p")
