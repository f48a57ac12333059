"""What is seen of subscriptions and the bridge, and of each one's position."""

import socket
from pathlib import Path

import pytest
import yaml

from services.testbed.ports import free_port
from tests.promises.failover.check.examining import Examiner, examiner_of, quoted, reset_on, set_on
from tests.promises.failover.servers import ask, create_subscription, tell
from tests.providers.databases import connect
from tests.providers.slots import advance_until_ready, await_ready
from tests.providers.waiting import eventually, patient_ms

BRIDGE = "events"


def test_no_worker(sound: Examiner) -> None:
    """A subscription that can't connect: its worker ends again and again."""
    trio = sound.trio
    before = ask(trio.subscriber, "SELECT subconninfo FROM pg_subscription", trio.dbname)
    tell(
        trio.subscriber,
        f"ALTER SUBSCRIPTION s1 CONNECTION {quoted(before.replace(trio.dbname, 'no_database'))}",
        dbname=trio.dbname,
    )
    found = sound.expect("subscription-worker")
    assert "hush" not in str(found)
    tell(trio.subscriber, f"ALTER SUBSCRIPTION s1 CONNECTION {quoted(before)}", dbname=trio.dbname)


@pytest.mark.long
def test_a_worker_that_fails_and_is_started_again_and_again(sound: Examiner) -> None:
    """A lone look may find it just started; its predecessors' errors are seen all the same."""
    trio = sound.trio
    tell(trio.primary, "CREATE TABLE lacking (id int PRIMARY KEY)", dbname=trio.dbname)
    tell(trio.primary, "INSERT INTO lacking VALUES (1)", dbname=trio.dbname)
    sound.expect("subscription-worker")
    for _ in range(10):
        (finding,) = sound.problems()["subscription-worker"]
        assert "sub/s1" in finding["what"]
    tell(trio.subscriber, "CREATE TABLE lacking (id int PRIMARY KEY)", dbname=trio.dbname)


def verdict(examiner: Examiner) -> str:
    """The severity that the worker of s1 gets."""
    found = examiner.run("--json").json["findings"]
    of_worker = [one for one in found if one["check"] == "subscription-worker"]
    assert [one["subject"] for one in of_worker] in ([None], ["sub/s1"]), of_worker
    return str(of_worker[0]["severity"])


@pytest.mark.long
def test_a_worker_whose_publisher_does_not_answer(sound: Examiner) -> None:
    """It hangs before start_apply, so that PostgreSQL counts no error: it is never called sound."""
    trio = sound.trio
    before = ask(trio.subscriber, "SELECT subconninfo FROM pg_subscription", trio.dbname)
    set_on(trio.primary, wal_sender_timeout=f"'{patient_ms(700)}ms'")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = f"port={silent.getsockname()[1]},"
        hosts = before.replace("host=", "host=127.0.0.1,").replace("port=", port)
        assert hosts.count("127.0.0.1,") == 1, hosts
        tell(
            trio.subscriber,
            f"ALTER SUBSCRIPTION s1 CONNECTION {quoted(hosts)}",
            dbname=trio.dbname,
        )
        eventually(lambda: verdict(sound) != "ok", what="its worker is started anew")
        eventually(
            lambda: "is not fed" in str(sound.problems().get("subscription-worker")),
            what="its worker hangs",
        )
        assert verdict(sound) == "warning"
        tell(
            trio.subscriber,
            f"ALTER SUBSCRIPTION s1 CONNECTION {quoted(before)}",
            dbname=trio.dbname,
        )
    reset_on(trio.primary, "wal_sender_timeout")


def test_a_worker_whose_slot_is_gone(fresh: Examiner) -> None:
    """It fails before start_apply, and is started anew: it is never called sound."""
    trio = fresh.trio
    tell(trio.subscriber, "ALTER SUBSCRIPTION s1 DISABLE", dbname=trio.dbname)
    free = "SELECT NOT active FROM pg_replication_slots WHERE slot_name = 's1'"
    eventually(lambda: ask(trio.primary, free), what="s1 is released")
    tell(trio.primary, "SELECT pg_drop_replication_slot('s1')")
    tell(trio.subscriber, "ALTER SUBSCRIPTION s1 ENABLE", dbname=trio.dbname)
    verdicts = {verdict(fresh) for _ in range(30)}
    assert verdicts <= {"warning", "not judged"}


def test_initial_copy_not_finished(sound: Examiner) -> None:
    """Breaker 21: a lock holds the copy back. No test before it may have left it a row twice."""
    trio = sound.trio
    tell(trio.primary, "TRUNCATE t", dbname=trio.dbname)
    eventually(
        lambda: ask(trio.subscriber, "SELECT count(*) FROM t", trio.dbname) == 0,
        what="the subscriber's table is empty too",
    )
    with connect(trio.subscriber, trio.dbname) as subscriber:
        conninfo = trio.primary.conninfo(trio.dbname)
        subscriber.execute(
            f"CREATE SUBSCRIPTION copying CONNECTION {quoted(conninfo)} PUBLICATION p "
            "WITH (failover, enabled = false)".encode()
        )
        with connect(trio.primary, trio.dbname) as locking:
            locking.execute("BEGIN")
            locking.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            subscriber.execute("ALTER SUBSCRIPTION copying ENABLE")
            found = sound.expect("initial-copy")
            (finding,) = found["initial-copy"]
            assert finding["subject"] == "sub/copying"
            assert finding["evidence"].endswith(("public.t i", "public.t d"))
            locking.execute("ROLLBACK")
        await_ready(trio.primary, trio.standby, "copying")
        sound.expect()
        subscriber.execute("DROP SUBSCRIPTION copying")


