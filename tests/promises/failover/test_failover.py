"""`slotfailover failover` on real servers whose primary is killed."""

import json
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import NewPair
from tests.promises.failover.servers import (
    KILLED_AFTER_A_STEP,
    ask,
    await_equal,
    configuration,
    create_subscription,
    slotfailover,
    slotfailover_process,
    subscribe,
    tell,
    write,
)
from tests.providers.databases import connect
from tests.providers.interface import Trio
from tests.providers.slots import await_ready
from tests.providers.tokens import token_of
from tests.providers.waiting import eventually, patient

BENCH = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers")


def test_a_primary_killed_under_load_is_replaced_and_the_subscriber_follows(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    _subscribe_bench(trio)
    config = configuration(tmp_path, trio, as_roles=True)
    load = _load(trio)
    alive = slotfailover("failover", "--config", config, "--yes")
    assert alive.code == 35
    assert "alive and writable" in alive.err
    trio.primary.kill()
    load.join(timeout=patient(120))

    shown = slotfailover("failover", "--config", config, "--dry-run")
    assert shown.code == 0
    assert "SELECT pg_promote(false)" in shown.out
    assert "hush" not in shown.out
    assert ask(trio.standby, "SELECT pg_is_in_recovery()")
    unconfirmed = slotfailover("failover", "--config", config)
    assert unconfirmed.code == 2

    begun = time.monotonic()
    ran = slotfailover("failover", "--config", config, "--yes", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["new_primary"] == "b"
    assert [slot["ready"] for slot in ran.json["slots"]] == [True]
    assert 0 < ran.json["seconds"] < time.monotonic() - begun
    again = slotfailover("failover", "--config", config, "--yes", "--json")
    assert (again.code, again.json["steps"]) == (0, [])

    _bench(trio, trio.standby.conninfo(trio.dbname), "-t", "20")
    await_equal(trio, trio.standby, *BENCH)
    history = "SELECT count(*), sum(delta) FROM pgbench_history"
    with connect(trio.standby, trio.dbname) as new, connect(trio.subscriber, trio.dbname) as sub:
        expected = new.execute(history).fetchone()
        eventually(lambda: sub.execute(history).fetchone() == expected, what="equal histories")
    conninfo = ask(trio.subscriber, "SELECT subconninfo FROM pg_subscription")
    assert "password='hush'" in conninfo
    journal = (tmp_path / "journal").read_text()
    assert "hush" not in journal + ran.out + ran.err
    entries = [json.loads(line) for line in journal.splitlines()]
    noted = [entry["step"] for entry in entries if entry["outcome"] != "started"]
    steps = [step["step"] for step in ran.json["steps"]]
    assert noted == ["begin", *steps, "end", "begin", "end"]


def test_killed_after_each_step_it_goes_on_where_it_stopped(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    comment = "COMMENT ON SUBSCRIPTION s1 IS 'it''s ours'"
    tell(trio.subscriber, comment, dbname=trio.dbname)
    write(trio.primary, trio.dbname, 1)
    config = configuration(tmp_path, trio)
    tell(
        trio.standby,
        "ALTER SYSTEM SET synchronized_standby_slots = 'standby_1', 'gone'",
        "ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (standby_1, \"other one\")'",
        "SELECT pg_reload_conf()",
    )
    shown = "SELECT current_setting('synchronized_standby_slots') <> ''"
    eventually(lambda: ask(trio.standby, shown), what="the standby has read its settings")
    trio.primary.kill()
    killed = 0
    command = ("failover", "--config", config, "--yes")
    while slotfailover_process(*command, before=KILLED_AFTER_A_STEP).code == -9:
        killed += 1
        assert killed < 10
    assert killed >= 6
    ended = slotfailover("failover", "--config", config, "--yes", "--json")
    assert (ended.code, ended.json["steps"]) == (0, [])
    write(trio.standby, trio.dbname, 101)
    await_equal(trio, trio.standby)
    kept = "SELECT obj_description(oid, 'pg_subscription') FROM pg_subscription"
    comment = ask(trio.subscriber, kept, trio.dbname)
    assert comment.startswith("it's ours [slotfailover: system ")
    assert "timeline 2 from " in comment


def test_a_slot_that_is_not_ready_refuses_until_its_loss_is_accepted(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    tell(trio.standby, "ALTER SYSTEM SET sync_replication_slots = off", "SELECT pg_reload_conf()")
    gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'slotsync worker')"
    eventually(lambda: ask(trio.standby, gone), what="slots are no longer synchronized")
    create_subscription(trio, "s2")
    config = configuration(tmp_path, trio)
    trio.primary.kill()
    refused = slotfailover("failover", "--config", config, "--yes", "--json")
    assert refused.code == 34
    assert "1 of 2 slots would be lost: s2: b does not have the slot" in refused.json["error"]
    token = token_of(refused.json["hint"])
    assert token.startswith("lost-slot:s2:b@")
    assert ask(trio.subscriber, "SELECT bool_and(subenabled) FROM pg_subscription")
    ran = slotfailover("failover", "--config", config, "--yes", "--json", "--accept", token)
    assert ran.code == 0, ran.err
    assert "loss accepted: sub/s2" in ran.json["notes"][0]
    enabled = "SELECT array_agg(subname::text ORDER BY 1) FROM pg_subscription WHERE subenabled"
    assert ask(trio.subscriber, enabled) == ["s1"]
    write(trio.standby, trio.dbname, 1)
    await_equal(trio, trio.standby)
    assert slotfailover("failover", "--config", config, "--yes").code == 1
    # A slot made by hand begins after these rows, and s2 has no position that would show it.
    by_hand = "SELECT pg_create_logical_replication_slot('s2', 'pgoutput', failover => true)"
    tell(trio.standby, by_hand, dbname=trio.dbname)
    held = slotfailover("repoint", "--config", config, "--yes", "--json")
    assert held.code == 1, held.err
    (left,) = held.json["left"]
    assert (left["subject"], "it has no position" in left["reason"]) == ("sub/s2", True), left
    assert ask(trio.subscriber, enabled) == ["s1"]
    assert token_of(left["hint"]) == token
    taken = slotfailover("repoint", "--config", config, "--yes", "--accept", token)
    assert taken.code == 0, taken.err
    assert ask(trio.subscriber, enabled) == ["s1", "s2"]


@pytest.mark.long
def test_an_unreachable_subscriber_is_completed_by_another_run(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    write(trio.primary, trio.dbname, 1)
    trio.subscriber.stop("immediate")
    for command in (("switchover", "--to", "b"), ("failover",)):
        refused = slotfailover(*command, "--config", config, "--yes", "--require-subscribers")
        assert (refused.code, "subscriptions would be left behind: sub" in refused.err) == (
            34,
            True,
        ), refused.err
        assert ask(trio.standby, "SELECT pg_is_in_recovery()")
        trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes", "--json")
    assert ran.code == 1
    assert [left["subject"] for left in ran.json["left"]] == ["sub"]
    write(trio.standby, trio.dbname, 101)
    trio.subscriber.start()
    again = slotfailover("failover", "--config", config, "--yes")
    assert again.code == 0, again.err
    await_equal(trio, trio.standby)


@pytest.mark.long
def test_privileges_split_brain_and_a_promotion_by_a_person(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    for server in (trio.primary, trio.subscriber):
        tell(server, "CREATE ROLE weak LOGIN IN ROLE pg_monitor")
    weak = {"sub": trio.subscriber.conninfo(trio.dbname, user="weak")}
    config = configuration(tmp_path, trio, subscribers=weak)
    blind = slotfailover("check", "--config", config)
    assert blind.code == 1
    assert "our role may not see where subscriptions lead" in blind.out
    strangers = {"a": trio.primary.conninfo(), "x": trio.subscriber.conninfo()}
    config = configuration(tmp_path, trio, nodes=strangers)
    for command in (["check"], ["failover", "--yes"]):
        assert slotfailover(*command, "--config", config).code == 31

    trio.primary.kill()
    nodes = {"a": trio.primary.conninfo(), "b": trio.standby.conninfo(user="weak")}
    weakly = configuration(tmp_path, trio, nodes=nodes)
    powerless = slotfailover("failover", "--config", weakly, "--yes")
    assert powerless.code == 20
    assert "GRANT EXECUTE ON FUNCTION pg_promote" in powerless.err
    assert ask(trio.subscriber, "SELECT bool_and(subenabled) FROM pg_subscription")

    tell(trio.standby, "SELECT pg_promote()")
    config = configuration(tmp_path, trio)
    trio.primary.start()
    write(trio.standby, trio.dbname, 1)
    split = slotfailover("failover", "--config", config, "--yes")
    assert split.code == 35
    assert "several nodes are writable" in split.err
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes")
    assert ran.code == 0, ran.err
    await_equal(trio, trio.standby)


def _subscribe_bench(trio: Trio) -> None:
    """pgbench's tables on both sides, subscribed with an initial copy."""
    for server in (trio.primary, trio.subscriber):
        server.run_tool("pgbench", ["-q", "-i", "-s", "1", trio.dbname])
    tell(trio.primary, "CREATE PUBLICATION p FOR ALL TABLES", dbname=trio.dbname)
    conninfo = trio.primary.conninfo(trio.dbname, password="hush").replace("'", "''")
    tell(
        trio.subscriber,
        f"TRUNCATE {', '.join((*BENCH, 'pgbench_history'))}",
        f"CREATE SUBSCRIPTION s1 CONNECTION '{conninfo}' PUBLICATION p WITH (failover)",
        dbname=trio.dbname,
    )
    copied = "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel"
    eventually(lambda: ask(trio.subscriber, copied, trio.dbname), what="the initial copy is done")
    await_ready(trio.primary, trio.standby, "s1")


def _load(trio: Trio) -> threading.Thread:
    """A light load on the primary until it dies; returns once it has written something."""
    arguments = ["-n", "-c", "2", "-R", "100", "-T", "60", trio.dbname]
    load = threading.Thread(
        target=trio.primary.run_tool, args=("pgbench", arguments), kwargs={"check": False}
    )
    load.start()
    written = "SELECT count(*) > 50 FROM pgbench_history"
    eventually(lambda: ask(trio.primary, written, trio.dbname), what="pgbench has written")
    return load


def _bench(trio: Trio, conninfo: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return trio.primary.run_tool("pgbench", ["-n", *arguments, conninfo])
