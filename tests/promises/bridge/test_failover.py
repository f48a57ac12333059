"""The bridge through a promotion: it follows, and refuses servers that would make it wrong."""

import re
import threading

import psycopg
import pytest

from schemas.errors import ExitCode
from services.testbed.pair import set_parameter
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.providers.databases import connect
from tests.providers.interface import Provider, Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient_ms

BEYOND = 25
BALANCES = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers")


def both(trio: Trio) -> str:
    """A connection setting that names both servers."""
    return trio.primary.conninfo(
        trio.dbname,
        host="127.0.0.1,127.0.0.1",
        port=f"{trio.primary.port},{trio.standby.port}",
        target_session_attrs="read-write",
    )


def promote(trio: Trio) -> None:
    with psycopg.connect(trio.standby.conninfo(), autocommit=True) as connection:
        connection.execute("SELECT pg_promote()")


def test_primary_killed_under_load_the_bridge_follows_and_refuses_the_old_one(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    trio = new_pair()
    primary = trio.primary.conninfo(trio.dbname)
    standby = trio.standby.conninfo(trio.dbname)
    trio.primary.run_tool("pgbench", ["-i", "-q", "-I", "dtp", primary])
    bridge = new_bridge(both(trio)).start().streaming(primary)
    trio.primary.run_tool("pgbench", ["-i", "-q", "-I", "g", primary])
    bridge.caught_up(primary)  # its TRUNCATE has created the topics that are read below
    await_ready(trio.primary, trio.standby, bridge.slot)
    arguments = ["-n", "-c", "3", "-T", "60", primary]
    load = threading.Thread(
        target=trio.primary.run_tool, args=("pgbench", arguments), kwargs={"check": False}
    )
    load.start()
    eventually(
        lambda: sum(1 for _ in bridge.events("pgbench_history")) > 500,
        what="500 transactions are in Kafka",
        timeout_s=60,
    )
    trio.primary.kill()
    promote(trio)
    load.join()
    bridge.streaming(standby)
    trio.standby.run_tool("pgbench", ["-n", "-c", "3", "-t", "200", standby])
    bridge.caught_up(standby)
    assert {record.server.timeline for record in bridge.progress()} == {1, 2}

    # The old primary comes back beside the new one: the newer timeline is chosen.
    trio.primary.start()
    assert bridge.stop() == 0, bridge.output
    bridge.start().streaming(standby)
    trio.standby.run_tool("pgbench", ["-n", "-c", "3", "-t", "50", standby])
    bridge.caught_up(standby)
    assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(standby, *BALANCES, "pgbench_history")
    with psycopg.connect(standby) as connection:
        row = connection.execute("SELECT count(*) FROM pgbench_history").fetchone()
    assert row is not None
    for table in BALANCES:
        assert sum(1 for e in bridge.events(table) if e["op"] == "u") == row[0]

    # Alone, the old primary is refused: it is on an older timeline.
    stale = new_bridge(primary, slot=bridge.slot, connect_deadline_ms=patient_ms(700)).start()
    assert stale.exit_code() == ExitCode.TIMELINE, stale.output
    assert "old primary" in stale.output
    inserted = sum(1 for event in bridge.events("pgbench_history") if event["op"] == "c")
    assert inserted == row[0]


@pytest.mark.long
def test_a_timeline_once_met_is_not_left_though_nothing_has_come_of_it(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    """The new primary is gone before it has any change to tell; the old one comes back alone."""
    trio = new_pair()
    primary = trio.primary.conninfo(trio.dbname)
    with connect(trio.primary, trio.dbname) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(both(trio)).start().streaming(primary)
        connection.execute("INSERT INTO t VALUES (1)")
    bridge.caught_up(primary)
    await_ready(trio.primary, trio.standby, bridge.slot)
    trio.primary.kill()
    promote(trio)
    bridge.streaming(trio.standby.conninfo(trio.dbname)).kill()
    trio.standby.kill()
    trio.primary.start()
    for name in ("synchronized_standby_slots", "synchronous_standby_names"):
        set_parameter(trio.primary, name, "")
    with connect(trio.primary, trio.dbname) as connection:
        connection.execute("SET synchronous_commit = local")
        connection.execute("INSERT INTO t VALUES (2)")
    stale = new_bridge(both(trio), slot=bridge.slot, connect_deadline_ms=patient_ms(700)).start()
    assert stale.exit_code() == ExitCode.TIMELINE, stale.output
    assert [event["after"] for event in bridge.events("t")] == [{"id": 1}]
    first, *_, last = bridge.progress()
    assert (first.server.timeline, last.server.timeline) == (1, 2)


def test_divergence_stops_the_bridge_and_names_what_is_beyond(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    """Without synchronized_standby_slots the bridge can be ahead of the standby it must follow."""
    trio = new_pair(synchronous=False)
    primary = trio.primary.conninfo(trio.dbname)
    with psycopg.connect(primary, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(both(trio)).start().streaming(primary)
        connection.execute("INSERT INTO t VALUES (1)")
        bridge.caught_up(primary)
        await_ready(trio.primary, trio.standby, bridge.slot)
        connection.execute("ALTER SYSTEM SET synchronized_standby_slots = ''")
        connection.execute("SELECT pg_reload_conf()")
        trio.standby.stop()
        for start in range(100, 100 + BEYOND):
            connection.execute("INSERT INTO t VALUES (%s), (%s)", [start, start + 1000])
        bridge.caught_up(primary)
    trio.primary.kill()
    trio.standby.start()
    promote(trio)
    assert bridge.exit_code() == ExitCode.TIMELINE, bridge.output
    (error,) = [line for line in bridge.output.splitlines() if line.startswith("error: ")]
    assert "never had the changes in between" in error
    assert f"{BEYOND} transactions: xid " in error
    assert "and 5 more" in error
    listed = re.findall(r"xid (\d+) at [0-9A-F/]+ \(public\.t 2\)", error)
    beyond = [e["source"]["txId"] for e in bridge.events("t") if e["after"]["id"] >= 1000]
    assert [int(xid) for xid in listed] == sorted(beyond)[:20]
    assert "synchronized_standby_slots" in error


def test_a_second_bridge_waits_and_takes_over(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        first = new_bridge(conninfo).start().streaming()
        second = new_bridge(conninfo).start()
        eventually(lambda: "hot standby" in second.output, what="the second bridge waits")
        connection.execute("INSERT INTO t SELECT generate_series(1, 100)")
        first.caught_up()
        assert first.running
        first.kill()
        eventually(lambda: "streaming" in second.output, what="the second bridge takes over")
        connection.execute("INSERT INTO t SELECT generate_series(101, 200)")
        second.caught_up()
        assert second.stop() == 0
    second.assert_kafka_equals(conninfo, "t")
