"""PostgreSQL itself: killed, restarted, full; its standby gone."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from schemas.errors import ExitCode
from services.testbed.pair import STANDBY_SLOT, set_parameter
from tests.marks import long_but
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import TABLE, Load, assert_intact, await_session
from tests.promises.bridge.running import Bridge
from tests.providers import databases
from tests.providers.databases import connect
from tests.providers.interface import Provider, Server, Trio
from tests.providers.waiting import eventually, patient_ms

FEW = {"max_connections": 24, "superuser_reserved_connections": 1}


@pytest.fixture(scope="module")
def trio(provider: Provider) -> Iterator[Trio]:
    """A pair to be killed and started again; nothing is promoted."""
    with provider.new_trio(synchronous=False, settings=FEW) as made:
        yield made


@pytest.fixture
def conninfo(trio: Trio, topic_prefix: str) -> Iterator[str]:
    """An empty database of its own, with the table of the load."""
    for server in (trio.primary, trio.standby):
        if not server.running:
            server.start()
    known = databases.origins(trio.primary)
    databases.create(trio.primary, topic_prefix)
    with connect(trio.primary, topic_prefix) as connection:
        connection.execute(TABLE)
    yield trio.primary.conninfo(topic_prefix)
    databases.remove(trio.primary, topic_prefix, keep_origins=known)


@pytest.fixture
def bridge(conninfo: str, new_bridge: NewBridge) -> Iterator[Bridge]:
    """It streams; ended before its slot is dropped."""
    made = new_bridge(conninfo).start().streaming()
    yield made
    made.end()


FAULTS: dict[str, Callable[[Server], None]] = {
    "killed": lambda server: server.kill(),
    "stopped": lambda server: server.stop(),
    "shut down immediately": lambda server: server.stop("immediate"),
}


@pytest.mark.parametrize("fault", long_but("killed", FAULTS))
def test_the_server_is_gone_and_comes_again(
    trio: Trio, conninfo: str, load: Load, bridge: Bridge, fault: str
) -> None:
    load.more()
    FAULTS[fault](trio.primary)
    eventually(lambda: "not streaming yet" in bridge.output, what="the bridge tries again")
    trio.primary.start()
    await_session(bridge, 2)
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_all_connections_are_taken_when_it_comes_back(
    trio: Trio, conninfo: str, load: Load, bridge: Bridge
) -> None:
    load.more()
    with contextlib.ExitStack() as others:
        first = others.enter_context(connect(trio.primary))
        _fill(trio.primary, others)

        def taken() -> bool:
            """Again and again, as the bridge may be quicker than we are."""
            if "too many clients" in bridge.output:
                return True
            first.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'slotbridge%'"
            )
            _fill(trio.primary, others)
            return False

        eventually(taken, what="it finds no place", interval_s=0.1)
        assert bridge.running
    await_session(bridge, 2)
    assert_intact(bridge, load, conninfo)


def _fill(server: Server, others: contextlib.ExitStack) -> None:
    """Take what is left of max_connections."""
    with contextlib.suppress(psycopg.OperationalError):
        for _ in range(100):
            others.enter_context(connect(server))


def test_a_listed_standby_is_gone_the_bridge_waits_and_says_why(
    trio: Trio, conninfo: str, load: Load, bridge: Bridge
) -> None:
    load.more()
    bridge.caught_up()
    trio.standby.kill()
    load.more()
    eventually(lambda: "the server withholds commits" in bridge.output, what="it says why")
    load.more(50)
    assert "standby_1: no standby is connected" in bridge.output
    assert bridge.output.count("the server withholds commits") == 1
    found = _status(bridge)
    assert found["streaming"]
    assert "standby_1: no standby is connected" in str(found["obstacles"])
    assert found["hosts"][0]["withheld_by"] == ["standby_1: no standby is connected"]
    published = sum(1 for event in bridge.events("t") if event["op"] == "c")
    assert published < load.committed, "Kafka is ahead of the standby"
    trio.standby.start()
    eventually(lambda: "sends commits again" in bridge.output, what="it goes on")
    assert bridge.sessions == 1, bridge.output
    assert_intact(bridge, load, conninfo)


LISTED = "listed_of_test"
PHYSICAL = f"SELECT pg_create_physical_replication_slot('{LISTED}', true)"
LOGICAL = f"SELECT pg_create_logical_replication_slot('{LISTED}', 'pgoutput')"
DROPPED = f"SELECT pg_drop_replication_slot('{LISTED}')"
AWAITED: dict[str, tuple[str, ...]] = {
    "does not have active_pid": (),
    "does not exist": (DROPPED,),
    "cannot specify logical replication slot": (DROPPED, LOGICAL),
}
"""What the server says of a slot in synchronized_standby_slots, and how the slot comes to it."""


@pytest.fixture
def listed(trio: Trio, conninfo: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A session with the primary, which awaits the slot LISTED; the pair's slot is listed again."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(PHYSICAL.encode())
        set_parameter(trio.primary, "synchronized_standby_slots", LISTED)
        yield connection
    set_parameter(trio.primary, "synchronized_standby_slots", STANDBY_SLOT)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"{DROPPED} FROM pg_replication_slots WHERE slot_name = '{LISTED}'")


@pytest.mark.long
@pytest.mark.parametrize("said", list(AWAITED))
def test_a_primary_that_awaits_a_standby_restarts_and_the_bridge_goes_on(
    trio: Trio,
    conninfo: str,
    listed: psycopg.Connection[tuple[object, ...]],
    load: Load,
    bridge: Bridge,
    said: str,
) -> None:
    """A walsender that waits for a standby fails where the server shuts down, formerly for good."""
    for statement in AWAITED[said]:
        listed.execute(statement.encode())
    load.more()
    eventually(lambda: "the server withholds commits" in bridge.output, what="it awaits the slot")
    trio.primary.restart()
    await_session(bridge, 2)
    (lost,) = [line for line in bridge.output.splitlines() if "session lost" in line]
    words = f"the primary is shutting down while it waits for the standby of slot {LISTED}: "
    assert words in lost
    assert said in lost
    set_parameter(trio.primary, "synchronized_standby_slots", STANDBY_SLOT)
    assert_intact(bridge, load, conninfo)


def _status(bridge: Bridge) -> dict[str, list[dict[str, object]]]:
    program = Path(sys.executable).parent / "slotbridge"
    command = [str(program), "status", "--config", str(bridge.config)]
    people = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "before this standby has them: standby_1" in people.stdout
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert (people.returncode, done.returncode) == (ExitCode.CHECK_FAILED,) * 2, done.stderr
    found: dict[str, list[dict[str, object]]] = json.loads(done.stdout)
    return found


UNPRINTABLE = (
    "CREATE TYPE bad",
    "CREATE FUNCTION bad_in(cstring) RETURNS bad AS 'byteain' LANGUAGE internal IMMUTABLE STRICT",
    "CREATE FUNCTION bad_out(bad) RETURNS cstring AS 'range_out' LANGUAGE internal STABLE STRICT",
    "CREATE TYPE bad (INPUT = bad_in, OUTPUT = bad_out)",
    "CREATE TABLE unprintable (id int PRIMARY KEY, value bad)",
)
"""The server takes any bytes as a value, and fails with XX000 when it is to print them."""


@pytest.mark.long
def test_undecodable_wal_ends_in_an_exit_code(conninfo: str, new_bridge: NewBridge) -> None:
    bridge = new_bridge(conninfo, connect_deadline_ms=patient_ms(1_700)).start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in UNPRINTABLE:
            connection.execute(statement.encode())
        connection.execute("INSERT INTO unprintable VALUES (1, '\\x1700000000')")
    assert bridge.exit_code() == ExitCode.UNDECODABLE, bridge.output
    assert "type 23 is not a range type (6 sessions in a row ended like this" in bridge.output
