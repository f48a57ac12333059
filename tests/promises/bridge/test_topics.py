"""What is read back from Kafka at start."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning

import pytest
import structlog
from confluent_kafka import Producer

from schemas.errors import OperatorNeeded
from schemas.events import progress_topic, schema_topic
from schemas.kafka import TopicSettings
from schemas.progress import ProgressRecord
from schemas.settings import BridgeSettings, KafkaSettings
from schemas.shaping import OutboxSettings, RouteSettings, ShapingSettings
from services.bridge.sink.topic_configs import Configs
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.kafka.records import TopicReader
from tests.providers.interface import Broker
from tests.providers.progress_records import altered, progress_record
from tests.providers.waiting import patient, patient_ms


def record(end_lsn: int, producer: int = 0) -> ProgressRecord:
    return progress_record(
        slot="mine",
        system_identifier="1",
        timeline=1,
        commit_lsn=end_lsn - 1,
        end_lsn=end_lsn,
        seq=0,
        ts_ms=0,
        producer=producer,
    )


def prepared(kafka: Broker, prefix: str) -> tuple[KafkaSettings, Topics]:
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=prefix)
    topics = Topics(settings)
    topics.prepare()
    return settings, topics


@pytest.mark.long
def test_an_open_transaction_of_another_bridge_hides_no_progress(
    kafka: Broker, topic_prefix: str
) -> None:
    settings, topics = prepared(kafka, topic_prefix)
    mine = TransactionalProducer(settings, BridgeSettings(), topics, "mine")
    mine.begin_session()
    mine.commit(record(100))
    assert topics.last_progress("mine") == record(100)
    assert topics.last_progress("other") is None
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
    other.flush(patient(30))
    mine.commit(record(200))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(topics.last_progress, "mine")
        with pytest.raises(StillRunning):
            found.result(2)
        other.abort_transaction(patient(30))
        last = found.result(patient(30))
        assert last is not None
        assert altered(last, ends={}, topic_ids={}, partitions={}) == record(200, producer=1)


@pytest.mark.long
def test_a_foreign_record_is_named(kafka: Broker, topic_prefix: str) -> None:
    _settings, topics = prepared(kafka, topic_prefix)
    stranger = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    stranger.produce(progress_topic(topic_prefix), b"secret row", b"mine")
    stranger.produce(schema_topic(topic_prefix), b"secret row", b"{}")
    stranger.flush(patient(30))
    for read in (lambda: topics.last_progress("mine"), topics.shapes):
        with pytest.raises(OperatorNeeded, match=rf"{topic_prefix}\.\w+\[0\]@0") as caught:
            read()
        assert "secret row" not in str(caught.value)


@pytest.mark.long
def test_a_cluster_of_many_topics_is_asked_in_parts(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, topics = prepared(kafka, topic_prefix)
    whole = topics.message_bytes_max()
    assert len(whole) == 5  # the bridge's own
    monkeypatch.setattr("services.bridge.sink.offsets.ASKED_AT_ONCE", 2)
    assert topics.message_bytes_max() == whole
    writer = TransactionalProducer(settings, BridgeSettings(), topics, "mine")
    writer.begin_session()
    other = Producer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "transactional.id": f"{topic_prefix}.other",
            "transaction.timeout.ms": patient_ms(20_000),
        }
    )
    other.init_transactions(patient(30))
    other.begin_transaction()
    for topic in whole:
        other.produce(topic, b"{}", b"other")
    other.flush(patient(30))
    assert topics.unstable() == {(topic, 0): 0 for topic in whole}
    other.abort_transaction(patient(30))


def test_written_are_the_topics_of_settings_and_of_the_prefix_but_no_other_bridges() -> None:
    shaping = ShapingSettings(
        topic="cdc-{schema}-{table}",
        routes=(RouteSettings(tables=r"public\.r", topic="{table}.all"),),
        outbox=OutboxSettings(table="public.box", topic="messages-{type}"),
    )
    settings = KafkaSettings(bootstrap_servers="127.0.0.1:1", topic_prefix="bank")
    topics = Topics(settings, shaping)
    other = ["progress", "schema", "prepared", "transaction", "message", "public.t", "x.dead"]
    topics._partitions = {
        **dict.fromkeys(["bank.progress", "bank.public.t", "bank.euro.progress"], 1),
        **dict.fromkeys(["cdc-public-t", "r.all", "messages-x", "else", "banker.public.t"], 1),
        **dict.fromkeys([f"bank.eu.{name}" for name in other], 1),
    }
    assert {name for name, _ in topics.written()} == {
        *("bank.progress", "bank.public.t", "bank.euro.progress"),
        *("cdc-public-t", "r.all", "messages-x"),
    }
    assert ("messages-x", 0) not in topics.event_partitions(), "others may have the same"


@pytest.mark.long
def test_topics_are_made_as_the_first_pattern_says(kafka: Broker, topic_prefix: str) -> None:
    settings = KafkaSettings.model_validate(
        {
            "bootstrap_servers": kafka.bootstrap_servers,
            "topic_prefix": topic_prefix,
            "partitions": 2,
            "topics": {
                "*.public.orders": {
                    "partitions": 1,
                    "config": {"cleanup.policy": "compact", "unclean.leader.election.enable": True},
                },
                "*.orders": {"partitions": 7},
                "*.public.*": {
                    "replication_factor": -1,
                    "config": {
                        "retention.ms": -1,
                        "compression.type": "zstd",
                        "max.message.bytes": 2_000_000,
                        "min.cleanable.dirty.ratio": 0.25,
                        "segment.bytes": 16_777_216,
                    },
                },
            },
        }
    )
    names = [f"{topic_prefix}.{name}" for name in ("public.orders", "x.orders", "public.t", "x.t")]
    topics = Topics(settings)
    topics.refresh()
    assert [topics.partitions(name) for name in names] == [1, 7, 2, 2]
    configs = Configs(topics.admin, settings)
    configs.describe(names)
    told = [configs.known[name] for name in names]
    assert [one["cleanup.policy"] for one in told] == ["compact", *["delete"] * 3]
    assert [one["retention.ms"] == "-1" for one in told] == [False, False, True, False]
    assert [one["compression.type"] for one in told] == ["producer", "producer", "zstd", "producer"]
    given = settings.topics["*.public.*"].config
    assert {name: told[2][name] for name in given} == {k: str(v) for k, v in given.items()}
    assert told[0]["unclean.leader.election.enable"] == "true"
    assert {one["message.timestamp.type"] for one in told} == {"LogAppendTime"}


@pytest.mark.long
def test_each_difference_from_the_settings_is_told_once(kafka: Broker, topic_prefix: str) -> None:
    """Of topics that are there; `prepare` is part of each session."""
    settings = KafkaSettings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, partitions=2
    )
    made = Topics(settings)
    made.refresh()
    names = [f"{topic_prefix}.public.{table}" for table in ("a", "b")]
    assert [made.partitions(name) for name in names] == [2, 2]
    wanted = {
        "partitions": 3,
        "replication_factor": 2,
        "config": {"cleanup.policy": "compact,delete", "compression.type": "lz4"},
    }
    other = settings.model_copy(update={"topics": {"*": TopicSettings.model_validate(wanted)}})
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            Topics(other).prepare()
    told = [line for line in logs if line["event"].startswith("topics differ from kafka.topics")]
    assert [(line["key"], line["found"], line["wanted"]) for line in told] == [
        ("partitions", "2", "3"),
        ("replication_factor", "1", "2"),
        ("cleanup.policy", "delete", "compact,delete"),
        ("compression.type", "producer", "lz4"),
    ]
    assert {line["topics"] for line in told} == {", ".join(names)}
    remedies = [line["remedy"] for line in told]
    assert f"--topic {names[0]} --partitions 3" in remedies[0]
    assert "cleanup.policy=[compact,delete]" in remedies[2]
    same = {
        **wanted,
        "partitions": 2,
        "replication_factor": 1,
        "config": {"cleanup.policy": "delete"},
    }
    third = settings.model_copy(update={"topics": {"*": TopicSettings.model_validate(same)}})
    with structlog.testing.capture_logs() as logs:
        Topics(third).prepare()
    assert not [line for line in logs if line["event"].startswith("topics differ")]


@pytest.mark.long
def test_a_record_behind_many_of_others_is_found_soon(kafka: Broker, topic_prefix: str) -> None:
    """Each step backwards is twice as long as the one before."""
    settings, topics = prepared(kafka, topic_prefix)
    mine = TransactionalProducer(settings, BridgeSettings(), topics, "mine")
    mine.begin_session()
    mine.commit(record(100))
    mine.abandon()
    others = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for _ in range(60_000):
        others.produce(progress_topic(topic_prefix), b"{}", b"other")
        others.poll(0)
    assert others.flush(patient(60)) == 0
    with calls(TopicReader, "between") as reads:
        found = topics.last_progress("mine")
    assert found is not None and found.position.end_lsn == 100
    assert len(reads) < 12, "200 at a time they were 300"


@contextlib.contextmanager
def calls(kind: type, method: str) -> Iterator[list[tuple[object, ...]]]:
    """The arguments of each call of a method meanwhile."""
    found: list[tuple[object, ...]] = []
    real = getattr(kind, method)

    def noting(self: object, *arguments: object) -> object:
        found.append(arguments)
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, noting)
        yield found
