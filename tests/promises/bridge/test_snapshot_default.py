"""Without snapshot.mode: a new topic prefix gets all rows, one that began without gets none."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from schemas.errors import ExitCode
from schemas.snapshot import SnapshotSettings
from services.bridge.cli.app import app
from services.bridge.failpoints import VARIABLE
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import done, read_all
from tests.providers.interface import Provider
from tests.providers.roles import make_roles
from tests.providers.waiting import eventually, patient

UNSET: dict[str, Any] = {}
NEVER: dict[str, Any] = {"mode": "never"}


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE log (note text)")
        connection.execute("INSERT INTO t SELECT generate_series(1, 30)")
        connection.execute("INSERT INTO log SELECT 'n' || g FROM generate_series(1, 20) g")
    return conninfo


def operations(bridge: Bridge, table: str) -> Counter[str]:
    """op -> how many events of it the table's topic has."""
    records = read_committed(bridge.kafka.bootstrap_servers, [f"{bridge.prefix}.public.{table}"])
    return Counter(json.loads(one.value)["op"] for one in records if one.value is not None)


def status(bridge: Bridge) -> dict[str, Any]:
    """The document of `slotbridge snapshot status --json`."""
    program = Path(sys.executable).parent / "slotbridge"
    command = [str(program), "snapshot", "status", "-c", str(bridge.config), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE).stdout)
    return found


def unset(bridge: Bridge) -> Bridge:
    """Take snapshot.mode out of its configuration."""
    text = bridge.config.read_text()
    assert "snapshot:\n  mode: never\n" in text
    bridge.config.write_text(text.replace("snapshot:\n  mode: never\n", "snapshot: {}\n"))
    return bridge


@pytest.mark.parametrize("mode", [None, "initial"])
def test_the_mode_in_effect(mode: Any) -> None:
    given = SnapshotSettings(mode=mode)
    assert given.in_effect(reads_rows=True).mode == "initial"
    assert given.in_effect(reads_rows=False).mode == (mode or "never")
    signals = SnapshotSettings(mode=mode, signal_topic="s")
    assert signals.in_effect(reads_rows=False).mode == (mode or "on_request")


def test_rows_come_once_also_where_the_bridge_dies_before_the_first(
    conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, snapshot=UNSET).start(**{VARIABLE: "first record:1"})
    assert bridge.exit_code() == -9, bridge.output
    read_all(bridge)
    eventually(lambda: operations(bridge, "t") == {"r": 30}, what="the rows are there")
    eventually(lambda: operations(bridge, "log") == {"r": 20}, what="also without a key")
    assert status(bridge)["mode"] == "initial"
    bridge.kill()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (31)")
    read_all(bridge)
    bridge.caught_up()
    assert operations(bridge, "t") == {"r": 30, "c": 1}


@pytest.mark.long
def test_a_prefix_that_began_without_rows_stays_without(
    conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, snapshot=NEVER).start().streaming()
    assert bridge.stop() == 0, bridge.output
    unset(bridge).start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (31)")
    bridge.caught_up()
    assert operations(bridge, "t") == {"c": 1}
    assert status(bridge)["mode"] == "never"
    assert "this topic prefix began without them" in bridge.output
    assert bridge.stop() == 0, bridge.output
    command = ["recover", "-c", str(bridge.config), "--yes", "--force", "--without", "public.log"]
    recovered = CliRunner().invoke(app, command)
    assert recovered.exit_code == 0, recovered.output
    bridge.start().streaming()
    assert status(bridge)["mode"] == "never", "a repair reads rows once"


@pytest.mark.long
def test_tables_without_a_key_need_a_slot_that_the_bridge_made(
    conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, snapshot=UNSET)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, false, true)",
            [bridge.slot],
        )
        connection.execute(f"CREATE PUBLICATION {bridge.publication} FOR ALL TABLES")
        assert bridge.start().exit_code() == 2, bridge.output
        assert "public.log" in bridge.output and "snapshot.exclude" in bridge.output
        connection.execute("ALTER TABLE log ADD id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY")
        bridge.start()
        eventually(lambda: operations(bridge, "t") == {"r": 30}, what="the rows are there")
        eventually(lambda: operations(bridge, "log") == {"r": 20}, what="also those of log")


