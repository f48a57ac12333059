"""Modes of a snapshot: repaired when needed, read again at each start, in an order of choice."""

import contextlib
import threading
import time
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from pydantic import ValidationError

from schemas.errors import ExitCode, OperatorNeeded, Retryable
from schemas.settings import BridgeSettings, Settings, SourceSettings
from schemas.snapshot import SnapshotSettings
from services.bridge.failpoints import OF_A_RECOVERY, VARIABLE
from services.bridge.session.runner import Runner
from services.bridge.session.settings import SessionSettings
from services.bridge.snapshot.progress import plan
from services.waiter import Waiter
from tests.bridge.snapshot.test_progress import OWNER, SHAPING, planned, progress, shape
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.recover_process import (
    assert_later_changes_come,
    change_unseen,
    drop_slot,
    recovered,
    touch,
)
from tests.promises.bridge.recover_process import fill as fill_wide
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import (
    DONE,
    Changes,
    assert_folds,
    await_chunks,
    chunks,
    done,
    fill,
    read_all,
    told,
)
from tests.providers.interface import Broker, Provider
from tests.providers.waiting import eventually, patient

NEEDED: dict[str, Any] = {"mode": "when_needed"}
ALWAYS: dict[str, Any] = {"mode": "always", "chunk_rows_max": 20}


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    return pair.primary.conninfo(fresh_database)


@pytest.fixture
def stopped(conninfo: str, new_bridge: NewBridge) -> Bridge:
    """A bridge that has read the table and some changes, and was stopped."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        fill_wide(connection)
        bridge = read_all(new_bridge(conninfo, snapshot=NEEDED))
        touch(connection)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    return bridge


def assert_repaired(bridge: Bridge, conninfo: str) -> None:
    """It streams after a repair; the topic is the table, and stays it."""
    bridge.streaming()
    assert "the topics are repaired" in bridge.output
    assert_later_changes_come(bridge, conninfo)
    assert len(bridge.records("recovery")) == 1


def test_a_slot_that_is_gone_is_repaired_at_the_start(stopped: Bridge, conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, stopped.slot)
        change_unseen(connection)
    assert_repaired(stopped.start(), conninfo)
    repairs = [e["op"] for e in stopped.events("t") if e["source"]["snapshot"] == "repair"]
    assert sorted(repairs) == ["c"] * 5 + ["d"] * 5 + ["u"] * 11


@pytest.mark.long
def test_a_progress_topic_that_is_lost_is_repaired(
    stopped: Bridge, conninfo: str, kafka: Broker
) -> None:
    name = f"{stopped.prefix}.progress"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([name])[name].result(patient(30))
    eventually(lambda: name not in stopped.topics(), what="the topic is gone", timeout_s=60)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        change_unseen(connection)
    assert_repaired(stopped.start(), conninfo)


@pytest.mark.long
def test_a_slot_that_goes_while_the_bridge_runs_is_repaired(stopped: Bridge, conninfo: str) -> None:
    bridge = stopped.start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        query = "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
        gone = False
        while not gone:
            connection.execute(f"{query} WHERE slot_name = %s".encode(), [bridge.slot])
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                connection.execute("SELECT pg_drop_replication_slot(%s)", [bridge.slot])
                gone = True
        change_unseen(connection)
    eventually(lambda: bridge.sessions > 2, what="it streams again", timeout_s=60)
    assert_repaired(bridge, conninfo)


@pytest.mark.long
@pytest.mark.parametrize("point", OF_A_RECOVERY)
def test_killed_at_each_step_of_the_repair(point: str, stopped: Bridge, conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, stopped.slot)
        change_unseen(connection)
    stopped.start(**{VARIABLE: f"{point}:1"})
    assert stopped.exit_code() == -9, stopped.output
    assert_repaired(stopped.start(), conninfo)


@pytest.mark.long
def test_a_stop_is_heard_in_the_middle_of_a_repair(stopped: Bridge, conninfo: str) -> None:
    """The new slot waits for a transaction; what can't be recovered was told in one line before."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, stopped.slot)
        with psycopg.connect(conninfo) as other:
            other.execute("SELECT pg_current_xact_id()")
            stopped.start()
            eventually(
                lambda: "the new slot waits for the transactions" in stopped.output,
                what="the repair waits",
                timeout_s=60,
            )
            assert stopped.stop() == 0, stopped.output
        query = "SELECT FROM pg_replication_slots WHERE slot_name = %s"
        eventually(
            lambda: connection.execute(query, [stopped.slot]).fetchone() is None,
            what="no slot stays behind",
        )
    lost = [line for line in stopped.output.splitlines() if "can't be recovered" in line]
    assert len(lost) == 1 and "messages of outboxes" in lost[0] and "since=" in lost[0]
    assert_repaired(stopped.start(), conninfo)


