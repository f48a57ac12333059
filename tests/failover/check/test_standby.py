"""Each setting of the standby that breaks slot synchronization: caused, seen, repaired."""

from pathlib import Path

from tests.failover.check.examining import (
    Examiner,
    Finding,
    examiner_of,
    make_slot,
    quoted,
    reset_on,
    set_on,
)
from tests.failover.servers import ask, tell, write
from tests.providers.slots import advance_until_ready
from tests.providers.waiting import eventually

LIST = "SHOW synchronized_standby_slots"


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
        found = sound.expect("primary-conninfo-dbname", "slotsync-worker")
        assert "hush" not in str(found)
    ran = sound.fix()
    assert "hush" not in ran.out + ran.err
    after = ask(sound.trio.standby, "SHOW primary_conninfo")
    for part in ("password='hush'", "dbname='postgres'", "application_name='standby_1'"):
        assert part in after


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
