"""Rows of a snapshot (op r) beside changes: state and history are those of the source."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from schemas.errors import OperatorNeeded, Retryable
from schemas.settings import require
from services.bridge.failpoints import VARIABLE
from services.testbed.ports import free_port
from spark_consumers.status import read_run_status
from spark_consumers.verify.as_of import verify_as_of
from spark_consumers.verify.comparison import verify_tables
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import INITIAL, Changes, chunks, done, fill, hasten
from tests.promises.bridge.test_snapshot_without_key import Inserts, assert_each_once, make_log, run
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable, Transaction
from tests.promises.tables.test_job import Running
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

ROWS = 1_500
ITEMS = SourceTable("items", {"id": ("int4", -1), "name": ("text", -1)}, oid=1)
Version = tuple[int, Any, int, int | None]
"""id, value, the commit LSN that it holds from, and that which ended it."""


@pytest.fixture
def bridge(pair: Provider, fresh_database: str, new_bridge: NewBridge) -> Iterator[Bridge]:
    conninfo = pair.primary.conninfo(fresh_database)
    fill(conninfo, ROWS)
    snapshot = {**INITIAL, "chunk_rows_max": 50}
    made = new_bridge(conninfo, snapshot=snapshot)
    yield made


@pytest.mark.parametrize("kind", ["current", pytest.param("history", marks=pytest.mark.long)])
def test_tables_equal_the_source_after_a_snapshot_under_load(
    kind: str, bridge: Bridge, new_pipeline: NewPipeline
) -> None:
    """They follow while it runs, so that epochs end between its chunks and changes."""
    rules = {"public.t": {"kind": kind}}
    pipeline = new_pipeline(bridge.conninfo, publication=bridge.publication, rules=rules)
    with Running(pipeline) as running:
        with Changes(bridge.conninfo, ROWS) as changes:
            bridge.start().streaming()
            done(bridge)
            eventually(
                lambda: running.failure or len(running.reports) > 2,
                what="some epochs",
                timeout_s=100,
            )
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        last = max(event["source"]["commit_lsn"] for event in bridge.events("t"))
        eventually(
            lambda: running.failure or running.reports[-1].commit_lsn >= last,
            what="everything is applied",
            timeout_s=90,
        )
    running.sound()
    assert changes.committed > 20
    for found in (
        *verify_tables(pipeline.spark, pipeline.settings),
        *verify_as_of(pipeline.spark, pipeline.settings, last),
    ):
        assert found.equal, found.line()
    if kind == "history":
        assert versions(pipeline, "t", "note") == expected(bridge)


@pytest.mark.long
def test_a_table_is_filling_until_the_epoch_that_has_its_last_rows(
    bridge: Bridge, new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_consumers.epochs.stream._LOOK_EVERY_S", 0.1)
    limit_rate(bridge)
    pipeline = new_pipeline(
        bridge.conninfo, publication=bridge.publication, slot=bridge.slot, http_port=free_port()
    )
    tables = require(pipeline.settings.tables, "tables")

    def filling() -> list[str] | None:
        with contextlib.suppress(Retryable):  # it does not serve yet
            return read_run_status(tables).filling
        return None

    with Running(pipeline) as running:
        bridge.start().streaming()
        eventually(lambda: running.failure or filling() == ["public.t"], what="it is filling")
        running.sound()
        hasten(bridge)

        def filled() -> bool:
            running.sound()
            rows = pipeline.spark.table(pipeline.identifier("t")).count()
            return rows == ROWS and filling() == []

        eventually(filled, what="it is filled", timeout_s=90)
    assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_rows_of_tables_without_a_key_are_inserts(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, new_pipeline: NewPipeline
) -> None:
    """Each comes once, as `r` or as `c`, also where the snapshot is broken off by a kill.

    A table that is updated is parked, for that reason; its snapshot alone is no reason.
    """
    conninfo = pair.primary.conninfo(fresh_database)
    make_log(conninfo, ROWS)
    run(
        conninfo,
        "CREATE TABLE whole (n int, note text)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "INSERT INTO whole VALUES (1, 'old')",
    )
    slow = {**INITIAL, "chunk_rows_max": 50, "rows_per_second_max": 500}
    bridge = new_bridge(conninfo, snapshot=slow)
    pipeline = new_pipeline(conninfo, publication=bridge.publication, parks=True)
    with Running(pipeline) as running, Inserts(conninfo, ROWS + 1):
        bridge.start(**{VARIABLE: "chunk handed:4"})
        assert bridge.exit_code() == -9
        assert 0 < chunks(bridge) < ROWS / 50, "it was killed in the middle"
        bridge.start().streaming()
        done(bridge)
        eventually(
            lambda: running.failure or len(running.reports) > 2, what="some epochs", timeout_s=100
        )
        running.sound()
    run(conninfo, "INSERT INTO whole VALUES (2, 'new')")
    bridge.caught_up()
    ops = assert_each_once(bridge, conninfo)
    assert ops["r"] >= ROWS and ops["c"] > 0, ops
    pipeline.stream()
    for found in verify_tables(pipeline.spark, pipeline.settings):
        assert found.equal, found.line()
    run(conninfo, "UPDATE whole SET note = 'newer' WHERE n = 2")
    bridge.caught_up()
    assert bridge.stop() == 0, bridge.output
    with pytest.raises(OperatorNeeded, match="whole has no key, and rows of it are updated"):
        pipeline.stream()
    assert len(pipeline.rows("whole")) == 2


def limit_rate(bridge: Bridge) -> None:
    """Let the snapshot read 30 rows a second."""
    text = bridge.config.read_text()
    assert "snapshot:\n" in text
    bridge.config.write_text(text.replace("snapshot:\n", "snapshot:\n  rows_per_second_max: 30\n"))


def versions(pipeline: Pipeline, table: str, value: str) -> list[Version]:
    """The versions that the history has, in the order of key and position."""
    frame = pipeline.spark.table(pipeline.identifier(table))
    rows = frame.select("id", value, "_commit_lsn", "_end_lsn", "_seq").orderBy(
        "id", "_commit_lsn", "_seq"
    )
    return [tuple(row)[:4] for row in rows.collect()]


def expected(bridge: Bridge) -> list[Version]:
    """The versions that the events make: a row that says what holds already begins none."""
    lives: dict[int, list[list[Any]]] = defaultdict(list)
    events = sorted(
        bridge.events("t"), key=lambda e: (e["source"]["commit_lsn"], e["source"]["seq"])
    )
    for event in events:
        row, lsn = event["after"] or event["before"], event["source"]["commit_lsn"]
        life = lives[row["id"]]
        holds = bool(life) and life[-1][3] is None
        if event["op"] == "r" and holds and life[-1][1] == row["note"]:
            continue
        if holds:
            life[-1][3] = lsn
        if event["op"] != "d":
            life.append([row["id"], row["note"], lsn, None])
    return [tuple(version) for _, life in sorted(lives.items()) for version in life]


def row(number: int, name: str) -> dict[str, Any]:
    return {"id": number, "name": name}


@pytest.mark.long
@pytest.mark.parametrize("epoch_each", [True, False], ids=["an epoch each", "one epoch"])
def test_a_row_that_says_what_holds_begins_no_version(
    new_pipeline: NewPipeline, epoch_each: bool
) -> None:
    """Wherever epochs end. One that says something else does, and so does one of a gone row."""
    pipeline = new_pipeline(rules={"public.items": {"kind": "history"}})
    publisher = pipeline.publisher
    publisher.announce(ITEMS)
    lsns = []

    def changes(t: Transaction) -> None:
        for number in range(1, 6):
            t.insert(ITEMS, row(number, "a"))

    def more_changes(t: Transaction) -> None:
        t.update(ITEMS, row(2, "b"))
        t.delete(ITEMS, row(3, "a"))

    def chunk(t: Transaction) -> None:
        for number, name in ((1, "a"), (2, "b"), (3, "again"), (4, "other"), (6, "old")):
            t.read(ITEMS, row(number, name))

    def truncate(t: Transaction) -> None:
        t.truncate(ITEMS)

    for step in (changes, more_changes, chunk, chunk, truncate, chunk):
        with publisher.transaction() as t:
            step(t)
            lsns.append(t.commit_lsn)
        if epoch_each:
            pipeline.apply()
    if not epoch_each:
        pipeline.apply()
    one, two, three, _, gone, last = lsns
    assert versions(pipeline, "items", "name") == [
        (1, "a", one, gone),
        (1, "a", last, None),
        (2, "a", one, two),
        (2, "b", two, gone),
        (2, "b", last, None),
        (3, "a", one, two),
        (3, "again", three, gone),
        (3, "again", last, None),
        (4, "a", one, three),
        (4, "other", three, gone),
        (4, "other", last, None),
        (5, "a", one, gone),
        (6, "old", three, gone),
        (6, "old", last, None),
    ]
