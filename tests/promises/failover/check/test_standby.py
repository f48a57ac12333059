"""Each setting of the standby that breaks slot synchronization: caused, seen, repaired."""

from pathlib import Path

import pytest

from schemas.errors import ExitCode, Retryable
from schemas.lsn import parse_lsn
from services.failover.checks.check_report import check_up
from services.failover.checks.remedies import order
from services.failover.cli.options import settings_of
from services.failover.execute.fix import Fixes, fixes_of, perform_orders, repair
from services.failover.execute.history import unfinished
from services.failover.execute.journal import BEGIN, DONE, END, FIX, Entry, Journal
from services.failover.execute.lock import locked
from services.failover.model.receiver import cut_off
from services.failover.model.replication import Replication
from services.failover.observe.client_sessions import COMMAND_LOCK
from services.failover.observe.cluster import Cluster
from services.failover.observe.server_link import parse_conninfo
from tests.promises.failover.check.examining import (
    Examiner,
    Finding,
    examiner_of,
    make_slot,
    quoted,
    reset_on,
    set_on,
)
from tests.promises.failover.servers import ask, slotfailover, tell, write
from tests.providers.databases import connect
from tests.providers.slots import advance_until_ready
from tests.providers.waiting import eventually

CUT = ("standby-cut-off", "standby-streams", "slotsync-worker", "listed-slot-inactive")
PASSWORD = "primary-conninfo-password"
FENCED = "'timeline 1 by x@y since then'"
LIST = "SHOW synchronized_standby_slots"
HELD = (
    "locktype = 'advisory' AND granted"
    f" AND (classid::bigint << 32) + objid::bigint = {COMMAND_LOCK}"
)


def test_sync_replication_slots_off(sound: Examiner) -> None:
    """Breaker 2."""
    set_on(sound.trio.standby, sync_replication_slots="off")
    found = sound.expect("sync-replication-slots", "slotsync-worker")
    (finding,) = found["sync-replication-slots"]
    assert finding["severity"] == "critical"
    assert finding["evidence"] == "sync_replication_slots = off"
    sound.carry_out(finding)
    sound.hasten()


def test_hot_standby_feedback_off(sound: Examiner) -> None:
    """Breaker 5."""
    set_on(sound.trio.standby, hot_standby_feedback="off")
    found = sound.expect("hot-standby-feedback", "slotsync-worker")
    sound.carry_out(found["hot-standby-feedback"][0])
    sound.hasten()


def test_fix_repairs_all_that_a_program_may_and_says_what_it_leaves(sound: Examiner) -> None:
    """Several at once: the remedies are shown, done, and what follows from them is awaited."""
    set_on(sound.trio.standby, sync_replication_slots="off", hot_standby_feedback="off")
    tell(sound.trio.subscriber, "ALTER SUBSCRIPTION s1 DISABLE", dbname=sound.trio.dbname)
    causes = ("sync-replication-slots", "hot-standby-feedback", "subscription-enabled")
    sound.expect("slotsync-worker", *causes)
    unasked = sound.run("--fix")
    assert unasked.code == 2
    assert "TO DO     b: ALTER SYSTEM SET \"hot_standby_feedback\" = 'on'" in unasked.err
    assert "NOT DONE  subscription-enabled" in unasked.err
    assert "somebody has disabled it for a reason" in unasked.err
    sound.expect("slotsync-worker", *causes)
    ran = sound.fix()
    assert ran.code == 0
    assert [order["server"] for order in ran.json["fixed"]] == ["b"] * 4
    assert ran.err.count("NOT DONE  subscription-enabled") == 1
    found = sound.expect("subscription-enabled")
    sound.carry_out(found["subscription-enabled"][0])


