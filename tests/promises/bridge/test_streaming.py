"""The bridge on a live database: what is created, streamed, confirmed and left behind."""

import base64
import contextlib
import json
import random
import signal
import threading

import psutil
import psycopg
import pytest

from schemas.events import Envelope, schema_topic
from schemas.lsn import format_lsn
from schemas.schema_events import SchemaEvent
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import committed
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient_ms


def test_first_start_makes_everything_and_a_clean_stop_confirms_it(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text, at timestamp)")
        bridge = new_bridge(conninfo).start().streaming()
        connection.execute("INSERT INTO t SELECT g, 'n' || g, now() FROM generate_series(1, 9) g")
        connection.execute("UPDATE t SET note = NULL WHERE id < 4")
        connection.execute("UPDATE t SET id = 100 WHERE id = 9")
        connection.execute("DELETE FROM t WHERE id = 8")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        bridge.assert_kafka_equals(conninfo, "t")
        for event in bridge.events("t"):
            assert Envelope.model_validate(event).source.db == fresh_database
        last = bridge.progress()[-1]
        expected = (True, False, False, format_lsn(last.position.end_lsn))
        query = (
            "SELECT failover, temporary, active, confirmed_flush_lsn::text"
            " FROM pg_replication_slots WHERE slot_name = %s"
        )

        def ended() -> bool:
            """The walsender may end a moment after the bridge."""
            return connection.execute(query, [bridge.slot]).fetchone() == expected

        eventually(ended, what=f"the slot is {expected}")
        origin = connection.execute(
            "SELECT pg_replication_origin_progress(%s, true)::text", [f"slotbridge_{bridge.slot}"]
        ).fetchone()
        assert origin == (format_lsn(last.position.end_lsn),)


@pytest.mark.long
def test_the_shape_of_a_table_is_published_once_and_again_when_it_changes(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo).start().streaming()
        connection.execute("INSERT INTO t VALUES (1)")
        bridge.caught_up()
        assert bridge.stop() == 0
        bridge.start().streaming()
        connection.execute("INSERT INTO t VALUES (2)")
        connection.execute("ALTER TABLE t ADD COLUMN price numeric(10, 2)")
        connection.execute("INSERT INTO t VALUES (3, 1.5)")
        bridge.caught_up()
        assert bridge.stop() == 0
    topic = schema_topic(bridge.prefix)
    shapes = [
        SchemaEvent.model_validate_json(value)
        for _partition, _key, value in committed(bridge.kafka.bootstrap_servers, topic)
        if value is not None
    ]
    assert [[c.name for c in shape.after] for shape in shapes] == [["id"], ["id", "price"]]
    assert shapes[1].before == shapes[0].after
    assert [event["after"] for event in bridge.events("t") if event["after"].get("price")] == [
        {"id": 3, "price": "1.50"}
    ]


@pytest.mark.long
def test_truncate_reaches_every_partition(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo).start().streaming()
        connection.execute("INSERT INTO t SELECT generate_series(1, 50)")
        connection.execute("TRUNCATE t")
        connection.execute("INSERT INTO t VALUES (7)")
        bridge.caught_up()
    truncates = [e for e in bridge.events("t") if e["op"] == "t"]
    assert len(truncates) == 2
    assert len({e["source"]["seq"] for e in truncates}) == 1
    bridge.assert_kafka_equals(conninfo, "t")


