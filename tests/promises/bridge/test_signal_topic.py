"""Signals of Debezium's formats by a Kafka topic: each is obeyed once."""

import contextlib
import json
import time
from typing import Any

import psycopg
import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pydantic import ValidationError
from typer.testing import CliRunner

from schemas.errors import ExitCode, Retryable
from schemas.settings import KafkaSettings, Settings
from schemas.snapshot import SignalPosition, SnapshotRequest, SnapshotSettings
from services.bridge.cli.app import app
from services.bridge.failpoints import OF_A_SIGNAL, VARIABLE
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.progress import request_of
from services.bridge.snapshot.requests import (
    BadSignal,
    Signal,
    asked_of,
    is_position,
    position_event,
    requests,
    topic_signal,
)
from services.bridge.snapshot.signal_topic import SignalTopic
from tests.bridge.snapshot.test_progress import OWNER
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import (
    Changes,
    assert_folds,
    await_chunks,
    chunks,
    done,
    fill,
    hasten,
    rows_a_second,
)
from tests.promises.bridge.test_failover import both, promote
from tests.promises.bridge.test_snapshot_requests import STAMP
from tests.providers.interface import Broker, Provider
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient

ROWS = 800
NAMES: dict[str, Any] = {"data-collections": ["public.t"]}


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    found = pair.primary.conninfo(fresh_database)
    fill(found, ROWS)
    return found


@pytest.fixture
def settings(topic_prefix: str) -> dict[str, Any]:
    return {"mode": "on_request", "signal_topic": f"{topic_prefix}-signal", "chunk_rows_max": 20}


