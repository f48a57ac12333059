"""Breakers that are in files and start parameters of servers, and in who feeds whom."""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.testbed.bed import Bed
from services.testbed.pair import clone, make_standby
from services.testbed.postgres import PostgresServer
from tests.promises.failover.check.examining import (
    Examiner,
    examiner_of,
    make_slot,
    quoted,
    reset_on,
    set_on,
)
from tests.promises.failover.conftest import NewTrio
from tests.promises.failover.servers import ask, subscribe, tell
from tests.providers.interface import Trio
from tests.providers.slots import advance_until_ready
from tests.providers.waiting import eventually


@pytest.fixture(scope="module")
def pair_here(local_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examiner]:
    """A pair with data folders on this machine, and a subscription that is ready."""
    with local_bed.new_pair(synchronous=False) as (pair, subscriber):
        trio = Trio(pair.primary, pair.standby, subscriber, pair.dbname)
        subscribe(trio, "s1")
        yield examiner_of(trio, tmp_path_factory.mktemp("here"))


@pytest.fixture
def local(pair_here: Examiner) -> Iterator[Examiner]:
    """Nothing is wrong before the test, and nothing is wrong after it."""
    pair_here.expect()
    yield pair_here
    pair_here.expect()


def folder_of(server: object) -> Path:
    assert isinstance(server, PostgresServer)
    return server.data


def test_pg_hba_admits_replication_only(local: Examiner) -> None:
    """Breaker 7: the walreceiver is let in, the slotsync worker is not."""
    primary, standby = local.trio.primary, local.trio.standby
    tell(primary, "CREATE ROLE repl LOGIN REPLICATION")
    file = folder_of(primary) / "pg_hba.conf"
    replication_only = [
        "host replication repl 127.0.0.1/32 trust",
        "host all,replication postgres,slotfailover 127.0.0.1/32 trust",
    ]
    file.write_text("\n".join(replication_only) + "\n")
    tell(primary, "SELECT pg_reload_conf()")
    conninfo = primary.conninfo(user="repl", application_name="standby_1")
    set_on(standby, primary_conninfo=quoted(conninfo))
    local.hasten()
    found = local.expect("pg-hba", "slotsync-worker")
    (finding,) = found["pg-hba"]
    assert finding["evidence"] == (
        "role repl from 127.0.0.1, database postgres: no line of pg_hba.conf admits it"
    )
    (line,) = re.findall("`(.*)`", finding["remedy"]["text"])
    assert line == "host postgres repl 127.0.0.1/32 scram-sha-256"
    rejecting = "host all repl 0.0.0.0/0 reject"
    file.write_text("\n".join([*replication_only, rejecting]) + "\n")
    (finding,) = local.expect("pg-hba", "slotsync-worker")["pg-hba"]
    assert "line 3 of pg_hba.conf says reject" in finding["evidence"]
    repaired = line.replace("scram-sha-256", "trust")  # the role has no password here
    file.write_text("\n".join([*replication_only, repaired, rejecting]) + "\n")
    local.carry_out(finding)
    local.hasten()
    local.expect()
    file.write_text("host all,replication all 127.0.0.1/32 trust\n")
    tell(primary, "SELECT pg_reload_conf()")
    reset_upstream(local)


@pytest.mark.long
def test_extension_and_native_synchronization_both(local: Examiner) -> None:
    """Breaker 23: the extension is not packaged here; another library stands under its name."""
    standby = local.trio.standby
    assert isinstance(standby, PostgresServer)
    libraries = folder_of(standby) / "libraries"
    libraries.mkdir()
    libraries.chmod(0o755)
    shutil.copy(standby.programs.parent / "lib" / "auto_explain.so", libraries)
    (libraries / "auto_explain.so").rename(libraries / "pg_failover_slots.so")
    shutil.chown(libraries, user=folder_of(standby).owner())
    set_on(
        standby,
        dynamic_library_path=quoted(f"{libraries}:$libdir"),
        shared_preload_libraries="pg_failover_slots",
    )
    local.hasten()
    found = local.expect("failover-slots-extension")
    assert found["failover-slots-extension"][0]["severity"] == "warning"
    reset_on(standby, "shared_preload_libraries")
    local.hasten()
    local.expect()


