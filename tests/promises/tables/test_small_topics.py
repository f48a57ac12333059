"""Small topics that were deleted and made again, on a real broker, without Spark."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import structlog
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode, OperatorNeeded, Retryable
from schemas.events import progress_topic
from schemas.settings import KafkaSettings
from spark_consumers.epochs.parking import own_fault
from spark_consumers.kafka import small_topic_tail
from spark_consumers.kafka.progress import ProgressTail
from spark_consumers.kafka.reader import Offsets, TopicOffsets
from spark_consumers.kafka.small_topic_tail import SmallTopicTail
from tests.providers.interface import Broker
from tests.providers.progress_records import progress_record
from tests.providers.waiting import eventually, patient


class Topic:
    """A topic of one partition, with records that the test writes."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.name = name
        self._servers: dict[str, str | int | float | bool] = {
            "bootstrap.servers": broker.bootstrap_servers
        }
        self._admin = AdminClient(self._servers)

    def make(self) -> None:
        self._admin.create_topics([NewTopic(self.name, 1, 1)])[self.name].result(patient(30))

    def drop(self) -> None:
        self._admin.delete_topics([self.name])[self.name].result(patient(30))
        eventually(
            lambda: self.name not in self._admin.list_topics(timeout=patient(20)).topics,
            what="the topic is gone",
            timeout_s=60,
        )

    def write(self, *values: str) -> None:
        producer = Producer(self._servers)
        for value in values:
            producer.produce(self.name, value, "slot")
        assert producer.flush(patient(30)) == 0


@pytest.fixture
def settings(kafka: Broker, topic_prefix: str) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix)


@pytest.fixture
def topic(kafka: Broker, topic_prefix: str) -> Topic:
    made = Topic(kafka, progress_topic(topic_prefix))
    made.make()
    made.write(record(100), record(200))
    return made


NewTail = Callable[[], SmallTopicTail]


@pytest.fixture
def new_tail(settings: KafkaSettings, topic: Topic) -> Iterator[NewTail]:
    made: list[SmallTopicTail] = []

    def make() -> SmallTopicTail:
        made.append(SmallTopicTail(settings, TopicOffsets(settings), topic.name))
        return made[-1]

    yield make
    for tail in made:
        tail.close()


def record(end_lsn: int) -> str:
    found = progress_record(
        slot="slot",
        system_identifier="1",
        timeline=1,
        commit_lsn=end_lsn - 8,
        end_lsn=end_lsn,
        seq=0,
        ts_ms=0,
    )
    return found.model_dump_json()


def test_a_topic_that_was_made_again_is_refused(topic: Topic, new_tail: NewTail) -> None:
    tail = new_tail()
    assert len(tail.new()) == 2
    topic.drop()
    topic.make()
    topic.write(*map(record, (300, 400, 500)))
    with pytest.raises(OperatorNeeded, match="deleted and made again") as found:
        tail.new()
    assert (found.value.subject, found.value.exit_code) == (topic.name, ExitCode.WITNESSES_DISAGREE)
    assert "try again" in found.value.hint and "ALTER TABLE" not in found.value.hint
    assert own_fault(found.value, "public.t") is None
    # The next process, which knows the id from the last epoch's, refuses the topic, too.
    later = new_tail()
    later.expect(tail.id, "fill new tables")
    with pytest.raises(OperatorNeeded, match=r"deleted and made again.*Hint: fill new tables"):
        later.new()
    assert len(new_tail().new()) == 3


@pytest.mark.long
def test_a_topic_that_is_made_again_within_the_read_is_refused(
    topic: Topic, new_tail: NewTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = new_tail()
    assert len(tail.new()) == 2
    written = TopicOffsets.written

    def slow(topics: TopicOffsets, partitions: dict[str, tuple[int, ...]]) -> Offsets:
        topic.drop()
        topic.make()
        found: list[Offsets] = []

        def answers() -> bool:
            with contextlib.suppress(Retryable):
                found.append(written(topics, partitions))
            return bool(found)

        eventually(answers, what="Kafka tells the end of the new topic")
        return found[0]

    monkeypatch.setattr(TopicOffsets, "written", slow)
    with pytest.raises(OperatorNeeded, match="deleted and made again"):
        tail.new()


@pytest.mark.long
def test_a_topic_that_is_gone_has_some_seconds_to_come_again(
    topic: Topic, new_tail: NewTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, other = new_tail(), new_tail()
    assert len(tail.new()) == len(other.new()) == 2
    topic.drop()
    with pytest.raises(Retryable, match="does not show the topic") as found:
        tail.new()
    assert found.value.exit_code == ExitCode.KAFKA_UNREACHABLE
    monkeypatch.setattr(small_topic_tail, "_SHOWN_WITHIN_S", patient(60))
    making = threading.Timer(0.5, topic.make)
    making.start()
    with pytest.raises(OperatorNeeded, match="deleted and made again"):
        other.new()
    making.join()


@pytest.mark.long
def test_a_topic_that_was_never_there_is_empty_at_once(
    settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_topic_tail, "_SHOWN_WITHIN_S", float("inf"))
    topics = TopicOffsets(settings)
    tail = SmallTopicTail(settings, topics, f"{settings.topic_prefix}.none")
    assert (tail.new(), tail.id) == ([], "")
    tail.close()


@pytest.mark.long
def test_a_broker_that_tells_no_ids_is_not_judged_and_told_once(
    new_tail: NewTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TopicOffsets, "id", lambda *_: "")
    tail = new_tail()
    with structlog.testing.capture_logs() as told:
        assert [len(tail.new()) for _ in range(3)] == [2, 0, 0]
    assert [line["event"] for line in told] == [
        "not judged: whether the topic was deleted and created again"
    ]


@pytest.mark.long
def test_the_progress_of_a_topic_that_is_gone_is_forgotten(
    topic: Topic, settings: KafkaSettings
) -> None:
    tail = ProgressTail(settings, TopicOffsets(settings), "slot")
    assert tail.last().position.end_lsn == 200
    topic.drop()
    topic.make()
    with pytest.raises(OperatorNeeded, match=r"deleted and made again.*Hint: find out") as found:
        tail.last()
    assert "ALTER TABLE" not in found.value.hint
    with pytest.raises(Retryable, match="has not a progress record"):
        tail.last()
    topic.write(record(150))
    assert tail.last().position.end_lsn == 150
    tail.close()
