"""Whose a subscription is, and from which timeline it was fed: seen, or it is not touched."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.testbed.bed import Bed
from tests.conftest import NewPair
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
from tests.promises.failover.watch.watch_process import SETTINGS, Watching
from tests.providers.databases import connect, create
from tests.providers.interface import Server, Trio
from tests.providers.proxy import Proxy
from tests.providers.roles import make_roles, make_subscriber_role
from tests.providers.waiting import eventually

SUBSCRIPTION = "SELECT subenabled || ' ' || subconninfo FROM pg_subscription WHERE subname = "
COMMENT = "SELECT obj_description(oid, 'pg_subscription') FROM pg_subscription WHERE subname = 's1'"


def promote(old: Server, new: Server) -> None:
    """As another manager does it: the old primary is dead, the new one waits for nobody."""
    for setting in ("synchronized_standby_slots", "synchronous_standby_names"):
        tell(new, f"ALTER SYSTEM SET {setting} = ''")
    tell(new, "SELECT pg_reload_conf()")
    old.kill()
    tell(new, "SELECT pg_promote()")


def test_no_command_and_no_new_watch_follows_an_old_primary_that_came_back(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """The pair was promoted and died; of a power cut the old primary comes back first, alone."""
    trio = new_pair()
    subscribe(trio, "s1")
    watch = {**SETTINGS, "first_ms": 500}
    config = configuration(tmp_path, trio, watch=watch)
    promote(trio.primary, trio.standby)
    assert slotfailover("repoint", "--config", config, "--yes").code == 0
    comment = ask(trio.subscriber, COMMENT, trio.dbname)
    assert "timeline 2 from " in comment
    write(trio.standby, trio.dbname, 101)
    await_equal(trio, trio.standby)
    trio.standby.kill()
    for setting in ("synchronized_standby_slots", "synchronous_standby_names"):
        tell_at_start(trio.primary, setting)
    write(trio.primary, trio.dbname, 5000)  # a line of history that was discarded
    (tmp_path / "journal").unlink()
    for command in ("repoint", "resume", "failover"):
        ran = slotfailover(command, "--config", config, "--yes")
        assert (ran.code, "older than timeline 2" in ran.err) == (32, True), ran.err
    checked = slotfailover("check", "--config", config, "--json")
    found = [f for f in checked.json["findings"] if f["check"] == "primary-timeline"]
    assert [f["severity"] for f in found] == ["critical"], found
    with watching(config) as replica:
        forbidden = replica.await_verdict("forbid")
        assert "older than timeline 2" in forbidden["decision"]["reason"]
        replica.await_rounds(12)
        assert replica.metric("slotfailover_repoints_total") == 0
    assert f"port='{trio.standby.port}'" in ask(trio.subscriber, SUBSCRIPTION + "'s1'", trio.dbname)
    assert (5000,) not in ids(trio.subscriber, trio.dbname)


@pytest.mark.long
def test_check_finds_an_old_primary_by_what_the_journal_alone_remembers(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """No subscription tells of the newer timeline, as where a bridge is the only consumer."""
    trio = new_pair()
    config = configuration(tmp_path, trio)
    promote(trio.primary, trio.standby)
    assert slotfailover("repoint", "--config", config, "--yes").code == 0
    trio.standby.kill()
    for setting in ("synchronized_standby_slots", "synchronous_standby_names"):
        tell_at_start(trio.primary, setting)
    journal = tmp_path / "journal"
    (found,) = timeline_findings(config)
    assert (found["severity"], found["subject"]) == ("critical", "a"), found
    assert "older than timeline 2" in found["what"] and "the journal" in found["what"]
    status = slotfailover("status", "--config", config, "--json")
    (line,) = [line for line in status.json["lines"] if line["kind"] == "PRIMARY"]
    assert not line["good"] and "an OLD primary" in line["text"], line
    journal.unlink()
    (found,) = timeline_findings(config)
    assert found["severity"] == "ok", "nothing remembers it"
    journal.mkdir()
    unread = timeline_findings(config)
    assert [f["severity"] for f in unread] == ["ok", "not judged"], unread
    assert "journal" in unread[1]["what"]


def timeline_findings(config: Path) -> list[Any]:
    checked = slotfailover("check", "--config", config, "--json")
    return [f for f in checked.json["findings"] if f["check"] == "primary-timeline"]


def tell_at_start(server: Server, setting: str) -> None:
    if not server.running:
        server.start()
    tell(server, f"ALTER SYSTEM SET {setting} = ''", "SELECT pg_reload_conf()")


def ids(server: Server, dbname: str) -> list[tuple[int]]:
    with connect(server, dbname) as connection:
        return connection.execute("SELECT id FROM t").fetchall()


@contextlib.contextmanager
def watching(config: Path) -> Iterator[Watching]:
    replica = Watching(config)
    try:
        yield replica
    finally:
        replica.end()


@pytest.mark.long
def test_watch_without_any_memory_waits_for_all_nodes_and_then_remembers(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, watch={**SETTINGS, "first_ms": 3_600_000})
    promote(trio.primary, trio.standby)
    with watching(config) as replica:  # a is down: is b the newest, or an old one?
        eventually(
            lambda: "which timeline is the newest" in replica.status["decision"]["reason"],
            what="it waits",
        )
        replica.await_rounds(10)
        decision = replica.status["decision"]
        assert (decision["verdict"], bool(decision["pending"])) == ("wait", True)
    assert slotfailover("repoint", "--config", config, "--yes").code == 0
    tell(trio.subscriber, "COMMENT ON SUBSCRIPTION s1 IS 'kept'", dbname=trio.dbname)
    with watching(config) as replica:
        eventually(
            lambda: "timeline 2 from" in str(ask(trio.subscriber, COMMENT, trio.dbname)),
            what="watch has the subscription remember",
        )
        eventually(
            lambda: any("s1 remembers timeline 2" in text for text in replica.events),
            what="watch tells of it",
        )
    assert ask(trio.subscriber, COMMENT, trio.dbname).startswith("kept [slotfailover: system ")


@pytest.mark.long
def test_a_subscription_of_another_cluster_is_not_touched_while_that_cluster_is_down(
    new_pair: NewPair, local_bed: Bed, tmp_path: Path
) -> None:
    """Two shards feed one subscriber by slots of the same name; ours is sound, theirs is down."""
    trio = new_pair()
    other = new_pair(synchronous=False)
    subscribe(trio, "s1")
    with connect(other.primary, other.dbname) as there:
        there.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        there.execute("CREATE PUBLICATION p FOR ALL TABLES")
    tell(
        trio.subscriber,
        f"CREATE SUBSCRIPTION from_shard2 CONNECTION '{other.primary.conninfo(trio.dbname)}'"
        " PUBLICATION p WITH (failover, copy_data = false, slot_name = s1)",
        dbname=trio.dbname,
    )
    before = ask(trio.subscriber, SUBSCRIPTION + "'from_shard2'", trio.dbname)
    config = configuration(tmp_path, trio, watch=SETTINGS)
    assert slotfailover("repoint", "--config", config, "--yes").code == 0
    other.primary.kill()
    ran = slotfailover("repoint", "--config", config, "--yes", "--json")
    assert (ran.code, ran.json["steps"]) == (1, []), ran.err
    assert [left["subject"] for left in ran.json["left"]] == ["sub/from_shard2"]
    assert "the publisher is unknown" in ran.json["left"][0]["reason"]
    checked = slotfailover("check", "--config", config, "--json")
    found = [f for f in checked.json["findings"] if f["check"] == "subscription-identified"]
    assert [(f["severity"], f["subject"]) for f in found] == [("warning", "sub/from_shard2")]
    with watching(config) as replica:
        replica.await_verdict("rest")
        replica.await_rounds(10)
        assert replica.metric("slotfailover_repoints_total") == 0
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes", "--json")
    assert "from_shard2" not in " ".join(step["step"] for step in ran.json["steps"]), ran.err
    assert ask(trio.subscriber, SUBSCRIPTION + "'from_shard2'", trio.dbname) == before
    listed = configuration(tmp_path, trio, others=[f"host=127.0.0.1 port={other.primary.port}"])
    ran = slotfailover("repoint", "--config", listed, "--yes")
    assert ran.code == 0, ran.err


def test_as_the_documented_role_a_subscriber_past_the_switch_is_refused(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """The subscriber has rows that the new primary never had; that one has written more since."""
    trio = new_pair(synchronous=False)
    subscribe(trio, "s1")
    role = make_roles(trio.primary, trio.dbname, publication="p").failover
    make_subscriber_role(trio.subscriber, trio.dbname)
    tell(
        trio.primary,
        "ALTER SYSTEM SET synchronized_standby_slots = ''",
        "SELECT pg_reload_conf()",
    )
    eventually(
        lambda: ask(trio.standby, f"SELECT count(*) FROM pg_roles WHERE rolname = '{role}'") == 1,
        what="the role is on the standby",
    )
    eventually(
        lambda: ask(
            trio.standby,
            "SELECT to_regprocedure('slotfailover.timeline_history(int)') IS NOT NULL",
        ),
        what="the function is on the standby",
    )
    phantoms(trio)
    tell(trio.standby, "SELECT pg_promote()")
    for first in range(1000, 1400, 10):
        write(trio.standby, trio.dbname, first)
    config = configuration(
        tmp_path,
        trio,
        nodes={n: s.conninfo(user=role) for n, s in nodes(trio).items()},
        subscribers={"sub": trio.subscriber.conninfo(trio.dbname, user=role)},
    )
    ran = slotfailover("repoint", "--config", config, "--yes", "--json")
    assert ran.json["left"], ran.out + ran.err
    assert (ran.code, "that b never had" in ran.out) == (1, True), ran.out + ran.err
    assert ask(trio.subscriber, SUBSCRIPTION + "'s1'", trio.dbname).startswith("false")
    back = slotfailover("resume", "--config", config, "--yes", "--rollback")
    assert (back.code, "b was promoted" in back.err) == (35, True), back.out
    assert ask(trio.subscriber, SUBSCRIPTION + "'s1'", trio.dbname).startswith("false")
    # Without the function the role can't tell, which is a refusal, too.
    tell(trio.standby, "DROP FUNCTION slotfailover.timeline_history(int)")
    ran = slotfailover("repoint", "--config", config, "--yes", "--json")
    assert (ran.code, "nobody can tell" in ran.out) == (32, True), ran.out + ran.err
    checked = slotfailover("check", "--config", config, "--json")
    found = [f for f in checked.json["findings"] if f["check"] == "timeline-history"]
    assert [f["severity"] for f in found] == ["critical"]
    # A role with REPLICATION asks for it by the replication protocol.
    tell(trio.standby, f"ALTER ROLE {role} REPLICATION")
    ran = slotfailover("repoint", "--config", config, "--yes", "--json")
    assert (ran.code, "that b never had" in ran.out) == (1, True), ran.out + ran.err


def nodes(trio: Trio) -> dict[str, Server]:
    return {"a": trio.primary, "b": trio.standby}


def phantoms(trio: Trio) -> None:
    """200 rows reach the subscriber and not the standby; then the primary dies."""
    stop = "ALTER SYSTEM SET primary_conninfo = ''"
    tell(trio.standby, stop, "SELECT pg_reload_conf()")
    eventually(
        lambda: ask(trio.standby, "SELECT count(*) FROM pg_stat_wal_receiver") == 0,
        what="the standby receives no more",
    )
    write(trio.primary, trio.dbname, 1, 200)
    await_equal(trio, trio.primary)
    trio.primary.kill()


@pytest.mark.long
def test_other_names_of_a_node_are_known_and_floating_ones_never_rewritten(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    floating = Proxy(trio.primary.port)
    with contextlib.closing(floating):
        by_alias = trio.primary.conninfo(trio.dbname, host="localhost")
        by_float = trio.primary.conninfo(trio.dbname, port=floating.port)
        create(trio.subscriber, "reports")
        tell(
            trio.subscriber,
            "CREATE TABLE t (id int PRIMARY KEY, note text)",
            f"CREATE SUBSCRIPTION s2 CONNECTION '{by_float}' PUBLICATION p"
            " WITH (failover, copy_data = false)",
            dbname="reports",
        )
        tell(
            trio.subscriber,
            f"ALTER SUBSCRIPTION s1 CONNECTION '{by_alias}'",
            dbname=trio.dbname,
        )
        subscribers = {
            "sub": trio.subscriber.conninfo(trio.dbname),
            "reports": trio.subscriber.conninfo("reports"),
        }
        config = configuration(tmp_path, trio, subscribers=subscribers)
        plan = ("repoint", "--config", config, "--dry-run", "--json")
        eventually(lambda: slotfailover(*plan).json["steps"] == [], what="both workers stream")
        ran = slotfailover("repoint", "--config", config, "--yes", "--json")
        assert (ran.code, ran.json["steps"]) == (0, []), ran.out + ran.err  # both lead to a
        own = {n: f"host=127.0.0.1 port={s.port}" for n, s in nodes(trio).items()}
        everywhere = f"host=127.0.0.1 port={floating.port}"
        advertised = {name: [address, everywhere] for name, address in own.items()}
        both = {"a": [everywhere], "b": own["b"]}
        wrong = configuration(tmp_path, trio, advertised={**both, "b": [own["b"], everywhere]})
        ran = slotfailover("repoint", "--config", wrong, "--yes")
        assert (ran.code, "is an address of a and of b" in ran.err) == (2, True), ran.err
        config = configuration(tmp_path, trio, subscribers=subscribers, advertised=advertised)
        for slot in ("s1", "s2"):
            from tests.providers.slots import await_ready

            await_ready(trio.primary, trio.standby, slot)
        promote(trio.primary, trio.standby)
        floating.target_port = trio.standby.port
        ran = slotfailover("repoint", "--config", config, "--yes", "--json")
        assert ran.code == 0, ran.out + ran.err
        steps = " ".join(step["step"] for step in ran.json["steps"])
        assert "point subscription s1" in steps
        assert "point subscription s2" not in steps
        write(trio.standby, trio.dbname, 1)
        expected = rows(trio.standby, trio.dbname)
        eventually(lambda: rows(trio.subscriber, "reports") == expected, what="reports follows")
        await_equal(trio, trio.standby)
        kept = ask(trio.subscriber, SUBSCRIPTION + "'s2'", "reports")
        assert f"port={floating.port}" in kept.replace("'", "")


@pytest.mark.long
def test_a_loopback_address_is_not_written_into_another_machines_subscriber(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """What we reach through a tunnel is another machine: its loopback is not ours."""
    trio = new_pair()
    subscribe(trio, "s1")
    tunnel = Proxy(trio.subscriber.port)
    with contextlib.closing(tunnel):
        subscribers = {"sub": trio.subscriber.conninfo(trio.dbname, port=tunnel.port)}
        config = configuration(tmp_path, trio, subscribers=subscribers)
        checked = slotfailover("check", "--config", config, "--json")
        assert any(
            "the publisher is unknown" in f["what"]
            for f in checked.json["findings"]
            if f["check"] == "subscription-identified"
        )
        promote(trio.primary, trio.standby)
        ran = slotfailover("repoint", "--config", config, "--yes", "--json")
        assert (ran.code, ran.json["steps"]) == (1, []), ran.out + ran.err
        advertised = {n: f"host=127.0.0.1 port={s.port}" for n, s in nodes(trio).items()}
        config = configuration(tmp_path, trio, subscribers=subscribers, advertised=advertised)
        ran = slotfailover("repoint", "--config", config, "--yes")
        assert ran.code == 0, ran.out + ran.err
        write(trio.standby, trio.dbname, 1)
        await_equal(trio, trio.standby)


def test_one_server_under_two_names_and_a_pooler_are_refused(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    twice = {"a": trio.primary.conninfo(), "b": trio.primary.conninfo(host="localhost")}
    config = configuration(tmp_path, trio, nodes=twice)
    for command in ("repoint", "failover"):
        ran = slotfailover(command, "--config", config, "--yes")
        assert (ran.code, "a and b are one server" in ran.err) == (2, True), ran.err
    assert yaml.safe_load(config.read_text())["failover"]["nodes"]


if __name__ == "__main__":
    pytest.main([__file__])