def test_primary_slot_name_empty(sound: Examiner) -> None:
    """Breaker 3: the remedy makes a slot of the standby's own; the old one is left over."""
    set_on(sound.trio.standby, primary_slot_name="")
    found = sound.expect(
        "primary-slot-name", "slotsync-worker", "standby-slot-listed", "listed-slot-inactive"
    )
    sound.carry_out(found["primary-slot-name"][0])
    sound.hasten()
    found = sound.expect("standby-slot-listed", "listed-slot-inactive")
    sound.carry_out(found["standby-slot-listed"][0])
    found = sound.expect("listed-slot-inactive")
    assert "standby_1" in found["listed-slot-inactive"][0]["what"]
    assert ask(sound.trio.primary, LIST) == "standby_1, slotfailover_b"
    sound.carry_out(found["listed-slot-inactive"][0])
    assert ask(sound.trio.primary, LIST) == "slotfailover_b"
    found = sound.expect("leftover-slot")
    assert "standby_1" in found["leftover-slot"][0]["what"]
    use_slot(sound, "standby_1")


def test_primary_slot_does_not_exist(sound: Examiner) -> None:
    """Breaker 4."""
    set_on(sound.trio.standby, primary_slot_name="'nowhere'")
    found = sound.expect(
        "primary-slot",
        "standby-streams",
        "slotsync-worker",
        "standby-slot-listed",
        "listed-slot-inactive",
    )
    sound.carry_out(found["primary-slot"][0])
    sound.hasten()
    sound.expect("standby-slot-listed", "listed-slot-inactive")
    use_slot(sound, "standby_1", instead_of="nowhere")


def test_primary_slot_name_is_a_logical_slot(sound: Examiner) -> None:
    set_on(sound.trio.standby, primary_slot_name="'s1'")
    found = sound.expect(
        "primary-slot",
        "standby-streams",
        "slotsync-worker",
        "standby-slot-listed",
        "listed-slot-inactive",
    )
    assert "not a physical slot" in found["primary-slot"][0]["what"]
    use_slot(sound, "standby_1")


def test_primary_conninfo_without_a_database(sound: Examiner) -> None:
    """Breaker 6; the remedy keeps every other keyword, and shows no password."""
    conninfo = sound.trio.primary.conninfo(application_name="standby_1", password="hush")
    for dbname in ("", " dbname=no_such_database"):
        changed = conninfo.replace(" dbname=postgres", dbname)
        set_on(sound.trio.standby, primary_conninfo=quoted(changed))
        sound.hasten()
        found = sound.expect("primary-conninfo-dbname", "slotsync-worker", PASSWORD)
        assert "hush" not in str(found)
    ran = sound.fix()
    assert "hush" not in ran.out + ran.err
    after = ask(sound.trio.standby, "SHOW primary_conninfo")
    for part in ("password='hush'", "dbname='postgres'", "application_name='standby_1'"):
        assert part in after
    without = sound.trio.primary.conninfo(application_name="standby_1")
    set_on(sound.trio.standby, primary_conninfo=quoted(without))


def test_a_standby_that_was_left_cut_off(sound: Examiner, tmp_path: Path) -> None:
    """As a failover leaves it that is killed between cutting receivers off and its end."""
    standby, primary = sound.trio.standby, sound.trio.primary
    before = primary.conninfo(application_name="standby_1", password="hush")
    nowhere = cut_off(parse_conninfo(before, subject="b")).text
    set_on(standby, primary_conninfo=quoted(nowhere))
    found = sound.expect(*CUT, PASSWORD)
    (finding,) = found["standby-cut-off"]
    assert (finding["subject"], finding["severity"]) == ("b", "critical")
    assert "has cut b off from every primary" in finding["what"]
    assert f"it led to 127.0.0.1:{primary.port}" in finding["evidence"]
    assert "hush" not in str(found)
    set_on(primary, default_transaction_read_only="on", **{"slotfailover.fenced": FENCED})
    fenced = sound.expect(*CUT, PASSWORD, "primary-fenced")["standby-cut-off"][0]["remedy"]
    assert (fenced["sql"], "slotfailover resume" in fenced["text"]) == ([], True)
    reset_on(primary, "default_transaction_read_only", "slotfailover.fenced")
    sound.expect(*CUT, PASSWORD)
    settings, _ = settings_of(sound.config)
    with Cluster(settings, admin=True) as cluster:
        view = cluster.survey()
        orders = [o for o in fixes_of(check_up(view)).orders if "primary_conninfo" in str(o)]
        with locked(cluster, view, "postgres", None) as lock:
            perform_orders(cluster, orders, lock, Journal(None, cluster, "postgres", FIX))
    after = ask(standby, "SHOW primary_conninfo")
    assert "password='hush'" in after
    assert "slotfailover-cut" not in after
    without = primary.conninfo(application_name="standby_1")
    set_on(standby, primary_conninfo=quoted(without))
    sound.hasten()


