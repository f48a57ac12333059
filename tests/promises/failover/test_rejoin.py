"""Old primaries made standbys again, on real servers: rewound, copied anew, ready for the next."""

import os
import re
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from services.postgres.identifiers import literal
from services.testbed.bed import Bed
from services.testbed.postgres import PostgresServer
from tests.promises.failover.check.examining import set_on
from tests.promises.failover.conftest import NewTrio, end, machines
from tests.promises.failover.servers import (
    accepting,
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.promises.failover.third import third_standby
from tests.providers.interface import Trio
from tests.providers.waiting import eventually

ODD_PASSWORD = "it's a \\ back\\\\slash"


def test_a_killed_primary_that_diverged_is_rewound_and_then_copied_anew(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, as_roles=True, machines=machines(trio, local_bed))
    upstream = make_conninfo(ask(trio.standby, "SHOW primary_conninfo"), password=ODD_PASSWORD)
    told = f"ALTER SYSTEM SET primary_conninfo = {literal(upstream)}"
    tell(trio.standby, told, "SELECT pg_reload_conf()")
    warned = slotfailover("check", "--config", config).out
    assert ("primary-conninfo-password" in warned, ODD_PASSWORD in warned) == (True, False)
    assert isinstance(trio.primary, PostgresServer)
    tell(trio.primary, "ALTER SYSTEM SET work_mem = '5MB'", "SELECT pg_reload_conf()")
    unknown = slotfailover("rejoin", "x", "--config", config, "--yes")
    assert (unknown.code, "x is not a node" in unknown.err) == (2, True)
    alive = slotfailover("rejoin", "a", "--config", config, "--yes")
    assert (alive.code, "a is the primary" in alive.err) == (35, True)

    _diverge(trio)
    ran = slotfailover("failover", "--config", config, "--yes")
    advice = "do NOT start a as it is; run: slotfailover rejoin a"
    assert (ran.code, ran.out.count(f"Hint: {advice}")) == (0, 1), ran.out
    write(trio.standby, trio.dbname, 101)
    checked = slotfailover("check", "--config", config).out
    assert (checked.count(advice), "start the node" in checked, "start a standby" in checked) == (
        (2, False, False)
    )
    standing = slotfailover("status", "--config", config)
    assert advice in standing.out
    assert "none unfinished" in standing.out
    ran = slotfailover("rejoin", "a", "--config", config, "--dry-run")
    discards = (
        r"the rejoin discards \d+ bytes of WAL of a, with [1-9]\d* commits, from 0/\w+, where b"
    )
    assert re.search(discards, ran.out), ran.out
    for written in ("hot_standby_feedback = on", "sync_replication_slots = on"):
        assert f"postgresql.auto.conf: {written}" in ran.out
    ran = slotfailover("rejoin", "a", "--config", config, "--yes", "--json")
    before, _, after = ran.err.partition("make a a standby of b")
    assert re.search(discards, before), ran.err
    assert after
    assert ran.code == 0, ran.err
    steps = [step["step"] for step in ran.json["steps"]]
    assert "make a a standby of b" in steps
    assert slotfailover("check", "--config", config).code == 0
    assert ask(trio.primary, "SHOW work_mem") == "5MB"  # its own configuration was kept
    rejoined = conninfo_to_dict(ask(trio.primary, "SHOW primary_conninfo"))
    assert rejoined["password"] == ODD_PASSWORD
    assert ask(trio.primary, "SELECT count(*) FROM t WHERE note = 'lost'", trio.dbname) == 0
    assert slotfailover("rejoin", "a", "--config", config, "--yes", "--json").json["steps"] == []

    # Back to a, and b's folder as an interrupted rewind leaves it: it is copied anew.
    kept = trio.standby.data.with_name(trio.standby.data.name + ".rejoining")  # type: ignore[attr-defined]
    there = slotfailover("switchover", "--config", config, "--yes", "--to", "a", "--no-rejoin")
    assert there.code == 0, there.err
    kept.mkdir()
    (kept / "changing").touch()
    for name in ("postgresql.conf", "postgresql.auto.conf"):
        (kept / name).write_text((trio.standby.data / name).read_text())  # type: ignore[attr-defined]
    owner = trio.standby.data.stat()  # type: ignore[attr-defined]
    for path in (kept, *kept.iterdir()):
        os.chown(path, owner.st_uid, owner.st_gid)
    unasked = slotfailover("rejoin", "b", "--config", config, "--yes")
    assert (unasked.code, "broken off while it changed data" in unasked.out) == (1, True)
    assert kept.exists()
    copied = slotfailover("rejoin", "b", "--config", config, "--yes", "--copy")
    assert copied.code == 0, copied.err
    assert not kept.exists()
    assert list(kept.parent.glob(f"{trio.standby.name}.before-*"))
    write(trio.primary, trio.dbname, 201)
    await_equal(trio, trio.primary)
    assert slotfailover("switchover", "--config", config, "--yes", "--to", "b").code == 0


@pytest.mark.long
def test_three_nodes_the_others_follow_and_the_best_is_chosen(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    with third_standby(trio, local_bed) as third:
        nodes = {
            "a": trio.primary.conninfo(),
            "b": trio.standby.conninfo(),
            "c": third.conninfo(),
        }
        config = configuration(tmp_path, trio, nodes=nodes, machines=machines(trio, local_bed))
        ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b")
        assert ran.code == 0, ran.err
        assert "let c stream from b" in ran.err
        named = ask(trio.standby, "SHOW synchronized_standby_slots")
        assert set(named.replace('"', "").split(", ")) == {"slotfailover_a", "standby_2"}
        assert slotfailover("check", "--config", config).code == 0

        # Another machine learns from the journal, on c, for whom commits on b waited.
        wanted = "ANY 1 (slotfailover_a, standby_2)"
        set_on(trio.standby, synchronous_standby_names=f"'{wanted}'")
        assert slotfailover("repoint", "--config", config, "--yes").code == 0
        (folder := tmp_path / "elsewhere").mkdir()
        elsewhere = configuration(folder, trio, nodes=nodes)
        noted = (
            f"SELECT count(*) FROM slotfailover.journal WHERE intent->>'synchronous' = '{wanted}'"
        )
        eventually(lambda: ask(third, noted), what="c has the journal")
        end(trio.primary)  # type: ignore[arg-type]
        trio.standby.stop("immediate")
        refused = slotfailover("failover", "--config", elsewhere, "--dry-run")
        assert (refused.code, "the silent ones may have commits" in refused.err) == (34, True)
        trio.primary.start()
        # c is up and lets nobody in: who has seen it as a standby knows that it is no primary.
        hba = third.data / "pg_hba.conf"
        admits = hba.read_text()
        hba.write_text("host all all all reject\n")
        tell(third, "SELECT pg_reload_conf()")
        eventually(lambda: not _lets_in(third), what="c lets nobody in")
        planning = ("failover", "--dry-run")
        unknown = slotfailover(*planning, "--config", elsewhere)
        assert (unknown.code, "c listens on its port" in unknown.err) == (35, True), unknown.err
        losing = accepting(slotfailover(*planning, "--config", config))
        known = slotfailover(*planning, "--config", config, *losing)
        assert (known.code, "not judged: c does not answer" in known.out) == (0, True), known.err
        hba.write_text(admits)
        third.run_tool("pg_ctl", ["reload", "-D", third.data])
        eventually(lambda: _lets_in(third), what="c lets us in")
        trio.standby.start()
        eventually(lambda: slotfailover("check", "--config", config).code == 0, what="all is well")
        set_on(trio.standby, synchronous_standby_names="")

        # c gets no more WAL; b dies: a has more, and its slots are ready.
        nowhere = "user=postgres port=1"  # its user stays: the default is the system's user
        tell(third, f"ALTER SYSTEM SET primary_conninfo = '{nowhere}'", "SELECT pg_reload_conf()")
        tell(trio.standby, "ALTER SYSTEM SET synchronized_standby_slots = 'slotfailover_a'")
        tell(trio.standby, "SELECT pg_reload_conf()")
        write(trio.standby, trio.dbname, 101)
        await_equal(trio, trio.standby)
        end(trio.standby)  # type: ignore[arg-type]
        ran = slotfailover("failover", "--config", config, "--yes", "--json")
        assert ran.json["new_primary"] == "a", ran.err
        assert "a has the most WAL (c " in slotfailover("history", "--config", config).out or (
            "a has the most WAL (c " in ran.err
        )
        assert "let c stream from a" in [step["step"] for step in ran.json["steps"]]
        assert ran.code == 0, ran.err
        write(trio.primary, trio.dbname, 201)
        eventually(
            lambda: ask(third, "SELECT count(*) FROM t", trio.dbname) == 20, what="c has all"
        )
        await_equal(trio, trio.primary)


def _lets_in(server: PostgresServer) -> bool:
    try:
        return ask(server, "SELECT true") is True
    except psycopg.OperationalError:
        return False


def _diverge(trio: Trio) -> None:
    """Kill the primary when it has WAL that its standby never got."""
    tell(trio.primary, "ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
    trio.standby.stop()
    tell(trio.primary, "INSERT INTO t VALUES (9999, 'lost')", dbname=trio.dbname)
    trio.primary.kill()
    trio.standby.start()