def reset_upstream(examiner: Examiner) -> None:
    conninfo = examiner.trio.primary.conninfo(application_name="standby_1")
    set_on(examiner.trio.standby, primary_conninfo=quoted(conninfo))


def test_no_room_on_the_standby(local: Examiner) -> None:
    """Breaker 24: max_replication_slots is used up."""
    trio = local.trio
    set_on(trio.standby, max_replication_slots="1")
    local.hasten()
    (finding,) = local.expect("promotion-capacity")["promotion-capacity"]
    assert "max_replication_slots = 1 on b; as the primary it needs 2" in finding["evidence"]
    make_slot(trio.primary, trio.dbname, "second")
    tell(trio.standby, "SELECT pg_reload_conf()")
    found = local.expect(
        "slot-capacity", "promotion-capacity", "slot-on-standby", "slotsync-worker"
    )
    (finding,) = found["slot-capacity"]
    assert finding["evidence"] == "max_replication_slots = 1, 1 used, 1 missing"
    local.carry_out(finding)
    local.hasten()
    advance_until_ready(trio.primary, trio.standby, trio.dbname, "second")
    local.expect()
    tell(trio.primary, "SELECT pg_drop_replication_slot('second')")
    reset_on(trio.standby, "max_replication_slots")
    local.hasten()


def test_wal_level_below_logical(bare: Examiner) -> None:
    """Breaker 8, on either side."""
    for name, server in (("a", bare.trio.primary), ("b", bare.trio.standby)):
        set_on(server, wal_level="replica")
        server.restart()
        bare.hasten()
        expected = ["wal-level"] if name == "a" else ["wal-level", "slotsync-worker"]
        (finding,) = bare.expect(*expected)["wal-level"]
        assert finding["what"] == f"wal_level is replica on {name}"
        assert finding["remedy"]["by_hand"] == f"{name} must be restarted then"
        bare.carry_out(finding)
        server.restart()
        bare.hasten()
        bare.expect()


@pytest.fixture
def third(local_bed: Bed) -> Iterator[Callable[[str], PostgresServer]]:
    """A further server of the bed, removed at the end."""
    with contextlib.ExitStack() as stack:

        def make(name: str) -> PostgresServer:
            server = local_bed.server(f"{name}-{local_bed.pairs_made}")
            stack.callback(server.discard)
            return server

        yield make


@pytest.mark.long
def test_standby_of_a_standby(
    local: Examiner, third: Callable[[str], PostgresServer], tmp_path: Path
) -> None:
    """Breaker 9; and a standby that is not the candidate is judged by name."""
    trio, cascade = local.trio, third("cascade")
    assert isinstance(trio.standby, PostgresServer)
    tell(trio.standby, "SELECT pg_create_physical_replication_slot('standby_2', true)")
    clone(trio.standby, cascade, slot="standby_2", dbname="postgres")
    cascade.start()
    nodes = {
        "a": trio.primary.conninfo(),
        "b": trio.standby.conninfo(),
        "c": cascade.conninfo(),
    }
    examiner = examiner_of(trio, tmp_path, nodes=nodes)
    found = examiner.expect("other-standbys")
    assert found["other-standbys"][0]["what"] == "c does not have ready: s1"
    assert examiner.run("--nagios").code == 1

    def judged() -> bool:
        report = examiner.run("--standby", "c", "--json").json
        names = {f["check"] for f in report["findings"] if f["severity"] in ("warning", "critical")}
        return report["standby"] == "c" and names == {
            "cascading-standby",
            "primary-slot",
            "slotsync-worker",
            "slot-on-standby",
            "standby-slot-listed",
        }

    eventually(judged, what="c is judged", interval_s=0.2)
    assert "c is a standby of the standby b" in examiner.run("--standby", "c").out
    tell(trio.primary, "SELECT pg_create_physical_replication_slot('standby_2', true)")
    assert isinstance(trio.primary, PostgresServer)
    make_standby(trio.primary, cascade, slot="standby_2", dbname="postgres")
    cascade.restart()
    set_on(trio.primary, synchronized_standby_slots="standby_1, standby_2")
    tell(trio.standby, "SELECT pg_drop_replication_slot('standby_2')")
    examiner.expect()
    assert examiner.run("--standby", "c").code == 0
    cascade.stop()
    set_on(trio.primary, synchronized_standby_slots="standby_1")
    tell(trio.primary, "SELECT pg_drop_replication_slot('standby_2')")