@pytest.mark.long
def test_fix_does_not_do_what_is_no_longer_needed_once_the_operator_has_agreed(
    sound: Examiner,
) -> None:
    """An answer may take an hour, in which somebody else repairs it, in another way."""
    standby = sound.trio.standby
    set_on(standby, hot_standby_feedback="off")
    sound.expect("hot-standby-feedback", "slotsync-worker")
    settings, _ = settings_of(sound.config)
    asked: list[Fixes] = []

    def agree(fixes: Fixes) -> bool:
        asked.append(fixes)
        reset_on(standby, "hot_standby_feedback")
        eventually(lambda: ask(standby, "SHOW hot_standby_feedback") == "on", what="it is on")
        return True

    with Cluster(settings, admin=True) as cluster:
        _, done, _ = repair(cluster, settings, lambda: check_up(cluster.survey()), agree)
    assert [len(fixes.orders) for fixes in asked] == [1]
    assert done == []
    sound.hasten()


def test_replay_paused_and_the_database_missing(bare: Examiner) -> None:
    """Breaker 24: a slot in a database that the standby has not replayed yet."""
    tell(bare.trio.standby, "SELECT pg_wal_replay_pause()")
    tell(bare.trio.primary, "CREATE DATABASE late")
    make_slot(bare.trio.primary, "late", "late")
    tell(bare.trio.standby, "SELECT pg_reload_conf()")
    found = bare.expect("replay", "databases", "slot-on-standby", "slotsync-worker")
    assert found["slot-on-standby"][0]["subject"] == "late"
    assert bare.run().code == 1
    bare.carry_out(found["replay"][0])
    bare.hasten()
    bare.expect("slot-idle")
    advance_until_ready(bare.trio.primary, bare.trio.standby, "late", "late")
    bare.expect()


def test_replay_delayed(sound: Examiner) -> None:
    set_on(sound.trio.standby, recovery_min_apply_delay="'50ms'")
    found = sound.expect("replay")
    assert found["replay"][0]["severity"] == "warning"
    assert sound.run().code == 0
    reset_on(sound.trio.standby, "recovery_min_apply_delay")


@pytest.mark.long
def test_a_standby_that_was_started_anew_has_more_wal_than_it_tells(sound: Examiner) -> None:
    """Until it has read what it has: then it waits for more, or streams."""
    trio = sound.trio
    tell(trio.standby, "SELECT pg_wal_replay_pause()")
    paused = "SELECT pg_get_wal_replay_pause_state() = 'paused'"
    eventually(lambda: ask(trio.standby, paused), what="b replays nothing")
    written = ask(trio.standby, "SELECT count(*) FROM t", trio.dbname)
    write(trio.primary, trio.dbname, 3101)
    target = ask(trio.primary, "SELECT pg_current_wal_flush_lsn()::text")
    received = f"SELECT pg_last_wal_receive_lsn() >= '{target}'"
    eventually(lambda: ask(trio.standby, received), what="b has received it")
    # The process that replays reads a setting later than others; a restart ends the pause.
    set_on(trio.standby, recovery_min_apply_delay="'1h'")
    trio.standby.restart()
    settings, _ = settings_of(sound.config)
    with Cluster(settings) as cluster:

        def told() -> Replication:
            said = cluster.observe().node("b").state
            assert said is not None
            return said.replication

        assert ask(trio.standby, "SELECT count(*) FROM t", trio.dbname) == written
        assert not told().received_all
        assert (told().received_lsn or 0) < parse_lsn(target)
        reset_on(trio.standby, "recovery_min_apply_delay")
        eventually(lambda: told().received_all, what="it has read all that it has")
        assert (told().received_lsn or 0) >= parse_lsn(target)


