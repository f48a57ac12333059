"""The transactional ids of a slot's two producers: nobody else's."""

from confluent_kafka import KafkaException, Producer

from schemas.settings import BridgeSettings, KafkaSettings
from services.bridge.sink import producer_pair
from services.bridge.sink.options import producer_options
from services.bridge.sink.transactional_producer import TransactionalProducer
from tests.promises.bridge.test_topics import prepared
from tests.providers.interface import Broker
from tests.providers.waiting import patient


def ids(prefix: str, slot: str) -> set[str]:
    kafka = KafkaSettings(bootstrap_servers="nowhere", topic_prefix=prefix)
    first = producer_options(kafka, BridgeSettings(), slot, (), False)["transactional.id"]
    return {first + suffix for suffix in producer_pair._SUFFIXES}


def test_no_other_prefix_and_slot_has_the_same_ids() -> None:
    assert len(ids("a", "b") | ids("a.b", "2") | ids("a.b", "_2") | ids("a.b.2", "2")) == 8


def test_another_bridge_is_fenced_with_both_of_its_ids(kafka: Broker, topic_prefix: str) -> None:
    settings, topics = prepared(kafka, topic_prefix)
    name = f"slotbridge.{topic_prefix}.mine"
    older = []
    for suffix in producer_pair._SUFFIXES:
        options = {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": name + suffix}
        older.append(Producer(options))
        older[-1].init_transactions(patient(30))
    newer = TransactionalProducer(settings, BridgeSettings(), topics, "mine")
    newer.begin_session()
    assert all(is_fenced(producer, f"{topic_prefix}.message") for producer in older)
    newer.abandon()


def is_fenced(producer: Producer, topic: str) -> bool:
    try:
        producer.begin_transaction()
        producer.produce(topic, b"x")
        producer.flush(patient(30))
        producer.commit_transaction(patient(30))
    except KafkaException:
        return True
    return False
