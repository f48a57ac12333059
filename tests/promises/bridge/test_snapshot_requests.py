"""Rows that are asked for while the bridge runs: by command, and by Debezium's signals."""

import json
import re
from collections import Counter
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from schemas.errors import ExitCode, SettingsError
from schemas.settings import Settings
from schemas.shaping import ShapingSettings
from schemas.snapshot import SnapshotProgress, SnapshotRequest, SnapshotSettings
from services.bridge.cli.app import app
from services.bridge.events.event import Event, Stamp
from services.bridge.events.shaping.tables import Shaping
from services.bridge.snapshot.progress import (
    ChunkPosition,
    SnapshotPlan,
    TableProgress,
    plan,
    progress_of,
)
from services.bridge.snapshot.requests import (
    BadSignal,
    Signal,
    check_signal,
    is_request,
    key_of,
    request_event,
    requests,
    signals,
    topic_signal,
)
from services.bridge.snapshot.signal_conditions import forbidden_part
from tests.bridge.snapshot.test_progress import OWNER, shape
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import (
    Changes,
    assert_folds,
    await_chunks,
    chunks,
    done,
    fill,
    hasten,
    rows_a_second,
)
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

ASKED: dict[str, Any] = {
    "mode": "on_request",
    "signal_table": "public.signals",
    "chunk_rows_max": 20,
}
STAMP = Stamp(7, 900, 0, 0, 5_000)
ROWS = 800


def read(signal: Signal) -> list[SnapshotRequest]:
    return requests(signal, "s", 3, STAMP, 1)


def signal(kind: str, **data: Any) -> Signal:
    return Signal("i", f"{kind}-snapshot", json.dumps(data))


def test_signals_of_debezium_are_understood() -> None:
    conditions = [{"data-collection": "public.t", "filter": "id > 5"}]
    found = read(
        signal(
            "execute",
            **{
                "data-collections": ["public.t", "s.u"],
                "type": "INCREMENTAL",
                "additional-conditions": conditions,
            },
        )
    )
    assert [(one.type, one.tables, one.where) for one in found] == [
        ("read", "public.t", "id > 5"),
        ("read", "s.u", ""),
    ]
    assert (found[0].commit_lsn, found[0].seq, found[0].ts_ms, found[0].timeline) == (900, 1, 5, 3)
    (stopped,) = read(Signal("i", "stop-snapshot", ""))
    assert (stopped.type, stopped.tables) == ("stop", "*.*")
    event = request_event("p", stopped)
    assert event.topic == "p.snapshot" and is_request(event.key)
    assert SnapshotRequest.model_validate_json(event.value or b"") == stopped
    assert not is_request(b'{"slot":"s","schema":"\\"request\\":","table":"t"}')


@pytest.mark.parametrize("schema", [False, True])
def test_signals_are_read_from_flat_rows_too(schema: bool) -> None:
    row = {"id": "i", "type": "stop-snapshot", "data": ""}
    told: list[dict[str, Any]] = [
        {"op": "c", "before": None, "after": row},
        *({"__op": op, "__commit_lsn": 9, "__seq": 1, "__timeline": 1, **row} for op in "cu"),
        {"__op": "t", "__commit_lsn": 9, "__seq": 1, "__timeline": 1},
    ]
    events = [
        Event(
            *("p.public.signals", b"{}"),
            json.dumps({"payload": one, "schema": {}} if schema else one).encode(),
            table="public.signals",
            seq=seq,
            op=one.get("op") or one["__op"],
        )
        for seq, one in enumerate(told)
    ]
    found = [*signals(events, "public.signals")]
    assert found == [(Signal(**row), 0), (Signal(**row), 1)]


def test_signals_in_avro_are_refused() -> None:
    """The bridge reads its own events, as JSON."""
    avro = {"bootstrap_servers": "k:9092", "topic_prefix": "p", "value_format": "avro"}
    with pytest.raises(ValueError, match=r"signal_table needs a kafka\.value_format"):
        Settings.model_validate({"kafka": avro, "registry": {"url": "http://r"}, "snapshot": ASKED})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Signal("i", "log", "{}"), "type 'log'"),
        (signal("execute"), "names no table"),
        (signal("execute", **{"data-collections": ["t"]}), "schema.table"),
        (signal("execute", **{"data-collections": [7]}), "valid string"),
        (signal("execute", **{"data-collections": ["a.b"], "type": "blocking"}), "incremental"),
        (Signal("i", "execute-snapshot", "[]"), "not a document"),
        (Signal("i", "execute-snapshot", "{"), "not a document"),
        (
            signal(
                "execute",
                **{
                    "data-collections": ["a.b"],
                    "additional-conditions": [{"data-collection": "a.b", "filter": "x; DROP"}],
                },
            ),
            "without `;`",
        ),
        (
            signal(
                "execute",
                **{
                    "data-collections": ["a.b"],
                    "additional-conditions": [{"data-collection": "a.c", "filter": "x"}],
                },
            ),
            "a.c",
        ),
    ],
)
def test_a_signal_that_asks_for_nothing_says_why(given: Signal, expected: str) -> None:
    with pytest.raises(BadSignal, match=expected):
        read(given)
    with pytest.raises(SettingsError, match=expected):
        check_signal(given)


