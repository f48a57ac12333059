"""Each reason why one slot would be lost: caused, seen, repaired. All on one pair."""

import threading

from tests.promises.failover.check.examining import Examiner, make_slot, quoted, set_on
from tests.promises.failover.servers import ask, create_subscription, subscribe, tell, write
from tests.providers.databases import connect
from tests.providers.slots import advance_until_ready, await_ready
from tests.providers.waiting import eventually


def drop(examiner: Examiner, name: str) -> None:
    """Drop a slot on the primary, and wait until its copy is gone."""
    copies = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}'"
    tell(examiner.trio.primary, f"SELECT pg_drop_replication_slot('{name}')")

    def gone() -> bool:
        tell(examiner.trio.standby, "SELECT pg_reload_conf()")
        return bool(ask(examiner.trio.standby, copies) == 0)

    eventually(gone, what=f"the copy of {name} is gone", interval_s=0.1)


def test_failover_off_though_the_subscription_has_it_on(sound: Examiner) -> None:
    """Breaker 1: slot_name was altered to a slot made without failover."""
    trio = sound.trio
    make_slot(trio.primary, trio.dbname, "plain", failover=False)
    tell(
        trio.subscriber,
        "ALTER SUBSCRIPTION s1 DISABLE",
        "ALTER SUBSCRIPTION s1 SET (slot_name = 'plain')",
        "ALTER SUBSCRIPTION s1 ENABLE",
        dbname=trio.dbname,
    )
    found = sound.expect("slot-failover-off", "slot-on-standby")
    (finding,) = found["slot-failover-off"]
    assert finding["subject"] == "plain"
    assert "wanted by sub/s1" in finding["evidence"]
    slots = {slot["slot"]: slot for slot in sound.run("--json").json["slots"]}
    assert slots["s1"]["ready"]
    assert [r["check"] for r in slots["plain"]["reasons"]] == [
        "slot-failover-off",
        "slot-on-standby",
    ]
    sound.carry_out(finding)
    await_ready(trio.primary, trio.standby, "plain")
    sound.expect()
    tell(
        trio.subscriber,
        "ALTER SUBSCRIPTION s1 DISABLE",
        "ALTER SUBSCRIPTION s1 SET (slot_name = 's1')",
        "ALTER SUBSCRIPTION s1 ENABLE",
        dbname=trio.dbname,
    )
    eventually(
        lambda: ask(
            trio.primary, "SELECT NOT active FROM pg_replication_slots WHERE slot_name = 'plain'"
        ),
        what="plain is released",
    )
    drop(sound, "plain")


def test_the_subscriptions_slot_does_not_exist(sound: Examiner) -> None:
    trio = sound.trio
    tell(
        trio.subscriber,
        "CREATE SUBSCRIPTION lone CONNECTION 'dbname=x' PUBLICATION p "
        "WITH (connect = false, slot_name = 'nowhere')",
        "ALTER SUBSCRIPTION lone SET (slot_name = NONE)",
        dbname=trio.dbname,
    )
    conninfo = trio.primary.conninfo(trio.dbname)
    tell(
        trio.subscriber,
        f"ALTER SUBSCRIPTION lone CONNECTION '{conninfo}'",
        "ALTER SUBSCRIPTION lone SET (slot_name = 'nowhere')",
        "UPDATE pg_subscription SET subfailover = true WHERE subname = 'lone'",
        dbname=trio.dbname,
    )
    found = sound.expect("slot-on-primary", "slot-on-standby", "subscription-enabled")
    assert "wanted by sub/lone" in found["slot-on-primary"][0]["evidence"]
    tell(
        trio.subscriber,
        "ALTER SUBSCRIPTION lone SET (slot_name = NONE)",
        "DROP SUBSCRIPTION lone",
        dbname=trio.dbname,
    )


def test_a_leftover_slot_of_that_name(sound: Examiner) -> None:
    """Breaker 10, with a slot that somebody made on the standby: not for a program to drop."""
    trio = sound.trio
    tell(trio.standby, "SELECT pg_create_physical_replication_slot('late')")
    make_slot(trio.primary, trio.dbname, "late")
    tell(trio.standby, "SELECT pg_reload_conf()")
    found = sound.expect("slot-name-clash", "slotsync-worker")
    (finding,) = found["slot-name-clash"]
    assert "somebody may use it" in finding["remedy"]["by_hand"]
    sound.carry_out(finding)
    sound.hasten()
    advance_until_ready(trio.primary, trio.standby, trio.dbname, "late")
    sound.expect()
    drop(sound, "late")


def test_an_idle_subscription(sound: Examiner) -> None:
    """Breaker 11: the standby has seen more than the slot needs, and nothing moves the slot."""
    trio = sound.trio
    set_on(trio.standby, sync_replication_slots="off")
    create_subscription(trio, "idle")
    tell(trio.subscriber, "ALTER SUBSCRIPTION idle DISABLE", dbname=trio.dbname)
    eventually(
        lambda: ask(
            trio.primary, "SELECT NOT active FROM pg_replication_slots WHERE slot_name = 'idle'"
        ),
        what="idle is released",
    )
    push_horizon(sound)
    set_on(trio.standby, sync_replication_slots="on")
    sound.hasten()
    found = sound.expect("slot-idle", "subscription-enabled")
    (finding,) = found["slot-idle"]
    assert finding["since"]
    assert "somebody has disabled it" in finding["remedy"]["by_hand"]
    sound.carry_out(finding)
    await_ready(trio.primary, trio.standby, "idle")
    sound.expect()
    tell(trio.subscriber, "DROP SUBSCRIPTION idle", dbname=trio.dbname)