@pytest.mark.long
def test_tables_that_the_role_may_not_read_are_named(
    pair: Provider, fresh_database: str, conninfo: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    """The first start ends; a table that comes later keeps nothing else back."""
    made = make_roles(
        pair.primary, fresh_database, publication=f"p_{topic_prefix}", suffix=topic_prefix
    )
    as_role = pair.primary.conninfo(fresh_database, user=made.bridge)
    bridge = new_bridge(as_role, snapshot=UNSET)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"REVOKE pg_read_all_data FROM {made.bridge}".encode())
        connection.execute(f"GRANT SELECT ON log TO {made.bridge}".encode())
        assert bridge.start().exit_code() == 2, bridge.output
        assert "public.t may not be read" in bridge.output and "public.log" not in bridge.output
        connection.execute(f"GRANT SELECT ON t TO {made.bridge}".encode())
        bridge.start()
        done(bridge)
        eventually(lambda: operations(bridge, "t") == {"r": 30}, what="the rows are there")
        connection.execute("CREATE TABLE later (id int PRIMARY KEY)")
        connection.execute("INSERT INTO later VALUES (1)")
        connection.execute("VACUUM FULL later")  # in its first file, it needs no snapshot
        bridge.kill()
        bridge.start()
        eventually(lambda: "public.later may not be read" in bridge.output, what="it is told")
        connection.execute("INSERT INTO later VALUES (2)")
        eventually(lambda: operations(bridge, "later") == {"c": 2}, what="changes come")
        eventually(lambda: set(status(bridge)["refused"]) == {"public.later"}, what="it is noted")
        connection.execute("CREATE TABLE hidden (id int PRIMARY KEY)")
        connection.execute("VACUUM FULL hidden")
        connection.execute(f"GRANT SELECT ON hidden TO {made.bridge}".encode())
        connection.execute("ALTER TABLE hidden ENABLE ROW LEVEL SECURITY")
        connection.execute(f"GRANT SELECT ON later TO {made.bridge}".encode())
        bridge.kill()
        bridge.start()
        eventually(lambda: operations(bridge, "later") == {"c": 2, "r": 2}, what="and rows")
        eventually(lambda: set(status(bridge)["refused"]) == {"public.hidden"}, what="the other")
        assert bridge.running, bridge.output
    assert (operations(bridge, "t"), operations(bridge, "log")) == ({"r": 30}, {"r": 20})


@pytest.mark.long
def test_a_prefix_keeps_its_rows_where_the_progress_is_lost(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """The record that told so is gone: the topic of the snapshot is there."""
    bridge = read_all(new_bridge(conninfo, snapshot=UNSET))
    eventually(lambda: operations(bridge, "log") == {"r": 20}, what="the rows are there")
    assert bridge.stop() == 0, bridge.output
    name = f"{bridge.prefix}.progress"
    admin = AdminClient({"bootstrap.servers": bridge.kafka.bootstrap_servers})
    admin.delete_topics([name])[name].result(patient(30))
    command = ["recover", "-c", str(bridge.config), "--yes", "--without", "public.log"]
    recovered = CliRunner().invoke(app, command)
    assert recovered.exit_code == 0, recovered.output
    assert "snapshot.mode is never" not in recovered.output
    bridge.start().streaming()
    assert status(bridge)["mode"] == "initial"


@pytest.mark.long
def test_a_column_that_is_renamed_before_the_first_chunk(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """The stream goes on with the changes that the settings fit; rows come when they fit again."""
    shaping = {"computed": {"public.t": {"double": "id * 2"}}}
    bridge = new_bridge(conninfo, snapshot=UNSET, shaping=shaping)
    bridge.start(**{VARIABLE: "chunk begun:1"})
    assert bridge.exit_code() == -9, bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (31)")
        connection.execute("ALTER TABLE t RENAME id TO number")
        bridge.start().streaming().caught_up()

        def others_are_read() -> bool:
            assert bridge.running, bridge.output
            return operations(bridge, "log") == {"r": 20}

        eventually(others_are_read, what="other tables' rows come")
        (event,) = bridge.events("t")
        assert (event["op"], event["after"]) == ("c", {"id": 31, "double": 62})
        told = [line for line in bridge.output.splitlines() if "are not published" in line]
        assert told and all("did you mean" in line or "a column id" in line for line in told), told
        assert "GRANT SELECT" not in bridge.output
        connection.execute("INSERT INTO t VALUES (32)")
        assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
        assert "a column id" in bridge.output.splitlines()[-1]
    corrected = {"computed": {"public.t": {"double": "number * 2"}}}
    going_on = new_bridge(conninfo, snapshot=UNSET, shaping=corrected)
    read_all(going_on)
    going_on.caught_up()
    assert operations(going_on, "t") == {"c": 2, "r": 32}
