"""`slotbridge recover` as a process, and a table with changes of every kind that a gap may hide."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

from schemas.recovery import RecoveryRecord
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.running import Bridge
from tests.providers.databases import once_free

LONG = "string_agg(md5(g::text || '/' || n::text), '')"


def recover(bridge: Bridge, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end; yes to all."""
    program = str(Path(sys.executable).parent / "slotbridge")
    command = [program, "recover", "--config", str(bridge.config), "--yes", *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=bridge.environment | environment
    )


def recovered(bridge: Bridge, *options: str) -> RecoveryRecord:
    """Run it, and require that it has repaired the topics."""
    done = recover(bridge, "--json", *options)
    assert done.returncode == 0, done.stderr
    return RecoveryRecord.model_validate_json(done.stdout)


def fill(connection: psycopg.Connection[Any]) -> None:
    """Make `t`: 300 rows, each with a value that is TOASTed."""
    connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text, long text, ratio float8)")
    connection.execute("ALTER TABLE t ALTER long SET STORAGE EXTERNAL")
    connection.execute(
        f"INSERT INTO t SELECT g, 'old', (SELECT {LONG} FROM generate_series(1, 90) n), g / 7.0"
        " FROM generate_series(1, 300) g".encode()
    )


def touch(connection: psycopg.Connection[Any]) -> None:
    """Change rows without their TOASTed value: the WAL lacks it."""
    connection.execute("UPDATE t SET note = 'touched' WHERE id BETWEEN 50 AND 80")
    connection.execute("DELETE FROM t WHERE id BETWEEN 90 AND 99")


def change_unseen(connection: psycopg.Connection[Any]) -> None:
    """What no slot decodes: 5 rows made, 10 + 1 updated, 4 + 1 deleted; one of each by its key."""
    connection.execute("INSERT INTO t SELECT g, 'made', 'x', NULL FROM generate_series(301, 304) g")
    connection.execute("UPDATE t SET note = 'unseen' WHERE id BETWEEN 10 AND 19")
    connection.execute("UPDATE t SET long = 'short' WHERE id = 60")
    connection.execute("DELETE FROM t WHERE id BETWEEN 20 AND 23")
    connection.execute("UPDATE t SET id = 1000 WHERE id = 30")


def drop_slot(connection: psycopg.Connection[Any], slot: str) -> None:
    """Drop it as soon as its walsender is gone."""
    once_free(connection, "SELECT pg_drop_replication_slot(%s)", slot)


def assert_equal(bridge: Bridge, conninfo: str) -> None:
    """Both folds of the topic are the table, and no event came twice."""
    folded = fold(bridge, "t")
    with psycopg.connect(conninfo) as connection:
        rows = connection.execute("SELECT to_jsonb(t) FROM t").fetchall()
    truth = {json.dumps({"id": row["id"]}, separators=(",", ":")): row for (row,) in rows}
    for told in (folded.by_offset, folded.by_position):
        assert told.keys() == truth.keys()
        wrong = [key for key in truth if _known(told[key]) != _known(truth[key], told[key])]
        assert not wrong, (told[wrong[0]], truth[wrong[0]])


def assert_goes_on(bridge: Bridge, conninfo: str) -> None:
    """It starts, and later changes come behind the repair."""
    bridge.start().streaming()
    assert_later_changes_come(bridge, conninfo)


def assert_later_changes_come(bridge: Bridge, conninfo: str) -> None:
    """The topic is still the table after further changes; the bridge ends well."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("UPDATE t SET note = 'later' WHERE id BETWEEN 1 AND 40")
        connection.execute("DELETE FROM t WHERE id = 301")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_equal(bridge, conninfo)


def _known(row: dict[str, Any], like: dict[str, Any] | None = None) -> dict[str, Any]:
    """The row's values but for those that the WAL lacked in `like`, which consumers have."""
    lacking = {name for name, value in (like or row).items() if value == UNAVAILABLE}
    return {name: value for name, value in row.items() if name not in lacking and value is not None}


UNAVAILABLE = "__debezium_unavailable_value"