CONDITION = {"data-collection": "a.b", "filter": "x"}
POISON = {
    "deep": "[" * 2000,
    "digits": f'{{"data-collections": [{"9" * 5000}]}}',
    "table": '{"data-collections": ["a.\\ud800"]}',
    "filter": json.dumps(
        {"data-collections": ["a.b"], "additional-conditions": [CONDITION | {"filter": "\ud800"}]}
    ),
    "nul": json.dumps(
        {"data-collections": ["a.b"], "additional-conditions": [CONDITION | {"filter": "x\0"}]}
    ),
    "unhashable": json.dumps(
        {"data-collections": ["a.b"], "additional-conditions": [CONDITION | {"filter": ["x"]}]}
    ),
    "null": "null",
    "kind": '{"data-collections": ["a.b"], "type": 7}',
}


@pytest.mark.parametrize("id_", ["i", "\ud800"])
@pytest.mark.parametrize("data", [*POISON.values(), "{}"], ids=[*POISON, "id"])
def test_whatever_a_stranger_writes_is_refused_as_a_signal(data: str, id_: str) -> None:
    with pytest.raises(BadSignal):
        read(Signal(id_, "execute-snapshot", data))
    document = f'{{"id": "\\ud800", "type": "execute-snapshot", "data": {data}}}'.encode()
    with pytest.raises(BadSignal):
        read(topic_signal(b"p", document, "p"))


def test_a_signal_whose_row_has_a_number_of_any_size_is_read() -> None:
    value = f'{{"op":"c","after":{{"id":"i","type":"t","data":"","n":{"9" * 5000}}}}}'
    event = Event("p.public.signals", b"{}", value.encode(), table="public.signals", seq=1, op="c")
    assert [*signals([event], "public.signals")] == [(Signal("i", "t", ""), 1)]


@pytest.mark.parametrize(
    "condition",
    [
        "created_at > '2024-01-01' AND note = 'it''s; (so)'",
        """(id BETWEEN 1 AND 5 OR "Größe" NOT IN (1.5, -2e3, .5)) AND NOT (gone IS NOT NULL)""",
        "made < CURRENT_TIMESTAMP - '1 day'::interval AND made::date >= '2024-01-01'",
        "note::int % 2 = 0 AND name ILIKE 'a%' AND data->>'a' IS DISTINCT FROM 'b'",
        "größe = ANY ('{1,2}'::_int4) OR id = ANY (ARRAY[1, 2])",
    ],
)
def test_a_signal_may_compare_columns(condition: str) -> None:
    assert forbidden_part(condition) == ""


@pytest.mark.parametrize(
    "condition",
    [
        "pg_drop_replication_slot('other') IS NULL",
        "pg_drop_replication_slot /* */ ('other') IS NULL",
        "id = 1 -- AND",
        "\"pg_drop_replication_slot\"('other') IS NULL",
        "pg_catalog.lower(note) = 'a'",
        "li\u212ae ('a')",
        "\u00a0('a') IS NULL",
        "(SELECT true)",
        "id IN (TABLE v)",
        "'x'::app.evil IS NULL",
        "'x'::evil IS NULL",
        "CAST ('x' AS evil) IS NULL",
        "evil 'x' IS NULL",
        "\"evil\" 'x' IS NULL",
        "E'\\'' IS NULL",
        "'\\' IS NULL",
        "$$x$$ IS NULL",
        "id OPERATOR(app.+) 1 > 1",
        "t.evil",
        "true)) IS TRUE AS wanted FROM v, ((x",
        "(true",
        "'a",
    ],
)
def test_a_signal_may_do_nothing_else(condition: str) -> None:
    assert forbidden_part(condition)
    data = {"data-collections": ["a.b"], "additional-conditions": [CONDITION]}
    with pytest.raises(BadSignal, match="may only compare columns"):
        read(
            signal(
                "execute", **data | {"additional-conditions": [CONDITION | {"filter": condition}]}
            )
        )