def send(bridge: Bridge, kind: str, data: Any = None, *, key: str = "", value: Any = None) -> None:
    """Write a signal into the topic, as a producer of Debezium's users does."""
    producer = Producer({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    document = value or {"id": "a1", "type": f"{kind}-snapshot", "data": data}
    text = document if isinstance(document, bytes) else json.dumps(document)
    producer.produce(f"{bridge.prefix}-signal", text, key or bridge.prefix)
    assert producer.flush(patient(30)) == 0


def command(bridge: Bridge, *words: str) -> None:
    told = CliRunner().invoke(app, ["snapshot", *words, "--config", str(bridge.config)])
    assert told.exit_code == 0, told.output


def test_rows_are_asked_for_by_records_and_by_command(
    conninfo: str, settings: dict[str, Any], new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, snapshot=settings).start().streaming()
    conditions = [{"data-collection": "public.t", "filter": "id <= 200"}]
    send(bridge, "execute", {**NAMES, "type": "INCREMENTAL", "additional-conditions": conditions})
    done(bridge)
    bridge.caught_up()
    assert fold(bridge, "t").reads.total() == 200
    command(bridge, "start", "public.t")
    done(bridge, times=2)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert fold(bridge, "t").reads.total() == 200 + ROWS
    bridge.start().streaming()
    bridge.caught_up()
    assert bridge.output.count("received a signal") == 2, "a signal was heard again"
    assert bridge.stop() == 0, bridge.output
    assert_folds(bridge, conninfo)


@pytest.mark.long
def test_sent_while_no_bridge_runs_and_killed_after_it(
    conninfo: str, settings: dict[str, Any], new_bridge: NewBridge
) -> None:
    """Before the first start, too: no record is passed over, none is obeyed twice."""
    bridge = new_bridge(conninfo, snapshot={**settings, "chunk_rows_max": 3})
    admin = AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    name = settings["signal_topic"]
    admin.create_topics([NewTopic(name, 1)])[name].result(patient(30))
    send(bridge, "execute", NAMES)
    seen = [0]
    with Changes(conninfo, ROWS):
        while len(seen) < 5 or len({*seen}) < 3:  # a slow machine commits changes, and no rows yet
            assert len(seen) < 20, f"the kills were not in the middle of it: {seen}"
            bridge.start(**{VARIABLE: "after kafka commit:6"})
            assert bridge.exit_code() == -9, bridge.output
            seen.append(chunks(bridge))
        bridge.start().streaming()
        done(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_folds(bridge, conninfo)
    assert max(fold(bridge, "t").reads.values()) == 1, "a row was read twice"
    asked = [key for key, _ in bridge.records("snapshot") if key and '"request"' in text_of(key)]
    assert len(asked) == 1


def text_of(key: bytes | str) -> str:
    return key.decode() if isinstance(key, bytes) else key


@pytest.mark.long
@pytest.mark.parametrize("point", [*OF_A_SIGNAL, "before kafka commit", "after kafka commit"])
def test_killed_at_each_seam_of_a_signal(
    point: str, conninfo: str, settings: dict[str, Any], new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, snapshot=settings).start().streaming()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    send(bridge, "execute", NAMES)
    bridge.start(**{VARIABLE: f"{point}:1"})
    assert bridge.exit_code() == -9, bridge.output
    bridge.start().streaming()
    done(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert {*assert_folds(bridge, conninfo).reads.values()} == {1}
    asked = [key for key, _ in bridge.records("snapshot") if key and '"request"' in text_of(key)]
    assert len(asked) == 1, "the signal was taken twice, or never"


@pytest.mark.long
def test_paused_resumed_and_stopped(
    conninfo: str, settings: dict[str, Any], new_bridge: NewBridge
) -> None:
    settings = {
        **settings,
        "mode": "initial",
        "chunk_rows_max": 2,
        "rows_per_second_max": rows_a_second(10),
    }
    bridge = new_bridge(conninfo, snapshot=settings).start().streaming()
    eventually(lambda: chunks(bridge) > 3, what="chunks are read")
    send(bridge, "pause")
    eventually(lambda: bridge.output.count("received a signal") == 1, what="the pause is heard")
    bridge.caught_up()
    paused = chunks(bridge)
    assert bridge.stop() == 0
    bridge.start().streaming()
    bridge.caught_up()
    assert chunks(bridge) <= paused + 1, "it went on"
    send(bridge, "resume")
    eventually(lambda: chunks(bridge) > paused + 3, what="chunks are read")
    send(bridge, "stop", NAMES)
    eventually(lambda: bridge.output.count("received a signal") == 3, what="the stop is heard")
    bridge.caught_up()
    stopped = fold(bridge, "t").reads.total()
    assert stopped < ROWS, "the stop is too late"
    hasten(bridge)
    send(bridge, "execute", NAMES)
    eventually(
        lambda: fold(bridge, "t").reads.total() == stopped + ROWS, what="all is read", timeout_s=60
    )
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_folds(bridge, conninfo)


@pytest.mark.long
def test_what_is_not_for_this_bridge_is_ignored_by_name(
    conninfo: str, settings: dict[str, Any], new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, snapshot=settings).start().streaming()
    send(bridge, "execute", NAMES, key="another_prefix")
    send(bridge, "", value=b"not json")
    send(bridge, "", value={"type": "execute-snapshot", "data": {"data-collections": []}})
    send(bridge, "", value={"type": "log", "data": {"message": "x"}})
    send(bridge, "execute", {**NAMES, "type": "BLOCKING"})
    send(bridge, "execute", NAMES)
    done(bridge)
    bridge.caught_up()
    for reason in (
        "its key 'another_prefix' is not",
        "its value is not a document",
        "data-collections names no table",
        "type 'log' is none of",
        "data.type is not incremental",
    ):
        assert bridge.output.count(reason) == 1, reason
    assert bridge.sessions == 1, bridge.output
    assert bridge.stop() == 0, bridge.output
    assert fold(bridge, "t").reads.total() == ROWS


@pytest.mark.long
def test_a_failover_in_the_middle_of_what_was_asked(
    new_pair: NewPair, new_bridge: NewBridge, topic_prefix: str
) -> None:
    trio = new_pair(synchronous=False)
    primary, standby = (one.conninfo(trio.dbname) for one in (trio.primary, trio.standby))
    fill(primary, 6_000)
    settings = {"mode": "on_request", "signal_topic": f"{topic_prefix}-signal"}
    slow = {**settings, "chunk_rows_max": 10, "rows_per_second_max": rows_a_second(600)}
    bridge = new_bridge(both(trio), snapshot=slow)
    with Changes(primary, 6_000):
        bridge.start().streaming(primary)
        await_ready(trio.primary, trio.standby, bridge.slot)
        send(bridge, "execute", NAMES)
        await_chunks(bridge, chunks(bridge) + 5)
        assert "snapshot is done" not in bridge.output, "the failover is too late"
        trio.primary.kill()
        promote(trio)
    with Changes(standby, 6_000):
        bridge.streaming(standby)
        done(bridge)
    bridge.caught_up(standby)
    assert bridge.stop() == 0, bridge.output
    assert_folds(bridge, standby)
    assert max(fold(bridge, "t").reads.values()) == 1, "a row was read twice"
    assert bridge.output.count("received a signal") == 1


@pytest.mark.long
def test_signals_of_a_topic_that_was_made_again_are_passed_over(
    conninfo: str, settings: dict[str, Any], new_bridge: NewBridge
) -> None:
    """Its records may be copies of those that were obeyed. Later ones are heard, also from a stop.

    The new topic has as many records as the former one had, and more.
    """
    bridge = new_bridge(conninfo, snapshot=settings).start().streaming()
    send(bridge, "execute", NAMES)
    done(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    name = settings["signal_topic"]
    admin = AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    admin.delete_topics([name])[name].result(patient(30))
    eventually(lambda: name not in bridge.topics(), what="the topic is gone", timeout_s=60)
    eventually(lambda: made(admin, name), what="the topic is made", timeout_s=60)
    for _ in range(2):
        send(bridge, "execute", NAMES)
    bridge.start().streaming()
    bridge.caught_up()
    assert "not judged: whether the records of the signal topic were obeyed" in bridge.output
    assert "the topic was made again" in bridge.output and "records=2" in bridge.output
    assert bridge.stop() == 0, bridge.output
    send(bridge, "execute", NAMES)
    bridge.start().streaming()
    done(bridge, times=2)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert bridge.output.count("not judged: whether the records of the signal topic") == 1
    assert bridge.output.count("received a signal") == 2


def made(admin: AdminClient, name: str) -> bool:
    """Make the topic; False where its former one is still being deleted."""
    try:
        admin.create_topics([NewTopic(name, 1)])[name].result(patient(30))
    except KafkaException:
        return False
    return True


@pytest.mark.long
def test_a_position_beyond_the_end_obeys_nothing_again(
    conninfo: str, settings: dict[str, Any], new_bridge: NewBridge
) -> None:
    """The topic has lost its end; and one that loses it while the bridge runs is judged anew."""
    bridge = new_bridge(conninfo, snapshot=settings).start().streaming()
    send(bridge, "execute", NAMES)
    done(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    values = [value for key, value in bridge.records("snapshot") if is_position(key)]
    position = SignalPosition.model_validate_json(values[-1] or b"")
    assert (position.offset, len(position.topic_id)) == (1, 22)
    beyond = position_event(bridge.prefix, position.model_copy(update={"offset": 50}))
    producer = Producer({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    producer.produce(beyond.topic, beyond.value, beyond.key)
    assert producer.flush(patient(30)) == 0
    bridge.start().streaming()
    bridge.caught_up()
    assert "the topic has lost its end" in bridge.output
    assert bridge.output.count("received a signal") == 1
    send(bridge, "execute", NAMES)
    done(bridge, times=2)
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_an_offset_that_is_gone_while_the_topic_is_read_ends_the_session(
    kafka: Broker, topic_prefix: str
) -> None:
    given = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix)
    topic = SignalTopic(Topics(given), f"{topic_prefix}-signal", None)
    topic._consumer.assign([TopicPartition(topic.name, 0, 50)])

    def polled() -> bool:
        topic.poll(time.monotonic())
        return False

    with contextlib.closing(topic), pytest.raises(Retryable, match="no offset 0 any more"):
        eventually(polled, what="it is told", timeout_s=30)


@pytest.mark.long
def test_a_topic_of_several_partitions_is_refused(
    conninfo: str, settings: dict[str, Any], new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, snapshot=settings)
    name = settings["signal_topic"]
    admin = AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    admin.create_topics([NewTopic(name, 2)])[name].result(patient(30))
    assert bridge.start().exit_code() == ExitCode.SERVER_SETTING, bridge.output
    assert "a signal topic has one partition" in bridge.output


def test_records_of_debezium_are_understood() -> None:
    value = (
        b'{"type":"execute-snapshot","data": {"data-collections": ["a.b"], "type": "INCREMENTAL"}}'
    )
    signal = topic_signal(b"p", value, "p")
    (found,) = requests(signal, "s", 3, STAMP, 1, "p-signal")
    assert (found.type, found.tables, found.topic) == ("read", "a.b", "p-signal")
    for key, wrong in ((None, value), (b"q", value), (b"p", None), (b"p", b"[]"), (b"p", b"{")):
        with pytest.raises(BadSignal):
            topic_signal(key, wrong, "p")


def test_what_a_record_asks_survives_the_loss_of_its_place() -> None:
    """The insert of a row is undone with the timeline; a record of Kafka is not."""
    signal = Signal("i", "execute-snapshot", '{"data-collections": ["a.b"]}')

    def asked(timeline: int, topic: str) -> SnapshotRequest:
        return requests(signal, "s", timeline, STAMP, 1, topic)[0]  # at 900

    assert request_of(asked(3, ""), OWNER) == asked(3, "")
    assert request_of(asked(2, ""), OWNER) is None
    moved = request_of(asked(2, "p-signal"), OWNER)
    assert moved is not None and (moved.timeline, moved.commit_lsn) == (3, 500)
    assert request_of(asked(9, "p-signal"), OWNER) is None


@pytest.mark.parametrize("last", ["stop", "execute"])
def test_records_whose_places_are_lost_keep_their_order(last: str) -> None:
    """Both ask from where that timeline was left; the later record is the one that counts."""
    kinds = ["execute", "stop"] if last == "stop" else ["stop", "execute"]
    found = []
    for number, kind in enumerate(kinds):
        signal = Signal(kind, f"{kind}-snapshot", '{"data-collections": ["a.b"]}')
        stamp = STAMP._replace(commit_lsn=STAMP.commit_lsn + 10 * number)
        (asked,) = requests(signal, "s", 2, stamp, 1 - number, "p-signal", 5 + number)
        moved = request_of(asked, OWNER)
        assert moved is not None and moved.commit_lsn == 500
        found.append(moved)
    for order in (found, found[::-1]):
        read = asked_of("a", "b", order).read
        assert read is not None and read.id == last


def test_settings_of_a_signal_topic() -> None:
    for wrong in ({"mode": "on_request"}, {"mode": "never", "signal_topic": "t"}):
        with pytest.raises(ValidationError):
            SnapshotSettings.model_validate(wrong)
    kafka = {"bootstrap_servers": "b:9092", "topic_prefix": "bank"}
    snapshot = {"mode": "initial", "signal_topic": "bank.signal"}
    with pytest.raises(ValidationError, match="own topics"):
        Settings.model_validate({"kafka": kafka, "snapshot": snapshot})


@pytest.mark.long
def test_a_signal_table_is_taken_where_both_are_set(
    conninfo: str, settings: dict[str, Any], new_bridge: NewBridge
) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE signals (id text PRIMARY KEY, type text, data text)")
    both_ways = {**settings, "signal_table": "public.signals"}
    bridge = new_bridge(conninfo, snapshot=both_ways).start().streaming()
    command(bridge, "start", "public.t")
    done(bridge)
    send(bridge, "execute", NAMES)
    done(bridge, times=2)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert {*assert_folds(bridge, conninfo).reads.values()} == {2}
