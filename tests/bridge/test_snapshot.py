"""Snapshots through a running bridge: rows that were there before the slot are in Kafka, once."""

import json
import random
import threading
import time
from typing import Any

import psycopg
import pytest

from schemas.snapshot import SnapshotProgress
from services.bridge.failpoints import OF_A_SNAPSHOT, VARIABLE
from tests.bridge.conftest import NewBridge
from tests.bridge.folding import fold
from tests.bridge.running import Bridge
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

INITIAL: dict[str, Any] = {"mode": "initial"}
DONE = "snapshot is done"


def fill(conninfo: str, rows: int) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        connection.execute("INSERT INTO t SELECT g, 'old' FROM generate_series(1, %s) g", [rows])


class Changes:
    """Inserts, updates, deletes and changes of keys, all over the table, until it is left."""

    def __init__(self, conninfo: str, keys: int) -> None:
        self._conninfo, self._keys = conninfo, keys
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(2)]
        self.committed = 0

    def __enter__(self) -> "Changes":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        with psycopg.connect(self._conninfo, options="-c synchronous_commit=local") as connection:
            while not self._stop.wait(0.002):
                try:
                    for _ in range(chance.randint(1, 4)):
                        self._change(connection, chance)
                    connection.commit()
                    self.committed += 1
                except psycopg.Error:  # a key that is there, a deadlock
                    connection.rollback()

    def _change(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        one, other = chance.randint(1, self._keys), chance.randint(1, self._keys)
        note = f"n{chance.getrandbits(40)}"
        what = chance.random()
        if what < 0.25:
            connection.execute("INSERT INTO t VALUES (%s, %s)", [one, note])
        elif what < 0.6:
            connection.execute("UPDATE t SET note = %s WHERE id = %s", [note, one])
        elif what < 0.75:
            connection.execute("DELETE FROM t WHERE id = %s", [one])
        else:
            connection.execute("UPDATE t SET id = %s, note = %s WHERE id = %s", [other, note, one])


def chunks(bridge: Bridge) -> int:
    """How many records of progress Kafka has."""
    return len(told(bridge)) if f"{bridge.prefix}.snapshot" in bridge.topics() else 0


def told(bridge: Bridge) -> list[SnapshotProgress]:
    """What `<prefix>.snapshot` tells, in order."""
    records = bridge.records("snapshot")
    return [SnapshotProgress.model_validate_json(value) for _, value in records if value]


def assert_exact(bridge: Bridge, conninfo: str) -> None:
    """Both folds are the table; no row was read twice; each chunk is counted by its progress."""
    with psycopg.connect(conninfo) as connection:
        truth = {
            json.dumps({"id": key}, separators=(",", ":")): {"id": key, "note": note}
            for key, note in connection.execute("SELECT id, note FROM t")
        }
    folded = fold(bridge, "t")
    assert folded.by_offset == truth
    assert folded.by_position == truth
    assert max(folded.reads.values()) == 1, "a row was read twice"
    progress = told(bridge)
    assert [one.chunks for one in progress] == [*range(1, len(progress) + 1)]
    assert progress[-1].done and progress[-1].rows == folded.reads.total()


def test_rows_from_before_the_slot_are_published_once(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 2_500)
    bridge = new_bridge(conninfo, snapshot=INITIAL).start().streaming()
    eventually(lambda: DONE in bridge.output, what="the snapshot is done", timeout_s=60)
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
    bridge = new_bridge(conninfo, snapshot=INITIAL).start().streaming()
    eventually(lambda: DONE in bridge.output, what="the snapshot is done", timeout_s=60)
    assert bridge.stop() == 0, bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE u (id int PRIMARY KEY)")
        connection.execute("INSERT INTO u VALUES (1), (2)")
    bridge.start().streaming()
    eventually(lambda: len(told(bridge)) == 2, what="u is read", timeout_s=60)
    assert bridge.stop() == 0, bridge.output
    assert sum(event["op"] == "r" for event in bridge.events("t")) == 20
    assert sorted(event["op"] for event in bridge.events("u")) == ["c", "c", "r", "r"]


def test_changed_all_the_time_and_killed_at_random_moments(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Twenty times. The spool's folder is emptied at each start: nothing is known but by Kafka."""
    conninfo, rows, kills = pair.primary.conninfo(fresh_database), 6_000, 20
    fill(conninfo, rows)
    chance = random.Random(33)
    bridge = new_bridge(conninfo, snapshot={**INITIAL, "chunk_rows_max": 40, "hold_ms": 50})
    with Changes(conninfo, rows) as changes:
        done_at = [0]
        for number in range(kills):
            bridge.start().streaming()
            if number % 3 == 0:  # a slow machine would get no further
                eventually(
                    lambda: DONE in bridge.output or chunks(bridge) > done_at[-1],
                    what="another chunk is read",
                    timeout_s=60,
                )
            time.sleep(chance.uniform(0, 0.6))
            bridge.kill()
            done_at.append(chunks(bridge))
        bridge.start().streaming()
        eventually(lambda: DONE in bridge.output, what="the snapshot is done", timeout_s=120)
    assert changes.committed > 100
    assert len({*done_at}) > 2, f"the kills were not in the middle of it: {done_at}"
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)


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
        assert bridge.exit_code(120) == -9, bridge.output
        bridge.start().streaming()
        eventually(lambda: DONE in bridge.output, what="the snapshot is done", timeout_s=60)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)
