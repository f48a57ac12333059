"""The test bed itself: what it promises to tests and demo."""

import psycopg
import pytest

from tests.conftest import NewPair
from tests.providers.databases import connect
from tests.providers.interface import Provider, Server
from tests.providers.slots import advance_until_ready, is_ready
from tests.providers.waiting import eventually


@pytest.mark.long
def test_a_failover_slot_becomes_persistent_on_the_standby(
    pair: Provider, fresh_database: str
) -> None:
    with connect(pair.primary, fresh_database) as connection:
        connection.execute(
            "SELECT pg_create_logical_replication_slot('test_sync', 'pgoutput', failover => true)"
        )
    advance_until_ready(pair.primary, pair.standby, fresh_database, "test_sync")


def test_acknowledged_commits_and_slots_survive_the_end_of_the_primary(new_pair: NewPair) -> None:
    trio = new_pair()
    with connect(trio.primary, trio.dbname) as connection:
        connection.execute(
            "SELECT pg_create_logical_replication_slot('s', 'pgoutput', failover => true)"
        )
        advance_until_ready(trio.primary, trio.standby, trio.dbname, "s")
        connection.execute("CREATE TABLE t (i int)")
        connection.execute("INSERT INTO t SELECT generate_series(1, 1000)")
        trio.primary.kill()
    with connect(trio.standby, trio.dbname) as connection:
        connection.execute("SELECT pg_promote()")
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (1000,)
        connection.execute("INSERT INTO t VALUES (1001)")  # waits for no standby of the old primary
        assert is_ready(connection, "s")


@pytest.mark.long
def test_a_killed_server_restarts_on_its_port_with_its_data(new_pair: NewPair) -> None:
    trio = new_pair(synchronous=False, settings={"max_connections": 30})
    port = trio.primary.port
    with connect(trio.primary, trio.dbname) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS i")
    trio.primary.kill()
    assert not trio.primary.running
    trio.primary.start()
    assert trio.primary.port == port
    with connect(trio.primary, trio.dbname) as connection:
        assert connection.execute("SELECT i FROM t").fetchone() == (1,)
        assert connection.execute("SHOW max_connections").fetchone() == ("30",)


@pytest.mark.long
def test_the_subscriber_replicates_from_the_pair(
    pair: Provider, subscriber: Server, fresh_database: str, fresh_subscriber_database: str
) -> None:
    with connect(pair.primary, fresh_database) as connection:
        connection.execute("CREATE TABLE t (i int PRIMARY KEY)")
        connection.execute("INSERT INTO t VALUES (7)")
        connection.execute("CREATE PUBLICATION p FOR TABLE t")
    with connect(subscriber, fresh_subscriber_database) as connection:
        connection.execute("CREATE TABLE t (i int PRIMARY KEY)")
        source = psycopg.conninfo.make_conninfo(pair.primary.conninfo(fresh_database))
        connection.execute(
            f"CREATE SUBSCRIPTION s_{fresh_database} CONNECTION '{source}'"
            f" PUBLICATION p WITH (failover, slot_name = '{fresh_database}')".encode()
        )
        eventually(
            lambda: connection.execute("SELECT i FROM t").fetchall() == [(7,)],
            what="the row arrives",
        )


@pytest.mark.long
def test_tools_reach_their_server(pair: Provider) -> None:
    done = pair.primary.run_tool("psql", ["-XAtc", "SELECT pg_is_in_recovery()"])
    assert done.stdout == "f\n"
