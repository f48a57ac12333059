"""`slotbridge recover`: topics that lack changes are repaired in place, and the bridge goes on."""

import json
from collections import Counter

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from schemas.errors import ExitCode
from schemas.events import UNAVAILABLE
from services.bridge.failpoints import OF_A_RECOVERY, VARIABLE
from tests.marks import long_but
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import DECIDED_S
from tests.promises.bridge.recover_process import (
    assert_equal,
    assert_goes_on,
    change_unseen,
    drop_slot,
    fill,
    recover,
    recovered,
    touch,
)
from tests.promises.bridge.running import UNDECIDED_S, Bridge
from tests.providers.databases import once_free
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    return pair.primary.conninfo(fresh_database)


@pytest.fixture
def stopped(conninfo: str, new_bridge: NewBridge) -> Bridge:
    """It has published the table and some changes, and was stopped."""
    bridge = new_bridge(conninfo).start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        fill(connection)
        touch(connection)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return bridge


def repairs(bridge: Bridge, decided_s: float = DECIDED_S) -> Counter[str]:
    """How many events of each op a repair has published."""
    events = bridge.events("t", decided_s)
    return Counter(e["op"] for e in events if e["source"]["snapshot"] == "repair")


def test_a_slot_that_is_gone(stopped: Bridge, conninfo: str) -> None:
    bridge = stopped
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)
        change_unseen(connection)
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    told = recover(bridge, "--dry-run")
    assert (told.returncode, "the slot is gone" in told.stderr) == (0, True), told.stderr
    assert f"{bridge.prefix}.recovery" not in bridge.topics()
    done = recovered(bridge)
    assert "the slot is gone" in done.reason
    (table,) = done.tables.values()
    assert (table.created, table.updated, table.deleted) == (5, 11, 5)
    assert repairs(bridge) == {"c": 5, "u": 11, "d": 5}
    assert_equal(bridge, conninfo)
    again = recover(bridge)
    assert (again.returncode, "nothing to recover" in again.stdout) == (0, True), again.stderr
    assert_goes_on(bridge, conninfo)


@pytest.mark.parametrize("point", long_but("recover sent", OF_A_RECOVERY))
def test_killed_and_run_again(stopped: Bridge, conninfo: str, point: str) -> None:
    bridge = stopped
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)
        change_unseen(connection)
    killed = recover(bridge, **{VARIABLE: f"{point}:1"})
    assert killed.returncode == -9, killed.stderr
    published = point == "recover committed"
    assert bool(repairs(bridge, DECIDED_S if published else UNDECIDED_S)) is published
    if not published:
        assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
        noted = "`slotbridge recover` was interrupted" in bridge.output
        assert noted is (point in ("recover slot made", "recover sent")), bridge.output
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("UPDATE t SET note = 'meanwhile' WHERE id = 200")
        assert recovered(bridge).tables["public.t"].updated == 12
    assert_equal(bridge, conninfo)
    assert_goes_on(bridge, conninfo)


