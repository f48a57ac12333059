"""A change of columns that Iceberg refuses, and one that takes values away from readers."""

from typing import Any

import pytest

from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import kill
from tests.promises.tables.publisher import SourceTable

Columns = dict[str, tuple[str, int]]
GOOD = SourceTable("good", {"id": ("int4", -1)})
BEFORE: Columns = {"id": ("int4", -1), "v": ("text", -1), "n": ("int4", -1)}
SHORTER: Columns = {"id": ("int4", -1), "v": ("text", -1)}
COLLIDES: Columns = {**SHORTER, "n": ("text", -1), "n__old1": ("int4", -1)}
"""The old values of n get the name of the new column."""
PARTED: Columns = {**BEFORE, "n_bucket": ("int4", -1)}
"""Iceberg names a partition by bucket(n) so."""
NAME = "public.items"


def table(columns: Columns, oid: int = 1) -> SourceTable:
    return SourceTable("items", columns, oid=oid)


def start(pipeline: Pipeline, columns: Columns = BEFORE) -> None:
    pipeline.publisher.announce(GOOD, table(columns))
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 1})
        t.insert(table(columns), dict.fromkeys(columns) | {"id": 1, "n": 1})


def change(pipeline: Pipeline, new: SourceTable, **row: Any) -> None:
    """The table is `new` from the next transaction on, which inserts a row, as into the other."""
    pipeline.publisher.reshape(new)
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": row["id"]})
        t.insert(new, dict.fromkeys(new.columns) | row)


def columns(pipeline: Pipeline) -> list[str]:
    pipeline.spark.catalog.refreshTable(pipeline.identifier("items"))
    names = pipeline.spark.table(pipeline.identifier("items")).columns
    return [name for name in names if not name.startswith("_")]


def ids(pipeline: Pipeline, name: str) -> list[int]:
    return [row.id for row in pipeline.rows(name, "id")]


@pytest.mark.long
def test_a_table_whose_new_columns_iceberg_refuses_is_parked(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(parks=True, on_changed_type="new_column")
    start(pipeline)
    pipeline.apply()
    change(pipeline, table(COLLIDES), id=2)
    pipeline.apply()
    assert "Iceberg refuses" in pipeline.runner.parking.tables[NAME].parked.reason
    assert ids(pipeline, "good") == [1, 2]
    assert (ids(pipeline, "items"), columns(pipeline)) == ([1], [*BEFORE])


@pytest.mark.long
def test_a_table_that_iceberg_refuses_to_make_is_parked(new_pipeline: NewPipeline) -> None:
    rules = {NAME: {"partition": ["bucket(4, n)"]}}
    pipeline = new_pipeline(parks=True, rules=rules)
    start(pipeline, PARTED)
    pipeline.apply()
    assert "Iceberg refuses" in pipeline.runner.parking.tables[NAME].parked.reason
    assert ids(pipeline, "good") == [1]


@pytest.mark.long
@pytest.mark.parametrize("alter", ["ADD PARTITION FIELD bucket(4, n)", "WRITE ORDERED BY n"])
def test_a_column_that_iceberg_needs_is_not_dropped_and_parks_the_table(
    new_pipeline: NewPipeline, alter: str
) -> None:
    """Somebody has partitioned or sorted the table by it."""
    pipeline = new_pipeline(parks=True, on_dropped_column="drop")
    start(pipeline)
    pipeline.apply()
    pipeline.spark.sql(f"ALTER TABLE {pipeline.identifier('items')} {alter}")
    change(pipeline, table(SHORTER), id=2)
    pipeline.apply()
    assert "Iceberg refuses" in pipeline.runner.parking.tables[NAME].parked.reason
    assert (ids(pipeline, "good"), ids(pipeline, "items")) == ([1, 2], [1])
    assert columns(pipeline) == [*BEFORE]


@pytest.mark.long
@pytest.mark.parametrize("way", ["park", "kill"])
def test_a_column_is_dropped_in_the_commit_that_brings_the_epoch(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    pipeline = new_pipeline(parks=way == "park", on_dropped_column="drop")
    start(pipeline)
    pipeline.apply()
    if way == "park":
        change(pipeline, table(SHORTER), id=2**40)
        pipeline.apply()
        assert NAME in pipeline.runner.parking.tables
    else:
        change(pipeline, table(SHORTER), id=2)
        kill(monkeypatch, "nothing")
        with pytest.raises(KeyboardInterrupt):
            pipeline.apply()
        monkeypatch.undo()
        pipeline.restart()
    assert columns(pipeline) == [*BEFORE]
    assert [row.n for row in pipeline.rows("items")] == [1], "readers keep the values"
    if way == "kill":
        pipeline.apply()
        assert columns(pipeline) == [*SHORTER]
        assert ids(pipeline, "items") == [1, 2]


@pytest.mark.long
def test_a_column_of_the_dropped_one_s_name_takes_its_place_in_the_same_commit(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(on_dropped_column="drop")
    start(pipeline)
    pipeline.apply()
    change(pipeline, table(SHORTER), id=2)
    kill(monkeypatch, "nothing")
    with pytest.raises(KeyboardInterrupt):
        pipeline.apply()
    monkeypatch.undo()
    pipeline.restart()
    change(pipeline, table({**SHORTER, "n": ("text", -1)}), id=3, n="three")
    pipeline.apply()
    assert columns(pipeline) == [*SHORTER, "n"]
    assert [row.n for row in pipeline.rows("items")] == [None, None, "three"]
