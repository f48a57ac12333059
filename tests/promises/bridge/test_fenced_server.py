"""The bridge on a primary whose SQL sessions are ended, as a switchover's fence ends them.

Changes, and the marker message of the switchover, are still to be confirmed: on the replication
connection, which a fence leaves alone.
"""

import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import psycopg
import pytest
from pydantic import SecretStr

from schemas.errors import Retryable
from schemas.lsn import parse_lsn
from schemas.settings import SourceSettings
from services.bridge.progress.ledger import Ledger, Position
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Heartbeat
from services.bridge.source.newer_primary import promoted
from services.bridge.source.sql_session import SqlSessionEnded
from services.failover.model import statements
from services.failover.observe.client_sessions import (
    end_sessions_before_reload,
    sessions_before_reload,
)
from services.postgres.server import Server
from services.testbed.ports import free_port
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import (
    DONE,
    INITIAL,
    assert_exact,
    chunks,
    done,
    fill,
    rows_a_second,
    told,
)
from tests.promises.bridge.test_failover import both, promote
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient

LONG_S = 120.0


@pytest.fixture
def trio(new_pair: NewPair) -> Trio:
    made = new_pair()
    with psycopg.connect(made.primary.conninfo(made.dbname), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
    return made


@pytest.fixture
def bridge(trio: Trio, new_bridge: NewBridge) -> Iterator[Bridge]:
    made = new_bridge(trio.primary.conninfo(trio.dbname), http_port=free_port())
    made.start().streaming()
    with psycopg.connect(made.conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
    made.caught_up()
    yield made


def run(trio: Trio, *texts: str) -> None:
    with psycopg.connect(trio.primary.conninfo(), autocommit=True) as connection:
        for text in texts:
            connection.execute(text.encode())


def fence(trio: Trio) -> None:
    """Fence the primary, and end every SQL session from before: also that of the bridge."""
    run(trio, *statements.fenced("timeline 1 by a test"))
    with psycopg.connect(trio.primary.conninfo(), autocommit=True) as connection:

        def ended() -> bool:
            end_sessions_before_reload(connection)
            return sessions_before_reload(connection) == 0

        fenced = "SELECT reset_val = 'on' FROM pg_settings WHERE name = %s"
        name = "default_transaction_read_only"
        eventually(
            lambda: connection.execute(fenced, [name]).fetchone() == (True,), what="it is fenced"
        )
        eventually(ended, what="sessions are ended")


def final_lsn(trio: Trio) -> int:
    """Write the marker message of a switchover; return where the WAL ends then."""
    with psycopg.connect(trio.primary.conninfo(trio.dbname), autocommit=True) as connection:
        for statement in statements.marker("the last of a"):
            connection.execute(statement.encode())
        row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return parse_lsn(row[0])


def confirmed(trio: Trio, bridge: Bridge) -> int:
    return position(
        trio,
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
        bridge.slot,
    )


def origin(trio: Trio, bridge: Bridge) -> int:
    query = "SELECT pg_replication_origin_progress(%s, true)::text"
    return position(trio, query, f"slotbridge_{bridge.slot}")


def position(trio: Trio, query: str, name: str) -> int:
    with psycopg.connect(trio.primary.conninfo(trio.dbname), autocommit=True) as connection:
        row = connection.execute(query.encode(), [name]).fetchone()
        return parse_lsn(row[0]) if row is not None and row[0] else 0


def unready(bridge: Bridge) -> str:
    """Why /readyz does not pass; "" where it does."""
    served = [part for part in bridge.output.split() if part.startswith("url=")][-1]
    url = served.removeprefix("url=").removesuffix("/metrics") + "/readyz"
    try:
        with urllib.request.urlopen(url, timeout=patient(30)):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


def metric(bridge: Bridge, name: str) -> float:
    served = [part for part in bridge.output.split() if part.startswith("url=")][-1]
    with urllib.request.urlopen(served.removeprefix("url="), timeout=patient(30)) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


@pytest.mark.long
def test_a_heartbeat_between_fence_and_drain_does_not_keep_the_slot_behind(
    trio: Trio, bridge: Bridge
) -> None:
    fence(trio)
    eventually(
        lambda: "takes no writes" in bridge.output or "session lost" in bridge.output,
        what="a heartbeat has met the fence",
    )
    written = origin(trio, bridge)
    final = final_lsn(trio)
    eventually(lambda: confirmed(trio, bridge) >= final, what="it is drained", timeout_s=60)
    assert bridge.sessions == 1, bridge.output
    assert origin(trio, bridge) == written, "the bridge writes on a fenced primary"
    run(trio, *statements.UNFENCED)
    eventually(lambda: origin(trio, bridge) >= final, what="the heartbeat goes on", timeout_s=60)
    assert unready(bridge) == ""
    with psycopg.connect(bridge.conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (2)")
    bridge.caught_up()
    assert bridge.sessions == 1, bridge.output
    assert metric(bridge, "slotbridge_sql_sessions_lost_total") == 1
    bridge.assert_kafka_equals(bridge.conninfo, "t")
    assert bridge.stop() == 0, bridge.output


def allow_sessions(trio: Trio, *, allowed: bool) -> None:
    """Let the server take new SQL sessions with the database, or end the bridge's and take none."""
    answer = "true" if allowed else "false"
    run(trio, f"ALTER DATABASE {trio.dbname} ALLOW_CONNECTIONS {answer}")
    if not allowed:
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = "
        run(trio, f"{end}'slotbridge'")


@pytest.mark.long
def test_unreachable_witness_is_not_judged_while_changes_flow(trio: Trio, bridge: Bridge) -> None:
    with psycopg.connect(bridge.conninfo, autocommit=True) as connection:
        allow_sessions(trio, allowed=False)
        eventually(lambda: "not judged" in unready(bridge), what="/readyz says so")
        assert "publication" in unready(bridge)
        connection.execute("INSERT INTO t VALUES (2)")
        eventually(lambda: {e["after"]["id"] for e in bridge.events("t")} == {1, 2}, what="flows")
        assert connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        allow_sessions(trio, allowed=True)
        eventually(lambda: unready(bridge) == "", what="all is judged again", timeout_s=LONG_S)
        assert bridge.sessions == 1, bridge.output
        allow_sessions(trio, allowed=False)
        eventually(lambda: "not judged" in unready(bridge), what="/readyz says so again")
        connection.execute(f"DROP PUBLICATION {bridge.publication}".encode())
        allow_sessions(trio, allowed=True)
    assert bridge.exit_code() != 0
    assert "is gone: changes committed without it" in bridge.output


@pytest.mark.long
def test_an_origin_that_another_bridge_has_taken_meanwhile_ends_the_session(
    trio: Trio, bridge: Bridge
) -> None:
    with psycopg.connect(bridge.conninfo, autocommit=True) as connection:
        allow_sessions(trio, allowed=False)
        eventually(lambda: "not judged" in unready(bridge), what="the SQL session has ended")
        name = f"slotbridge_{bridge.slot}"
        connection.execute("SELECT pg_replication_origin_session_setup(%s)", [name])
        allow_sessions(trio, allowed=True)
        eventually(lambda: "session lost" in bridge.output, what="it ends", timeout_s=LONG_S)
    eventually(lambda: bridge.sessions == 2, what="the next session streams", timeout_s=LONG_S)


@pytest.mark.long
def test_a_session_without_sql_ends_after_the_connect_deadline(trio: Trio) -> None:
    conninfo, name = trio.primary.conninfo(trio.dbname), "unjudged"
    source = SourceSettings(conninfo=SecretStr(conninfo), slot=name, publication=name)
    primary = Primary(source, sql_deadline_ms=60_000, idle_timeout_ms=600_000)
    with contextlib.closing(primary):
        primary.prepare()
        primary.establish()
        primary.selection()
        ledger = Ledger(Position(0, 1, 0), 1)
        Heartbeat(name, interval_ms=100, patience_ms=0).perform(primary, ledger)
        primary.streams = True
        allow_sessions(trio, allowed=False)
        patient = Heartbeat(name, interval_ms=100, patience_ms=600_000)
        patient.perform(primary, ledger)
        assert "not judged" in patient.obstacle
        hasty = Heartbeat(name, interval_ms=100, patience_ms=0)
        hasty.perform(primary, ledger)
        with pytest.raises(SqlSessionEnded, match="not currently accepting connections"):
            hasty.perform(primary, ledger)
        allow_sessions(trio, allowed=True)
        with pytest.raises(Retryable, match="another server answers now"):  # nobody has the slot
            patient.perform(primary, ledger)


@pytest.mark.long
def test_a_snapshot_writes_nothing_behind_a_fence_and_goes_on_after_it(
    trio: Trio, new_bridge: NewBridge
) -> None:
    """Its SQL sessions are ended too, and changes are confirmed all the while."""
    conninfo = trio.primary.conninfo(trio.dbname)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("DROP TABLE t")
    fill(conninfo, 4_000)
    slow = {**INITIAL, "chunk_rows_max": 20, "rows_per_second_max": rows_a_second(200)}  # 20 s
    bridge = new_bridge(conninfo, snapshot=slow)
    bridge.start().streaming()
    eventually(lambda: chunks(bridge) > 2, what="some chunks are read")
    fence(trio)
    assert DONE not in bridge.output, "the fence was too late"
    final = final_lsn(trio)
    eventually(lambda: confirmed(trio, bridge) >= final, what="it is drained", timeout_s=60)
    what = "the snapshot has met the fence"
    eventually(lambda: "takes no writes" in bridge.output, what=what, timeout_s=60)
    assert told(bridge)[-1].commit_lsn < final
    written = chunks(bridge)
    time.sleep(6)
    assert chunks(bridge) == written
    assert bridge.sessions == 1, bridge.output
    run(trio, *statements.UNFENCED)
    done(bridge)
    assert bridge.sessions == 1, bridge.output
    assert bridge.stop() == 0, bridge.output
    assert_exact(bridge, conninfo)


def test_the_bridge_leaves_a_fenced_primary_for_the_promoted_standby(
    trio: Trio, new_bridge: NewBridge
) -> None:
    """A switchover without a stop command: the old primary runs on, and takes no writes."""
    old, new = trio.primary.conninfo(trio.dbname), trio.standby.conninfo(trio.dbname)
    bridge = new_bridge(both(trio)).start().streaming(old)
    with psycopg.connect(old, autocommit=True) as connection:
        connection.execute("INSERT INTO t SELECT generate_series(1, 50)")
    bridge.caught_up(old)
    await_ready(trio.primary, trio.standby, bridge.slot)
    with psycopg.connect(old, autocommit=True) as connection:
        connection.execute("INSERT INTO t SELECT generate_series(51, 60)")
    fence(trio)
    eventually(lambda: "takes no writes" in bridge.output, what="a heartbeat has met the fence")
    final = final_lsn(trio)
    eventually(lambda: confirmed(trio, bridge) >= final, what="it is drained", timeout_s=60)
    assert bridge.sessions == 1, bridge.output  # the standby is not a reason to leave
    promote(trio)
    moved = "another host of source.conninfo is the primary on timeline 2"
    eventually(lambda: moved in bridge.output, what="it leaves", timeout_s=LONG_S)
    eventually(lambda: bridge.sessions == 2, what="it streams from the new primary", timeout_s=60)
    assert trio.primary.running
    with psycopg.connect(new, autocommit=True) as connection:
        connection.execute("INSERT INTO t SELECT generate_series(61, 70)")
    bridge.caught_up(new)
    bridge.assert_kafka_equals(new, "t")
    assert {record.server.timeline for record in bridge.progress()} == {1, 2}
    assert bridge.stop() == 0, bridge.output


def server(timeline: int, system: str = "1", *, in_recovery: bool = False) -> Server:
    return Server(
        system_identifier=system,
        timeline=timeline,
        version=180006,
        database="d",
        in_recovery=in_recovery,
        wal_level="logical",
        synchronized_standby_slots="",
        wal_sender_timeout_ms=60_000,
    )


@pytest.mark.parametrize(
    ("writable", "newer"),
    [
        ([], None),  # nobody answers
        ([server(2)], None),  # the same timeline: the server itself, or one that is fenced too
        ([server(1)], None),
        ([server(3, system="2")], None),
        ([server(3, in_recovery=True)], None),
        ([server(3), server(4), server(2)], server(4)),
    ],
)
def test_only_a_primary_on_a_later_timeline_is_a_reason_to_leave(
    writable: list[Server], newer: Server | None
) -> None:
    assert promoted(server(2), writable) == newer