def test_overlapping_transactions_keep_a_copy_temporary(bare: Examiner) -> None:
    """Breaker 12: there is no place, without an open transaction, from which a copy could go on.

    Without other slots: what the copy of one has read of the WAL helps the copies of others.
    """
    trio = bare.trio
    subscribe(trio)
    set_on(trio.standby, sync_replication_slots="off")
    create_subscription(trio, "held")
    restart = "SELECT restart_lsn::text FROM pg_replication_slots WHERE slot_name = 'held'"
    with connect(trio.primary, trio.dbname) as first, connect(trio.primary, trio.dbname) as second:
        first.execute("BEGIN")
        first.execute("SELECT pg_current_xact_id()")
        target = ask(trio.primary, "SELECT pg_current_wal_lsn()::text")
        tell(trio.primary, "SELECT pg_log_standby_snapshot()")
        passed = f"SELECT confirmed_flush_lsn > '{target}' FROM pg_replication_slots "
        eventually(
            lambda: ask(trio.primary, passed + "WHERE slot_name = 'held'"), what="it was read"
        )
        second.execute("BEGIN")
        second.execute("SELECT pg_current_xact_id()")
        first.execute("COMMIT")

        def moved() -> bool:
            tell(trio.primary, "SELECT pg_log_standby_snapshot()")
            return bool(ask(trio.primary, f"SELECT ({restart})::pg_lsn >= '{target}'"))

        eventually(moved, what="its restart_lsn is within the first transaction", interval_s=0.2)
        set_on(trio.standby, sync_replication_slots="on")
        bare.hasten()
        found = bare.expect("slot-snapshot")
        (finding,) = found["slot-snapshot"]
        assert f"pid {second.info.backend_pid}" in finding["evidence"]
        second.execute("COMMIT")
    bare.carry_out(finding)
    await_ready(trio.primary, trio.standby, "held")
    bare.expect()


def push_horizon(examiner: Examiner) -> None:
    """Let the standby see transactions end that a slot of the primary has not passed."""
    for _ in range(3):
        tell(examiner.trio.primary, "SELECT pg_current_xact_id()", "SELECT pg_switch_wal()")
    tell(examiner.trio.primary, "CHECKPOINT")
    target = ask(examiner.trio.primary, "SELECT pg_current_wal_lsn()::text")
    eventually(
        lambda: ask(examiner.trio.standby, f"SELECT pg_last_wal_replay_lsn() >= '{target}'"),
        what="the standby has replayed",
    )


def test_slots_that_can_never_survive(sound: Examiner) -> None:
    """Breaker 22: temporary, made without failover, made on a standby."""
    trio = sound.trio
    make_slot(trio.primary, trio.dbname, "plain", failover=False)
    with connect(trio.primary, trio.dbname) as session:
        session.execute("SELECT pg_create_logical_replication_slot('brief', 'pgoutput', true)")
        found = sound.expect("slot-without-failover")
    assert {f["subject"]: f["what"] for f in found["slot-without-failover"]} == {
        "plain": "the slot was made without failover, so no other node has it",
        "brief": "the slot is temporary, so no other node has it",
    }
    assert sound.run().code == 0  # a warning
    tell(trio.primary, "SELECT pg_drop_replication_slot('plain')")
    sound.expect()
    with connect(trio.standby, trio.dbname) as session, connect(trio.primary) as primary:
        stop = threading.Event()

        def log_snapshots() -> None:
            while not stop.wait(0.1):  # the slot is made once it finds a running-xacts record
                primary.execute("SELECT pg_log_standby_snapshot()")

        thread = threading.Thread(target=log_snapshots)
        thread.start()
        try:
            session.execute("SELECT pg_create_logical_replication_slot('own', 'pgoutput')")
        finally:
            stop.set()
            thread.join()
    found = sound.expect("slot-without-failover")
    assert "was made on a standby" in found["slot-without-failover"][0]["what"]
    tell(trio.standby, "SELECT pg_drop_replication_slot('own')")


def test_consumer_ahead_of_the_standby(sound: Examiner) -> None:
    """Breaker 13: nothing holds consumers back, and the standby stops receiving."""
    trio = sound.trio
    set_on(trio.primary, synchronized_standby_slots="")
    sound.expect("standby-slot-listed")
    nowhere = trio.primary.conninfo(application_name="standby_1", port=1)
    set_on(trio.standby, primary_conninfo=quoted(nowhere))
    eventually(
        lambda: ask(trio.standby, "SELECT count(*) FROM pg_stat_wal_receiver") == 0,
        what="the standby receives nothing",
    )
    write(trio.primary, trio.dbname, 1301)
    written = "SELECT count(*) FROM t WHERE id BETWEEN 1301 AND 1310"
    eventually(
        lambda: ask(trio.subscriber, written, trio.dbname) == 10,
        what="the subscriber got ahead",
    )
    found = sound.expect(
        "consumer-ahead", "standby-slot-listed", "standby-streams", "slotsync-worker"
    )
    assert "its consumer is ahead of b by" in found["consumer-ahead"][0]["what"]
    upstream = trio.primary.conninfo(application_name="standby_1")
    set_on(trio.standby, primary_conninfo=quoted(upstream))
    sound.hasten()
    sound.carry_out(sound.expect("standby-slot-listed")["standby-slot-listed"][0])