def test_stale_lists_on_the_standby(sound: Examiner) -> None:
    """Breaker 19: what a base backup copied of the primary's own standbys."""
    set_on(
        sound.trio.standby,
        synchronized_standby_slots="'standby_1'",
        synchronous_standby_names="'standby_1'",
    )
    sound.expect("standby-list-stale", "synchronous-names-stale")
    assert sound.fix().code == 0


def use_slot(examiner: Examiner, slot: str, *, instead_of: str = "slotfailover_b") -> None:
    """Let the standby stream through `slot` again, and drop the other."""
    primary = examiner.trio.primary
    set_on(examiner.trio.standby, primary_slot_name=quoted(slot))
    set_on(primary, synchronized_standby_slots=quoted(slot))
    free = "SELECT active_pid IS NULL FROM pg_replication_slots WHERE slot_name = "
    examiner.hasten()
    eventually(
        lambda: ask(primary, free + quoted(instead_of)) is not False, what="the slot is released"
    )
    tell(
        primary,
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        f" WHERE slot_name = {quoted(instead_of)}",
    )


@pytest.mark.long
def test_the_standby_is_paused_and_lags(fresh: Examiner, tmp_path: Path) -> None:
    """What is not received is lost with the primary: critical above the limit."""
    folder = tmp_path / "limited"
    folder.mkdir()
    limited = examiner_of(fresh.trio, folder, lag_bytes_max_on_failover=100)
    nowhere = fresh.trio.primary.conninfo(application_name="standby_1", port=1)
    set_on(fresh.trio.standby, primary_conninfo=quoted(nowhere))
    write(fresh.trio.primary, fresh.trio.dbname, 2001)

    def seen() -> list[Finding]:
        return limited.problems().get("standby-lag", [])

    (finding,) = eventually(seen, what="the lag is seen")
    assert finding["severity"] == "critical"
    assert "b lacks " in finding["what"]
    assert "to replay" in finding["evidence"]
    assert not fresh.problems().get("standby-lag")


@pytest.mark.long
def test_fix_changes_nothing_while_another_command_is_at_work(
    sound: Examiner, tmp_path: Path
) -> None:
    """Its lock is seen to be ours before each order; what it does is in the journal, as no run."""
    standby, primary = sound.trio.standby, sound.trio.primary
    set_on(standby, hot_standby_feedback="off")
    sound.expect("hot-standby-feedback", "slotsync-worker")
    with connect(standby) as rival:
        rival.execute("SELECT pg_advisory_lock(%s)", [COMMAND_LOCK])
        refused = sound.run("--fix", "--yes", "--json")
        assert (refused.code, "another slotfailover command" in refused.out) == (15, True)
    settings, _ = settings_of(sound.config)
    with Cluster(settings, admin=True) as cluster:
        journal = Journal(tmp_path / "journal", cluster, "postgres", FIX)
        orders = (order("b", "SELECT 1"), order("b", "ALTER SYSTEM RESET hot_standby_feedback"))
        with locked(cluster, cluster.observe(), "postgres", None) as lock:
            tell(primary, "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE " + HELD)
            perform_orders(cluster, orders[:1], lock, journal)  # one that was lost is taken again
            tell(standby, "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE " + HELD)
            with connect(standby) as rival, pytest.raises(Retryable) as refusal:
                rival.execute("SELECT pg_advisory_lock(%s)", [COMMAND_LOCK])
                perform_orders(cluster, orders, lock, journal)
            assert refusal.value.exit_code is ExitCode.LOCKED
        assert ask(standby, "SHOW hot_standby_feedback") == "off"
    assert sound.fix().code == 0
    entries = slotfailover("history", "--config", sound.config, "--json").json["entries"]
    done = [e for e in entries if e["step"].startswith('fix: ALTER SYSTEM SET "hot_standby')]
    assert [e["outcome"] for e in done[-2:]] == ["started", "done"]
    killed = [Entry("r", 1, "", "", "switchover", BEGIN), Entry("r", 2, "", "", "switchover", "")]
    fixed = [Entry("f", n, "", "", FIX, step, outcome=DONE) for n, step in ((1, BEGIN), (2, END))]
    assert unfinished([*killed, *fixed]) == killed[0], "a repair hides no run that was broken off"
