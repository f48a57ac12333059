"""Snapshots beside standbys: commits that wait for the bridge, and a failover in the middle."""

import json
import threading
from typing import Any

import psycopg
import pytest

from services.bridge.source.replication_connection import walsender_name
from services.testbed.pair import set_parameter
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import (
    DONE,
    INITIAL,
    Changes,
    assert_exact,
    await_chunks,
    chunks,
    done,
    fill,
    read_all,
    rows_a_second,
    told,
)
from tests.promises.bridge.test_failover import both, promote
from tests.providers.databases import connect
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient

ROWS = 4_000
MANY = 10_000


def let_commits_wait(trio: Trio, bridge: Bridge) -> None:
    """Make commits wait for the walsender of `bridge`, which streams."""
    names = f'"{walsender_name(bridge.slot)}"'
    set_parameter(trio.primary, "synchronous_standby_names", names)
    await_synchronous(trio, bridge)


def await_synchronous(trio: Trio, bridge: Bridge) -> None:
    """Wait until the server knows the bridge as its synchronous standby."""
    query = "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s"
    with connect(trio.primary) as connection:
        eventually(
            lambda: (
                connection.execute(query, [walsender_name(bridge.slot)]).fetchone() == ("sync",)
            ),
            what="commits wait for the bridge",
        )


@pytest.mark.parametrize("level", ["on", pytest.param("remote_write", marks=pytest.mark.long)])
def test_commits_wait_for_the_bridge_while_it_reads(
    level: str, new_pair: NewPair, new_bridge: NewBridge
) -> None:
    """What it has published is invisible until it confirms that, also in the middle of a chunk."""
    trio = new_pair(synchronous=False)
    conninfo = trio.primary.conninfo(trio.dbname)
    fill(conninfo, ROWS)
    bridge = new_bridge(conninfo).start().streaming()
    let_commits_wait(trio, bridge)
    assert bridge.stop() == 0, bridge.output
    reader = new_bridge(conninfo, snapshot={**INITIAL, "chunk_rows_max": 50})
    with Changes(conninfo, ROWS, level) as changes:
        reader.start().streaming()
        await_synchronous(trio, reader)
        before = changes.committed
        done(reader)
        during = changes.committed - before
    assert during > 50, f"only {during} transactions were committed meanwhile"
    reader.caught_up()
    assert reader.stop() == 0, reader.output
    assert_exact(reader, conninfo)


@pytest.mark.long
def test_commits_without_events_wait_for_the_bridge_while_it_reads(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    """Of a table that `shaping` leaves out: Kafka gets nothing of them, yet they are confirmed."""
    trio = new_pair(synchronous=False)
    conninfo = trio.primary.conninfo(trio.dbname)
    fill(conninfo, ROWS)
    given: dict[str, Any] = {"shaping": {"exclude": ["public.hidden"]}}
    with connect(trio.primary, trio.dbname) as connection:
        connection.execute("CREATE TABLE hidden (id int)")
    bridge = new_bridge(conninfo, **given).start().streaming()
    let_commits_wait(trio, bridge)
    assert bridge.stop() == 0, bridge.output
    reader = new_bridge(conninfo, **given, snapshot={**INITIAL, "chunk_rows_max": 100})
    stop = threading.Event()

    def insert() -> None:
        with psycopg.connect(conninfo, autocommit=True) as own:
            while not stop.is_set():
                own.execute("INSERT INTO hidden VALUES (1)")

    writers = [threading.Thread(target=insert) for _ in range(4)]
    for writer in writers:
        writer.start()
    try:
        read_all(reader)
    finally:
        stop.set()
        for writer in writers:
            writer.join(patient(60))
    assert not any(writer.is_alive() for writer in writers), "a commit hangs"
    reader.caught_up()
    assert reader.stop() == 0, reader.output
    assert_exact(reader, conninfo)


@pytest.mark.long
def test_a_commit_that_waits_for_another_standby_is_not_taken_back(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    """Kafka has it from an earlier session; it is the newest transaction, and not visible yet."""
    trio = new_pair(synchronous=False)
    conninfo = trio.primary.conninfo(trio.dbname)
    fill(conninfo, 20)
    slow = {"heartbeat_interval_ms": 60_000}  # whose transactions would be newer
    bridge = new_bridge(conninfo, **slow).start().streaming()
    bridge.caught_up()
    set_parameter(trio.primary, "synchronous_standby_names", "nobody")
    writer = threading.Thread(target=_rename, args=[conninfo])
    writer.start()
    topic = f"{bridge.prefix}.public.t"
    try:
        what = "Kafka has its event"
        eventually(lambda: topic in bridge.topics() and [*bridge.events("t")], what=what)
        bridge.kill()
        reader = new_bridge(conninfo, **slow, snapshot=INITIAL).start().streaming()
        eventually(
            lambda: DONE in reader.output or "postponed a chunk" in reader.output,
            what="it is waited for",
        )
    finally:
        set_parameter(trio.primary, "synchronous_standby_names", "")
        writer.join(patient(60))
    done(reader)
    assert reader.stop() == 0, reader.output
    assert_exact(reader, conninfo)


def _rename(conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("UPDATE t SET note = 'new' WHERE id = 7")


@pytest.mark.parametrize("mode", ["initial", pytest.param("on_request", marks=pytest.mark.long)])
def test_a_failover_in_the_middle_of_a_snapshot(
    mode: str, new_pair: NewPair, new_bridge: NewBridge
) -> None:
    """Commits do not wait for the standby: those that it lacks are nowhere, nor in any chunk.

    With `initial`, three workers read rows from the standby until it is promoted.
    """
    trio = new_pair(synchronous=False)
    primary, standby = (one.conninfo(trio.dbname) for one in (trio.primary, trio.standby))
    fill(primary, MANY)
    slow = {"chunk_rows_max": 10, "rows_per_second_max": rows_a_second(MANY // 10)}
    settings = {"mode": mode, "signal_table": "public.signals", **slow}
    if mode == "initial":
        settings |= {"conninfo": standby, "workers": 3}
    first = new_bridge(both(trio)).start().streaming(primary)
    await_ready(trio.primary, trio.standby, first.slot)  # it may take as long as the rows do
    assert first.stop() == 0, first.output
    bridge = new_bridge(both(trio), snapshot=settings)
    with Changes(primary, MANY) as before:
        bridge.start().streaming(primary)
        if mode == "on_request":
            ask(primary)
        await_chunks(bridge, chunks(bridge) + 5)
        assert DONE not in bridge.output, "the failover is too late"
        trio.primary.kill()
        promote(trio)
    with Changes(standby, MANY) as after:
        bridge.streaming(standby)
        done(bridge)
    assert before.committed > 50 and after.committed > 50
    bridge.caught_up(standby)
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, standby)
    before_it = "standby" if mode == "initial" else "primary"
    assert {(one.timeline, one.read_from) for one in told(bridge)} == {
        (1, before_it),
        (2, "primary"),
    }


def ask(conninfo: str) -> None:
    """Ask for all rows of t by a signal."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE signals (id text PRIMARY KEY, type text, data text)")
        data = json.dumps({"data-collections": ["public.t"]})
        connection.execute("INSERT INTO signals VALUES ('1', 'execute-snapshot', %s)", [data])
