"""What `slotbridge recover` meets beside rows: refused records, shared topics, publications."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas.errors import ExitCode
from services.bridge.failpoints import VARIABLE
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.recover_process import (
    assert_equal,
    change_unseen,
    drop_slot,
    fill,
    recover,
    recovered,
)
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_dead_letters import dead, noise
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    return pair.primary.conninfo(fresh_database)


def stop(bridge: Bridge) -> None:
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_rows_that_kafka_refuses_are_dead_letters_again(
    conninfo: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    """The broker refuses whole batches: the repair learns what it may send, as the bridge does."""
    bridge = new_bridge(conninfo, on_refused="dead_letter")
    topic = NewTopic(f"{bridge.prefix}.public.t", 1, 1, config={"max.message.bytes": "20000"})
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([topic])[topic.topic].result(patient(60))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (1, 'small'), (2, 'small')")
        stop(bridge)
        drop_slot(connection, bridge.slot)
        connection.execute("INSERT INTO t VALUES (3, %s), (4, 'small')", [noise(40_000)])
        connection.execute("UPDATE t SET v = %s WHERE id = 2", [noise(40_000)])
        done = recovered(bridge)
        assert (done.tables["public.t"].created, done.tables["public.t"].updated) == (2, 1)
        letters = dead(bridge)
        assert {(one.commit_lsn, one.end_lsn) for one in letters} == {(done.commit_lsn, done.lsn)}
        keys = sorted(one.key.text or "" for one in letters if one.key is not None)
        assert keys == ['{"id":2}', '{"id":3}']
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (5, 'small')")
        stop(bridge)
    assert [e["after"]["id"] for e in bridge.events("t")] == [1, 2, 4, 5]


@pytest.mark.long
def test_an_open_transaction_is_named_and_can_be_left(conninfo: str, new_bridge: NewBridge) -> None:
    """A new slot waits for it. Given up by Ctrl-C, nothing stays behind on the server."""
    bridge = new_bridge(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (1)")
        stop(bridge)
        drop_slot(connection, bridge.slot)
        with psycopg.connect(conninfo, application_name="slow_report") as other:
            other.execute("INSERT INTO t VALUES (2)")
            program = str(Path(sys.executable).parent / "slotbridge")
            command = [program, "recover", "--config", str(bridge.config), "--yes"]
            with subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                # A shell's background jobs, and with them the tests, may have it ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            ) as running:
                assert running.stdout is not None
                said = next(line for line in running.stdout if "(slow_report) since" in line)
                assert f"pid {other.info.backend_pid} " in said
                running.send_signal(signal.SIGINT)
                running.stdout.read()
                assert running.wait(patient(60)) == 130
            slots = "SELECT FROM pg_replication_slots WHERE slot_name = %s"
            eventually(
                lambda: not connection.execute(slots, [bridge.slot]).fetchall(),
                what="the slot is not made",
                timeout_s=60,
            )
        assert recovered(bridge).tables["public.t"].created == 1
        bridge.start().streaming()
        stop(bridge)


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    ["TRUNCATE t", "DROP TABLE u", "ALTER TABLE t ADD COLUMN n int DEFAULT 5", "VACUUM FULL t"],
)
def test_a_table_that_changes_while_the_slot_is_made(
    conninfo: str, new_bridge: NewBridge, change: str
) -> None:
    """Under the slot's database snapshot its rows would not be seen, or be others."""
    bridge = new_bridge(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in ("t", "u"):
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)".encode())
        bridge.start().streaming()
        for table in ("t", "u"):
            connection.execute(f"INSERT INTO {table} VALUES (1), (2)".encode())
        stop(bridge)
        drop_slot(connection, bridge.slot)
        program = str(Path(sys.executable).parent / "slotbridge")
        command = [program, "recover", "--config", str(bridge.config), "--yes"]
        environment = bridge.environment | {VARIABLE: "recover slot made:1:stop"}
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        ) as running:
            process = psutil.Process(running.pid)
            eventually(
                lambda: process.status() == psutil.STATUS_STOPPED,
                what="the slot is made",
                timeout_s=60,
            )
            connection.execute(change.encode())
            running.send_signal(signal.SIGCONT)
            assert running.stderr is not None
            said = running.stderr.read()
            assert running.wait(patient(60)) == ExitCode.SERVER_UNREACHABLE, said
        assert "run `slotbridge recover` again" in said, said
        recovered(bridge)
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (3)")
        stop(bridge)
    told = {e["after"]["id"] for e in bridge.events("t") if e["op"] == "c"}
    assert told == {1, 2, 3}


