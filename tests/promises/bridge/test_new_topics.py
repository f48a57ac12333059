"""The first records into a new topic, whose leader may not be ready for the first of them.

The broker refuses that request, and takes the next one of the same producer if it is under way
already: it knows of no earlier sequence. librdkafka takes the refused one for written then. With
several under way this happens to one topic in thirty or so: not in every run.
"""

import pytest

from schemas.settings import BridgeSettings, KafkaSettings
from services.bridge.events.event import Event
from services.bridge.sink.dead_letters import Refused
from services.bridge.sink.options import producer_options
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.kafka.client import TopicRefused
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.test_topics import prepared, record
from tests.providers.interface import Broker

TOPICS = 30


@pytest.mark.long
@pytest.mark.parametrize(("careful", "size"), [(True, 10), (False, 400_000)])
def test_topics_made_while_running_lose_nothing(
    kafka: Broker, topic_prefix: str, careful: bool, size: int
) -> None:
    settings, topics = prepared(kafka, topic_prefix)
    refused = Refused(careful_until=2**62) if careful else None
    producer = TransactionalProducer(settings, BridgeSettings(), topics, "mine", refused)
    producer.begin_session()
    values = [bytes([65 + n]) * size for n in range(6)]
    names = [f"{topic_prefix}.t{number}" for number in range(TOPICS)]
    for lsn, name in enumerate(names, 100):
        producer.send([Event(name, b"key", value) for value in values])
        producer.commit(record(lsn))
    found = read_committed(kafka.bootstrap_servers, names)
    arrived = {name: [each.value for each in found if each.topic == name] for name in names}
    assert {name: len(come) for name, come in arrived.items() if come != values} == {}


@pytest.mark.parametrize("name", ["max.in.flight", "max.in.flight.requests.per.connection"])
def test_no_setting_brings_a_second_request_under_way(name: str) -> None:
    """librdkafka has two names for it, and takes what comes last."""
    settings = KafkaSettings(bootstrap_servers="nowhere", topic_prefix="p", options={name: 5})
    found = producer_options(settings, BridgeSettings(), "mine", (), False)
    assert {value for name, value in found.items() if name.startswith("max.in.flight")} == {1}


@pytest.mark.long
def test_topics_are_made_by_one_request_also_beside_one_that_can_not_be_made(
    kafka: Broker, topic_prefix: str
) -> None:
    settings, topics = prepared(kafka, topic_prefix)
    names = [f"{topic_prefix}.t{number}" for number in range(TOPICS)]
    wrong = f"{topic_prefix}.{'x' * 250}"
    for _ in range(2):
        topics.make_all([*names, wrong])
        assert topics.counts([*names, wrong]) == dict.fromkeys(names, settings.partitions)
    with pytest.raises(TopicRefused, match="x" * 250):
        topics.partitions(wrong)
    topics.refresh()
    assert all(map(topics.has, names))
    assert not topics.leaderless
