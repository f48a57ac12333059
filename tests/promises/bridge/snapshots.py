"""Snapshots in tests: a table that changes all the time, and what Kafka has of it in the end."""

import contextlib
import json
import random
import re
import threading
from typing import Any, Self

import psycopg
import yaml

from schemas.snapshot import SnapshotProgress
from services.bridge.snapshot.requests import is_progress
from tests.promises.bridge.consumer_folds import Folded, fold
from tests.promises.bridge.running import Bridge
from tests.providers.waiting import LEAST, eventually, patient

INITIAL: dict[str, Any] = {"mode": "initial"}
DONE = "snapshot is done"
STREAMING = "[info     ] streaming"


def fill(conninfo: str, rows: int) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        connection.execute("INSERT INTO t SELECT g, 'old' FROM generate_series(1, %s) g", [rows])


class Writers:
    """Threads that write until the block is left; `_run` writes until `_stop` is set."""

    def __init__(self, conninfo: str, count: int) -> None:
        self._conninfo = conninfo
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]
        self.committed = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(patient(180))
        assert not any(thread.is_alive() for thread in self._threads), "a commit hangs"

    def _run(self, number: int) -> None:
        raise NotImplementedError


class Changes(Writers):
    """Inserts, updates, deletes and changes of keys, all over the table, until it is left."""

    def __init__(self, conninfo: str, keys: int, synchronous_commit: str = "local") -> None:
        options = f"-c synchronous_commit={synchronous_commit}"
        super().__init__(psycopg.conninfo.make_conninfo(conninfo, options=options), 2)
        self._keys = keys

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        with psycopg.connect(self._conninfo) as connection:
            while not self._stop.wait(0.002):
                try:
                    for _ in range(chance.randint(1, 4)):
                        self._change(connection, chance)
                    connection.commit()
                    self.committed += 1
                except psycopg.Error:  # a key that is there, a deadlock
                    with contextlib.suppress(psycopg.Error):
                        connection.rollback()
                    if connection.closed:  # the server is gone
                        return

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
    return [
        SnapshotProgress.model_validate_json(value)
        for key, value in records
        if value and is_progress(key)
    ]


def assert_exact(bridge: Bridge, conninfo: str) -> None:
    """Both folds are the table; no row was read twice; each chunk is counted by its progress."""
    folded = assert_folds(bridge, conninfo)
    assert max(folded.reads.values()) == 1, "a row was read twice"
    progress = told(bridge)
    assert [one.chunks for one in progress] == [*range(1, len(progress) + 1)]
    assert progress[-1].done and progress[-1].rows == folded.reads.total()


def assert_folds(bridge: Bridge, conninfo: str) -> Folded:
    """Both folds are the table."""
    with psycopg.connect(conninfo) as connection:
        truth = {
            json.dumps({"id": key}, separators=(",", ":")): {"id": key, "note": note}
            for key, note in connection.execute("SELECT id, note FROM t")
        }
    folded = fold(bridge, "t")
    for rows in (folded.by_offset, folded.by_position):
        names = sorted(truth.keys() | rows.keys())
        wrong = {n: (rows.get(n), truth.get(n)) for n in names if rows.get(n) != truth.get(n)}
        assert not wrong, f"row as its events leave it, as the table has it: {wrong}"
    return folded


def read_all(bridge: Bridge, conninfo: str = "") -> Bridge:
    """Start it and wait until all rows are read."""
    bridge.start().streaming(conninfo)
    done(bridge)
    return bridge


def hasten(bridge: Bridge) -> None:
    """Restart it without a limit of rows, in a second or in a chunk."""
    assert bridge.stop() == 0, bridge.output
    lift_limits(bridge)
    bridge.start().streaming()


def rows_a_second(quiet: int) -> int:
    """A limit of rows that a slow machine meets in the middle of a table, too."""
    return max(1, round(quiet * LEAST / patient(1)))


def lift_limits(bridge: Bridge) -> None:
    """Limit the rows of its next start neither in a second nor in a chunk."""
    settings = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
    for name in ("rows_per_second_max", "chunk_rows_max"):
        settings["snapshot"].pop(name, None)
    bridge.config.write_text(yaml.safe_dump(settings), encoding="utf-8")


def done(bridge: Bridge, times: int = 1) -> None:
    """Wait until it has told so often that its snapshot is done."""

    def told_so() -> bool:
        assert bridge.running, bridge.output
        return bridge.output.count(DONE) >= times or (times == 1 and nothing_left(bridge))

    eventually(told_so, what="the snapshot is done", timeout_s=120)


def nothing_left(bridge: Bridge) -> bool:
    """Whether its last session has found all rows in Kafka: a killed one did not tell it.

    A session without tables has not read any.
    """
    last = bridge.output.rpartition(STREAMING)[2]
    plan = re.search(r"\] snapshot +done=(\d+) refused=\d+ tables=(\d+)", last)
    return plan is not None and plan[1] == plan[2] != "0"


def await_chunks(bridge: Bridge, count: int, *, or_all: bool = True) -> None:
    """Wait until Kafka has so many chunks, or all; not `or_all` where all are read again."""
    eventually(
        lambda: (
            (or_all and (DONE in bridge.output or nothing_left(bridge))) or chunks(bridge) >= count
        ),
        what=f"chunk {count} is read",
        timeout_s=60,
        interval_s=0.1,  # each look asks Kafka, whose answers the bridge waits for, too
    )
