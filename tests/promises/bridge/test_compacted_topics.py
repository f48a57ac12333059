"""Compacted topics of tables: events without a key, which Kafka refuses there."""

import json
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_preflight import Examined
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import patient

WARNING = "a compacted topic refuses events without a key"


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    found = pair.primary.conninfo(fresh_database)
    run(found, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE keyless (n int)")
    return found


def run(conninfo: str, *statements: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def compacted(kafka: Broker, *topics: str) -> None:
    """Make topics of two partitions as docs/guides/configure.md lets operators make them."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    new = [NewTopic(topic, 2, 1, config={"cleanup.policy": "compact"}) for topic in topics]
    for future in admin.create_topics(new).values():
        future.result(patient(30))


def values(bridge: Bridge) -> list[Any]:
    return [event["op"] for event in bridge.events("t")]


@pytest.mark.long
def test_a_truncate_is_warned_of_refused_by_name_and_left_out_on_request(
    conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo)
    compacted(kafka, f"{bridge.prefix}.public.t")
    bridge.start().streaming()
    (line,) = [line for line in bridge.output.splitlines() if WARNING in line]
    assert "table=public.t" in line and "shaping.skip: {public.t: [t]}" in line
    found = Examined(bridge).one("topic-refuses-events")
    assert (found["severity"], found["subject"]) == ("warning", "public.t")
    assert "cleanup.policy=delete" in found["remedy"]["text"]
    run(conninfo, "INSERT INTO t VALUES (1)", "TRUNCATE t", "INSERT INTO t VALUES (2)")
    for _ in range(2):  # and at each restart
        assert bridge.exit_code() == ExitCode.RECORD_REFUSED
        last = bridge.output.splitlines()[-1]
        assert "shaping.skip: {public.t: [t]}" in last and "max.message.bytes" not in last
        bridge.start()
    assert bridge.exit_code() == ExitCode.RECORD_REFUSED
    told = bridge.output.count(WARNING)
    again = new_bridge(conninfo, shaping={"skip": {"public.t": ["t"]}}).start().streaming()
    again.caught_up()
    assert values(again) == ["c", "c"]
    assert WARNING not in again.output and told == 3
    assert "topic-refuses-events" not in {name for name, _ in Examined(again).names()}
    assert again.stop() == 0


@pytest.mark.long
def test_a_refused_truncate_may_be_a_dead_letter(
    conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, on_refused="dead_letter")
    compacted(kafka, f"{bridge.prefix}.public.t")
    bridge.start().streaming()
    run(conninfo, "INSERT INTO t VALUES (1)", "TRUNCATE t", "INSERT INTO t VALUES (2)")
    bridge.caught_up()
    assert values(bridge) == ["c", "c"]
    ((_, letter),) = bridge.records("dead")
    document = json.loads(letter or b"")
    assert document["table"] == "public.t" and '"op":"t"' in document["value"]["text"]
    assert bridge.stop() == 0


@pytest.mark.long
def test_each_event_of_a_table_without_a_key_is_refused(
    conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    """Also where the settings would make the topic so, before there is one."""
    topics = {"*.keyless": {"config": {"cleanup.policy": "compact"}}}
    bridge = new_bridge(conninfo, formats={"topics": topics}).start().streaming()
    (line,) = [line for line in bridge.output.splitlines() if WARNING in line]
    assert "table=public.keyless" in line and "shaping.keys" in line
    found = Examined(bridge).one("topic-refuses-events")
    assert (found["severity"], found["subject"]) == ("critical", "public.keyless")
    run(conninfo, "INSERT INTO keyless VALUES (1)")
    assert bridge.exit_code() == ExitCode.RECORD_REFUSED
    last = bridge.output.splitlines()[-1]
    assert "cleanup.policy=delete" in last and "max.message.bytes" not in last
