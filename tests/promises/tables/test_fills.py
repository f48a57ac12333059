"""Columns added with a default: the rows that were there get the value that the source has."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from spark_consumers.iceberg import catalog
from spark_consumers.operations import Operator
from spark_consumers.verify.as_of import verify_as_of
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.test_parked import changed

BEFORE = {"id": ("int4", -1), "name": ("text", -1)}
AFTER = {**BEFORE, "c": ("int4", -1), "d": ("text", -1)}
ITEMS = SourceTable("items", BEFORE, oid=1)
WIDE = SourceTable("items", AFTER, oid=1, missing={"c": 7, "d": "a 'b' \\ \"c\""})
D = WIDE.missing["d"]


def start(pipeline: Pipeline, table: SourceTable = ITEMS) -> None:
    pipeline.publisher.announce(table)
    with pipeline.publisher.transaction() as t:
        for number in (1, 2, 3):
            t.insert(table, {"id": number, "name": f"{number}"})
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.update(table, {"id": 1, "name": "one"})
    pipeline.apply()


def widen(pipeline: Pipeline) -> None:
    """Add two columns; one row is changed, one has NULL, one is new."""
    pipeline.publisher.reshape(WIDE)
    with pipeline.publisher.transaction() as t:
        t.update(WIDE, {"id": 2, "name": "two", "c": None, "d": None})
        t.insert(WIDE, {"id": 4, "name": "4", "c": 8, "d": "d"})


WIDENED = [(1, "one", 7, D), (2, "two", None, None), (3, "3", 7, D), (4, "4", 8, "d")]


def rows(pipeline: Pipeline) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in pipeline.rows("items", "id")]


def as_of_equal(pipeline: Pipeline) -> None:
    for found in verify_as_of(pipeline.spark, pipeline.settings, pipeline.publisher.commit_lsn):
        assert found.equal, found.line()


@pytest.mark.parametrize("key_index", [False, pytest.param(True, marks=pytest.mark.long)])
def test_rows_that_were_there_get_the_value(new_pipeline: NewPipeline, *, key_index: bool) -> None:
    pipeline = new_pipeline(key_index=key_index)
    start(pipeline)
    widen(pipeline)
    pipeline.apply()
    assert rows(pipeline) == WIDENED
    found = pipeline.spark.table(pipeline.identifier("items"))
    assert found.where("c = 7").count() == found.where("c IS NOT NULL AND id <> 4").count() == 2
    as_of_equal(pipeline)
    with pipeline.publisher.transaction() as t:
        t.delete(WIDE, {"id": 3})
        t.insert(WIDE, {"id": 5, "name": "5", "c": None, "d": None})
    pipeline.apply()
    assert rows(pipeline) == [*WIDENED[:2], WIDENED[3], (5, "5", None, None)]
    as_of_equal(pipeline)


@pytest.mark.long
@pytest.mark.usefixtures("any_table_is_large")
@pytest.mark.parametrize("key_index", [False, True])
def test_large_tables_too(new_pipeline: NewPipeline, *, key_index: bool) -> None:
    test_rows_that_were_there_get_the_value(new_pipeline, key_index=key_index)


@pytest.mark.long
def test_every_version_of_a_history_gets_it_and_no_event_of_a_changelog(
    new_pipeline: NewPipeline,
) -> None:
    history = new_pipeline(rules={"public.items": {"kind": "history"}})
    start(history)
    widen(history)
    history.apply()
    versions = history.spark.table(history.identifier("items")).orderBy("id", "_commit_lsn", "_seq")
    found = [tuple(row) for row in versions.select("id", "name", "c").collect()]
    told = [(1, "1", 7), (1, "one", 7), (2, "2", 7), (2, "two", None), (3, "3", 7), (4, "4", 8)]
    assert found == told
    as_of_equal(history)
    log = new_pipeline(
        namespace=f"{history.kafka.topic_prefix}_log", rules={"*.*": {"kind": "changelog"}}
    )
    log.publisher.commit_lsn = history.publisher.commit_lsn
    log.apply()
    table = log.spark.table(f"slotbridge.{log.tables.namespace}.items").orderBy(
        "_commit_lsn", "_seq"
    )
    assert [row.c for row in table.collect()] == [None, None, None, None, None, 8]


@pytest.mark.long
def test_versions_of_a_history_get_it_where_the_epoch_truncates(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(rules={"public.items": {"kind": "history"}})
    start(pipeline)
    with pipeline.publisher.transaction() as t:
        pipeline.publisher.shape_at(WIDE, t.commit_lsn, t.seq)
        t.truncate(WIDE)
        t.insert(WIDE, {"id": 1, "name": "new", "c": None, "d": None})
    pipeline.apply()
    versions = pipeline.spark.table(pipeline.identifier("items")).orderBy("_commit_lsn", "_seq")
    found = [tuple(row) for row in versions.select("name", "c", "d").collect()]
    assert found == [*((name, 7, D) for name in ("1", "2", "3", "one")), ("new", None, None)]
    as_of_equal(pipeline)


@pytest.mark.long
def test_a_transaction_that_adds_the_column_and_a_rebuild(pipeline: Pipeline) -> None:
    start(pipeline)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 5, "name": "early"})
        t.delete(ITEMS, {"id": 3})
        pipeline.publisher.shape_at(WIDE, t.commit_lsn, t.seq)
        t.insert(WIDE, {"id": 6, "name": "late", "c": None, "d": "d"})
    pipeline.apply()
    expected = [(1, "one", 7, D), (2, "2", 7, D), (5, "early", 7, D), (6, "late", None, "d")]
    assert rows(pipeline) == expected
    as_of_equal(pipeline)
    table = catalog.load(pipeline.spark, pipeline.identifier("items"))
    assert catalog.FILLS not in catalog.properties(table)
    assert [*Operator(pipeline.spark, pipeline.settings).rebuild(["public.items"])]
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(WIDE, {"id": 7, "name": "7", "c": 7, "d": None})
    pipeline.apply()
    assert rows(pipeline) == [*expected, (7, "7", 7, None)]


@pytest.mark.long
@pytest.mark.parametrize("place", ["fills.fill", "current.merge", "staging.Staging.adopt"])
def test_a_kill_on_the_way(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The columns are there already, and only a property tells that rows lack their values."""

    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    start(pipeline)
    widen(pipeline)
    with monkeypatch.context() as patch:
        patch.setattr(f"spark_consumers.iceberg.{place}", killed)
        with pytest.raises(RuntimeError, match="killed"):
            pipeline.apply()
    pipeline.restart()
    renamed = {**BEFORE, "c": ("int8", -1), "e": ("text", -1)}
    pipeline.publisher.reshape(SourceTable("items", renamed, oid=1))
    with pipeline.publisher.transaction() as t:
        t.insert(SourceTable("items", renamed, oid=1), {"id": 9, "name": "9", "c": 2**40, "e": "e"})
    pipeline.apply()
    assert rows(pipeline) == [*WIDENED, (9, "9", 2**40, "e")]