def asked(kind: str, lsn: int, tables: str = "public.t", **changed: Any) -> SnapshotRequest:
    (found,) = read(signal(kind, **{"data-collections": [tables]}))
    return found.model_copy(update={"commit_lsn": lsn, **changed})


def planned(mode: str, *given: SnapshotRequest, found: int | None = None) -> SnapshotPlan:
    """Of the table public.t, whose progress in Kafka, if any, is at `found`."""
    one = shape("public.t", "id")
    told: list[SnapshotProgress] = []
    if found is not None:
        table = TableProgress(one, ["5"], 7, 2)
        told.append(progress_of(OWNER, table, ChunkPosition(found, 6, found), 1, 0))
    settings = SnapshotSettings.model_validate({"mode": mode, "signal_table": "public.signals"})
    return plan([one], told, settings, Shaping(ShapingSettings(), "p"), OWNER, given)


def test_progress_from_before_a_request_counts_for_nothing() -> None:
    assert planned("on_request", found=900).next is None
    before = planned("on_request", asked("execute", 901), found=900).next
    assert before is not None and before.rows == 0
    after = planned("on_request", asked("execute", 899, where="x"), found=900).next
    assert after is not None and (after.rows, after.where) == (7, "x")
    assert planned("on_request", asked("execute", 600, timeline=2), found=900).next is None


def test_the_last_request_counts() -> None:
    run, stop, pause, resume = (
        asked(kind, lsn) for kind, lsn in (("execute", 1), ("stop", 2), ("pause", 3), ("resume", 4))
    )
    assert planned("initial").next
    assert not planned("initial", run, stop).tables
    assert planned("initial", stop, run.model_copy(update={"commit_lsn": 9})).next
    paused = planned("initial", pause)
    assert paused.tables and paused.next is None and not paused.done
    assert planned("initial", resume, pause).next
    assert not planned("initial", asked("stop", 5, "public.*")).tables
    assert len({key_of(one).model_dump_json() for one in (run, stop, pause, resume)}) == 2


@pytest.fixture
def conninfo(pair: Provider, fresh_database: str) -> str:
    found = pair.primary.conninfo(fresh_database)
    fill(found, ROWS)
    run(found, "CREATE TABLE signals (id varchar(42) PRIMARY KEY, type text NOT NULL, data text)")
    return found