def test_a_former_primary_with_its_own_slots(local_trio: NewTrio, tmp_path: Path) -> None:
    """Breakers 10 and 19: a demoted primary keeps its slots, and they block synchronization."""
    trio = local_trio()
    subscribe(trio, "s1")
    local = examiner_of(trio, tmp_path)
    local.expect()
    old, new = trio.primary, trio.standby
    assert isinstance(old, PostgresServer)
    assert isinstance(new, PostgresServer)
    tell(trio.subscriber, "ALTER SUBSCRIPTION s1 DISABLE", dbname=trio.dbname)
    old.stop()
    tell(
        new, "SELECT pg_promote()", "SELECT pg_create_physical_replication_slot('standby_a', true)"
    )
    set_on(new, synchronized_standby_slots="standby_a")
    make_standby(new, old, slot="standby_a", dbname="postgres")
    set_auto(old, "synchronized_standby_slots", "standby_1, gone")
    old.start()
    conninfo = new.conninfo(trio.dbname)
    tell(
        trio.subscriber,
        f"ALTER SUBSCRIPTION s1 CONNECTION {quoted(conninfo)}",
        "ALTER SUBSCRIPTION s1 ENABLE",
        dbname=trio.dbname,
    )
    found = local.expect(
        *("slot-name-clash", "slotsync-worker", "standby-list-stale", "leftover-slot"),
        "synchronous-before",
    )
    (clash,) = found["slot-name-clash"]
    assert clash["remedy"]["fix"]
    assert "synced = f, failover = t" in clash["evidence"]
    (left,) = found["leftover-slot"]
    assert left["remedy"]["fix"]  # the new primary streamed by it, before its promotion
    for name in ("slot-name-clash", "standby-list-stale", "leftover-slot", "synchronous-before"):
        local.carry_out(found[name][0])
    assert ask(old, "SHOW synchronized_standby_slots") == ""
    old.restart()
    local.expect()


def set_auto(server: PostgresServer, name: str, value: str) -> None:
    """A line for a server that is stopped."""
    with (server.data / "postgresql.auto.conf").open("a", encoding="utf-8") as file:
        file.write(f"{name} = {quoted(value)}\n")


def test_the_standby_does_not_admit_the_consumer(local: Examiner) -> None:
    """The subscription's role may come to the primary, and is rejected by the standby."""
    primary, standby = local.trio.primary, local.trio.standby
    tell(primary, "CREATE ROLE consumer LOGIN SUPERUSER")
    upstream = quoted(primary.conninfo(local.trio.dbname, user="consumer"))
    moved = f"ALTER SUBSCRIPTION s1 CONNECTION {upstream}"
    tell(local.trio.subscriber, moved, dbname=local.trio.dbname)
    used = (
        "SELECT count(*) FROM pg_stat_replication r JOIN pg_replication_slots s"
        " ON s.active_pid = r.pid WHERE s.slot_name = 's1' AND r.usename = 'consumer'"
    )
    eventually(lambda: ask(primary, used) == 1, what="the subscription comes as consumer")
    local.expect()
    file = folder_of(standby) / "pg_hba.conf"
    before = file.read_text()
    file.write_text("host all consumer 127.0.0.1/32 reject\n" + before)
    tell(standby, "SELECT pg_reload_conf()")
    (finding,) = local.expect("standby-admits-consumers")["standby-admits-consumers"]
    assert "b does not let the consumer of s1 in" in finding["what"]
    assert "line 1 of pg_hba.conf says reject" in finding["evidence"]
    file.write_text(before)
    local.carry_out(finding)
    upstream = quoted(primary.conninfo(local.trio.dbname))
    moved = f"ALTER SUBSCRIPTION s1 CONNECTION {upstream}"
    tell(local.trio.subscriber, moved, dbname=local.trio.dbname)
