"""Snapshots through a running bridge: rows that were there before the slot are in Kafka, once."""

import json
import random
import threading
import time
from itertools import pairwise

import psycopg
import pytest
import yaml
from confluent_kafka.admin import AdminClient

from services.bridge.failpoints import OF_A_SNAPSHOT, VARIABLE
from services.postgres.sessions import ROWS as READING
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.snapshots import (
    DONE,
    INITIAL,
    Changes,
    assert_exact,
    await_chunks,
    chunks,
    done,
    fill,
    hasten,
    lift_limits,
    read_all,
    rows_a_second,
    told,
)
from tests.providers.interface import Provider
from tests.providers.waiting import eventually, patient

ROWS = 2_500
LARGE = 500


def test_rows_from_before_the_slot_are_published_once(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 2_500)
    bridge = read_all(new_bridge(conninfo, snapshot=INITIAL))
    assert "are not sent" not in bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("UPDATE t SET note = 'new' WHERE id = 7")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)
    events = [event for event in bridge.events("t") if event["op"] == "r"]
    events.sort(key=lambda event: (event["source"]["commit_lsn"], event["source"]["seq"]))
    assert [event["after"]["id"] for event in events] == [*range(1, 2_501)]
    said = [event["source"]["snapshot"] for event in events]
    assert said == ["first", *["true"] * 2_498, "last"]


def test_a_second_start_reads_nothing_again_but_a_table_that_is_new(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 20)
    bridge = read_all(new_bridge(conninfo, snapshot=INITIAL))
    assert bridge.stop() == 0, bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE u (id int PRIMARY KEY)")
        connection.execute("INSERT INTO u VALUES (1), (2)")
        connection.execute("VACUUM FULL u")  # in its first file, all of its rows are changes
    bridge.start().streaming()
    eventually(lambda: len(told(bridge)) == 2, what="u is read", timeout_s=60)
    assert bridge.stop() == 0, bridge.output
    assert sum(event["op"] == "r" for event in bridge.events("t")) == 20
    assert sorted(event["op"] for event in bridge.events("u")) == ["c", "c", "r", "r"]


@pytest.mark.long
def test_done_is_told_of_what_kafka_has(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """The last chunk is in an open Kafka transaction when the bridge is killed."""
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 20)
    bridge = new_bridge(conninfo, snapshot=INITIAL).start(**{VARIABLE: "chunk handed:1"})
    assert bridge.exit_code() == -9, bridge.output
    assert DONE not in bridge.output and "table is done" not in bridge.output
    assert chunks(bridge) == 0
    read_all(bridge)
    assert chunks(bridge) == 1
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)


@pytest.mark.long
def test_all_is_read_again_where_the_topic_of_the_progress_was_deleted(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 20)
    bridge = read_all(new_bridge(conninfo, snapshot=INITIAL))
    assert bridge.stop() == 0, bridge.output
    topic = f"{bridge.prefix}.snapshot"
    admin = AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(patient(30))
    eventually(lambda: topic not in bridge.topics(), what="it is gone")
    bridge.start().streaming()
    done(bridge, times=2)
    assert bridge.stop() == 0, bridge.output
    folded = fold(bridge, "t")
    assert folded.by_offset == folded.by_position
    assert len(folded.by_offset) == 20 and {*folded.reads.values()} == {2}


@pytest.mark.long
def test_changed_all_the_time_and_killed_at_random_moments(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Twenty times. The spool's folder is emptied at each start: nothing is known but by Kafka."""
    conninfo, rows, kills = pair.primary.conninfo(fresh_database), 6_000, 20
    fill(conninfo, rows)
    chance = random.Random(33)
    slow = {"chunk_rows_max": 40, "hold_ms": 50, "rows_per_second_max": rows_a_second(200)}
    bridge = new_bridge(conninfo, snapshot={**INITIAL, **slow})
    with Changes(conninfo, rows) as changes:
        done_at = [0]
        for number in range(kills):
            bridge.start().streaming()
            if number % 3 == 0:  # a slow machine would get no further
                await_chunks(bridge, done_at[-1] + 1)
            time.sleep(chance.uniform(0, 0.6))
            bridge.kill()
            done_at.append(chunks(bridge))
        lift_limits(bridge)
        read_all(bridge)
    assert changes.committed > 100
    assert len({*done_at}) > 2, f"the kills were not in the middle of it: {done_at}"
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)