@pytest.mark.long
def test_a_transaction_of_which_kafka_has_a_part_ends_there(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """Its END counts that part, in the repair's Kafka transaction; also where it is killed."""
    bridge = new_bridge(conninfo, transaction_bytes_max=2**16)
    bridge.start(**{VARIABLE: "between parts:2"}).streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        connection.execute("INSERT INTO t SELECT g, 'large' FROM generate_series(1, 3001) g")
        assert bridge.exit_code() == -9, bridge.output
        sent = len([*bridge.events("t")])
        assert 0 < sent < 3001
        drop_slot(connection, bridge.slot)
    assert recover(bridge, **{VARIABLE: "recover sent:1"}).returncode == -9
    assert recovered(bridge).tables["public.t"].created == 3001 - sent
    boundaries = [json.loads(value) for _, value in bridge.records("transaction") if value]
    begin, end, *repair = boundaries[-4:]
    assert [one["status"] for one in (begin, end, *repair)] == ["BEGIN", "END", "BEGIN", "END"]
    assert (begin["id"], begin["ts_ms"]) == (end["id"], end["ts_ms"])
    counted = {"data_collection": "public.t", "event_count": sent}
    assert (end["event_count"], end["data_collections"]) == (sent, [counted])
    assert {one["id"].partition(":")[0] for one in repair} == {"0"}
    assert_equal(bridge, conninfo)
    assert_goes_on(bridge, conninfo)


@pytest.mark.long
def test_a_value_that_is_the_text_of_the_placeholder(conninfo: str, new_bridge: NewBridge) -> None:
    """It is a value as any other: row 1 has another one now, row 2 still has it."""
    bridge = new_bridge(conninfo).start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        connection.execute("INSERT INTO t VALUES (1, 'first'), (2, %s)", [UNAVAILABLE])
        connection.execute("UPDATE t SET note = %s WHERE id = 1", [UNAVAILABLE])
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        drop_slot(connection, bridge.slot)
        connection.execute("UPDATE t SET note = 'first' WHERE id = 1")
    assert recovered(bridge).tables["public.t"].updated == 1
    (repair,) = (e for e in bridge.events("t") if e["source"]["snapshot"] == "repair")
    assert repair["before"] == {"id": 1, "note": UNAVAILABLE}
    assert repair["after"] == {"id": 1, "note": "first"}


@pytest.mark.long
def test_a_slot_that_somebody_advanced(stopped: Bridge, conninfo: str) -> None:
    bridge = stopped
    with psycopg.connect(conninfo, autocommit=True) as connection:
        change_unseen(connection)
        connection.execute("SELECT pg_switch_wal()")
        advance = "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())"
        once_free(connection, advance, bridge.slot)
    assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    recovered(bridge)
    assert_goes_on(bridge, conninfo)


@pytest.mark.long
@pytest.mark.parametrize("lost", ["public.t", "progress"])
def test_a_topic_that_is_lost(stopped: Bridge, conninfo: str, kafka: Broker, lost: str) -> None:
    bridge, name = stopped, f"{stopped.prefix}.{lost}"
    without: tuple[str, ...] = ()
    if lost == "progress":
        with psycopg.connect(conninfo, autocommit=True) as connection:
            bridge.start().streaming()
            connection.execute("CREATE TABLE log (v int)")
            connection.execute("INSERT INTO log VALUES (1)")
            bridge.caught_up()
            assert bridge.stop() == 0, bridge.output
        without = ("--without", "public.log")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([name])[name].result(patient(30))
    eventually(lambda: name not in bridge.topics(), what="the topic is gone", timeout_s=60)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        change_unseen(connection)
    forced = () if lost == "progress" else ("--force",)  # the bridge does not judge it
    if not forced:
        assert bridge.start().exit_code() == ExitCode.WITNESSES_DISAGREE, bridge.output
    done = recovered(bridge, *forced, *without).tables["public.t"]
    assert done.created == (done.rows if lost == "public.t" else 5)
    assert_goes_on(bridge, conninfo)
    told = [line for line in bridge.output.splitlines() if "tables without a key: " in line]
    assert ["public.log" in line for line in told] == ([True] if without else [])


@pytest.mark.long
def test_a_topic_without_its_first_events(stopped: Bridge, conninfo: str, kafka: Broker) -> None:
    """Kafka's retention: which keys it had is not known, so the table is emptied first."""
    bridge, name = stopped, f"{stopped.prefix}.public.t"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    from confluent_kafka import OFFSET_END, TopicPartition

    wanted = [TopicPartition(name, partition, OFFSET_END) for partition in range(2)]
    for found in admin.delete_records(wanted).values():
        found.result(patient(30))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)
        change_unseen(connection)
    done = recovered(bridge).tables["public.t"]
    assert done.emptied and done.created == done.rows
    events = [e for e in bridge.events("t") if e["source"]["snapshot"] == "repair"]
    assert Counter(e["op"] for e in events) == {"t": 2, "c": done.rows}
    assert min((e["source"]["seq"], e["op"]) for e in events) == (0, "t")


def test_repair_refuses_what_it_can_not_prove(stopped: Bridge, conninfo: str) -> None:
    bridge = stopped
    with psycopg.connect(conninfo, autocommit=True) as connection:
        bridge.start().streaming()
        used = recover(bridge)
        assert used.returncode == ExitCode.SLOT_IN_USE, used.stderr
        assert bridge.stop() == 0
        drop_slot(connection, bridge.slot)
        connection.execute("CREATE TABLE k (v int)")
        keyless = recover(bridge)
        assert (keyless.returncode, "public.k has no primary key" in keyless.stderr) == (2, True)
        mistyped = recover(bridge, "--without", "public.k", "--without", "public.z")
        assert (mistyped.returncode, "public.z" in mistyped.stderr) == (2, True)
        with psycopg.connect(conninfo) as other:
            other.execute("INSERT INTO t VALUES (2000)")
            other.execute("PREPARE TRANSACTION 'undecided'")
        waits = recover(bridge, "--without", "public.k")
        assert (waits.returncode, "undecided" in waits.stderr) == (25, True), waits.stderr
        connection.execute("COMMIT PREPARED 'undecided'")
    assert recovered(bridge, "--without", "public.k").left_out == {"public.k": "has no primary key"}
    assert_goes_on(bridge, conninfo)


@pytest.mark.long
def test_the_same_database_needs_no_acceptance(stopped: Bridge, conninfo: str) -> None:
    """One that is given is no obstacle; of another database see test_recover_upgrade."""
    bridge = stopped
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)
    done = recover(bridge, "--accept", "other-database:s@1:2")
    assert done.returncode == 0 and "not used" in done.stderr, done.stderr
    assert_goes_on(bridge, conninfo)
