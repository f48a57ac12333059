"""Kafka comes back without the last records of a table's topic, as after an unclean election."""

import struct
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode
from services.testbed.kafka import KafkaBroker
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import Load, await_session
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_refusals import last_line
from tests.providers.waiting import eventually, patient

HEADER = struct.Struct(">qi")
"""baseOffset, batchLength: of each batch in a partition's file."""


def cut_tail(broker: KafkaBroker, topic: str, batches: int) -> tuple[int, int]:
    """Cut the last `batches` off the fullest partition: its number, and where it ends now."""
    logs = sorted((broker.folder / "data").glob(f"{topic}-*/*.log"), key=_size)
    log = logs[-1]
    data, at, starts = log.read_bytes(), 0, []
    while at + HEADER.size <= len(data):
        offset, length = HEADER.unpack_from(data, at)
        if length <= 0:
            break
        starts.append((at, offset))
        at += HEADER.size + length
    cut, offset = starts[-batches]
    with log.open("r+b") as file:
        file.truncate(cut)
    for kept in (*log.parent.glob("*.snapshot"), *log.parent.glob("*index")):
        kept.unlink()
    folder = broker.folder / "data"
    for checkpoint in (*folder.glob("*-offset-checkpoint"), folder / ".kafka_cleanshutdown"):
        checkpoint.unlink(missing_ok=True)
    return int(log.parent.name.rpartition("-")[2]), offset


def _size(path: Path) -> int:
    return path.stat().st_size


