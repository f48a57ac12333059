"""Filters and computed columns through a running bridge: the topics are the rows that fit."""

import json
import signal
from typing import Any

import psycopg
import pytest

from schemas.errors import ExitCode
from schemas.events import DeadLetter
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.recover_process import drop_slot, recovered
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import INITIAL, Changes, read_all
from tests.promises.bridge.test_preflight import Examined
from tests.providers.interface import Provider

SHAPING: dict[str, Any] = {
    "filters": {"public.t": "n > 2 && note.startsWith('n')"},
    "computed": {
        "public.t": {
            "label": "note + '/' + string(n)",
            "late": "at > timestamp('2026-06-01T00:00:00Z')",
        }
    },
}
FITS = (
    "SELECT id, note, n, note || '/' || n, at > '2026-06-01 00:00:00+00' FROM t"
    " WHERE n > 2 AND note LIKE 'n%'"
)


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    """A database with a table of 300 rows whose changes tell the whole old row."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE t (id int PRIMARY KEY, note text, n int DEFAULT 3 + random() * 3,"
            " at timestamptz DEFAULT '2026-01-01'::timestamptz + random() * interval '1 year')"
        )
        connection.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        connection.execute(
            "INSERT INTO t SELECT g, chr(109 + g % 3) || g, g % 6 FROM generate_series(1, 300) g"
        )
        connection.execute("UPDATE t SET n = NULL WHERE id % 10 = 0")
    return conninfo


def assert_fits(bridge: Bridge, conninfo: str) -> int:
    """Both folds of the topic are the rows that fit, and END counts its events. Return how many."""
    folded = fold(bridge, "t")
    with psycopg.connect(conninfo) as connection:
        truth = {
            json.dumps({"id": key}, separators=(",", ":")): tuple(row)
            for key, *row in connection.execute(FITS.encode()).fetchall()
        }
    for told in (folded.by_offset, folded.by_position):
        rows = {
            key: tuple(row[name] for name in ("note", "n", "label", "late"))
            for key, row in told.items()
        }
        assert rows == truth
    ends = [json.loads(value) for _, value in bridge.records("transaction") if value is not None]
    counted = sum(end["event_count"] or 0 for end in ends if end["status"] == "END")
    assert counted == len([*bridge.events("t")])
    return len(truth)


@pytest.mark.long
def test_a_snapshot_changes_and_a_kill_keep_the_topic_equal_to_the_rows_that_fit(
    conninfo: str, new_bridge: NewBridge
) -> None:
    snapshot = {**INITIAL, "chunk_rows_max": 40}
    settings = {"shaping": SHAPING, "snapshot": snapshot, "transaction_bytes_max": 2**18}
    bridge = new_bridge(conninfo, **settings)
    with Changes(conninfo, 300):
        read_all(bridge)
    bridge.caught_up()
    assert assert_fits(bridge, conninfo)
    assert bridge.stop() == 0, bridge.output
    bridge.start(SLOTBRIDGE_FAILPOINT="between parts:2").streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(  # streamed, and published in parts
            "INSERT INTO t SELECT g, chr(109 + g % 3) || g, g / 5 % 6"
            " FROM generate_series(1000, 9000) g"
        )
    assert bridge.exit_code() == -signal.SIGKILL
    bridge.start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("UPDATE t SET n = 6 - n WHERE id % 2 = 0")
        connection.execute("UPDATE t SET id = id + 100000 WHERE id % 7 = 0")
        connection.execute("DELETE FROM t WHERE id % 5 = 0")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert assert_fits(bridge, conninfo) > 300
    bridge.start().streaming().caught_up()
    assert bridge.stop() == 0, bridge.output
    assert assert_fits(bridge, conninfo) > 300


@pytest.mark.long
def test_recover_compares_and_publishes_the_rows_that_fit(
    conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = read_all(new_bridge(conninfo, shaping=SHAPING, snapshot=INITIAL))
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    with psycopg.connect(conninfo, autocommit=True) as connection:
        drop_slot(connection, bridge.slot)
        fitting = len(connection.execute(FITS.encode()).fetchall())
        connection.execute("UPDATE t SET n = 0 WHERE id = 4")  # note n4, n 4: it fits no more
        connection.execute("UPDATE t SET n = 5 WHERE id = 1")  # note n1, n 1: it fits now
        connection.execute("INSERT INTO t VALUES (1000, 'other', 9), (1001, 'new', 9)")
    (table,) = recovered(bridge).tables.values()
    assert (table.rows, table.created, table.updated, table.deleted) == (fitting + 1, 2, 0, 1)
    bridge.start().streaming().caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_fits(bridge, conninfo)


@pytest.mark.long
def test_a_row_that_an_expression_fails_on_stops_the_bridge_or_is_a_dead_letter(
    conninfo: str, new_bridge: NewBridge
) -> None:
    shaping = {"filters": {"public.t": "60 / n > 2"}}
    bridge = new_bridge(conninfo, shaping=shaping).start().streaming()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO t VALUES (1001, 'x', 1), (1002, 'x', 0), (1003, 'x', 60)")
        connection.execute("UPDATE t SET n = 0 WHERE id = 1001")
    assert bridge.exit_code() == ExitCode.RECORD_REFUSED, bridge.output
    said = bridge.output.splitlines()[-1]
    for part in ("60 / n > 2", "shaping.filters.public.t", "public.t", "at LSN", "divide by zero"):
        assert part in said
    bridge = new_bridge(conninfo, shaping=shaping, on_refused="dead_letter").start().streaming()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    letters = [DeadLetter.model_validate_json(value or b"") for _, value in bridge.records("dead")]
    assert [(one.table, one.seq, one.topic) for one in letters] == [
        ("public.t", 1, ""),
        ("public.t", 0, ""),
    ]
    assert [one.key.text if one.key else "" for one in letters] == ['{"id":1002}', '{"id":1001}']
    assert {one.value for one in letters} == {None}
    assert [(e["op"], e["after"]["id"]) for e in bridge.events("t")] == [("c", 1001)]
    ends = [json.loads(value or b"") for _, value in bridge.records("transaction")]
    assert sum(end["event_count"] or 0 for end in ends if end["status"] == "END") == 3


@pytest.mark.long
def test_a_row_that_enters_a_filter_without_its_toast_value_is_refused(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """Under REPLICA IDENTITY DEFAULT the WAL has the old key alone; FULL has the value."""
    shaping = {"filters": {"public.t": "id > 1000"}}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "ALTER TABLE t REPLICA IDENTITY DEFAULT, ALTER note SET STORAGE EXTERNAL"
        )
        bridge = new_bridge(conninfo, shaping=shaping).start().streaming()
        connection.execute("INSERT INTO t VALUES (500, repeat('n', 9000), 1), (501, 'short', 1)")
        connection.execute("UPDATE t SET id = 1501 WHERE id = 501")
        bridge.caught_up()
        connection.execute("UPDATE t SET id = 1500 WHERE id = 500")
        assert bridge.exit_code() == ExitCode.RECORD_REFUSED, bridge.output
        said = bridge.output.splitlines()[-1]
        for part in ("column note", "public.t", "at LSN", "REPLICA IDENTITY FULL"):
            assert part in said
        assert [e["after"]["id"] for e in bridge.events("t")] == [1501]
        connection.execute("UPDATE t SET id = 500 WHERE id = 1500")
        connection.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        connection.execute("UPDATE t SET id = 1502 WHERE id = 500")
    bridge = new_bridge(conninfo, shaping=shaping, on_refused="dead_letter").start().streaming()
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    [letter] = [DeadLetter.model_validate_json(value or b"") for _, value in bridge.records("dead")]
    assert (letter.table, letter.key and letter.key.text) == ("public.t", '{"id":1500}')
    rows = [(e["after"]["id"], e["after"]["note"]) for e in bridge.events("t") if e["op"] == "c"]
    assert sorted(rows) == [(1501, "short"), (1502, "n" * 9000)]


@pytest.mark.long
def test_an_expression_that_the_bridge_can_not_use_ends_it(
    conninfo: str, new_bridge: NewBridge
) -> None:
    bridge = new_bridge(conninfo, shaping={"filters": {"public.t": "n >"}}).start()
    assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
    assert "Syntax error" in bridge.output.splitlines()[-1]
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT")
        bridge = new_bridge(conninfo, shaping={"filters": {"public.t": "n > 2"}}).start()
        assert bridge.exit_code() == ExitCode.SETTINGS, "without a change of the table"
        assert "REPLICA IDENTITY FULL" in bridge.output.splitlines()[-1]
        bridge = new_bridge(conninfo, shaping={"filters": {"public.t*": "notes == 'n1'"}})
        (finding,) = [
            one for one in Examined(bridge).findings if one["check"] == "expression-does-not-fit"
        ]
        assert "does not have a column notes" in finding["evidence"]
        assert finding["remedy"]["text"].startswith("did you mean note?")
        bridge.start()
        assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
        for part in ("notes == 'n1'", "public.t:", "a column notes", "did you mean note?"):
            assert part in bridge.output.splitlines()[-1]
        row = connection.execute(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", [bridge.slot]
        ).fetchone()
        assert row == (0,), "a refused first start makes no slot"


@pytest.mark.long
def test_a_known_expression_goes_on_up_to_the_first_change_that_it_does_not_fit(
    conninfo: str, new_bridge: NewBridge
) -> None:
    """A column is renamed behind changes that the bridge has yet to read, and corrects nothing."""
    bridge = new_bridge(conninfo, shaping={"filters": {"public.t": "n > 2"}})
    with psycopg.connect(conninfo, autocommit=True) as connection:
        bridge.start().streaming()
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        connection.execute("INSERT INTO t VALUES (1000, 'n', 9)")
        connection.execute("ALTER TABLE t RENAME n TO amount")
        bridge.start().streaming().caught_up()
        assert "a setting does not fit its table any more" in bridge.output
        assert [event["after"]["id"] for event in bridge.events("t")][-1] == 1000
        connection.execute("INSERT INTO t VALUES (1001, 'n', 9)")
        assert bridge.exit_code() == ExitCode.SETTINGS, bridge.output
        assert "a column n" in bridge.output.splitlines()[-1]
        corrected = new_bridge(conninfo, shaping={"filters": {"public.t": "amount > 2"}})
        corrected.start().streaming().caught_up()
        assert corrected.stop() == 0, corrected.output
    assert [event["after"]["id"] for event in corrected.events("t")][-1] == 1001
