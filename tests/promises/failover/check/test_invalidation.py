"""Breakers 20 and 25: every way in which a slot is invalidated, really happening."""

import pytest

from tests.promises.failover.check.examining import Examiner, make_slot, reset_on, set_on
from tests.promises.failover.servers import ask, tell
from tests.providers.interface import Server
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually


def reason_on(server: Server) -> object:
    """Why s1 is invalidated there."""
    query = "SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = 's1'"
    return ask(server, query)


def disable(examiner: Examiner) -> None:
    """Leave s1 without a consumer."""
    trio = examiner.trio
    tell(trio.subscriber, "ALTER SUBSCRIPTION s1 DISABLE", dbname=trio.dbname)
    free = "SELECT NOT active FROM pg_replication_slots WHERE slot_name = 's1'"
    eventually(lambda: ask(trio.primary, free), what="s1 is released")


def start_over(examiner: Examiner) -> None:
    """The remedy of a slot that is lost upstream: make it again, go on from there."""
    trio = examiner.trio
    tell(trio.primary, "SELECT pg_drop_replication_slot('s1')")
    make_slot(trio.primary, trio.dbname, "s1")
    tell(trio.subscriber, "ALTER SUBSCRIPTION s1 ENABLE", dbname=trio.dbname)
    await_ready(trio.primary, trio.standby, "s1")
    examiner.expect()


def write_wal(examiner: Examiner) -> None:
    """6 MB of WAL, and wait until the standby has them."""
    primary = examiner.trio.primary
    tell(primary, "SELECT pg_logical_emit_message(false, 'x', repeat('x', 6000000))")
    target = ask(primary, "SELECT pg_current_wal_lsn()::text")
    caught = "SELECT restart_lsn FROM pg_replication_slots WHERE slot_name = 'standby_1'"
    eventually(lambda: ask(primary, f"SELECT ({caught}) >= '{target}'"), what="it has caught up")


def test_wal_is_about_to_be_removed_and_then_is(sound: Examiner) -> None:
    """Breaker 25, then 20 wal_removed, on the primary and, by synchronization, on the standby."""
    primary = sound.trio.primary
    disable(sound)
    set_on(primary, max_slot_wal_keep_size="'64MB'", wal_keep_size="0")
    seen: set[str] = set()

    def severity() -> str:
        write_wal(sound)
        found = sound.problems()
        seen.update(finding["severity"] for finding in found.get("slot-wal", []))
        if "slot-wal" in found:
            assert {"slot-wal", "subscription-enabled"} <= set(found)
            assert found["slot-wal"][0]["subject"] == "s1"
        return "critical" if "critical" in seen else ""

    eventually(severity, what="the slot is unreserved", timeout_s=60)
    assert seen == {"warning", "critical"}
    tell(primary, "CHECKPOINT")
    eventually(lambda: reason_on(primary) == "wal_removed", what="s1 is invalidated")
    tell(sound.trio.standby, "SELECT pg_reload_conf()")
    found = sound.expect("slot-invalidated", "subscription-enabled")
    assert "wal_removed" in found["slot-invalidated"][0]["evidence"]
    reset_on(primary, "max_slot_wal_keep_size", "wal_keep_size")
    start_over(sound)


@pytest.mark.since_18  # idle_replication_slot_timeout
def test_idle_for_too_long(sound: Examiner) -> None:
    """Breaker 20, idle_timeout (PostgreSQL 18)."""
    primary = sound.trio.primary
    disable(sound)
    set_on(primary, idle_replication_slot_timeout="'1s'")

    def lost() -> bool:
        tell(primary, "CHECKPOINT")
        return reason_on(primary) == "idle_timeout"

    eventually(lost, what="s1 is invalidated", interval_s=0.2)
    reset_on(primary, "idle_replication_slot_timeout")
    found = sound.expect("slot-invalidated", "subscription-enabled")
    assert "idle_timeout" in found["slot-invalidated"][0]["evidence"]
    assert found["slot-invalidated"][0]["since"]
    start_over(sound)


def test_rows_removed_then_wal_level_insufficient(fresh: Examiner) -> None:
    """Breaker 20: the copy loses catalog rows that it needs; then the primary's wal_level drops."""
    primary, standby, dbname = fresh.trio.primary, fresh.trio.standby, fresh.trio.dbname
    set_on(standby, sync_replication_slots="off", hot_standby_feedback="off")
    disable(fresh)
    tell(primary, "SELECT pg_drop_replication_slot('s1')")
    make_slot(primary, dbname, "s1")
    tell(fresh.trio.subscriber, "ALTER SUBSCRIPTION s1 ENABLE", dbname=dbname)

    def removed() -> bool:
        for statement in ("CREATE TABLE gone (a int)", "DROP TABLE gone", "VACUUM pg_class"):
            tell(primary, statement, dbname=dbname)
        tell(primary, "SELECT pg_log_standby_snapshot()")
        return reason_on(standby) == "rows_removed"

    eventually(removed, what="the copy is invalidated", interval_s=0.2)
    settings = ("sync-replication-slots", "hot-standby-feedback")
    found = fresh.expect("slot-invalidated", "slotsync-worker", *settings)
    assert found["slot-invalidated"][0]["what"] == "its copy is invalidated on b"
    for name in settings:
        fresh.carry_out(found[name][0])
    fresh.hasten()
    fresh.carry_out(found["slot-invalidated"][0])
    await_ready(primary, standby, "s1")
    fresh.expect()

    set_on(standby, sync_replication_slots="off")
    tell(fresh.trio.subscriber, "DROP SUBSCRIPTION s1", dbname=dbname)
    set_on(primary, wal_level="replica")
    primary.restart()
    eventually(
        lambda: reason_on(standby) == "wal_level_insufficient", what="the copy is invalidated"
    )
    primary.kill()
    found = fresh.expect(
        "primary-answers", "node-answers", "sync-replication-slots", "slot-invalidated"
    )
    (finding,) = found["slot-invalidated"]
    assert "wal_level_insufficient" in finding["evidence"]
    assert "load its consumer anew" in finding["remedy"]["text"]
    assert fresh.run("--nagios").code == 2
