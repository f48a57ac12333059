"""`slotbridge release` without a Debezium: which rows Kafka must have before it gives back."""

import json
import subprocess
from pathlib import Path

import psycopg
import pytest
import yaml

from schemas.errors import ExitCode
from services.adoption.connector import JSON_CONVERTER
from services.bridge.failpoints import VARIABLE
from tests.promises.adoption.ground import run
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import INITIAL, await_chunks, fill, read_all, rows_a_second
from tests.providers.debezium import Connector
from tests.providers.interface import Provider


def release(
    bridge: Bridge, folder: Path, *, schemas: str = "false"
) -> subprocess.CompletedProcess[str]:
    """Run the command for a connector of the bridge's slot and topics.

    `schemas`: whether its keys have schemas.
    """
    connector = Connector("c", bridge.conninfo, bridge.slot, bridge.publication, bridge.prefix)
    config = {name: str(value) for name, value in connector.properties().items()}
    file, worker = folder / "connector.json", folder / "worker.properties"
    file.write_text(json.dumps({"name": "c", "config": config}))
    worker.write_text(
        f"offset.storage.file.filename={folder / 'offsets'}\n"
        f"key.converter={JSON_CONVERTER}\nkey.converter.schemas.enable={schemas}\n"
    )
    files = ("--to-debezium", str(file), "--worker", str(worker))
    return run("release", *files, "--config", str(bridge.config), "--yes")


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    """Two tables with rows: public.a, public.t."""
    found = pair.primary.conninfo(fresh_database)
    fill(found, 100)
    with psycopg.connect(found, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY)")
        connection.execute("INSERT INTO a SELECT generate_series(1, 100)")
    return found


@pytest.mark.long
def test_a_table_whose_snapshot_has_not_begun_keeps_it_from_being_given_back(
    conninfo: str, new_bridge: NewBridge, tmp_path: Path
) -> None:
    bridge = new_bridge(conninfo, snapshot=INITIAL)
    bridge.start(**{VARIABLE: "first record:1"})
    assert bridge.exit_code() == -9, bridge.output
    refused = release(bridge, tmp_path)
    assert refused.returncode == ExitCode.WITNESSES_DISAGREE, refused.stderr
    assert "has not read all rows of public.a, public.t" in refused.stderr
    read_all(bridge)
    assert bridge.stop() == 0, bridge.output
    moved = release(bridge, tmp_path, schemas="true")
    assert moved.returncode == ExitCode.SETTINGS, moved.stderr
    assert "in other partitions" in moved.stderr
    assert not (tmp_path / "offsets").exists()
    given = release(bridge, tmp_path)
    assert given.returncode == 0, given.stderr
    assert (tmp_path / "offsets").exists()


@pytest.mark.long
def test_a_table_that_no_snapshot_can_read_keeps_it_from_being_given_back(
    conninfo: str, new_bridge: NewBridge, tmp_path: Path
) -> None:
    """It has joined since; where the settings leave it out, nobody waits for its rows."""
    bridge = read_all(new_bridge(conninfo, snapshot={**INITIAL, "without_key": "refuse"}))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE log (n int)")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    refused = release(bridge, tmp_path)
    assert refused.returncode == ExitCode.WITNESSES_DISAGREE, refused.stderr
    assert "public.log (has no primary key)" in refused.stderr
    exclude(bridge, "public.log")
    given = release(bridge, tmp_path)
    assert given.returncode == 0, given.stderr


@pytest.mark.long
def test_rows_that_are_read_in_part_are_waited_for_or_given_up(
    conninfo: str, new_bridge: NewBridge, tmp_path: Path
) -> None:
    bridge = new_bridge(conninfo, snapshot={**INITIAL, "rows_per_second_max": rows_a_second(10)})
    bridge.start().streaming()
    await_chunks(bridge, 1)
    assert bridge.stop() == 0, bridge.output
    refused = release(bridge, tmp_path)
    assert refused.returncode == ExitCode.WITNESSES_DISAGREE, refused.stderr
    exclude(bridge, "public.a", "public.t")
    given = release(bridge, tmp_path)
    assert given.returncode == 0, given.stderr


def exclude(bridge: Bridge, *tables: str) -> None:
    settings = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
    settings["snapshot"]["exclude"] = [*tables]
    bridge.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
