"""Kafka has what the database lost at a failover, and an operator accepts it, on live servers.

That the bridge stops and names it: tests/promises/bridge/test_failover.py.
"""

import psycopg
import pytest

from schemas.errors import ExitCode
from schemas.events import DivergenceRecord
from services.bridge.failpoints import VARIABLE
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import await_session
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_failover import both, promote
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually

pytestmark = pytest.mark.since_18  # with prepared transactions


@pytest.fixture
def trio(new_pair: NewPair) -> Trio:
    return new_pair(synchronous=False)


@pytest.fixture
def diverged(trio: Trio, new_bridge: NewBridge) -> Bridge:
    """It stopped: rows 100 to 102 and the prepared row 103 were lost, 1 and the prepared 2 not."""
    return diverge(trio, new_bridge)


def diverge(trio: Trio, new_bridge: NewBridge) -> Bridge:
    """As `diverged`."""
    primary = trio.primary.conninfo(trio.dbname)
    with psycopg.connect(primary, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(both(trio), two_phase=True).start()
        bridge.streaming(primary)
        connection.execute("INSERT INTO t VALUES (1)")
        bridge.caught_up(primary)
        await_ready(trio.primary, trio.standby, bridge.slot)  # an open transaction delays it
        prepare(connection, 2)
        bridge.caught_up(primary)
        connection.execute("ALTER SYSTEM SET synchronized_standby_slots = ''")
        connection.execute("SELECT pg_reload_conf()")
        trio.standby.stop()
        for number in (100, 101, 102):
            connection.execute("INSERT INTO t VALUES (%s)", [number])
        prepare(connection, 103)
        bridge.caught_up(primary)
    trio.primary.kill()
    trio.standby.start()
    promote(trio)
    assert bridge.exit_code() == ExitCode.TIMELINE, bridge.output
    return bridge


def prepare(connection: psycopg.Connection[tuple[object, ...]], number: int) -> None:
    connection.execute("BEGIN")
    connection.execute("INSERT INTO t VALUES (%s)", [number])
    connection.execute(f"PREPARE TRANSACTION 'p{number}'".encode())


def accepted(bridge: Bridge) -> list[DivergenceRecord]:
    values = [value for _, value in bridge.records("divergence") if value is not None]
    return [DivergenceRecord.model_validate_json(value) for value in values]


def test_an_accepted_divergence_is_recorded_once_and_the_new_timeline_followed(
    diverged: Bridge, trio: Trio
) -> None:
    """Killed with the acceptance in an open Kafka transaction, it accepts again; then never."""
    bridge, token = diverged, diverged.token
    before = bridge.sessions
    for other in (
        f"{token}0",
        token.replace("@", "@9", 1),
        token.replace("divergence", "lost-wal"),
    ):
        bridge.start(accept=other)
        assert bridge.exit_code() == ExitCode.TIMELINE, bridge.output
        assert bridge.token == token and "not used" in bridge.output[-3000:]
    bridge.start(accept=token, **{VARIABLE: "divergence sent:1"})
    assert bridge.exit_code() == -9, bridge.output
    assert accepted(bridge) == []
    bridge.start(accept=token)
    await_session(bridge, before + 1)
    standby = trio.standby.conninfo(trio.dbname)
    with psycopg.connect(standby, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (100), (200)")
        connection.execute("COMMIT PREPARED 'p2'")
        bridge.caught_up(standby)
        (lost,) = accepted(bridge)
        assert (lost.lost_timeline, lost.timeline, lost.count) == (1, 2, 3)
        events = list(bridge.events("t"))
        assert [event.commit_lsn for event in lost.transactions] == sorted(
            e["source"]["commit_lsn"]
            for e in events
            if e["source"]["timeline"] == 1 and e["source"]["commit_lsn"] >= lost.switch_lsn
        )
        assert "divergence accepted" in bridge.output
        rows = [(e["after"]["id"], e["source"]["timeline"]) for e in events]
        assert sorted(rows) == [(1, 1), (2, 2), (100, 1), (100, 2), (101, 1), (102, 1), (200, 2)]
        assert "prepared transactions are lost" in bridge.output and "gids=p103" in bridge.output
        assert bridge.stop() == 0, bridge.output

        bridge.start(accept=token)
        await_session(bridge, before + 2)
        connection.execute("INSERT INTO t VALUES (201)")
        bridge.caught_up(standby)
        assert len(accepted(bridge)) == 1
        assert bridge.stop() == 0, bridge.output
    bridge.start()
    await_session(bridge, before + 3)
    assert [record.server.timeline for record in bridge.progress()][-1] == 2
    eventually(lambda: "prepared transactions wait" not in bridge.output[-400:], what="none wait")
    assert bridge.stop() == 0, bridge.output
