"""Someone else promoted a standby: `slotfailover repoint` does the rest, and only that."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import sql
from psycopg.errors import ReadOnlySqlTransaction

from services.testbed.bed import Bed
from services.testbed.ports import free_port
from tests.conftest import NewPair
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    rows,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.providers.databases import connect, create
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually

ODD = "it's a \\ name"


def test_all_subscriptions_of_all_databases_follow_and_nothing_else_is_touched(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    tell(
        trio.primary,
        "CREATE TABLE u (id int PRIMARY KEY)",
        "INSERT INTO u SELECT generate_series(1, 50)",
        "CREATE PUBLICATION of_u FOR TABLE u",
        dbname=trio.dbname,
    )
    tell(trio.subscriber, "CREATE TABLE u (id int PRIMARY KEY)", dbname=trio.dbname)
    subscribe(trio, "s1")
    _same_name_in_another_database(trio)
    subscribers = {
        "sub": trio.subscriber.conninfo(trio.dbname),
        "reports": trio.subscriber.conninfo("reports"),
        "gone": trio.subscriber.conninfo(port=free_port()),
    }
    config = configuration(tmp_path, trio, as_roles=True, subscribers=subscribers)
    nothing = slotfailover("repoint", "--config", config, "--yes", "--json")
    assert nothing.json["steps"] == []
    with _copy_in_progress(trio):
        trio.primary.kill()
        none = slotfailover("repoint", "--config", config, "--yes")
        assert (none.code, "no node is a primary" in none.err) == (34, True)
        tell(trio.standby, "SELECT pg_promote()")
        ran = slotfailover("repoint", "--config", config, "--yes", "--json")
        assert ran.code == 1, ran.err
        assert [left["subject"] for left in ran.json["left"]] == ["gone"], ran.err
        assert "hush" not in ran.out + ran.err
    steps = " ".join(step["step"] for step in ran.json["steps"])
    for name in ("s1 at sub", "s1 at reports", "copying at sub"):
        assert f"enable subscription {name}" in steps
    assert "wait for the subscriptions' workers at b: copying, s1, s1_reports" in steps
    assert "slot slotfailover" not in steps
    write(trio.standby, trio.dbname, 101)
    await_equal(trio, trio.standby, "t", "u")
    expected = rows(trio.standby, trio.dbname)
    eventually(lambda: rows(trio.subscriber, "reports") == expected, what="reports follows too")
    conninfo = ask(
        trio.subscriber, "SELECT subconninfo FROM pg_subscription WHERE subslotname = 's1_reports'"
    )
    assert "password='hush'" in conninfo
    assert "application_name='it\\'s a \\\\ name'" in conninfo


@pytest.mark.long
def test_fencing_a_living_primary_and_labels(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    given = machines(trio, local_bed)
    folder = local_bed.folder / f"labels of {trio.primary.name}"
    folder.mkdir()
    folder.chmod(0o777)  # the commands run as the servers' user
    for machine in given.values():
        machine["label"] = f"touch '{folder}/{{node}} is {{role}} beside {{primary}}'"
    config = configuration(tmp_path, trio, machines=given)
    shown = slotfailover("failover", "--config", config, "--fence", "--dry-run")
    assert "-m immediate" in shown.out
    ran = slotfailover("failover", "--config", config, "--fence", "--yes")
    assert ran.code == 0, ran.err
    assert "fence the machine of a" in ran.err
    assert not (Path(given["a"]["data_folder"]) / "postmaster.pid").exists()
    assert slotfailover("rejoin", "a", "--config", config, "--yes").code == 0
    labels = {path.name for path in folder.iterdir()}
    assert labels == {"b is primary beside b", "a is standby beside b"}
    # Without a command, the primary fences itself: it says so, and that it still runs.
    config = configuration(tmp_path, trio)
    ran = slotfailover("failover", "--config", config, "--fence", "--yes", "--json")
    assert ran.json["new_primary"] == "a", ran.err
    assert "the node is fenced and still runs, on the old timeline" in ran.err
    with connect(trio.standby) as old, pytest.raises(ReadOnlySqlTransaction):
        old.execute("CREATE TABLE x ()")
    write(trio.primary, trio.dbname, 1)
    await_equal(trio, trio.primary)


def test_repoint_answers_each_wrong_state_with_one_error(new_pair: NewPair, tmp_path: Path) -> None:
    trio = new_pair()
    for changes, code, says in (
        ({"machines": {"x": {}}}, 2, "failover.machines names x, which is not a node"),
        ({"machines": {"a": {"stop": "ssh {x}"}}}, 2, "the command `stop` is wrong: KeyError 'x'"),
        ({"nodes": {"a": trio.primary.conninfo()}}, 2, "b is not a node"),
        ({"nodes": {"b": trio.standby.conninfo()}}, 10, "no node answers as a primary"),
        ({"journal_database": "none"}, 2, 'database "none" does not exist'),
    ):
        config = configuration(tmp_path, trio, **changes)
        ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b")
        assert (ran.code, says in ran.err) == (code, True), ran.err
    config = configuration(tmp_path, trio)
    ran = slotfailover("switchover", "--config", config, "--yes", "--to", "x")
    assert (ran.code, "x is not a node" in ran.err) == (2, True), ran.err
    tell(trio.primary, "CREATE ROLE weak LOGIN REPLICATION IN ROLE pg_monitor")
    weak = {
        "a": trio.primary.conninfo(user="weak"),
        "b": trio.standby.conninfo(),
    }
    config = configuration(tmp_path, trio, nodes=weak)
    ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b")
    says = "switch over: our role lacks the privilege to end sessions and to fence on a (a)"
    assert (ran.code, says in ran.err) == (20, True), ran.err
    config = configuration(tmp_path, trio, journal=str(tmp_path / "none" / "journal"))
    ran = slotfailover("rejoin", "b", "--config", config, "--yes")
    assert (ran.code, "can't be written" in ran.out) == (0, True), ran.err
    tell(trio.primary, "CREATE PUBLICATION everything FOR ALL TABLES")
    ran = slotfailover("rejoin", "b", "--config", config, "--yes")
    assert "it publishes all its tables" in ran.out


def _same_name_in_another_database(trio: Trio) -> None:
    """A subscription s1 in the database reports, too, with a conninfo that is hard to quote."""
    create(trio.subscriber, "reports")
    tables = (
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "CREATE TABLE u (id int PRIMARY KEY)",
    )
    tell(trio.subscriber, *tables, dbname="reports")
    conninfo = trio.primary.conninfo(trio.dbname, password="hush", application_name=ODD)
    statement = sql.SQL(
        "CREATE SUBSCRIPTION s1 CONNECTION {} PUBLICATION p"
        " WITH (failover, copy_data = false, slot_name = s1_reports)"
    ).format(conninfo)
    with connect(trio.subscriber, "reports") as subscriber:
        subscriber.execute(statement)
    await_ready(trio.primary, trio.standby, "s1_reports")


@contextlib.contextmanager
def _copy_in_progress(trio: Trio) -> Iterator[None]:
    """A subscription whose initial copy waits, until the end of the block, for a lock."""
    conninfo = trio.primary.conninfo(trio.dbname).replace("'", "''")
    with connect(trio.subscriber, trio.dbname) as locker, locker.transaction():
        locker.execute("LOCK TABLE u IN SHARE MODE")
        tell(
            trio.subscriber,
            f"CREATE SUBSCRIPTION copying CONNECTION '{conninfo}' PUBLICATION of_u WITH (failover)",
            dbname=trio.dbname,
        )
        busy = "SELECT count(*) > 0 FROM pg_stat_subscription WHERE worker_type LIKE 'table sync%'"
        eventually(lambda: ask(trio.subscriber, busy, trio.dbname), what="the copy has begun")
        await_ready(trio.primary, trio.standby, "copying")
        yield
