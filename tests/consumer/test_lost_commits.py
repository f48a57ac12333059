"""A wait for a commit that a failover has lost, on real servers."""

import psycopg
import pytest

from schemas.errors import OperatorNeeded
from schemas.lsn import parse_lsn
from services.testbed.ports import free_port
from slotbridge.consumer import wait_for
from tests.bridge.conftest import NewBridge
from tests.bridge.test_failover import both, promote
from tests.conftest import NewPair
from tests.providers.databases import Connection, connect
from tests.providers.slots import await_ready


def inserted(connection: Connection, number: int) -> str:
    """Commit a row; the LSN as a writer asks for it."""
    connection.execute("INSERT INTO t VALUES (%s)", [number])
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])


def test_a_commit_that_a_failover_lost_is_told_by_its_timeline(
    new_pair: NewPair, new_bridge: NewBridge
) -> None:
    trio = new_pair(synchronous=False)
    primary, port = trio.primary.conninfo(trio.dbname), free_port()
    url = f"http://127.0.0.1:{port}"
    with psycopg.connect(primary, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(both(trio), http_port=port).start().streaming(primary)
        kept = inserted(connection, 1)
        assert wait_for(url, kept, timeline=1).timeline == 1
        await_ready(trio.primary, trio.standby, bridge.slot)
        trio.standby.stop()
        lost = inserted(connection, 2)
    trio.primary.kill()
    trio.standby.start()
    promote(trio)
    bridge.streaming(trio.standby.conninfo(trio.dbname))
    with connect(trio.standby, trio.dbname) as connection:
        number = 3
        while parse_lsn(inserted(connection, number)) <= parse_lsn(lost):
            number += 1
    assert wait_for(url, lost).timeline == 2, "the new timeline has passed the LSN"
    with pytest.raises(OperatorNeeded, match="timeline 1 was left at"):
        wait_for(url, lost, timeline=1)
    assert wait_for(url, kept, timeline=1).timeline == 2
    assert 2 not in [event["after"]["id"] for event in bridge.events("t")]
    assert bridge.stop() == 0, bridge.output