def test_two_subscriptions_of_one_slot(sound: Examiner) -> None:
    trio = sound.trio
    conninfo = trio.primary.conninfo(trio.dbname)
    tell(
        trio.subscriber,
        f"CREATE SUBSCRIPTION twin CONNECTION {quoted(conninfo)} PUBLICATION p "
        "WITH (create_slot = false, slot_name = 's1', enabled = false, copy_data = false)",
        dbname=trio.dbname,
    )
    found = sound.expect("slot-shared", "subscription-enabled")
    assert "sub/s1, sub/twin" in found["slot-shared"][0]["evidence"]
    tell(
        trio.subscriber,
        "ALTER SUBSCRIPTION twin SET (slot_name = NONE)",
        "DROP SUBSCRIPTION twin",
        dbname=trio.dbname,
    )


def test_positions_of_subscribers_one_of_which_does_not_answer(
    sound: Examiner, tmp_path: Path
) -> None:
    trio = sound.trio
    conninfo = trio.subscriber.conninfo(trio.dbname)
    nowhere = trio.subscriber.conninfo(trio.dbname, port=free_port())
    some = examiner_of(trio, tmp_path, subscribers={"sub": conninfo, "gone": nowhere})
    found = some.expect("subscriber-answers")
    assert found["subscriber-answers"][0]["subject"] == "gone"
    ran = some.run("--json")
    assert ran.code == 0
    (slot,) = ran.json["slots"]
    assert set(slot["consumers"]) >= {"its slot on the primary"}
    assert all(more >= 0 for more in slot["standby_has_more_bytes"].values())
    tell(trio.primary, "INSERT INTO t VALUES (77, 'x')", dbname=trio.dbname)

    def told() -> bool:
        (slot,) = some.run("--json").json["slots"]
        return "sub/s1" in slot["consumers"]

    eventually(told, what="the subscriber's position is known")
    assert "b against sub/s1 +" in some.run().out


@pytest.fixture
def with_bridge(sound: Examiner, tmp_path: Path) -> Examiner:
    """The same pair with a bridge in the settings."""
    examiner = examiner_of(sound.trio, tmp_path)
    document = yaml.safe_load(examiner.config.read_text())
    document["source"] = {"conninfo": sound.trio.primary.conninfo(), "slot": BRIDGE}
    examiner.config.write_text(yaml.safe_dump(document))
    return examiner


def test_the_bridges_slot_and_position(with_bridge: Examiner) -> None:
    """Its slot is required, its position is that of its origin on the primary."""
    trio = with_bridge.trio
    found = with_bridge.expect("slot-on-primary", "slot-on-standby")
    assert "wanted by the bridge" in found["slot-on-primary"][0]["evidence"]
    with connect(trio.primary, trio.dbname) as primary:
        primary.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, false, true)",
            [BRIDGE],
        )
        advance_until_ready(trio.primary, trio.standby, trio.dbname, BRIDGE)
        found = with_bridge.expect("bridge-connected")
        assert "its origin is at unknown" in found["bridge-connected"][0]["evidence"]
        primary.execute("SELECT pg_replication_origin_create(%s)", [f"slotbridge_{BRIDGE}"])
        move = "SELECT pg_replication_origin_advance(%s, pg_current_wal_lsn() + %s)"
        primary.execute(move, [f"slotbridge_{BRIDGE}", 0])
        with_bridge.expect("bridge-connected")
        slots = {slot["slot"]: slot for slot in with_bridge.run("--json").json["slots"]}
        assert slots[BRIDGE]["standby_has_more_bytes"]["bridge"] >= 0
        primary.execute(move, [f"slotbridge_{BRIDGE}", 10**9])
        found = with_bridge.expect("bridge-connected", "consumer-ahead")
        (finding,) = found["consumer-ahead"]
        assert finding["subject"] == BRIDGE
        assert finding["evidence"].startswith("bridge is at ")
        primary.execute("SELECT pg_replication_origin_drop(%s)", [f"slotbridge_{BRIDGE}"])
        primary.execute("SELECT pg_drop_replication_slot(%s)", [BRIDGE])


def test_subscription_without_failover(sound: Examiner) -> None:
    """Its slot is not required, but its loss is foreseen."""
    trio = sound.trio
    create_subscription(trio, "plain")
    tell(
        trio.subscriber,
        "ALTER SUBSCRIPTION plain DISABLE",
        dbname=trio.dbname,
    )
    free = "SELECT NOT active FROM pg_replication_slots WHERE slot_name = 'plain'"
    eventually(lambda: ask(trio.primary, free), what="plain is released")
    tell(
        trio.subscriber,
        "ALTER SUBSCRIPTION plain SET (failover = false)",
        "ALTER SUBSCRIPTION plain ENABLE",
        dbname=trio.dbname,
    )
    found = sound.expect("slot-without-failover")
    assert found["slot-without-failover"][0]["subject"] == "plain"
    assert [slot["slot"] for slot in sound.run("--json").json["slots"]] == ["s1"]
    tell(trio.subscriber, "DROP SUBSCRIPTION plain", dbname=trio.dbname)
