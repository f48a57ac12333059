"""Switchovers that do not know the bridge: their fence ends its SQL session, not its stream."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.testbed.bed import Bed
from tests.promises.bridge.running import Bridge
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.drill import both
from tests.promises.failover.servers import ask, configuration, slotfailover, subscribe, tell, write
from tests.providers.databases import connect
from tests.providers.interface import Broker, Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient_ms

ORIGIN = "SELECT pg_replication_origin_progress('slotbridge_{}', true) - '0/0'"


@pytest.fixture
def trio(local_trio: NewTrio) -> Trio:
    made = local_trio()
    subscribe(made, "s1")
    return made


@pytest.fixture
def bridge(trio: Trio, kafka: Broker, topic_prefix: str, tmp_path: Path) -> Iterator[Bridge]:
    made = Bridge(tmp_path, both(trio), kafka, topic_prefix, heartbeat_interval_ms=20)
    made.start().streaming(trio.primary.conninfo(trio.dbname))
    write(trio.primary, trio.dbname, 1)
    await_ready(trio.primary, trio.standby, made.slot)
    yield made
    made.end()


@pytest.mark.long
def test_heartbeats_that_meet_the_fence_do_not_keep_a_switchover_from_its_end(
    trio: Trio, bridge: Bridge, local_bed: Bed, tmp_path: Path
) -> None:
    config = configuration(tmp_path, trio, machines=machines(trio, local_bed))
    ran = slotfailover("switchover", "--to", "b", "--config", config, "--yes")
    assert ran.code == 0, ran.err
    conninfo = trio.standby.conninfo(trio.dbname)
    bridge.streaming(conninfo)
    write(trio.standby, trio.dbname, 101)
    bridge.caught_up(conninfo)
    bridge.assert_kafka_equals(conninfo, "t")


@pytest.mark.long
def test_a_switchover_that_only_fences_ends_with_the_bridge_at_the_new_primary(
    trio: Trio, bridge: Bridge, tmp_path: Path
) -> None:
    """As after the quick start: neither a stop command nor bridge.control_url."""
    path = configuration(tmp_path, trio, step_deadline_ms=60_000)
    both_sections = yaml.safe_load(bridge.config.read_text()) | yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(both_sections))
    ran = slotfailover("switchover", "--to", "b", "--config", path, "--yes")
    assert "wait for the bridge at b" in ran.err
    left = re.findall(r"TO DO +(\w+):", ran.out)
    assert (ran.code, left) == (1, ["a"]), ran.out + ran.err + bridge.output  # a is to rejoin
    assert trio.primary.running
    conninfo = trio.standby.conninfo(trio.dbname)
    write(trio.standby, trio.dbname, 101)
    bridge.caught_up(conninfo)
    bridge.assert_kafka_equals(conninfo, "t")


@pytest.mark.long
def test_heartbeats_go_on_once_a_fence_is_taken_back(
    trio: Trio, bridge: Bridge, local_bed: Bed, tmp_path: Path
) -> None:
    config = configuration(
        tmp_path, trio, machines=machines(trio, local_bed), step_deadline_ms=patient_ms(5_000)
    )
    origin = ORIGIN.format(bridge.slot)
    with connect(trio.subscriber, trio.dbname) as locker, locker.transaction():
        locker.execute("LOCK TABLE t")  # s1 can't apply the row, nor be confirmed past it
        write(trio.primary, trio.dbname, 101, 1)
        ran = slotfailover("switchover", "--to", "b", "--config", config, "--yes")
    assert ran.code == 13, ran.err
    behind = re.findall(r"(\w+) \d+ bytes behind", ran.err)
    assert set(behind) == {"s1"}, ran.err
    before = ask(trio.primary, origin, trio.dbname)
    tell(trio.primary, "INSERT INTO t VALUES (201, 'x')", dbname=trio.dbname)
    eventually(lambda: ask(trio.primary, origin, trio.dbname) > before, what="heartbeats go on")
    bridge.caught_up(trio.primary.conninfo(trio.dbname))
    assert bridge.sessions == 1, bridge.output
    bridge.assert_kafka_equals(trio.primary.conninfo(trio.dbname), "t")