@pytest.mark.long
def test_null_if_the_settings_say_so(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(on_column_default="null")
    start(pipeline)
    widen(pipeline)
    with capture_logs() as told:
        pipeline.apply()
    assert [row[2] for row in rows(pipeline)] == [None, None, None, 8]
    (warning,) = (line for line in told if line["log_level"] == "warning")
    assert (warning["table"], warning["columns"]) == ("public.items", ["c", "d"])
    assert "slottables rebuild --table public.items" in warning["hint"]


@pytest.mark.long
def test_null_stops_a_fill_that_is_on_its_way(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy where the table can't be written anew, as the disk is too small for it."""

    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    start(pipeline)
    widen(pipeline)
    monkeypatch.setattr("spark_consumers.iceberg.fills.fill", killed)
    with pytest.raises(RuntimeError, match="killed"):
        pipeline.apply()
    changed(pipeline, on_column_default="null")
    with capture_logs() as told:
        pipeline.apply()
    assert [row[2] for row in rows(pipeline)] == [None, None, None, 8]
    assert [line["columns"] for line in told if line["log_level"] == "warning"] == [["c", "d"]]
    assert catalog.FILLS not in catalog.properties(
        catalog.load(pipeline.spark, pipeline.identifier("items"))
    )


@pytest.mark.long
def test_what_no_event_tells_is_logged(pipeline: Pipeline) -> None:
    start(pipeline)
    columns = {"id": ("int8", -1), "name": ("text", -1), "u": ("uuid", -1)}
    other = SourceTable("items", columns, oid=1, unsent=["u", "id"])
    pipeline.publisher.reshape(other)
    with pipeline.publisher.transaction() as t:
        t.insert(other, {"id": 4, "name": "4", "u": "5"})
    with capture_logs() as told:
        pipeline.apply()
    (warning,) = (line for line in told if line["log_level"] == "warning")
    assert warning["columns"] == ["u", "id"]
    assert "slotbridge snapshot start public.items" in warning["hint"]


@pytest.mark.long
def test_a_value_that_does_not_fit_is_logged(pipeline: Pipeline) -> None:
    start(pipeline)
    columns = {**BEFORE, "c": ("numeric", (4 << 16) + 4 + 2)}
    other = SourceTable("items", columns, oid=1, missing={"c": "NaN"})
    pipeline.publisher.reshape(other)
    with pipeline.publisher.transaction() as t:
        t.insert(other, {"id": 4, "name": "4", "c": "1.50"})
    with capture_logs() as told:
        pipeline.apply()
    assert [row[2] is None for row in rows(pipeline)] == [True, True, True, False]
    assert any("does not fit" in line["event"] for line in told)


@pytest.mark.long
def test_sums_of_a_column_count_what_rows_got(new_pipeline: NewPipeline) -> None:
    sums = {"total": {"source": "public.items", "group_by": ["name"], "sums": {"of_id": "id"}}}
    pipeline = new_pipeline(sums=sums)
    start(pipeline)
    widen(pipeline)
    pipeline.apply()
    found = pipeline.spark.table(pipeline.identifier("total")).orderBy("of_id").collect()
    assert [(row.name, row.of_id) for row in found] == [("one", 1), ("two", 2), ("3", 3), ("4", 4)]


@pytest.mark.long
def test_a_parked_table_gets_it_under_the_column_s_later_name(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(parks=True)
    start(pipeline)
    pipeline.publisher.reshape(WIDE)
    with pipeline.publisher.transaction() as t:
        t.insert(WIDE, {"id": 4, "name": "4", "c": 2**40, "d": None})
    assert "public.items" in pipeline.apply().refused
    columns = {**BEFORE, "c": ("int8", -1), "e": ("text", -1)}
    renamed = SourceTable("items", columns, oid=1)
    pipeline.publisher.reshape(renamed)
    with pipeline.publisher.transaction() as t:
        t.insert(renamed, {"id": 5, "name": "5", "c": 2**40, "e": None})
    pipeline.apply()
    changed(pipeline, on_bad_event="quarantine")
    assert [*Operator(pipeline.spark, pipeline.settings).rebuild(["public.items"])]
    with pipeline.publisher.transaction() as t:
        t.insert(renamed, {"id": 6, "name": "6", "c": 6, "e": "e"})
    assert not pipeline.apply().refused
    assert [*pipeline.rows("items")[0].asDict()] == ["id", "name", "c", "e"]
    assert [row[2:] for row in rows(pipeline)] == [(7, D)] * 3 + [(2**40, None), (6, "e")]
