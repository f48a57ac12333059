"""What could write past a fence, and who may not keep a failover from its promotion."""

import shlex
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from services.testbed.bed import Bed
from tests.conftest import NewPair
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.servers import (
    KILLED_AFTER_A_STEP,
    ask,
    await_equal,
    configuration,
    rows,
    slotfailover,
    slotfailover_process,
    subscribe,
    tell,
    write,
)
from tests.providers.databases import connect
from tests.providers.waiting import eventually, patient_ms


def test_failover_refuses_sessions_past_the_fence_without_a_stop_command(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    tell(trio.primary, "CREATE ROLE app LOGIN SUPERUSER")
    tell(trio.subscriber, "CREATE PUBLICATION back", dbname=trio.dbname)
    upstream = trio.subscriber.conninfo(trio.dbname).replace("'", "''")
    for make, unmake, says in (
        (
            "ALTER ROLE app SET default_transaction_read_only = off",
            "ALTER ROLE app RESET default_transaction_read_only",
            "the role app has a default_transaction_read_only of its own",
        ),
        (
            "BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION 'undecided'",
            "ROLLBACK PREPARED 'undecided'",
            "the prepared transaction undecided",
        ),
        (
            f"CREATE SUBSCRIPTION up CONNECTION '{upstream}' PUBLICATION back"
            " WITH (connect = false, slot_name = NONE, enabled = false)",
            "",
            "",
        ),
        (
            "ALTER SUBSCRIPTION up SET (slot_name = up); ALTER SUBSCRIPTION up ENABLE",
            "ALTER SUBSCRIPTION up DISABLE",
            "the subscription up",
        ),
    ):
        with connect(trio.primary, trio.dbname) as connection:
            for statement in make.split("; "):
                connection.execute(statement)  # type: ignore[call-overload, unused-ignore]
        if says:
            for command in (("switchover", "--to", "b"), ("failover", "--fence")):
                ran = slotfailover(*command, "--config", config, "--yes")
                assert (ran.code, says in ran.err) == (34, True), ran.err
        if unmake:
            tell(trio.primary, unmake, dbname=trio.dbname)
    # A server that is stopped gives the standby all of it before.
    with connect(trio.primary, trio.dbname) as connection, connection.transaction():
        connection.execute("INSERT INTO t VALUES (2, 'x')")
        connection.execute("PREPARE TRANSACTION 'decided elsewhere'")
    config = configuration(tmp_path, trio, machines=machines(trio, local_bed))
    ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b", "--no-rejoin")
    assert ran.code == 0, ran.err
    tell(trio.standby, "COMMIT PREPARED 'decided elsewhere'", dbname=trio.dbname)
    await_equal(trio, trio.standby)
    assert len(rows(trio.subscriber, trio.dbname)) == 1


@pytest.mark.long
def test_borrowed_names_do_not_get_past_a_fence(new_pair: NewPair, tmp_path: Path) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    names = ("standby_1", "slotfailover", "slotbridge", "s1", "b slotsync worker")
    clients = [
        psycopg.connect(trio.primary.conninfo(trio.dbname, application_name=name)) for name in names
    ]
    for number, client in enumerate(clients):
        client.execute("INSERT INTO t VALUES (%s, 'of a transaction from before')", [number])
    ran = slotfailover("switchover", "--config", config, "--yes", "--to", "b", "--no-rejoin")
    assert ran.code == 1, ran.err
    for client in clients:
        with pytest.raises(psycopg.OperationalError):
            client.commit()
    assert ask(trio.primary, "SELECT count(*) FROM t", trio.dbname) == 0


@pytest.mark.long
def test_no_subscriber_keeps_a_failover_from_its_promotion(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """One that is locked, and one that our role may not read."""
    trio = new_pair()
    subscribe(trio, "s1", "s2")
    tell(trio.subscriber, "CREATE ROLE blind LOGIN")
    subscribers = {
        "sub": trio.subscriber.conninfo(trio.dbname),
        "blind": trio.subscriber.conninfo(trio.dbname, user="blind"),
    }
    config = configuration(tmp_path, trio, subscribers=subscribers)
    trio.primary.kill()
    with connect(trio.subscriber, trio.dbname) as locker, locker.transaction():
        locker.execute("ALTER SUBSCRIPTION s2 SET (streaming = on)")
        hasty = configuration(tmp_path, trio, step_deadline_ms=patient_ms(2_700))
        all_or_none = slotfailover(
            "failover", "--config", hasty, "--yes", "--require-subscribers", "--json"
        )
        assert (all_or_none.code, "it was taken back" in all_or_none.out) == (
            13,
            True,
        ), all_or_none.out
        holder = f"pid {locker.info.backend_pid} of "
        assert "a lock was not granted within" in all_or_none.out
        assert f"held by {holder}" in all_or_none.out
        assert ask(trio.standby, "SELECT pg_is_in_recovery()")
        enabled = "SELECT bool_and(subenabled) FROM pg_subscription"
        assert ask(trio.subscriber, enabled, trio.dbname), "s1 had been disabled"
    config = configuration(tmp_path, trio, subscribers=subscribers)
    with connect(trio.subscriber, trio.dbname) as locker, locker.transaction():
        locker.execute("ALTER SUBSCRIPTION s1 SET (streaming = on)")
        ends = f"SELECT pg_terminate_backend({locker.info.backend_pid})"
        ran = slotfailover("failover", "--config", config, "--yes", "--json")
    assert ran.code == 1, ran.err
    assert ran.json["new_primary"] == "b"
    left = {item["subject"]: item for item in ran.json["left"]}
    assert set(left) == {"blind", "sub/s1"}
    assert "may still be fed by the old primary" in left["sub/s1"]["reason"]
    assert "idle in transaction for" in left["sub/s1"]["reason"]
    assert ends in left["sub/s1"]["hint"]
    led = sql.SQL("SELECT subconninfo FROM pg_subscription WHERE subname = {}")
    with connect(trio.subscriber, trio.dbname) as subscriber:
        moved = subscriber.execute(led.format("s2")).fetchone()
    assert moved is not None
    assert str(trio.standby.port) in moved[0]
    only = configuration(tmp_path, trio)
    assert slotfailover("repoint", "--config", only, "--yes").code == 0
    write(trio.standby, trio.dbname, 1)
    await_equal(trio, trio.standby)


def test_settings_that_can_not_be_changed_refuse_before_anything_is(
    local_trio: NewTrio, tmp_path: Path
) -> None:
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    trio.standby.configure({"allow_alter_system": "off"})  # type: ignore[attr-defined]
    tell(trio.standby, "SELECT pg_reload_conf()")
    off = "SELECT current_setting('allow_alter_system') = 'off'"
    eventually(lambda: ask(trio.standby, off), what="settings can't be changed")
    planned = slotfailover("switchover", "--config", config, "--yes", "--to", "b")
    assert (planned.code, "allow_alter_system is off on b" in planned.err) == (25, True)
    write(trio.primary, trio.dbname, 1)
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes")
    assert (ran.code, "slotfailover repoint" in ran.err) == (25, True), ran.err
    assert ask(trio.standby, "SELECT pg_is_in_recovery()")
    assert ask(trio.subscriber, "SELECT bool_and(subenabled) FROM pg_subscription", trio.dbname)


@pytest.mark.long
def test_names_of_no_node_and_no_slot_and_a_target_that_is_not_the_outcome(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio)
    for options, code, says in (
        (("failover", "--to", "x"), 2, "x is not a node"),
        (("failover", "--accept", "lost-slot:s11"), 2, "is not a token"),
        (("switchover",), 2, "the new primary is not named"),
    ):
        ran = slotfailover(*options, "--config", config, "--yes")
        assert (ran.code, says in ran.err) == (code, True), ran.err
    trio.primary.kill()
    assert slotfailover("failover", "--config", config, "--yes").code == 0
    ran = slotfailover("failover", "--config", config, "--yes", "--fence", "--to", "a")
    assert ran.code == 10, ran.err
    assert not ask(trio.standby, "SELECT pg_is_in_recovery()")


@pytest.mark.long
def test_the_label_is_given_although_the_run_was_killed_after_the_promotion(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    label = tmp_path / "label"
    given = {"b": {"label": f"touch {shlex.quote(str(label))}"}}
    config = configuration(tmp_path, trio, machines=given)
    trio.primary.kill()
    command = ("failover", "--config", str(config), "--yes")
    while ask(trio.standby, "SELECT pg_is_in_recovery()"):
        assert slotfailover_process(*command, before=KILLED_AFTER_A_STEP).code == -9
    assert not label.exists()
    assert slotfailover(*command).code == 0
    assert label.exists()