@pytest.mark.long
def test_a_snapshot_that_was_broken_off(conninfo: str, new_bridge: NewBridge) -> None:
    """The repair publishes the rows that it had not reached; it is done then."""
    quiet = {"heartbeat_interval_ms": 60_000}  # whose commits would count
    bridge = new_bridge(conninfo, snapshot={"mode": "initial", "chunk_rows_max": 5}, **quiet)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        fill(connection)
        topic = f"{bridge.prefix}.public.t"
        while topic not in bridge.topics():  # a busy machine commits before the first rows
            bridge.start(**{VARIABLE: "after kafka commit:3"})
            assert bridge.exit_code() == -signal.SIGKILL, bridge.output
        drop_slot(connection, bridge.slot)
        change_unseen(connection)
        assert len([*bridge.events("t")]) < 300
        assert recovered(bridge).tables["public.t"].created > 0
        repaired = len([*bridge.events("t")])
        bridge.start().streaming()
        connection.execute("UPDATE t SET note = 'later' WHERE id = 7")
        stop(bridge)
        assert len([*bridge.events("t")]) == repaired + 1, "rows are read again"
    assert_equal(bridge, conninfo)


@pytest.mark.long
def test_a_key_column_that_is_renamed(conninfo: str, new_bridge: NewBridge) -> None:
    """No consumer could delete rows by a column that the table no longer has."""
    bridge = new_bridge(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (1), (2)")
        stop(bridge)
        drop_slot(connection, bridge.slot)
        connection.execute("ALTER TABLE t RENAME id TO number")
        done = recovered(bridge).tables["public.t"]
        assert (done.emptied, done.created, done.updated, done.deleted) == (True, 2, 0, 0)
        assert not recovered(bridge, "--force").tables["public.t"].deleted


@pytest.mark.long
def test_tables_with_one_topic_and_equal_keys(conninfo: str, new_bridge: NewBridge) -> None:
    """A tombstone behind a delete of one table tells nothing of the other one's row."""
    routes = [{"tables": r"public\.part_\d", "topic": "{prefix}.parts"}]
    bridge = new_bridge(conninfo, shaping={"routes": routes})
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in ("part_1", "part_2"):
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)".encode())
        bridge.start().streaming()
        for table in ("part_1", "part_2"):
            connection.execute(f"INSERT INTO {table} VALUES (1, 1), (2, 2)".encode())
        connection.execute("DELETE FROM part_2 WHERE id = 1")
        stop(bridge)
        drop_slot(connection, bridge.slot)
        connection.execute("UPDATE part_2 SET v = 3")
        done = recovered(bridge).tables
    assert [(one.created, one.updated, one.deleted) for _, one in sorted(done.items())] == [
        (0, 0, 0),
        (0, 1, 0),
    ]


@pytest.mark.long
def test_publications_that_do_not_tell_all(conninfo: str, new_bridge: NewBridge) -> None:
    """Topics that never get deletes are not to get them from a repair; no publication is made."""
    bridge = new_bridge(conninfo)
    name = bridge.publication
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute(
            f"CREATE PUBLICATION {name} FOR TABLE t WITH (publish = 'insert, update')".encode()
        )
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (1), (2)")
        connection.execute("DELETE FROM t WHERE id = 1")
        stop(bridge)
        drop_slot(connection, bridge.slot)
        archive = recover(bridge)
        assert archive.returncode == ExitCode.SERVER_SETTING, archive.stderr
        assert "leaves out delete, truncate" in archive.stderr
        connection.execute(f"DROP PUBLICATION {name}".encode())
        gone = recover(bridge)
        assert gone.returncode == ExitCode.SERVER_SETTING, gone.stderr
        assert "the publication does not exist" in gone.stderr
        assert connection.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)
        connection.execute(f"CREATE PUBLICATION {name} FOR TABLE t".encode())
        assert recovered(bridge).tables["public.t"].deleted == 1
        bridge.start().streaming()
        assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_an_old_row_that_would_make_an_update_too_large(
    conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, n int, v text)")
        connection.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (1, 1, repeat('x', 900000)), (2, 1, 'short')")
        stop(bridge)
        drop_slot(connection, bridge.slot)
        connection.execute("UPDATE t SET n = 2")
        recovered(bridge)
    repaired = [e for e in bridge.events("t") if e["source"]["snapshot"] == "repair"]
    assert {e["after"]["id"]: e["before"] for e in repaired} == {
        1: None,
        2: {"id": 2, "n": 1, "v": "short"},
    }
    assert json.dumps(repaired).count("x" * 900_000) == 1


@pytest.mark.long
def test_a_column_that_is_gone_makes_no_difference(conninfo: str, new_bridge: NewBridge) -> None:
    """Of a table that lost a column, not every row is published anew."""
    bridge = new_bridge(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, yes bool, former text)")
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (1, true, 'x'), (2, true, 'y')")
        stop(bridge)
        drop_slot(connection, bridge.slot)
        connection.execute("ALTER TABLE t DROP COLUMN former")
        connection.execute("DELETE FROM t WHERE id = 2")
        done = recovered(bridge).tables["public.t"]
        assert (done.created, done.updated, done.deleted) == (0, 0, 1)
        connection.execute("ALTER TABLE t ALTER yes TYPE int USING yes::int")
        assert recovered(bridge, "--force").tables["public.t"].updated == 1