def test_unpublished_writes_move_the_slot(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE published (id int PRIMARY KEY)")
        connection.execute("CREATE TABLE other (id int)")
        bridge = new_bridge(conninfo, tables=("public.published",)).start().streaming()
        connection.execute("INSERT INTO other SELECT generate_series(1, 20000)")
        bridge.caught_up()
        assert bridge.stop() == 0
        assert max(record.position.seq for record in bridge.progress()) == 0


def test_a_large_transaction_leaves_in_parts_and_resumes_in_the_middle(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        bridge = new_bridge(conninfo, transaction_bytes_max=2**18)
        bridge.start(SLOTBRIDGE_FAILPOINT="between parts:3").streaming()
        connection.execute(
            "INSERT INTO t SELECT g, repeat('x', 50) FROM generate_series(1, 40000) g"
        )
        for following in ({"SLOTBRIDGE_FAILPOINT": "between parts:9"}, {}):
            assert bridge.exit_code() == -signal.SIGKILL
            assert bridge.progress()[-1].position.seq, "it is in the middle"
            bridge.start(**following)
        bridge.streaming().caught_up()
        assert bridge.stop() == 0
        bridge.assert_kafka_equals(conninfo, "t")
        assert set(bridge.identities("t").values()) == {1}


@pytest.mark.long
def test_killed_at_random_moments_under_load_nothing_is_lost_or_repeated(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    pair.primary.run_tool("pgbench", ["-i", "-q", "-I", "dtp", conninfo])
    tables = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history")
    bridge = new_bridge(conninfo).start().streaming()
    pair.primary.run_tool("pgbench", ["-i", "-q", "-I", "g", conninfo])
    enough = threading.Event()

    def work() -> None:
        while not enough.is_set():
            pair.primary.run_tool("pgbench", ["-n", "-c", "3", "-T", "3", conninfo])

    load = threading.Thread(target=work)
    load.start()
    moments = random.Random(20261121)
    for _ in range(5):
        load.join(timeout=moments.uniform(0.05, 1.5))
        bridge.kill()
        bridge.start().streaming()
    enough.set()
    load.join()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, *tables)
    with psycopg.connect(conninfo) as connection:
        row = connection.execute("SELECT count(*) FROM pgbench_history").fetchone()
    assert row is not None
    for table in ("pgbench_accounts", "pgbench_branches", "pgbench_tellers"):
        updates = sum(1 for event in bridge.events(table) if event["op"] == "u")
        assert updates == row[0], f"{table}: {updates} updates of {row[0]} transactions"


@pytest.mark.long
def test_the_key_is_the_primary_key_under_every_replica_identity(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in ("fully", "nothing", "keyless"):
            key = "" if table == "keyless" else "PRIMARY KEY"
            connection.execute(f"CREATE TABLE {table} (id int {key}, note text)".encode())
        connection.execute("ALTER TABLE fully REPLICA IDENTITY FULL")
        connection.execute("ALTER TABLE nothing REPLICA IDENTITY NOTHING")
        connection.execute("ALTER TABLE keyless REPLICA IDENTITY FULL")
        bridge = new_bridge(conninfo).start().streaming()
        for table in ("fully", "nothing", "keyless"):
            connection.execute(f"INSERT INTO {table} VALUES (1, 'a')".encode())
        for table in ("fully", "keyless"):
            connection.execute(f"UPDATE {table} SET note = 'b'".encode())
        connection.execute("UPDATE fully SET id = 2")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    topic = f"{bridge.prefix}.public"
    servers = bridge.kafka.bootstrap_servers
    assert {key for _, key, _ in committed(servers, f"{topic}.nothing")} == {b'{"id":1}'}
    assert {key for _, key, _ in committed(servers, f"{topic}.keyless")} == {None}
    assert sorted(e["op"] for e in bridge.events("keyless")) == ["c", "u"]
    assert sorted(e["op"] for e in bridge.events("fully")) == ["c", "c", "d", "u"]
    updates = [e for e in bridge.events("fully") if e["op"] == "u"]
    assert updates[0]["before"] == {"id": 1, "note": "a"}
    bridge.assert_kafka_equals(conninfo, "fully", "nothing")


@pytest.mark.long
def test_a_message_right_before_a_commit_and_a_restart_between_them(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Its LSN is where the commit record begins: resuming there must not skip the commit."""
    conninfo = pair.primary.conninfo(fresh_database)
    with (
        psycopg.connect(conninfo, autocommit=True) as connection,
        psycopg.connect(conninfo) as other,
    ):
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo, heartbeat_interval_ms=60_000).start().streaming()
        other.execute("INSERT INTO t VALUES (1)")
        other.execute("SELECT pg_logical_emit_message(false, 'slotbridge.failover', 'hello', true)")
        topic = f"{bridge.prefix}.message"
        servers = bridge.kafka.bootstrap_servers
        eventually(lambda: list(committed(servers, topic)), what="the message is in Kafka")
        bridge.kill()
        other.commit()
        connection.execute("INSERT INTO t VALUES (2)")
        bridge.start().streaming().caught_up()
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")
    assert len(list(committed(servers, topic))) == 1


def test_messages_that_nobody_wants_are_skipped(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Any login may write them, of any size: in plain, prepared and streamed transactions."""
    conninfo = pair.primary.conninfo(fresh_database, options="-c logical_decoding_work_mem=64kB")
    emit = "SELECT pg_logical_emit_message({}, '{}', repeat('a', {}))"
    large = [
        emit.format(transactional, prefix, 3_000_000)
        for transactional in ("true", "false")
        for prefix in ("x", "slotbridge", "slotbridge.snapshot", "slotbridge.failover")
    ]
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo, two_phase=True).start().streaming()
        first = 0
        for number, rows in enumerate((1, 5000)):
            for end in ("COMMIT", f"PREPARE TRANSACTION '{fresh_database}{number}'"):
                rows_of = f"generate_series({first}, {first + rows - 1}) g"
                first += rows
                insert = f"INSERT INTO t SELECT g FROM {rows_of}"
                for statement in ("BEGIN", *large, insert, *large, end):
                    connection.execute(statement.encode())
                if end != "COMMIT":
                    connection.execute(f"COMMIT PREPARED '{fresh_database}{number}'".encode())
        for statement in (*large, emit.format("true", "slotbridge.failover", 9)):
            connection.execute(statement.encode())
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")
    assert "logical messages are skipped" in bridge.output and "prefix=x\n" in bridge.output
    records = committed(bridge.kafka.bootstrap_servers, f"{bridge.prefix}.message")
    contents = [json.loads(value)["message"]["content"] for _, _, value in records if value]
    assert {*contents} == {"", base64.b64encode(b"a" * 9).decode()}


@pytest.mark.long
def test_many_sessions_leave_no_threads_or_descriptors(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo).start().streaming()
        connection.execute("INSERT INTO t VALUES (0)")
        bridge.caught_up()
        process = psutil.Process(bridge.pid)
        for number in range(1, 13):
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE slot_name = %s",
                [bridge.slot],
            )
            eventually(
                lambda number=number: bridge.output.count("[info     ] streaming") > number,  # type: ignore[misc]
                what=f"session {number + 1} streams",
            )
            connection.execute("INSERT INTO t VALUES (%s)", [number])
            bridge.caught_up()
            if number == 2:
                threads, descriptors = process.num_threads(), process.num_fds()
        eventually(
            lambda: process.num_threads() <= threads + 4 and process.num_fds() <= descriptors + 8,
            what=f"about {threads} threads and {descriptors} descriptors are left",
        )
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")


def test_a_server_that_hangs_is_left(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Its kernel still acknowledges, so that only the bridge's own deadline can tell."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo, sql_deadline_ms=patient_ms(500)).start().streaming()
        query = (
            "SELECT client_port FROM pg_stat_activity WHERE application_name = 'slotbridge'"
            " AND datname = current_database()"
        )

        def hangs() -> psutil.Process | None:
            """The backend of its SQL session, suspended; a busy one may have been left already."""
            row = connection.execute(query).fetchone()
            backend = _peer_of(row[0], pair.primary.port) if row is not None else None
            with contextlib.suppress(psutil.NoSuchProcess):
                if backend is not None:
                    backend.suspend()
                    return backend
            return None

        backend = eventually(hangs, what="its SQL session is there")
        assert backend is not None
        lost, sessions = bridge.output.count("session lost"), bridge.sessions
        try:
            eventually(
                lambda: bridge.output.count("session lost") > lost,
                what="the hanging server is left",
            )
        finally:
            backend.resume()
        eventually(lambda: bridge.sessions > sessions, what="a new session streams")
        connection.execute("INSERT INTO t VALUES (1)")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")


def _peer_of(client_port: int, server_port: int) -> psutil.Process | None:
    """The server process at the other end of a local connection; its pid may be a container's."""
    found = {
        c.pid
        for c in psutil.net_connections("tcp4")
        if c.pid and c.raddr and (c.raddr.port, c.laddr.port) == (client_port, server_port)
    }
    if not found:
        return None
    process = psutil.Process(found.pop())
    assert process.name() == "postgres"
    return process