def run(conninfo: str, statement: str, *values: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(statement.encode(), values)


def insert(conninfo: str, id_: str, kind: str, data: dict[str, Any]) -> None:
    values = (id_, f"{kind}-snapshot", json.dumps(data))
    run(conninfo, "INSERT INTO signals VALUES (%s, %s, %s)", *values)


def command(bridge: Bridge, *words: str) -> str:
    done = CliRunner().invoke(app, ["snapshot", *words, "--config", str(bridge.config)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_rows_are_asked_for_by_command(conninfo: str, new_bridge: NewBridge) -> None:
    bridge = new_bridge(conninfo, snapshot=ASKED).start().streaming()
    bridge.caught_up()
    assert chunks(bridge) == 0
    command(bridge, "start", "public.t", "--where", "id <= 200")
    done(bridge)
    bridge.caught_up()
    assert sum(event["op"] == "r" for event in bridge.events("t")) == 200
    command(bridge, "start", "public.t")
    done(bridge, times=2)
    bridge.caught_up()
    status = json.loads(command(bridge, "status", "--json").splitlines()[-1])
    assert [(one["table"], one["state"], one["rows"]) for one in status["tables"]] == [
        ("t", "done", ROWS)
    ]
    command(bridge, "start", "public.signals")
    done(bridge, times=3)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    rows = [one for name in ("t", "signals") for one in bridge.events(name) if one["op"] == "r"]
    said = Counter(one["source"]["snapshot"] for one in rows)
    assert (said["first"], said["last"]) == (3, 2), "the last chunk of the first one was filtered"
    assert_folds(bridge, conninfo)


@pytest.mark.long
def test_killed_in_the_middle_of_what_was_asked(conninfo: str, new_bridge: NewBridge) -> None:
    """At once, and after some chunks: neither the request nor what was read is lost or twice."""
    slow = {**ASKED, "chunk_rows_max": 2, "rows_per_second_max": rows_a_second(30)}
    bridge = new_bridge(conninfo, snapshot=slow).start().streaming()
    seen = []
    with Changes(conninfo, ROWS):
        insert(conninfo, "one", "execute", {"data-collections": ["public.t"]})
        for _ in range(4):
            bridge.kill()
            seen.append(chunks(bridge))
            bridge.start().streaming()
            await_chunks(bridge, seen[-1] + 3)
        hasten(bridge)
        done(bridge)
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert len({*seen}) > 2, f"the kills were not in the middle of it: {seen}"
    assert_folds(bridge, conninfo)
    assert max(fold(bridge, "t").reads.values()) == 1, "a row was read twice"


def test_a_snapshot_is_paused_resumed_stopped_and_begun_again(
    conninfo: str, new_bridge: NewBridge
) -> None:
    settings = {
        **ASKED,
        "mode": "initial",
        "chunk_rows_max": 2,
        "rows_per_second_max": rows_a_second(10),
    }
    bridge = new_bridge(conninfo, snapshot=settings).start().streaming()
    eventually(lambda: chunks(bridge) > 3, what="chunks are read")
    command(bridge, "pause", "public.t")
    bridge.caught_up()
    assert "snapshot is done" not in bridge.output, "the pause is too late"
    paused = chunks(bridge)
    run(conninfo, "UPDATE t SET note = 'paused' WHERE id IN (1, 799)")
    assert bridge.stop() == 0
    bridge.start().streaming()
    bridge.caught_up()
    assert chunks(bridge) <= paused + 1  # and that of signals
    command(bridge, "resume", "public.t")
    eventually(lambda: chunks(bridge) > paused + 3, what="chunks are read")
    command(bridge, "stop", "public.t")
    bridge.caught_up()
    stopped = fold(bridge, "t").reads.total()
    assert stopped < ROWS, "the stop is too late"
    hasten(bridge)
    command(bridge, "start", "public.t")
    eventually(
        lambda: fold(bridge, "t").reads.total() == stopped + ROWS, what="all is read", timeout_s=60
    )
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    assert_folds(bridge, conninfo)


def test_bad_signals_are_logged_and_ignored(conninfo: str, new_bridge: NewBridge) -> None:
    """So many that the table's rows have code of their own by the last one.

    A machine that stands still for 15 s costs the session, and a signal that was not confirmed yet
    is told again.
    """
    bridge = new_bridge(conninfo, snapshot=ASKED).start().streaming()
    names = {"data-collections": ["public.t"]}
    for id_, data in POISON.items():
        run(conninfo, "INSERT INTO signals VALUES (%s, 'execute-snapshot', %s)", id_, data)
    for number in range(30):
        insert(conninfo, f"bad{number}", "execute", {"data-collections": ["nothing"]})
    run(conninfo, f"SELECT pg_create_physical_replication_slot('{bridge.slot}_other')")
    for id_, filter_ in {
        "drop": f"pg_drop_replication_slot('{bridge.slot}_other') IS NULL",
        "wrong": "no_such_column > 1",
        "value": "note::int > 0",
    }.items():
        condition = {"data-collection": "public.t", "filter": filter_}
        insert(conninfo, id_, "execute", {**names, "additional-conditions": [condition]})
        if id_ == "wrong":
            eventually(lambda: "no_such_column" in bridge.output, what="it is told")
    eventually(lambda: "a value or a function was refused" in bridge.output, what="it is told")
    assert '"old"' not in bridge.output, "a row's value is in the log"
    assert bridge.stop() == 0, bridge.output
    bridge.start().streaming()
    insert(conninfo, "right", "execute", names)
    done(bridge)
    bridge.caught_up()
    run(conninfo, f"SELECT pg_drop_replication_slot('{bridge.slot}_other')")
    ignored = re.findall(r"a signal is ignored.* id=(\w+) ", bridge.output)
    assert {*ignored} == {*POISON, "drop", *(f"bad{number}" for number in range(30))}
    assert len(ignored) == len({*ignored}) or bridge.sessions > 2, "each once in a session"
    lost = [line for line in bridge.output.splitlines() if "session lost" in line]
    assert not [line for line in lost if "signal" in line or "no_such_column" in line]
    assert bridge.stop() == 0, bridge.output
    assert_folds(bridge, conninfo)


@pytest.mark.long
def test_a_command_without_a_published_signal_table(conninfo: str, new_bridge: NewBridge) -> None:
    bridge = new_bridge(conninfo, snapshot={"mode": "initial"})
    told = CliRunner().invoke(app, ["snapshot", "stop", "--config", str(bridge.config)])
    assert told.exit_code == ExitCode.SETTINGS
    run(conninfo, "CREATE PUBLICATION few FOR TABLE t")
    bridge = new_bridge(conninfo, snapshot=ASKED, publication="few")
    told = CliRunner().invoke(app, ["snapshot", "stop", "--config", str(bridge.config)])
    assert told.exit_code == ExitCode.SETTINGS
