"""The progress topic, read while somebody writes: nothing is waited for, nothing is fenced."""

import pytest
from confluent_kafka import Producer

from schemas.events import SETTLED_KEY, progress_topic
from schemas.settings import BridgeSettings
from services.bridge.recovery.visible_record import Visible, read_visible
from services.bridge.sink.transactional_producer import TransactionalProducer
from tests.promises.bridge.test_topics import prepared, record
from tests.providers.interface import Broker
from tests.providers.waiting import patient, patient_ms


def positions(found: Visible) -> tuple[int | None, list[int], tuple[str, ...]]:
    last = found.record.position.end_lsn if found.record is not None else None
    return last, [hidden.position.end_lsn for hidden in found.hidden], found.others


@pytest.mark.long
def test_an_open_transaction_is_reported_and_not_awaited(kafka: Broker, topic_prefix: str) -> None:
    settings, topics = prepared(kafka, topic_prefix)
    assert read_visible(topics, "mine") == (None, (), ())
    mine = TransactionalProducer(settings, BridgeSettings(), topics, "mine")
    mine.begin_session()
    mine.commit(record(100))
    other = Producer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "transactional.id": f"{topic_prefix}.other",
            "transaction.timeout.ms": patient_ms(20_000),
        }
    )
    other.init_transactions(patient(30))
    other.begin_transaction()
    other.produce(progress_topic(topic_prefix), b"{}", b"other")
    assert other.flush(patient(30)) == 0
    mine.commit(record(200))
    found = read_visible(topics, "mine")
    assert positions(found) == (100, [200], ()), "Kafka ended the other's meanwhile"
    mine.commit(record(300))
    other.abort_transaction(patient(30))
    last = topics.last_progress("mine")
    assert last is not None and last.position.end_lsn == 300, "it was not fenced"
    assert positions(read_visible(topics, "mine")) == (300, [], ())


@pytest.mark.long
def test_other_slots_are_those_whose_last_record_is_there(kafka: Broker, topic_prefix: str) -> None:
    _settings, topics = prepared(kafka, topic_prefix)
    anyone = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    name = progress_topic(topic_prefix)
    for key, value in ((b"a", b"1"), (b"b", b"1"), (SETTLED_KEY, None), (b"a", None)):
        anyone.produce(name, value, key)
        assert anyone.flush(patient(30)) == 0
    assert read_visible(topics, "mine") == (None, (), ("b",))
