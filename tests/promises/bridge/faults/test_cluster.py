"""Three brokers: restarted in turn, killed, without a disk; a partition that has no leader.

More rounds: `python -m tests.promises.bridge.brokers`.
"""

import contextlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from functools import partial
from threading import Timer
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import NewTopic

from schemas.acceptance import Acceptance
from schemas.errors import ExitCode, Retryable
from schemas.settings import BridgeSettings, KafkaSettings
from services.bridge.events.event import Event
from services.bridge.hanging.transactions import require_none_hanging
from services.bridge.sink import partition_ends
from services.bridge.sink.leader_epochs import cut_off
from services.bridge.sink.markers import MarkerCheck
from services.bridge.sink.offsets import some_answers
from services.bridge.sink.partition_ends import check_tails, noted
from services.bridge.sink.topics import Topics
from services.bridge.sink.transactional_producer import TransactionalProducer
from services.testbed.kafka import KafkaBroker
from tests.promises.bridge.brokers import FAULTS
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import Load, assert_intact, await_session
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_refusals import last_line
from tests.promises.bridge.test_status import as_json
from tests.promises.bridge.test_topics import record
from tests.providers.kafka_cluster import KafkaCluster
from tests.providers.progress_records import altered
from tests.providers.waiting import eventually, patient


@pytest.fixture
def alone(kafka_cluster: KafkaCluster, topic_prefix: str) -> Iterator[str]:
    """A topic with one replica. It goes after the test: another one loses a broker's disk."""
    name = f"{topic_prefix}.public.alone"
    admin = AdminClient({"bootstrap.servers": kafka_cluster.bootstrap_servers})
    config = {"min.insync.replicas": "1"}
    new = NewTopic(name, num_partitions=1, replication_factor=1, config=config)
    admin.create_topics([new])[name].result(patient(60))
    yield name
    admin.delete_topics([name])[name].result(patient(30))


@pytest.mark.parametrize("fault", ["roll", pytest.param("disk", marks=pytest.mark.long)])
def test_brokers_come_and_go_and_nothing_is_lost_or_comes_twice(
    conninfo: str, load: Load, kafka_cluster: KafkaCluster, new_bridge: NewBridge, fault: str
) -> None:
    bridge = new_bridge(conninfo, broker=kafka_cluster).start().streaming()
    FAULTS[fault](kafka_cluster, load, bridge)
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_topics_have_three_replicas_two_of_which_must_be_in_sync(
    kafka_cluster: KafkaCluster, topic_prefix: str
) -> None:
    topics = Topics(settings(kafka_cluster, topic_prefix))
    topics.prepare()
    topics.partitions(f"{topic_prefix}.public.t")
    admin = AdminClient({"bootstrap.servers": kafka_cluster.bootstrap_servers})

    def made() -> dict[str, Any] | None:
        """None of a broker that has not heard of all of them yet."""
        there = admin.list_topics(timeout=patient(60)).topics
        found = {name: one for name, one in there.items() if name.startswith(topic_prefix)}
        return found if len(found) >= 6 else None

    def config(name: str) -> dict[str, Any] | None:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        with contextlib.suppress(KafkaException):
            return dict(admin.describe_configs([resource])[resource].result(patient(60)))
        return None

    found = eventually(made, what="the topics are there") or {}
    assert len(found) == 6
    for name, topic in found.items():
        assert {len(one.replicas) for one in topic.partitions.values()} == {3}
        told = eventually(partial(config, name), what=f"{name} is described") or {}
        assert told["min.insync.replicas"].value == "2"
        assert told["message.timestamp.type"].value == "LogAppendTime"


