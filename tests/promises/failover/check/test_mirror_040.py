"""PostgreSQL's src/test/recovery/t/040_standby_failover_slots_sync.pl, step by step.

Each step makes the original's assertions, and asks `slotfailover check` what it says there. The
steps of the original that read the server's log are told from the catalogs instead.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.testbed.bed import Bed
from services.testbed.pair import hasten_slot_sync
from tests.promises.failover.check.cast import Cast, count, create_slot, refused, released, slot
from tests.promises.failover.check.examining import quoted, set_on
from tests.promises.failover.servers import ask, tell
from tests.providers.databases import connect
from tests.providers.waiting import eventually, patient

MANUAL = ("sync-replication-slots", "slotsync-worker")
"""What check says throughout while slots are synchronized by pg_sync_replication_slots() only."""
READY = "synced AND NOT temporary AND invalidation_reason IS NULL"


@pytest.fixture
def cast(local_bed: Bed, tmp_path: Path) -> Iterator[Cast]:
    with contextlib.ExitStack() as exits:
        yield Cast(local_bed, tmp_path, exits)


@pytest.mark.long
@pytest.mark.since_18  # the messages are those of 18
def test_standby_failover_slots_sync(cast: Cast) -> None:
    _failover_of_a_subscription_is_its_slots(cast)
    _slots_of_any_plugin_are_synchronized(cast)
    _a_copy_invalidated_alone_is_made_again(cast)
    _copies_are_not_for_use(cast)
    _no_dbname_no_synchronization(cast)
    _no_cascading(cast)
    _a_snapshot_is_reached(cast)
    _safe_from_operators_of_others(cast)
    _the_worker_ends_and_starts_with_settings(cast)
    _positions_are_synchronized(cast)
    _failover_slots_wait_for_the_standby(cast)
    _functions_wait_too(cast)
    _an_inactive_slot_holds_until_it_is_removed(cast)
    _two_phase_is_synchronized(cast)
    _promotion(cast)
    _a_slot_that_lags_is_skipped_until_it_catches_up(cast)


def _failover_of_a_subscription_is_its_slots(cast: Cast) -> None:
    primary, subscriber = cast.primary, cast.subscriber1
    tell(primary, "CREATE PUBLICATION regress_mypub FOR ALL TABLES")
    tell(
        subscriber,
        f"CREATE SUBSCRIPTION regress_mysub1 CONNECTION {quoted(primary.conninfo())} "
        "PUBLICATION regress_mypub WITH (slot_name = lsub1_slot, copy_data = false, "
        "failover = true, enabled = false)",
    )
    alone = ("standby-answers", "subscription-enabled")
    for failover in ("true", "false", "true"):
        tell(subscriber, f"ALTER SUBSCRIPTION regress_mysub1 SET (failover = {failover})")
        on = failover == "true"
        assert slot(primary, "lsub1_slot", "failover") is on
        more = () if on else ("slot-without-failover",)
        assert cast.verdict(*alone, *more) == ({"lsub1_slot": False} if on else {})
    tell(subscriber, "ALTER SUBSCRIPTION regress_mysub1 ENABLE")
    refused(
        subscriber,
        "ALTER SUBSCRIPTION regress_mysub1 SET (failover = false)",
        'cannot set option "failover" for enabled subscription',
    )
    refused(
        primary,
        "SELECT pg_sync_replication_slots()",
        "replication slots can only be synchronized to a standby server",
    )
    cast.verdict("standby-answers")


def _slots_of_any_plugin_are_synchronized(cast: Cast) -> None:
    primary = cast.primary
    eventually(lambda: slot(primary, "lsub1_slot", "active"), what="the worker is connected")
    standby = cast.standby("b", primary, "sb1_slot", start=False)
    tell(cast.subscriber1, "DROP SUBSCRIPTION regress_mysub1")
    create_slot(primary, "lsub1_slot")
    create_slot(primary, "lsub2_slot", "test_decoding")
    tell(primary, "SELECT pg_create_physical_replication_slot('sb1_slot', true)")
    standby.start()
    cast.synchronize(standby)
    for name in ("lsub1_slot", "lsub2_slot"):
        assert slot(standby, name, READY)
        above = slot(primary, name, "extract(epoch FROM inactive_since)::float8")
        below = slot(standby, name, "extract(epoch FROM inactive_since)::float8")
        assert isinstance(above, float)
        assert isinstance(below, float)
        assert above < below
    ready = cast.verdict(*MANUAL, "standby-slot-listed")
    assert ready == {"lsub1_slot": True, "lsub2_slot": True}
    tell(primary, "SELECT pg_drop_replication_slot('lsub2_slot')")
    cast.synchronize(standby)
    assert slot(standby, "lsub2_slot", "1") is None
    assert cast.verdict(*MANUAL, "standby-slot-listed") == {"lsub1_slot": True}


def _a_copy_invalidated_alone_is_made_again(cast: Cast) -> None:
    primary, standby = cast.primary, cast.standby1
    set_on(standby, max_slot_wal_keep_size="'64kB'", wal_keep_size="0")
    tell(primary, "SELECT pg_logical_emit_message(true, 'x', 'x')", "SELECT pg_switch_wal()")
    tell(primary, "CHECKPOINT")
    cast.caught_up(standby)

    def invalidated() -> bool:
        tell(standby, "CHECKPOINT")
        return slot(standby, "lsub1_slot", "invalidation_reason") == "wal_removed"

    eventually(invalidated, what="the copy is invalidated")
    set_on(standby, max_slot_wal_keep_size="-1")
    found = cast.verdict(*MANUAL, "standby-slot-listed", "slot-invalidated")
    assert found == {"lsub1_slot": False}
    tell(primary, "SELECT pg_drop_replication_slot('lsub1_slot')")
    create_slot(primary, "lsub1_slot")
    cast.synchronize(standby)
    assert slot(standby, "lsub1_slot", READY)
    assert cast.verdict(*MANUAL, "standby-slot-listed") == {"lsub1_slot": True}


def _copies_are_not_for_use(cast: Cast) -> None:
    standby = cast.standby1
    refused(
        standby,
        "SELECT * FROM pg_logical_slot_get_changes('lsub1_slot', NULL, NULL)",
        'cannot use replication slot "lsub1_slot" for logical decoding',
    )
    refused(
        standby,
        "ALTER_REPLICATION_SLOT lsub1_slot (failover)",
        'cannot alter replication slot "lsub1_slot"',
        replication="database",
    )
    refused(
        standby,
        "SELECT pg_drop_replication_slot('lsub1_slot')",
        'cannot drop replication slot "lsub1_slot"',
    )


def _no_dbname_no_synchronization(cast: Cast) -> None:
    primary, standby = cast.primary, cast.standby1
    conninfo = primary.conninfo(application_name="sb1_slot")
    set_on(standby, primary_conninfo=quoted(conninfo.replace(" dbname=postgres", "")))
    found = cast.verdict(*MANUAL, "standby-slot-listed", "primary-conninfo-dbname")
    assert found == {"lsub1_slot": True}
    refused(
        standby,
        "SELECT pg_sync_replication_slots()",
        'replication slot synchronization requires "dbname" to be specified in "primary_conninfo"',
    )
    set_on(standby, primary_conninfo=quoted(conninfo))
    cast.verdict(*MANUAL, "standby-slot-listed")


def _no_cascading(cast: Cast) -> None:
    standby = cast.standby1
    tell(standby, "SELECT pg_create_physical_replication_slot('cascading_sb_slot', true)")
    cascading = cast.standby("d", standby, "cascading_sb_slot")
    refused(
        cascading,
        "SELECT pg_sync_replication_slots()",
        "cannot synchronize replication slots from a standby server",
    )
    missing = ("cascading-standby", "primary-slot", "slot-on-standby", "standby-slot-listed")
    assert cast.verdict(*MANUAL, *missing, standby="d") == {"lsub1_slot": False}
    cascading.stop()
    del cast.up["d"]
    tell(standby, "SELECT pg_drop_replication_slot('cascading_sb_slot')")


def _a_snapshot_is_reached(cast: Cast) -> None:
    primary, standby = cast.primary, cast.standby1
    create_slot(primary, "snap_test_slot", "test_decoding")
    cast.synchronize(standby)
    with connect(primary) as session:
        for _ in range(2):
            with session.transaction():
                session.execute("SELECT txid_current()")
                session.execute("SELECT pg_log_standby_snapshot()")
    tell(primary, "SELECT pg_replication_slot_advance('snap_test_slot', pg_current_wal_lsn())")
    tell(primary, "SELECT pg_logical_emit_message(false, 'test', 'test')")
    position = slot(primary, "snap_test_slot", "confirmed_flush_lsn::text")
    cast.synchronize(standby)
    assert slot(standby, "snap_test_slot", "confirmed_flush_lsn::text", READY) == position
    ready = cast.verdict(*MANUAL, "standby-slot-listed")
    assert ready == {"lsub1_slot": True, "snap_test_slot": True}


def _safe_from_operators_of_others(cast: Cast) -> None:
    """Nor is check deceived: it asks in that database, whose search_path leads astray."""
    primary, standby = cast.primary, cast.standby1
    tell(primary, "CREATE DATABASE slotsync_test_db")
    tell(
        primary,
        "CREATE ROLE repl_role REPLICATION LOGIN",
        "CREATE SCHEMA myschema",
        "CREATE FUNCTION myschema.myintne(bigint, int) RETURNS bool"
        " AS 'BEGIN RETURN $1 <> $2; END' LANGUAGE plpgsql IMMUTABLE",
        "CREATE OPERATOR myschema.= (leftarg = bigint, rightarg = int,"
        " procedure = myschema.myintne)",
        "ALTER DATABASE slotsync_test_db SET search_path TO myschema, pg_catalog",
        "GRANT USAGE ON SCHEMA myschema TO repl_role",
        dbname="slotsync_test_db",
    )
    conninfo = primary.conninfo("slotsync_test_db", user="repl_role", application_name="sb1_slot")
    set_on(standby, primary_conninfo=quoted(conninfo))
    cast.verdict(*MANUAL, "standby-slot-listed")
    cast.synchronize(standby)
    set_on(standby, primary_conninfo=quoted(primary.conninfo(application_name="sb1_slot")))
    cast.verdict(*MANUAL, "standby-slot-listed")
    tell(primary, "DROP DATABASE slotsync_test_db")


def _the_worker_ends_and_starts_with_settings(cast: Cast) -> None:
    standby = cast.standby1
    set_on(standby, sync_replication_slots="on")
    cast.verdict("standby-slot-listed")
    set_on(standby, hot_standby_feedback="off")
    cast.verdict("standby-slot-listed", "hot-standby-feedback", "slotsync-worker")
    set_on(standby, hot_standby_feedback="on")
    standby.restart()  # else the server starts the worker again only after 10 s
    cast.verdict("standby-slot-listed")


def _positions_are_synchronized(cast: Cast) -> None:
    primary, standby, subscriber = cast.primary, cast.standby1, cast.subscriber1
    tell(primary, "CREATE TABLE tab_int (a int PRIMARY KEY)")
    tell(primary, "INSERT INTO tab_int SELECT generate_series(1, 10)")
    tell(
        subscriber,
        "CREATE TABLE tab_int (a int PRIMARY KEY)",
        f"CREATE SUBSCRIPTION regress_mysub1 CONNECTION {quoted(primary.conninfo())} PUBLICATION "
        "regress_mypub WITH (slot_name = lsub1_slot, failover = true, create_slot = false)",
    )
    copied = "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel"
    eventually(lambda: ask(subscriber, copied), what="the initial copy")
    tell(subscriber, "ALTER SUBSCRIPTION regress_mysub1 DISABLE")
    released(primary, "lsub1_slot")
    position = slot(primary, "lsub1_slot", "confirmed_flush_lsn::text")

    def synchronized() -> bool:
        hasten_slot_sync(primary.conninfo(), standby.conninfo())
        return slot(standby, "lsub1_slot", "confirmed_flush_lsn::text", READY) == position

    eventually(synchronized, what="the position is synchronized", interval_s=0.2)
    ready = cast.verdict("standby-slot-listed", "subscription-enabled")
    assert ready == {"lsub1_slot": True, "snap_test_slot": True}


def _failover_slots_wait_for_the_standby(cast: Cast) -> None:
    primary, standby = cast.primary, cast.standby1
    tell(primary, "SELECT pg_create_physical_replication_slot('sb2_slot', true)")
    standby2 = cast.standby("c", primary, "sb2_slot")
    set_on(primary, synchronized_standby_slots="sb1_slot")
    subscriber2 = cast.subscriber("subscriber2")
    tell(
        subscriber2,
        "CREATE TABLE tab_int (a int PRIMARY KEY)",
        f"CREATE SUBSCRIPTION regress_mysub2 CONNECTION {quoted(primary.conninfo())} "
        "PUBLICATION regress_mypub WITH (slot_name = lsub2_slot)",
    )
    eventually(lambda: count(subscriber2) == 10, what="subscriber2 has the table")
    tell(cast.subscriber1, "ALTER SUBSCRIPTION regress_mysub1 ENABLE")
    known = ("slot-without-failover",)  # lsub2_slot
    cast.verdict(*known, nodes="ab")
    standby.stop()
    tell(primary, "INSERT INTO tab_int SELECT generate_series(11, 20)")
    eventually(lambda: count(standby2) == 20, what="standby2 gets the data")
    eventually(lambda: count(subscriber2) == 20, what="subscriber2 gets the data")
    stalled = ("listed-slot-inactive", "node-answers", "standby-answers")
    assert not any(cast.verdict(*known, *stalled, nodes="ab").values())
    assert count(cast.subscriber1) != 20
    standby.start()
    eventually(lambda: count(cast.subscriber1) == 20, what="subscriber1 gets the data")
    cast.verdict(*known, nodes="ab")


def _functions_wait_too(cast: Cast) -> None:
    primary, standby = cast.primary, cast.standby1
    tell(primary, "TRUNCATE tab_int")
    eventually(lambda: count(cast.subscriber1) == 0, what="subscriber1 is empty")
    standby.stop()
    tell(cast.subscriber1, "ALTER SUBSCRIPTION regress_mysub1 DISABLE")
    released(primary, "lsub1_slot")
    create_slot(primary, "test_slot", "test_decoding")
    with connect(primary) as session:
        read = "SELECT pg_logical_slot_get_changes('test_slot', NULL, NULL)"
        reader = threading.Thread(target=lambda: session.execute(read))
        reader.start()
        waits = "SELECT wait_event = 'WaitForStandbyConfirmation' FROM pg_stat_activity "
        waits += f"WHERE pid = {session.info.backend_pid}"
        eventually(lambda: ask(primary, waits), what="the function waits")
        set_on(primary, synchronized_standby_slots="")
        reader.join(timeout=patient(120))
        assert not reader.is_alive()
    tell(primary, "SELECT pg_drop_replication_slot('test_slot')")
    set_on(primary, synchronized_standby_slots="sb1_slot")
    tell(cast.subscriber1, "ALTER SUBSCRIPTION regress_mysub1 ENABLE")


def _an_inactive_slot_holds_until_it_is_removed(cast: Cast) -> None:
    primary = cast.primary
    tell(primary, "INSERT INTO tab_int SELECT generate_series(1, 10)")
    stalled = ("listed-slot-inactive", "node-answers", "standby-answers")
    cast.verdict("slot-without-failover", *stalled, nodes="ab")
    assert count(cast.subscriber1) == 0
    set_on(primary, synchronized_standby_slots="")
    eventually(lambda: count(cast.subscriber1) == 10, what="subscriber1 gets the data")
    set_on(primary, synchronized_standby_slots="sb1_slot")


def _two_phase_is_synchronized(cast: Cast) -> None:
    primary, standby, subscriber = cast.primary, cast.standby1, cast.subscriber1
    standby.start()
    with connect(primary) as session:
        session.autocommit = False
        session.execute("INSERT INTO tab_int VALUES (0)")
        session.execute("PREPARE TRANSACTION 'test_twophase_slotsync'")
    cast.caught_up(standby)
    tell(subscriber, "ALTER SUBSCRIPTION regress_mysub1 DISABLE")
    released(primary, "lsub1_slot")
    tell(subscriber, "ALTER SUBSCRIPTION regress_mysub1 SET (two_phase = true)")
    tell(subscriber, "ALTER SUBSCRIPTION regress_mysub1 ENABLE")
    eventually(lambda: slot(primary, "lsub1_slot", "two_phase_at"), what="two_phase is on")
    at = slot(primary, "lsub1_slot", "two_phase_at::text")

    def synchronized() -> bool:
        hasten_slot_sync(primary.conninfo(), standby.conninfo())
        return slot(standby, "lsub1_slot", "two_phase_at::text", f"two_phase AND {READY}") == at

    eventually(synchronized, what="two_phase is synchronized", interval_s=0.2)
    assert ask(subscriber, "SELECT count(*) FROM pg_prepared_xacts") == 0
    ready = cast.verdict("slot-without-failover", nodes="ab")  # no slot-two-phase: this is 18
    assert ready == {"lsub1_slot": True, "snap_test_slot": True}


def _promotion(cast: Cast) -> None:
    new, subscriber = cast.standby1, cast.subscriber1
    cast.caught_up(new)
    before = slot(new, "snap_test_slot", "inactive_since")
    tell(new, "SELECT pg_promote()")
    for name in ("lsub1_slot", "snap_test_slot"):
        assert slot(new, name, READY)
    assert slot(new, "lsub1_slot", f"inactive_since >= '{before}'")
    tell(
        subscriber,
        f"ALTER SUBSCRIPTION regress_mysub1 CONNECTION {quoted(new.conninfo())}",
    )
    assert cast.verdict("standby-answers", nodes="b") == {
        "lsub1_slot": False,
        "snap_test_slot": False,
    }  # the next failover has no standby yet
    tell(new, "COMMIT PREPARED 'test_twophase_slotsync'")
    eventually(lambda: count(subscriber) == 11, what="the prepared transaction arrives")
    tell(new, "INSERT INTO tab_int SELECT generate_series(11, 20)")
    eventually(lambda: count(subscriber) == 21, what="data arrives from the new primary")
    messages = "pg_logical_slot_get_changes('snap_test_slot', NULL, NULL)"
    assert ask(new, f"SELECT count(*) FROM {messages} WHERE data ~ 'message*'") == 1


def _a_slot_that_lags_is_skipped_until_it_catches_up(cast: Cast) -> None:
    """On the old primary with standby2, as the original goes on (slotsync_skip_reason is of 19)."""
    primary, standby, subscriber = cast.primary, cast.standby2, cast.subscriber1
    set_on(primary, synchronized_standby_slots="")
    tell(subscriber, "DROP SUBSCRIPTION regress_mysub1", "TRUNCATE tab_int")
    tell(primary, "COMMIT PREPARED 'test_twophase_slotsync'")
    for name in ("sb1_slot", "lsub1_slot", "snap_test_slot"):
        tell(primary, f"SELECT pg_drop_replication_slot('{name}')")
    cast.caught_up(standby)
    tell(
        subscriber,
        "CREATE TABLE push_wal (a int)",
        f"CREATE SUBSCRIPTION regress_mysub1 CONNECTION {quoted(primary.conninfo())} PUBLICATION "
        "regress_mypub WITH (slot_name = lsub1_slot, failover = true, enabled = false, "
        "copy_data = false)",
    )
    tell(primary, "CREATE TABLE push_wal (a int)")
    cast.synchronize(standby)  # the function drops the copy again, as it is temporary
    known = (*MANUAL, "standby-slot-listed", "slot-without-failover")
    lagging = cast.verdict(*known, "slot-on-standby", "subscription-enabled", nodes="ac")
    assert lagging == {"lsub1_slot": False}
    tell(subscriber, "ALTER SUBSCRIPTION regress_mysub1 ENABLE")

    def ready() -> bool:
        tell(primary, "SELECT pg_log_standby_snapshot()")
        cast.synchronize(standby)
        return bool(slot(standby, "lsub1_slot", READY))

    eventually(ready, what="the slot is synchronized", interval_s=0.2)
    assert cast.verdict(*known, nodes="ac") == {"lsub1_slot": True}
