"""What holds a failover up, or keeps a consumer from following: on real servers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from schemas.settings import load_settings
from services.failover.model.view import FENCE
from services.failover.observe.cluster import Cluster
from services.testbed.bed import Bed
from tests.conftest import NewPair
from tests.promises.failover.conftest import NewTrio, machines
from tests.promises.failover.frozen_server import frozen
from tests.promises.failover.servers import (
    accepting,
    ask,
    await_equal,
    configuration,
    slotfailover,
    slotfailover_process,
    subscribe,
    tell,
    write,
)
from tests.promises.failover.third import third_standby
from tests.providers.waiting import eventually

NO_ROOM = """
import resource, signal, tempfile
tempfile.gettempdir()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
"""
"""Put before a command: it may open files and make some, and can't write a byte into any."""


def test_a_full_disk_and_a_dead_server_to_be_fenced_keep_nobody_from_a_promotion(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    """The default `fence` command fails where no server runs: its status is the proof."""
    trio = local_trio()
    subscribe(trio, "s1")
    config = configuration(tmp_path, trio, machines=machines(trio, local_bed))
    trio.primary.kill()
    ran = slotfailover("failover", "--config", config, "--yes", "--fence", "--json")
    assert (ran.code, ran.json["new_primary"]) == (0, "b"), ran.err
    assert slotfailover("rejoin", "a", "--config", config, "--yes").code == 0
    trio.standby.kill()
    for path in tmp_path.glob("journal*"):
        path.unlink()
    command = ("failover", "--config", str(config), "--yes", "--json")
    ran = slotfailover_process(*command, before=NO_ROOM)
    assert (ran.code, ran.json["new_primary"]) == (0, "a"), ran.err
    assert any("journal can't be written: File too large" in note for note in ran.json["notes"])
    assert not list(tmp_path.glob("journal.seen*"))
    write(trio.primary, trio.dbname, 1)
    await_equal(trio, trio.primary)
    kept = "SELECT count(*) FROM slotfailover.journal WHERE step = 'promote a'"
    assert ask(trio.primary, kept) > 0  # the servers have the notes


def test_another_standby_that_stands_still_does_not_hold_up_the_stop(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    trio = local_trio(settings={"wal_sender_timeout": "0"})
    subscribe(trio, "s1")
    config = configuration(
        tmp_path, trio, machines=machines(trio, local_bed), step_deadline_ms=30_000
    )
    with third_standby(trio, local_bed) as third:
        named = "ALTER SYSTEM SET synchronized_standby_slots = 'standby_1'"
        tell(trio.primary, named, "SELECT pg_reload_conf()")
        with frozen(third, wholly=True):
            write(trio.primary, trio.dbname, 1)
            command = ("switchover", "--to", "b", "--config", config, "--yes", "--no-rejoin")
            ran = slotfailover(*command)
            assert "stop a" in ran.err
            assert ran.code == 0, ran.err
    await_equal(trio, trio.standby)


def test_consumers_of_every_kind_follow_stay_or_are_asked_about(
    new_pair: NewPair, tmp_path: Path
) -> None:
    """A list of hosts clings to the fenced primary; a standby feeds one; one has no copy."""
    trio = new_pair()
    subscribe(trio, "s1")
    ports = f"{trio.primary.port},{trio.standby.port}"
    by_list = trio.primary.conninfo(
        trio.dbname, host="127.0.0.1,127.0.0.1", port=ports, target_session_attrs="primary"
    )
    there = trio.standby.conninfo(trio.dbname)
    tell(trio.subscriber, f"ALTER SUBSCRIPTION s1 CONNECTION $${by_list}$$", dbname=trio.dbname)
    make = "SELECT pg_create_logical_replication_slot('s2', 'pgoutput')"
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(ask, trio.standby, make, trio.dbname)
        snapshot = "SELECT pg_log_standby_snapshot()"
        eventually(lambda: ask(trio.primary, snapshot) and made.done(), what="the slot is made")
    options = "create_slot = false, copy_data = false, slot_name = 's2'"
    create = f"CREATE SUBSCRIPTION s2 CONNECTION $${there}$$ PUBLICATION p WITH ({options})"
    tell(trio.subscriber, "CREATE DATABASE reports")
    tell(
        trio.subscriber,
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        create,
        dbname="reports",
    )
    subscribers = {
        "sub": trio.subscriber.conninfo(trio.dbname),
        "reports": trio.subscriber.conninfo("reports"),
    }
    config = configuration(tmp_path, trio, subscribers=subscribers, step_deadline_ms=30_000)
    fed = "SELECT count(*) = 1 FROM pg_replication_slots WHERE slot_name = 's2' AND active"
    eventually(lambda: ask(trio.standby, fed), what="the standby feeds s2")
    nothing = slotfailover("repoint", "--config", config, "--yes", "--json")
    assert (nothing.code, nothing.json["steps"]) == (0, []), nothing.err
    assert "s2, enabled" not in slotfailover("status", "--config", config).out

    tell(trio.subscriber, "CREATE DATABASE more")
    tell(trio.subscriber, "CREATE TABLE t (id int PRIMARY KEY, note text)", dbname="more")
    home = trio.primary.conninfo(trio.dbname)
    alone = f"CREATE SUBSCRIPTION s3 CONNECTION $${home}$$ PUBLICATION p WITH (copy_data = false)"
    tell(trio.subscriber, alone, dbname="more")
    subscribers["more"] = trio.subscriber.conninfo("more")
    config = configuration(tmp_path, trio, subscribers=subscribers, step_deadline_ms=30_000)
    command = ("switchover", "--to", "b", "--config", config, "--yes", "--no-rejoin")
    refused = slotfailover(*command)
    assert (refused.code, "more/s3: the slot s3 is not on b" in refused.err) == (34, True)
    write(trio.primary, trio.dbname, 1)  # nothing was fenced

    ran = slotfailover(*command, *accepting(refused), "--json")
    assert ran.code == 1, ran.err
    assert [left["subject"] for left in ran.json["left"]] == ["a"], ran.err  # fenced, and runs on
    assert not [step["step"] for step in ran.json["steps"] if "s2" in step["step"].split(":")[0]]
    write(trio.standby, trio.dbname, 101)
    await_equal(trio, trio.standby)
    conninfo = ask(trio.subscriber, "SELECT subconninfo FROM pg_subscription WHERE subname = 's1'")
    assert (ports in conninfo, "read-write" in conninfo) == (True, True)


def test_where_a_setting_comes_from_is_seen_and_no_password_of_it(
    new_pair: NewPair, tmp_path: Path
) -> None:
    trio = new_pair()
    settings = load_settings(configuration(tmp_path, trio)).failover
    assert settings is not None
    with Cluster(settings) as cluster:
        seen = cluster.observe().node("b").known_state.settings
    assert (seen["primary_conninfo"].value, seen[FENCE].source) == ("", "default")
    assert seen["primary_conninfo"].source == "configuration file"
