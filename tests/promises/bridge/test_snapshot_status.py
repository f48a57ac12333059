"""`slotbridge snapshot status`: rows, bytes, rate and time left of each table."""

import json

import psycopg
import pytest
from typer.testing import CliRunner

from schemas.snapshot import SnapshotProgress
from services.bridge.cli import snapshot as snapshot_command
from services.bridge.cli.app import app
from services.bridge.cli.snapshot_bars import Bars
from services.bridge.failpoints import VARIABLE
from tests.bridge.snapshot.test_progress import progress, shape
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.snapshots import INITIAL, await_chunks, done, fill, hasten, rows_a_second
from tests.providers.interface import Provider
from tests.providers.waiting import eventually


def told(**changed: object) -> SnapshotProgress:
    begun = {"rows": 1_000, "rows_estimate": 5_000, "began_ms": 10_000, "ts_ms": 12_000}
    return progress(shape("public.t", "id"), **(begun | changed))


def test_the_rate_and_what_is_left() -> None:
    assert (told().rows_per_second, told().seconds_left) == (500, 8)
    assert told(done=True).seconds_left == 0
    assert told(began_ms=0).seconds_left is None
    assert told(rows_estimate=-1).seconds_left is None
    assert told(rows_estimate=900).seconds_left is None


def test_bars_of_tables_that_come_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    with Bars() as bars:
        bars.show([told()], ["being read"])
        bars.show([told(done=True, rows=7_000)], ["done"])
    assert "7,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "states", "seconds"),
    [
        ({"waiting": 1}, ["being read"], 300),
        ({"waiting": 1, "ts_ms": 290_000}, ["being read"], 0),
        ({"waiting": 1}, ["paused"], 0),
        ({"waiting": 1, "done": True}, ["done"], 300),
        ({"waiting": 0, "done": True}, ["done"], 0),
    ],
)
def test_status_tells_how_long_no_rows_have_come(
    changed: dict[str, int], states: list[str], seconds: float
) -> None:
    """Not where all of them are read, or somebody has paused the rest."""
    one = told(**{"ts_ms": 10_000, **changed})
    assert snapshot_command.Seen([one], [], states, one.waiting, {}).stalled_s(310) == seconds


@pytest.mark.long
def test_a_snapshot_is_not_finished_between_two_tables(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Kafka has all of one table, nothing of the next; it is finished once that one has gone."""
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 500)
    settings = {**INITIAL, "signal_table": "public.signals", "exclude": ["public.signals"]}
    bridge = new_bridge(conninfo, snapshot=settings)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY)")
        connection.execute("INSERT INTO a SELECT generate_series(1, 10)")
        connection.execute("CREATE TABLE signals (id text PRIMARY KEY, type text, data text)")
        bridge.start(**{VARIABLE: "first record:1"})
        assert bridge.exit_code() == -9, bridge.output
        pause = "INSERT INTO signals VALUES ('1', 'pause-snapshot', %s)"
        connection.execute(pause, ['{"data-collections": ["public.t"]}'])
        bridge.start().streaming()
        await_chunks(bridge, 1)
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        options = ["snapshot", "status", "--config", str(bridge.config), "--json"]
        between = CliRunner().invoke(app, options)
        (table,) = json.loads(between.stdout.splitlines()[-1])["tables"]
        assert (table["table"], table["state"], table["waiting"]) == ("a", "done", 1)
        assert between.exit_code == 1, between.output
        connection.execute("DROP TABLE t")
    bridge.start().streaming()
    eventually(
        lambda: CliRunner().invoke(app, options).exit_code == 0, what="it is told", timeout_s=60
    )
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_status_is_shown_while_rows_are_read_and_after(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, 2_000)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("ANALYZE t")
    slow = {
        "chunk_rows_max": 20,
        "rows_per_second_max": rows_a_second(100),
    }
    bridge = new_bridge(conninfo, snapshot={**INITIAL, **slow})
    bridge.start().streaming()
    await_chunks(bridge, 5)
    assert bridge.stop() == 0, bridge.output  # a kill may leave a transaction that hides the topic
    options = ["snapshot", "status", "--config", str(bridge.config)]
    seen = CliRunner().invoke(app, [*options, "--json"])
    assert seen.exit_code == 1, seen.output
    (table,) = json.loads(seen.stdout.splitlines()[-1])["tables"]
    assert table["rows"] < 2_000 <= table["rows_estimate"]  # the server counts late
    assert table["bytes"] > 100 * table["rows"] and table["rows_per_second"] > 0
    assert table["seconds_left"] > 0 and table["state"] == "being read"
    hasten(bridge)
    done(bridge)
    assert bridge.stop() == 0, bridge.output
    watched = CliRunner().invoke(app, [*options, "--watch"])
    assert watched.exit_code == 0, watched.output
    assert "public.t" in watched.stdout and "2,000" in watched.stdout
