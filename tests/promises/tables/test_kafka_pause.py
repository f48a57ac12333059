"""A Kafka that holds its connections and answers nothing, for longer than a request may take."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import structlog

from schemas.errors import ExitCode, Retryable
from services.testbed.kafka import KafkaBroker
from spark_consumers.kafka.reader import TopicOffsets
from tests.promises.tables.conftest import Pipeline
from tests.promises.tables.test_job import ONE, Running, insert
from tests.providers.steady_kafka import steady_kafka
from tests.providers.waiting import eventually, patient


@pytest.fixture(scope="module")
def kafka(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker of its own, which leads its partitions again at once after a pause."""
    with steady_kafka(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests give up early, and the run asks often."""
    monkeypatch.setattr("spark_consumers.kafka.reader.REQUEST_TIMEOUT_S", patient(0.3))
    monkeypatch.setattr("spark_consumers.epochs.stream._LOOK_EVERY_S", 0.2)


@pytest.mark.long
def test_a_run_outlasts_a_pause_of_kafka(kafka: KafkaBroker, pipeline: Pipeline) -> None:
    """Whatever asks Kafka beside the epochs says so, and goes on."""
    pipeline.publisher.announce(ONE)
    insert(pipeline, ONE, 1)
    with structlog.testing.capture_logs() as told, Running(pipeline) as running:

        def silences() -> int:
            running.sound()
            return sum(line["event"].startswith("not judged: which tables") for line in told)

        eventually(lambda: running.failure or running.events == 1, what="the first", timeout_s=60)
        kafka.pause()
        try:
            before = silences()
            eventually(lambda: silences() >= before + 2, what="the run asks in vain", timeout_s=60)
        finally:
            kafka.resume()
        insert(pipeline, ONE, 2)
        eventually(lambda: running.failure or running.events == 2, what="the second", timeout_s=90)
    running.sound()
    assert len(pipeline.rows("one")) == 2


@pytest.mark.long
def test_a_request_is_repeated_with_patience_alone(kafka: KafkaBroker, pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ONE)
    once, again = TopicOffsets(pipeline.kafka), TopicOffsets(pipeline.kafka, patience_s=300)
    topic = f"{pipeline.kafka.topic_prefix}.schema"
    eventually(lambda: _known(once, topic) and _known(again, topic), what="it is known")
    found: list[object] = []
    with structlog.testing.capture_logs() as told:
        kafka.pause()
        try:
            eventually(lambda: _unanswered(once.refresh), what="it has stopped")
            assert _unanswered(lambda: once.stable({topic: (0,)}))
            asking = threading.Thread(target=lambda: found.append(again.stable({topic: (0,)})))
            asking.start()
            eventually(lambda: told, what="it asks again")
            assert not found
        finally:
            kafka.resume()
        asking.join(patient(300))

    def same() -> bool:
        with contextlib.suppress(Retryable):  # a busy broker needs longer than the second
            return found == [once.stable({topic: (0,)})]
        return False

    eventually(same, what="both have one answer")


def _known(topics: TopicOffsets, topic: str) -> bool:
    with contextlib.suppress(Retryable):
        topics.refresh(topic)
        return bool(topics.partitions(topic))
    return False


def _unanswered(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except Retryable as error:
        return error.exit_code == ExitCode.KAFKA_UNREACHABLE
    return False