@pytest.mark.long
def test_the_probe_hears_of_a_repair_while_it_goes_on_alone(conninfo: str) -> None:
    """A repair that hangs is as dead as any other hanging loop."""
    stop = threading.Event()
    settings = Settings.model_validate(
        {
            "source": {"conninfo": conninfo, "slot": "s", "publication": "p"},
            "kafka": {"bootstrap_servers": "b:9092", "topic_prefix": "p"},
        }
    )
    assert settings.source is not None and settings.kafka is not None
    seen: list[bool] = []

    def repair(_: SourceSettings, _bridge: BridgeSettings, waiter: Waiter) -> None:
        runner._opening_since = time.monotonic() - 1_000
        seen.append(runner.healthy())
        waiter.turn()
        seen.append(runner.healthy())
        stop.set()
        waiter.turn()

    runner = Runner(
        SessionSettings(
            *(settings.source, settings.kafka, settings.bridge, settings.shaping),
            settings.snapshot,
            streaming=True,
        ),
        stop,
        None,
        repair,
    )
    disagree = OperatorNeeded("x", operation="compare")
    with pytest.raises(Retryable, match="a stop was asked for"):
        runner._mend(disagree, settings.source)
    assert seen == [False, True]


@pytest.mark.long
def test_another_choice_of_changes_stays_an_exit(stopped: Bridge, conninfo: str) -> None:
    """A wrong name of a publication is not to cost the slot."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"DROP PUBLICATION {stopped.publication}".encode())
        connection.execute("INSERT INTO t VALUES (301, 'unseen', 'x', NULL)")
        connection.execute(f"CREATE PUBLICATION {stopped.publication} FOR ALL TABLES".encode())
    assert stopped.start().exit_code() == ExitCode.WITNESSES_DISAGREE, stopped.output
    assert "it was dropped and made again since" in stopped.output
    assert f"{stopped.prefix}.recovery" not in stopped.topics()
    assert recovered(stopped).tables["public.t"].created == 1  # as an operator decides


@pytest.mark.long
def test_what_a_repair_would_make_worse_stays_an_exit(
    stopped: Bridge, conninfo: str, new_bridge: NewBridge
) -> None:
    """Another slot's topics."""
    other = new_bridge(conninfo, prefix=stopped.prefix, slot="s_another", snapshot=NEEDED).start()
    assert other.exit_code() == ExitCode.WITNESSES_DISAGREE, other.output
    assert f"{stopped.prefix}.recovery" not in other.topics()


@pytest.mark.parametrize(
    "other",
    [
        {"kafka": {"value_format": "json_schema_envelope"}},
        {"shaping": {"flat": {}}},
    ],
)
def test_records_that_no_repair_understands_are_refused(other: dict[str, Any]) -> None:
    kafka = {"bootstrap_servers": "b:9092", "topic_prefix": "p", **other.get("kafka", {})}
    with pytest.raises(ValidationError, match="when_needed repairs topics of plain JSON alone"):
        Settings.model_validate({**other, "kafka": kafka, "snapshot": NEEDED})


@pytest.mark.long
def test_all_rows_come_again_at_each_start_and_not_at_each_session(
    conninfo: str, new_bridge: NewBridge
) -> None:
    fill(conninfo, 300)
    bridge = read_all(new_bridge(conninfo, snapshot=ALWAYS))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            " WHERE slot_name = %s",
            [bridge.slot],
        )
        eventually(lambda: bridge.sessions >= 2, what="it streams again", timeout_s=60)
        connection.execute("UPDATE t SET note = 'new' WHERE id = 7")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert {*assert_folds(bridge, conninfo).reads.values()} == {1}
    bridge.start().streaming()
    done(bridge, times=2)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert {*assert_folds(bridge, conninfo).reads.values()} == {2}


@pytest.mark.long
def test_killed_in_the_middle_of_a_snapshot_that_always_begins_anew(
    conninfo: str, new_bridge: NewBridge
) -> None:
    fill(conninfo, 900)
    bridge = new_bridge(conninfo, snapshot=ALWAYS)
    with Changes(conninfo, 900):
        for _ in range(3):
            before = chunks(bridge)
            bridge.start().streaming()
            await_chunks(bridge, before + 5, or_all=False)
            bridge.kill()
        passes = bridge.output.count(DONE)  # one may be done before it is killed
        bridge.start().streaming()
        done(bridge, times=passes + 1)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_folds(bridge, conninfo)
    assert [one.chunks for one in told(bridge)].count(1) == 4


def test_progress_from_before_the_start_counts_for_nothing() -> None:
    found = shape("public.t", "id")
    told = progress(found)  # at 900
    for since_lsn, rows in ((900, 7), (901, 0)):
        owner = OWNER._replace(since_lsn=since_lsn)
        found_plan = plan([found], [told], SnapshotSettings(mode="always"), SHAPING, owner)
        assert found_plan.next is not None and found_plan.next.rows == rows


def test_tables_are_read_in_the_order_of_the_settings() -> None:
    names = ["public.a", "public.b", "public.c", "public.d1", "public.d2"]
    found = planned(
        shapes=[shape(name, "id", oid=n) for n, name in enumerate(names, 1)],
        order=["public.d*", "public.c", "public.nothing"],
    )
    assert [name[7:] for name in found.tables] == ["d1", "d2", "c", "a", "b"]


def test_the_mode_always_refuses_to_repeat_rows_without_a_key() -> None:
    with pytest.raises(ValidationError, match="without a key again"):
        SnapshotSettings.model_validate({**ALWAYS, "without_key": "read"})