@pytest.mark.long
def test_no_more_rows_a_second_than_the_settings_allow(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Changes do not wait for the rows."""
    conninfo, rows, a_second = pair.primary.conninfo(fresh_database), 6_000, 80
    fill(conninfo, rows)
    bridge = new_bridge(conninfo, snapshot={**INITIAL, "rows_per_second_max": a_second})
    bridge.start().streaming()
    await_chunks(bridge, 1)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("UPDATE t SET note = 'new' WHERE id = %s", [rows])
    bridge.caught_up()
    eventually(lambda: told(bridge)[-1].rows > 5 * a_second, what="rows of some seconds are read")
    progress = told(bridge)
    read = [one.rows for one in progress]
    assert max(later - one for one, later in pairwise([0, *read])) <= a_second
    took_s = (progress[-1].ts_ms - progress[-1].began_ms) / 1000
    assert took_s > 0.9 * (read[-1] - 2 * a_second) / a_second
    hasten(bridge)  # the last row takes over a minute else
    done(bridge)
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)
    last = [event["op"] for event in bridge.events("t") if event["after"]["id"] == rows]
    assert last == ["u", "r"], "the change has waited for the rows"


@pytest.mark.long
def test_its_sql_sessions_may_be_ended_at_any_moment(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """As a fence ends them. Changes flow on, and no chunk is read twice."""
    conninfo, rows = pair.primary.conninfo(fresh_database), 3_000
    fill(conninfo, rows)
    slow = {"chunk_rows_max": 40, "rows_per_second_max": rows_a_second(400)}
    bridge = new_bridge(conninfo, snapshot={**INITIAL, **slow})
    ended = (
        "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = %s"
    )
    with Changes(conninfo, rows), psycopg.connect(conninfo, autocommit=True) as connection:
        bridge.start().streaming()
        for number in range(1, 5):
            await_chunks(bridge, number + 1)
            connection.execute(ended, [READING.application])
        done(bridge)
        connection.execute(ended, [READING.application])
    bridge.caught_up()
    assert "opened the snapshot's SQL sessions again" in bridge.output
    assert bridge.sessions == 1, bridge.output
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)


@pytest.mark.long
@pytest.mark.parametrize(
    ("failpoint", "passage"),
    [*((name, 3) for name in OF_A_SNAPSHOT), ("before kafka commit", 6), ("after kafka commit", 6)],
)
def test_changed_all_the_time_and_killed_at_each_seam_of_a_chunk(
    failpoint: str, passage: int, pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo, rows = pair.primary.conninfo(fresh_database), 900
    fill(conninfo, rows)
    bridge = new_bridge(conninfo, snapshot={**INITIAL, "chunk_rows_max": 100})
    with Changes(conninfo, rows):
        bridge.start(**{VARIABLE: f"{failpoint}:{passage}"})
        assert bridge.exit_code() == -9, bridge.output
        read_all(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)


def test_several_workers_under_constant_change_killed_at_each_seam(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Ranges of one chunk, read at once; the last session has fewer workers."""
    conninfo, rows = pair.primary.conninfo(fresh_database), 3_000
    fill(conninfo, rows)
    several = {**INITIAL, "chunk_rows_max": 200, "workers": 3}
    bridge = new_bridge(conninfo, snapshot=several)
    with Changes(conninfo, rows):
        for failpoint in OF_A_SNAPSHOT:
            bridge.start(**{VARIABLE: f"{failpoint}:3"})
            assert bridge.exit_code() == -9, f"{failpoint}: {bridge.output}"
        assert DONE not in bridge.output
        settings = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
        settings["snapshot"]["workers"] = 1
        bridge.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        read_all(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)


@pytest.mark.long
@pytest.mark.since_18
def test_streamed_and_prepared_transactions_beside_its_chunks(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    """In progress at a mark, published in parts, rolled back, decided later; and three SIGKILLs."""
    settings = {"max_prepared_transactions": 5, "logical_decoding_work_mem": "64kB"}
    trio = new_pair(synchronous=False, settings=settings)
    conninfo = trio.primary.conninfo(trio.dbname)
    fill(conninfo, ROWS)
    chunk = {**INITIAL, "chunk_rows_max": 30}
    bridge = new_bridge(conninfo, snapshot=chunk, two_phase=True, transaction_bytes_max=65_536)
    stop = threading.Event()
    large = threading.Thread(target=large_changes, args=[conninfo, stop])
    with Changes(conninfo, ROWS) as changes:
        large.start()
        try:
            for _ in range(3):
                bridge.start().streaming()
                await_chunks(bridge, chunks(bridge) + 5)
                bridge.kill()
            read_all(bridge)
        finally:
            stop.set()
            large.join(patient(60))
    assert changes.committed > 30
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)
    statuses = [json.loads(value) for _, value in bridge.records("transaction") if value]
    assert max(each["event_count"] or 0 for each in statuses) > LARGE // 2
    assert bridge.records("prepared"), "no transaction was prepared"


def large_changes(conninfo: str, stop: threading.Event) -> None:
    """Change many rows at once, with rolled back savepoints; each second time in two phases."""
    number = 0
    with psycopg.connect(conninfo, autocommit=True) as connection:
        while not stop.is_set():
            number += 1
            low = (number * 731) % ROWS
            update = "UPDATE t SET note = %s || repeat('x', 80) WHERE id BETWEEN %s AND %s"
            try:
                connection.execute("BEGIN")
                connection.execute(update, [f"large{number}", low, low + LARGE])
                connection.execute("SAVEPOINT s")
                connection.execute(update, [f"never{number}", low, low + LARGE])
                connection.execute("ROLLBACK TO s")
                if number % 2:
                    connection.execute("COMMIT")
                    continue
                connection.execute("PREPARE TRANSACTION 'large'")
                stop.wait(0.2)
                decision = "ROLLBACK" if number % 3 == 0 else "COMMIT"
                connection.execute(f"{decision} PREPARED 'large'".encode())
            except psycopg.Error:  # a deadlock
                connection.execute("ROLLBACK")