@pytest.mark.long
def test_a_partition_without_a_leader_at_the_commit_is_found_before_its_producer_goes_on(
    kafka_cluster: KafkaCluster, topic_prefix: str, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka skips its marker, and no client is told: all else goes on with the other brokers."""
    cluster = kafka_cluster
    topics = Topics(settings(cluster, topic_prefix))
    topics.prepare()
    producer = TransactionalProducer(
        settings(cluster, topic_prefix),
        BridgeSettings(),
        topics,
        "mine",
    )
    producer.markers.look = lambda: require_none_hanging(topics, "mine")
    producer.begin_session()
    leader = eventually(lambda: leader_of(cluster, alone), what="it has a leader")
    assert leader is not None
    flushed = MarkerCheck.flushed

    def lose_leader(check: MarkerCheck, names: Iterable[str]) -> None:
        flushed(check, names)
        leader.kill()
        eventually(lambda: is_leaderless(cluster, alone), what="it has no leader")

    with monkeypatch.context() as patch:
        patch.setattr(MarkerCheck, "flushed", lose_leader)
        producer.send([Event(alone, b"k", event(topic_prefix, 100))])
        producer.commit(record(101))
    leader.start()
    cluster.await_in_sync()
    producer.send([Event(f"{topic_prefix}.public.other", b"k", event(topic_prefix, 200))])
    producer.commit(record(201))  # the other producer's turn
    with pytest.raises(Retryable, match=r"alone\[0\]@0 did not get its marker"):
        producer.begin()
    producer.abandon()


@pytest.mark.long
def test_a_start_waits_for_a_partition_without_a_leader_and_says_so(
    conninfo: str, load: Load, kafka_cluster: KafkaCluster, alone: str, new_bridge: NewBridge
) -> None:
    """Its only broker is away: nothing is fenced or changed before it has come again."""
    bridge = new_bridge(conninfo, broker=kafka_cluster, http_port=0)
    leader = eventually(lambda: leader_of(kafka_cluster, alone), what="it has a leader")
    assert leader is not None
    bridge.start().streaming()
    load.more(5)
    bridge.kill()
    leader.kill()
    eventually(lambda: is_leaderless(kafka_cluster, alone), what="it has no leader")
    impatient = new_bridge(
        conninfo, broker=kafka_cluster, connect_deadline_ms=100, publication=bridge.publication
    )
    impatient.start(SLOTBRIDGE_FAILPOINT="shown:1")  # before it fences
    assert impatient.exit_code() == ExitCode.KAFKA_UNREACHABLE, impatient.output
    assert f"{alone}[0] have no leader" in last_line(impatient.output)
    assert as_json(bridge, ExitCode.CHECK_FAILED)["leaderless"] == [f"{alone}[0]"]
    bridge.start()
    eventually(lambda: f"{alone}[0]" in unready(bridge), what="/readyz says so")
    leader.start()
    await_session(bridge, 2)
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_a_broker_that_was_cut_off_and_takes_itself_for_the_leader_proves_no_loss(
    kafka_cluster: KafkaCluster, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells the end that it knows, by an older epoch, until it hears of the new leader."""
    monkeypatch.setattr(partition_ends, "_STALE_S", 120.0)  # on a busy machine
    cluster, name = kafka_cluster, f"{topic_prefix}.public.t"
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    new = NewTopic(name, num_partitions=1, replication_factor=3)
    admin.create_topics([new])[name].result(patient(60))
    old = eventually(lambda: leader_of(cluster, name), what="it has a leader", timeout_s=120)
    assert old is not None
    write(cluster, name)
    old.pause()
    others = [broker for broker in cluster.brokers if broker is not old]
    try:
        eventually(
            lambda: (led := leader_of(cluster, name)) is not None and led is not old,
            what="another broker leads it",
            timeout_s=120,
        )
        write(cluster, name)
        topics = Topics(settings(cluster, topic_prefix))
        topics.refresh()
        there = some_answers(topics.ask_ends([(name, 0)], committed=False))
        assert there[(name, 0)].offset == 20
        for broker in others:
            broker.pause()
        resume([old])
        alone = settings(cluster, topic_prefix).model_copy(
            update={"bootstrap_servers": old.bootstrap_servers}
        )
        stale = Topics(alone)
        stale.refresh()
        told = some_answers(stale.ask_ends([(name, 0)], committed=False))
        assert told[(name, 0)].offset == 10, "it does not know of what came since"
        later = Timer(2.0, lambda: resume(others))
        later.start()
        last = altered(record(1), ends=noted(there))
        kept = check_tails(stale, last, partial(cut_off, alone), Acceptance())
        assert not kept.renewed and kept.ends[(name, 0)].offset == 20
        later.join()
    finally:
        cluster.resume()
    cluster.await_in_sync()


def leader_of(cluster: KafkaCluster, topic: str) -> KafkaBroker | None:
    """The leader, None also where the broker that was asked does not know the topic or is away."""
    with contextlib.suppress(KafkaException, KeyError):
        return cluster.leader(topic)
    return None


def is_leaderless(cluster: KafkaCluster, topic: str) -> bool:
    """Whether a broker says that nobody leads it."""
    with contextlib.suppress(KafkaException):
        return cluster.leader(topic) is None
    return False


def resume(brokers: Iterable[KafkaBroker]) -> None:
    for broker in brokers:
        broker.resume()


def write(cluster: KafkaCluster, topic: str) -> None:
    """Ten records that all replicas in sync have."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "acks": "all"})
    for _ in range(10):
        producer.produce(topic, b"x")
    assert producer.flush(patient(120)) == 0


def unready(bridge: Bridge) -> str:
    """Why /readyz does not pass; "" where it does, or does not answer yet."""
    served = re.findall(r"url=(http\S+)/metrics", bridge.output)
    if not served:
        return ""
    try:
        with urllib.request.urlopen(f"{served[-1]}/readyz", timeout=patient(5)):
            return ""
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def settings(cluster: KafkaCluster, prefix: str) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, topic_prefix=prefix)


def event(prefix: str, commit_lsn: int) -> bytes:
    source = {"name": prefix, "commit_lsn": commit_lsn, "seq": 0}
    return json.dumps({"op": "c", "source": source}).encode()