def test_the_end_of_a_tables_topic_is_gone(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """Also where others have written on behind it, as far as it went and farther."""
    bridge = new_bridge(conninfo, broker=own_kafka).start().streaming()
    load.more(30)
    load.stop()
    bridge.caught_up()
    noted(bridge)
    bridge.kill()
    topic = f"{bridge.prefix}.public.t"
    own_kafka.kill()
    partition, end = cut_tail(own_kafka, topic, 4)
    own_kafka.start()
    bridge.start(SLOTBRIDGE_FAILPOINT="shown:1")  # where it would begin to change something
    assert bridge.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    line = last_line(bridge.output)
    assert f"{topic}[{partition}] ends at {end}, not " in line
    assert (
        "at LSN " in line
        and "restore the topics, or run `slotbridge recover`, or start over" in line
    )
    noted_end = int(line.partition("not ")[2].split()[0].rstrip(","))
    other = Producer({"bootstrap.servers": own_kafka.bootstrap_servers})
    for _ in range(noted_end - end + 50):
        other.produce(topic, b"{}", b"of another", partition=partition)
    assert other.flush(patient(30)) == 0
    token = bridge.token
    bridge.start(SLOTBRIDGE_FAILPOINT="shown:1")  # it ends beyond what was noted now
    assert bridge.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    line = last_line(bridge.output)
    assert bridge.token == token, "the records that are lost are the same"
    assert f"{topic}[{partition}] was cut off before {noted_end}, and written on since" in line
    assert line.count(topic) == 1, "all partitions have a new leader epoch, the others all they had"
    bridge.start(accept=token)
    await_session(bridge, 2)
    assert "going on without records that Kafka has lost" in bridge.output
    noted(bridge)
    assert bridge.stop() == 0, bridge.output
    bridge.start()
    await_session(bridge, 3)
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_a_loss_is_accepted_for_the_start_not_one_that_comes_later(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """A process that was started with a token runs on for weeks, and is restarted with it."""
    bridge = new_bridge(conninfo, broker=own_kafka).start().streaming()
    load.more(30)
    load.stop()
    bridge.caught_up()
    noted(bridge)
    bridge.kill()
    topic = f"{bridge.prefix}.public.t"
    own_kafka.kill()
    cut_tail(own_kafka, topic, 2)
    own_kafka.start()
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    token = bridge.token
    bridge.start(accept=token)
    await_session(bridge, 2)
    assert "going on without records that Kafka has lost" in bridge.output
    noted(bridge)
    own_kafka.kill()
    partition, _ = cut_tail(own_kafka, topic, 2)
    own_kafka.start()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t SELECT 100000 + i, 'later' FROM generate_series(1, 20) i")
    assert bridge.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    assert f"Kafka lost committed records: {topic}[{partition}]" in last_line(bridge.output)
    bridge.start(accept=token)
    assert bridge.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    assert bridge.token != token and "not used" in bridge.output


def noted(bridge: Bridge) -> None:
    """Wait until two more progress records tell where partitions end."""

    def count() -> int:
        return sum(bool(record.kafka.ends) for record in bridge.progress())

    wanted = count() + 2
    eventually(lambda: count() >= wanted, what="the ends of partitions are noted")


@pytest.mark.long
def test_a_topic_that_is_gone_is_not_judged(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """An operator may have deleted it; it is made again when it is written to, or before."""
    bridge = new_bridge(conninfo, broker=own_kafka).start().streaming()
    load.more(10)
    load.stop()
    bridge.caught_up()
    noted(bridge)
    assert bridge.stop() == 0, bridge.output
    assert f"{bridge.prefix}.public.t" in bridge.progress()[-1].kafka.ends, (
        "a clean stop notes them"
    )
    admin = AdminClient({"bootstrap.servers": own_kafka.bootstrap_servers})
    name = f"{bridge.prefix}.public.t"
    admin.delete_topics([name])[name].result(patient(60))
    eventually(lambda: name not in bridge.topics(), what="the topic is gone")
    bridge.start()
    await_session(bridge, 2)
    assert "not judged: topics that the slot has written are gone" in bridge.output
    bridge.kill()
    admin.create_topics([NewTopic(name, num_partitions=3)])[name].result(patient(60))
    eventually(lambda: name in bridge.topics(), what="the topic is there again")
    bridge.start()
    await_session(bridge, 3)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (100000, 'again')")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output


def test_a_topic_is_deleted_and_made_again_and_others_write_more_to_it_than_it_had(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """Ends and leader epochs are then those of a topic that has everything; only its id tells."""
    bridge = new_bridge(conninfo, broker=own_kafka).start().streaming()
    load.more(30)
    load.stop()
    bridge.caught_up()
    noted(bridge)
    assert bridge.stop() == 0, bridge.output
    topic = f"{bridge.prefix}.public.t"
    ends = bridge.progress()[-1].kafka.ends[topic]
    assert {epoch for _, _, epoch in ends} == {0}
    admin = AdminClient({"bootstrap.servers": own_kafka.bootstrap_servers})
    count = len(admin.list_topics(topic, timeout=patient(60)).topics[topic].partitions)
    admin.delete_topics([topic])[topic].result(patient(60))
    eventually(lambda: topic not in bridge.topics(), what="the topic is gone", timeout_s=120)
    admin.create_topics([NewTopic(topic, num_partitions=count)])[topic].result(patient(60))
    eventually(lambda: topic in bridge.topics(), what="the topic is there again", timeout_s=120)
    other = Producer({"bootstrap.servers": own_kafka.bootstrap_servers})
    for partition, offset, _ in ends:
        for _ in range(offset + 10):
            other.produce(topic, b"{}", b"of another", partition=partition)
    assert other.flush(patient(60)) == 0
    bridge.start(SLOTBRIDGE_FAILPOINT="shown:1")  # where it would begin to change something
    assert bridge.exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    line = last_line(bridge.output)
    assert f"Kafka lost committed records: {topic} was deleted and made again" in line
    assert line.count(topic) == 1
    bridge.start(accept=bridge.token)
    await_session(bridge, 2)
    assert "going on without records that Kafka has lost" in bridge.output
    assert bridge.stop() == 0, bridge.output
    bridge.start()
    await_session(bridge, 3)
    assert bridge.stop() == 0, bridge.output
