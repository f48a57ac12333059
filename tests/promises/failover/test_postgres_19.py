"""What came with PostgreSQL 19 (`make postgres-19`): foreign servers, REPACK, the server's slot."""

import threading
from pathlib import Path

import pytest
from psycopg import sql

from services.postgres.server import Connection
from services.postgres.slots import read_slots
from services.testbed.bed import Bed
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.providers.databases import connect, create
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually

pytestmark = [pytest.mark.since_19, pytest.mark.usefixtures("servers")]

LEADS_TO = "SELECT array_to_string(srvoptions, ' ') FROM pg_foreign_server"


def by_a_server(trio: Trio, **publications: str) -> None:
    """Let subscriptions share one foreign server: name -> the publication."""
    host, port = "127.0.0.1", str(trio.primary.port)
    with connect(trio.subscriber, trio.dbname) as subscriber:
        subscriber.execute("CREATE EXTENSION IF NOT EXISTS postgres_fdw")
        server = "CREATE SERVER pair FOREIGN DATA WRAPPER postgres_fdw"
        subscriber.execute(
            sql.SQL(
                f"{server} OPTIONS (host {{}}, port {{}}, dbname {{}}, fetch_size '10')"
            ).format(host, port, trio.dbname)
        )
        subscriber.execute(
            "CREATE USER MAPPING FOR CURRENT_USER SERVER pair OPTIONS (user 'postgres', "
            "password 'hush')"
        )
        for name, publication in publications.items():
            subscriber.execute(
                f"CREATE SUBSCRIPTION {name} SERVER pair PUBLICATION {publication} "
                "WITH (failover, copy_data = false)"
            )
    for name in publications:
        await_ready(trio.primary, trio.standby, name)


def test_subscriptions_by_a_foreign_server_are_moved_and_come_back(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio)
    tell(trio.primary, "CREATE TABLE u (id int PRIMARY KEY)", dbname=trio.dbname)
    tell(trio.primary, "CREATE PUBLICATION of_u FOR TABLE u", dbname=trio.dbname)
    tell(trio.subscriber, "CREATE TABLE u (id int PRIMARY KEY)", dbname=trio.dbname)
    tell(trio.primary, "DROP PUBLICATION p", "CREATE PUBLICATION p FOR TABLE t", dbname=trio.dbname)
    by_a_server(trio, s1="p", s2="of_u")
    config = configuration(tmp_path, trio, machines=machines(trio, local_bed))
    status = slotfailover("status", "--config", config)
    assert status.code == 0, status.err
    for new, name, first in ((trio.standby, "b", 101), (trio.primary, "a", 201)):
        ran = slotfailover("switchover", "--config", config, "--yes", "--to", name)
        assert ran.code == 0, ran.err
        assert "hush" not in ran.out + ran.err
        assert f"port={new.port}" in ask(trio.subscriber, LEADS_TO, trio.dbname)
        write(new, trio.dbname, first)
        tell(new, f"INSERT INTO u VALUES ({first})", dbname=trio.dbname)
        await_equal(trio, new, "t", "u")
    checked = slotfailover("check", "--config", config)
    assert checked.code == 0, checked.out


def test_a_subscription_by_a_server_of_a_database_that_is_not_named_is_not_judged(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    create(trio.subscriber, "reports")
    tell(
        trio.subscriber,
        "CREATE EXTENSION postgres_fdw",
        "CREATE SERVER elsewhere FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '192.0.2.1')",
        "CREATE USER MAPPING FOR CURRENT_USER SERVER elsewhere OPTIONS (user 'u', password 'hush')",
        "CREATE SUBSCRIPTION hidden SERVER elsewhere PUBLICATION p WITH (connect = false)",
        dbname="reports",
    )
    checked = slotfailover("check", "--config", configuration(tmp_path, trio))
    assert "only the database reports shows where its server leads" in checked.out
    assert "1 not judged" in checked.out


def test_a_running_repack_is_named_before_a_switchover(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, machines=machines(trio, local_bed))
    tell(
        trio.primary,
        "INSERT INTO t SELECT n, 'x' FROM generate_series(1, 200000) n",
        dbname=trio.dbname,
    )
    with connect(trio.primary, trio.dbname) as holder, connect(trio.primary, trio.dbname) as other:
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE t IN ACCESS SHARE MODE")  # its end waits for this one
        thread = threading.Thread(target=repack, args=(other,), daemon=True)
        thread.start()
        slots = "SELECT count(*) FROM pg_replication_slots WHERE plugin = 'pgrepack'"
        eventually(lambda: ask(trio.primary, slots) == 1, what="REPACK runs")
        checked = slotfailover("check", "--config", config)
        assert "pg_repack" not in checked.out
        ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b")
        assert ran.code == 34, ran.err
        assert "REPACK (CONCURRENTLY) runs on a" in ran.err
        holder.execute("COMMIT")
        thread.join()
    ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b")
    assert ran.code == 0, ran.err


def test_the_servers_own_slot_takes_room_and_is_left_alone(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    """The primary itself subscribes, with retain_dead_tuples."""
    trio = local_trio(settings={"track_commit_timestamp": "on"})
    subscribe(trio, "s1")
    tell(trio.subscriber, "CREATE PUBLICATION back FOR TABLE t", dbname=trio.dbname)
    there = trio.subscriber.conninfo(trio.dbname)
    with connect(trio.primary, trio.dbname) as primary:
        primary.execute(
            sql.SQL(
                "CREATE SUBSCRIPTION own CONNECTION {} PUBLICATION back"
                " WITH (copy_data = false, retain_dead_tuples = true)"
            ).format(there)
        )
        conflict = "SELECT count(*) FROM pg_replication_slots WHERE slot_name ~ 'conflict'"
        eventually(lambda: ask(trio.primary, conflict) == 1, what="the server has made its slot")
        assert "pg_conflict_detection" in {slot.slot_name for slot in read_slots(primary)}
    checked = slotfailover("check", "--config", configuration(tmp_path, trio), "--json")
    assert [one["check"] for one in checked.json["findings"] if "conflict" in str(one)] == []


def repack(connection: Connection) -> None:
    """Rewrite the table beside its readers."""
    connection.execute("REPACK (CONCURRENTLY) t")
