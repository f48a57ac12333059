"""A topic that was made again under its name has another id, whatever it has by now."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, Uuid
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.acceptance import Acceptance
from schemas.errors import OperatorNeeded
from schemas.progress import ProgressKafka
from schemas.settings import KafkaSettings
from services.bridge.sink import topic_ids
from services.bridge.sink.offsets import PartitionEnd, some_answers
from services.bridge.sink.partition_ends import Tails
from services.bridge.sink.topic_ids import IdWatch, MadeAgain, answers, compare_ids, made_again
from services.bridge.sink.topics import Topics
from tests.providers.interface import Broker
from tests.providers.waiting import eventually, patient


def test_only_topics_whose_both_ids_are_known_are_compared() -> None:
    noted, told = {"a": "1", "b": "2", "gone": "3"}, {"a": "1", "b": "9", "new": "4"}
    assert made_again(noted, told) == [MadeAgain("b", "2", "9")]
    assert made_again({}, told) == made_again(noted, {}) == []


def test_a_broker_without_ids_and_one_that_refuses_tell_nothing() -> None:
    def told(outcome: object) -> "Future[Any]":
        future: Future[Any] = Future()
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(SimpleNamespace(topic_id=outcome))
        return future

    denied = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    asked = {"old": told(Uuid(0, 0)), "denied": told(denied), "t": told(Uuid(1, 2))}
    assert answers(asked) == {"t": str(Uuid(1, 2))}


@pytest.fixture
def topics(kafka: Broker, topic_prefix: str) -> Topics:
    made = Topics(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix="none"))
    make(made.admin, f"{topic_prefix}.t")
    made.refresh()
    return made


def make(admin: AdminClient, topic: str) -> None:
    admin.create_topics([NewTopic(topic, num_partitions=1)])[topic].result(patient(60))


def make_again(admin: AdminClient, topic: str) -> None:
    admin.delete_topics([topic])[topic].result(patient(60))
    eventually(lambda: there(admin, topic) is False, what="the topic is gone", timeout_s=120)
    make(admin, topic)
    eventually(lambda: there(admin, topic), what="the topic is there again", timeout_s=120)


def there(admin: AdminClient, topic: str) -> bool:
    return topic in admin.list_topics(timeout=patient(60)).topics


def write(kafka: Broker, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for _ in range(count):
        producer.produce(topic, b"{}", partition=0)
    assert producer.flush(patient(60)) == 0


def end(topics: Topics, topic: str) -> PartitionEnd:
    return some_answers(topics.ask_ends([(topic, 0)], committed=False))[(topic, 0)]


def test_while_running_a_topic_made_again_is_seen_though_it_has_more_than_was_noted(
    kafka: Broker, topics: Topics, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"{topic_prefix}.t"
    tails = Tails("s", "p", lambda then: dict.fromkeys(then, False))
    tails.start(topics, None, Acceptance())
    write(kafka, topic, 10)
    tails.learn({(topic, 0): end(topics, topic)})

    def noted() -> ProgressKafka:
        tails.learn({})
        tails.hurry()
        return tails.note_all(0)

    eventually(lambda: noted().topic_ids, what="the id is noted", timeout_s=120)
    last = noted()
    assert last.ends == {topic: [(0, 10, 0)]} and last.topic_ids.keys() == {topic}
    make_again(topics.admin, topic)
    write(kafka, topic, 20)
    tails.learn({(topic, 0): end(topics, topic)})  # nothing else tells: more, and epoch 0
    monkeypatch.setattr(topic_ids, "RECHECK_S", 0.0)
    assert tails._ids is not None
    tails._ids._next.clear()  # as after a minute

    def refused() -> OperatorNeeded | None:
        try:
            tails.learn({(topic, 0): end(topics, topic)})
        except OperatorNeeded as error:
            return error
        return None

    error = eventually(refused, what="the other id is seen", timeout_s=120)
    assert error is not None
    assert f"lost committed records: {topic} was deleted and made again" in str(error)
    assert noted().topic_ids == last.topic_ids, "the next start finds it too"


@pytest.mark.long
def test_another_id_is_asked_for_again_where_there_are_several_brokers(
    topics: Topics, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was cut off from the others may tell the id of a former topic."""
    topic, admin = f"{topic_prefix}.t", topics.admin
    known, changed = compare_ids(admin, {}, [topic, f"{topic}.missing"], brokers=1)
    assert known.keys() == {topic} and changed == []
    other = {topic: str(Uuid(1, 2))}
    seen = [MadeAgain(topic, other[topic], known[topic])]
    monkeypatch.setattr(topic_ids, "STALE_S", 0.1)
    for brokers in (1, 3):
        assert compare_ids(admin, other, [topic], brokers=brokers) == (known, seen)
    monkeypatch.setattr(topic_ids, "RECHECK_S", 0.0)
    monkeypatch.setattr(topic_ids, "_LOOK_S", 0.0)
    monkeypatch.setattr(topic_ids, "STALE_S", 1e9)
    watch = IdWatch(admin, lambda: 3, other)
    watch._next.clear()
    eventually(
        lambda: watch.look(lambda: {topic}) or watch._changed, what="it is seen", timeout_s=120
    )
    assert watch.look(lambda: {topic}) == [] and watch.known == other
    monkeypatch.setattr(topic_ids, "STALE_S", 0.0)
    assert eventually(lambda: watch.look(lambda: {topic}), what="it stays", timeout_s=120) == seen
    watch.known = {}
    watch.look(set)
    assert watch.known == {}, "only topics with noted ends have their id noted"
