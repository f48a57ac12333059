"""Scenarios of pg_auto_failover's specs and Patroni's features, by their names, on three nodes.

The specs are those of tests/tap/specs, the features those of features/, read in 2026. Where another
test has the scenario already, the table in docs/contributing/evidence.md names it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer
from tests.promises.failover.check.examining import set_on
from tests.promises.failover.conftest import NewTrio, end, machines
from tests.promises.failover.servers import (
    Ran,
    accepting,
    ask,
    await_equal,
    configuration,
    losing,
    rows,
    slotfailover,
    subscribe,
    tell,
    word_of,
    write,
)
from tests.promises.failover.third import third_standby
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually

RECEIVERS = "SELECT count(*) FROM pg_stat_wal_receiver"
BY_BYTES = re.compile(r"--accept lost-wal:b@\d+:[0-9A-F/]+[+]\d+")


@dataclass
class Three:
    """A primary a, standbys b and c, and a subscription s1."""

    trio: Trio
    c: PostgresServer
    config: Path

    @property
    def nodes(self) -> dict[str, PostgresServer]:
        assert isinstance(self.trio.primary, PostgresServer)
        assert isinstance(self.trio.standby, PostgresServer)
        return {"a": self.trio.primary, "b": self.trio.standby, "c": self.c}

    def order(self, *words: str) -> Ran:
        """Run a command."""
        yes = () if words[0] in ("check", "status") else ("--yes",)
        return slotfailover(*words, "--config", self.config, *yes)

    def settled(self) -> None:
        """Wait until a failover would lose nothing; the last primary is noted then."""
        eventually(
            lambda: (self.order("check").code, self.order("status").code) == (0, 0),
            what="all three are well",
            timeout_s=120,
        )

    def disconnect(self, name: str) -> str:
        """Let a standby receive nothing; return its primary_conninfo of before."""
        server = self.nodes[name]
        conninfo = str(ask(server, "SHOW primary_conninfo"))
        set_on(server, primary_conninfo="'user=postgres port=1'")
        eventually(lambda: ask(server, RECEIVERS) == 0, what=f"{name} receives nothing")
        return conninfo

    def primaries(self) -> list[str]:
        """The nodes that run and are out of recovery."""
        return [
            name
            for name, server in self.nodes.items()
            if server.running and not ask(server, "SELECT pg_is_in_recovery()")
        ]


@pytest.fixture
def three(local_trio: NewTrio, local_bed: Bed, tmp_path: Path) -> Iterator[Three]:
    trio = local_trio()
    subscribe(trio, "s1")
    with third_standby(trio, local_bed) as third:
        nodes = {
            name: server.conninfo()
            for name, server in (("a", trio.primary), ("b", trio.standby), ("c", third))
        }
        hands: dict[str, Any] = machines(trio, local_bed, c=third)
        made = Three(
            trio, third, configuration(tmp_path, trio, admins=nodes, nodes=nodes, machines=hands)
        )
        made.settled()
        yield made
        end(third)


@pytest.mark.long
def test_timeline_fork_3node_auto_detect(three: Three) -> None:
    """And timeline_fork_report_lsn_deadlock: c is promoted by hand beside a, and made a standby
    again. Its timeline has the larger number, and it is chosen by nobody's default.
    """
    a, b, c = three.nodes.values()
    set_on(a, synchronized_standby_slots="'standby_1'")
    before = three.disconnect("c")
    for setting in ("synchronized_standby_slots", "synchronous_standby_names"):
        set_on(c, **{setting: "''"})
    tell(c, "SELECT pg_promote()")
    write(c, three.trio.dbname, 7001)
    tell(c, "SELECT pg_logical_emit_message(false, 'x', repeat('x', 2000000), true)")
    write(a, three.trio.dbname, 101)
    await_equal(three.trio, a)
    for order in (("check",), ("failover",), ("switchover", "--to", "b")):
        refused = three.order(*order)
        assert refused.code == 35, (order, refused.out + refused.err)
    c.stop()
    (c.data / "standby.signal").touch()
    c.start()
    set_on(c, primary_conninfo="'" + before.replace("'", "''") + "'")
    write(a, three.trio.dbname, 201)
    await_equal(three.trio, a)
    checked = slotfailover("check", "--config", three.config, "--json").json
    assert checked["standby"] == "b", checked

    acknowledged = rows(a, three.trio.dbname)
    a.kill()
    refused = three.order("failover")
    assert (refused.code, three.primaries()) == (34, []), refused.err
    assert "b lacks the commits of timeline 2" in refused.err
    other = three.order("failover", "--to", "c")
    assert (other.code, three.primaries()) == (34, []), other.err
    assert "c left timeline 1 at " in other.err
    assert BY_BYTES.search(refused.err), refused.err
    ran = three.order("failover", *accepting(refused))
    assert three.primaries() == ["b"], ran.err
    assert rows(b, three.trio.dbname) == acknowledged
    write(b, three.trio.dbname, 301)
    await_equal(three.trio, b)


@pytest.mark.long
def test_guard_data_loss(three: Three) -> None:
    """Commits waited for one of two standbys; the primary and one of the standbys die at once."""
    a, b, c = three.nodes.values()
    set_on(a, synchronous_standby_names="'ANY 1 (standby_1, standby_2)'")
    three.settled()
    b.kill()
    a.kill()
    for _ in range(2):
        refused = three.order("failover")
        assert (refused.code, three.primaries()) == (34, []), refused.err
        assert "the silent ones may have commits" in refused.err
    set_on(c, log_min_messages="warning")  # no node is left that could not be changed
    ran = three.order("failover", *accepting(refused), *word_of(c, "a", "b"))
    assert three.primaries() == ["c"], ran.err
    write(c, three.trio.dbname, 301)
    await_equal(three.trio, c)
    b.start()
    for name in ("b", "a"):
        rejoined = three.order("rejoin", name)
        assert rejoined.code == 0, rejoined.err + rejoined.out
    assert three.primaries() == ["c"]
    eventually(lambda: rows(b, three.trio.dbname) == rows(c, three.trio.dbname), what="b has all")


@pytest.mark.long
def test_fast_forward(three: Three) -> None:
    """The wanted standby lacks WAL that another has: that is told, and it streams from that."""
    a, b, c = three.nodes.values()
    set_on(a, synchronized_standby_slots="'standby_1'")
    three.disconnect("c")
    write(a, three.trio.dbname, 101)
    await_equal(three.trio, a)
    three.order("status")
    a.kill()
    words = ("failover", "--to", "c", *losing(b, "s1", "c"))
    refused = three.order(*words)
    assert (refused.code, three.primaries()) == (34, []), refused.err
    assert re.search(r"c lacks \d+ bytes of WAL that b has", refused.err), refused.err
    assert "let c stream from b first" in refused.err
    tell(b, "SELECT pg_create_physical_replication_slot('forward', true)")
    forward = b.conninfo(three.trio.dbname).replace("'", "''")
    set_on(c, primary_conninfo=f"'{forward}'", primary_slot_name="forward")
    has = ask(b, "SELECT pg_last_wal_receive_lsn()::text")
    query = f"SELECT pg_last_wal_replay_lsn() >= '{has}'"
    eventually(lambda: ask(c, query), what="c has what b has")
    ran = three.order(*words)
    assert three.primaries() == ["c"], ran.err
    assert rows(c, three.trio.dbname) == rows(b, three.trio.dbname)


@pytest.mark.long
def test_fast_forward_whose_source_dies(three: Three) -> None:
    a, b, c = three.nodes.values()
    set_on(a, synchronized_standby_slots="'standby_1'")
    set_on(a, synchronous_standby_names="standby_1")
    three.disconnect("c")
    tell(a, "SELECT pg_logical_emit_message(false, 'x', repeat('x', 20000000))")
    write(a, three.trio.dbname, 101)
    await_equal(three.trio, a)
    three.order("status")
    b.kill()
    a.kill()
    refused = three.order("failover", *losing(c, "s1", "c"))
    assert (refused.code, three.primaries()) == (34, []), refused.err
    assert "--accept lost-wal:c@" in refused.err, refused.err


@pytest.mark.long
def test_multi_alternate(three: Three) -> None:
    """Each node is the primary once, and dies: three nodes on three timelines, started in the
    order in which they died.
    """
    a, b, c = three.nodes.values()
    dbname = three.trio.dbname
    a.kill()
    ran = three.order("failover", "--to", "b")
    assert three.primaries() == ["b"], ran.err
    write(b, dbname, 101)
    await_equal(three.trio, b)
    await_ready(b, c, "s1", timeout_s=120)
    three.order("status")
    b.kill()
    ran = three.order("failover")
    assert three.primaries() == ["c"], ran.err
    write(c, dbname, 201)
    await_equal(three.trio, c)
    c.kill()
    for server in (a, b):  # primaries of timelines 1 and 2
        for setting in ("synchronized_standby_slots", "synchronous_standby_names"):
            with (server.data / "postgresql.auto.conf").open("a") as file:
                file.write(f"{setting} = ''\n")
        server.start()
        for order in (("failover",), ("repoint",), ("resume",), ("switchover", "--to", "b")):
            refused = three.order(*order)
            assert refused.code in (32, 35), (order, refused.err)
    assert (7,) not in rows(three.trio.subscriber, dbname)
    acknowledged = set(rows(three.trio.subscriber, dbname))
    b.kill()
    a.kill()
    c.start()
    assert three.primaries() == ["c"]
    for name in ("a", "b"):
        rejoined = three.order("rejoin", name)
        assert rejoined.code in (0, 1), rejoined.err
    assert set(rows(c, dbname)) == acknowledged
    write(c, dbname, 301)
    await_equal(three.trio, c)
    for server in (a, b):
        eventually(lambda s=server: rows(s, dbname) == rows(c, dbname), what="it has all")  # type: ignore[misc]


@pytest.mark.long
def test_ignored_slots(three: Three) -> None:
    """Slots of somebody else are on every node what they were, after two switchovers."""
    a, b, _ = three.nodes.values()
    for name, physical in (("unmanaged_0", False), ("unmanaged_1", True)):
        made = (
            f"pg_create_physical_replication_slot('{name}', true)"
            if physical
            else f"pg_create_logical_replication_slot('{name}', 'test_decoding')"
        )
        tell(a, f"SELECT {made}")
    found = (
        "SELECT string_agg(slot_name, ' ' ORDER BY slot_name) FROM pg_replication_slots"
        " WHERE slot_name LIKE 'unmanaged%'"
    )
    for to in ("b", "a"):
        ran = three.order("switchover", "--to", to)
        assert ran.code in (0, 1), ran.err
    assert ask(a, found) == "unmanaged_0 unmanaged_1"
    assert ask(b, found) is None
