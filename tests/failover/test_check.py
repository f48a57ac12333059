"""`slotfailover check` on real servers: ready, and each reason why not."""

from pathlib import Path

import pytest

from tests.conftest import NewPair
from tests.failover.servers import ask, configuration, slotfailover, subscribe, tell, write
from tests.providers.interface import Trio
from tests.providers.waiting import eventually


@pytest.fixture
def trio(new_pair: NewPair) -> Trio:
    made = new_pair()
    subscribe(made, "s1")
    return made


def test_ready_then_each_reason_why_not(trio: Trio, tmp_path: Path) -> None:
    config = configuration(tmp_path, trio)
    ran = slotfailover("check", "--config", config)
    assert (ran.code, ran.out, ran.err) == (0, "ready     s1 on b\n", "")

    _pair_conditions(trio, config)
    _slot_without_failover(trio, config)
    _blocking_slot(trio, config)
    _dead_primary(trio, config)


def _pair_conditions(trio: Trio, config: Path) -> None:
    settings = {
        trio.primary: {"synchronized_standby_slots": "''"},
        trio.standby: {
            "sync_replication_slots": "off",
            "hot_standby_feedback": "off",
        },
    }
    for server, changes in settings.items():
        for name, value in changes.items():
            tell(server, f"ALTER SYSTEM SET {name} = {value}")
        tell(server, "SELECT pg_reload_conf()")
    gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'slotsync worker')"
    eventually(lambda: ask(trio.standby, gone), what="the slotsync worker ends")
    report = slotfailover("check", "--config", config, "--json").json
    broken = {c["condition"] for c in report["conditions"] if not c["holds"]}
    assert broken == {
        "sync_replication_slots is on",
        "hot_standby_feedback is on",
        "the slotsync worker runs",
        "synchronized_standby_slots names the standby's slot",
    }
    assert "remedy" in slotfailover("check", "--config", config).out


def _slot_without_failover(trio: Trio, config: Path) -> None:
    """Breaker 1: the subscription's slot_name was altered to a slot made without failover."""
    tell(
        trio.primary,
        "SELECT pg_create_logical_replication_slot('plain', 'pgoutput')",
        dbname=trio.dbname,
    )
    tell(
        trio.subscriber,
        "ALTER SUBSCRIPTION s1 DISABLE",
        "ALTER SUBSCRIPTION s1 SET (slot_name = 'plain')",
        dbname=trio.dbname,
    )
    ran = slotfailover("check", "--config", config, "--json")
    found = {slot["slot"]: slot for slot in ran.json["slots"]}
    assert ran.code == 1
    assert found["s1"]["ready"]
    assert "failover is off" in found["plain"]["reasons"][0]["reason"]
    assert "subfailover = t at sub/s1" in found["plain"]["reasons"][0]["evidence"]
    tell(
        trio.subscriber,
        "ALTER SUBSCRIPTION s1 SET (slot_name = 's1')",
        "ALTER SUBSCRIPTION s1 ENABLE",
        dbname=trio.dbname,
    )


def _blocking_slot(trio: Trio, config: Path) -> None:
    """Breaker 10: the standby has a slot of its own of that name."""
    with_failover = (
        "SELECT pg_create_logical_replication_slot('late', 'pgoutput', false, false, true)"
    )
    tell(trio.primary, with_failover, dbname=trio.dbname)
    tell(trio.standby, "SELECT pg_create_physical_replication_slot('late')")
    ran = slotfailover("check", "--config", config)
    assert ran.code == 1
    assert "NOT READY late on b" in ran.out
    assert "slot of its own of that name" in ran.out
    tell(trio.standby, "SELECT pg_drop_replication_slot('late')")
    assert "does not have it" in slotfailover("check", "--config", config).out
    tell(trio.primary, "SELECT pg_drop_replication_slot('late')")


def _dead_primary(trio: Trio, config: Path) -> None:
    """Judged from standby and subscriber alone, and a consumer that got ahead of the standby."""
    tell(trio.primary, "ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
    trio.standby.stop()
    write(trio.primary, trio.dbname, 1)
    count = "SELECT count(*) FROM t"
    eventually(
        lambda: ask(trio.subscriber, count, trio.dbname) == 10, what="the subscriber got ahead"
    )
    trio.primary.kill()
    down = slotfailover("check", "--config", config)
    assert down.code == 1
    assert "there is no standby" in down.out
    trio.standby.start()
    ran = slotfailover("check", "--config", config, "--json")
    assert ran.code == 1
    assert ran.json["primary"] is None
    (verdict,) = ran.json["slots"]
    assert verdict["slot"] == "s1"
    assert "ahead of b" in verdict["reasons"][0]["reason"]
    refused = slotfailover("failover", "--config", config, "--yes")
    assert refused.code == 34
    assert "ahead of b" in refused.err
