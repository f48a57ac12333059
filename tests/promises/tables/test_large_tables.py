"""Tables that are too large to be written anew: rows go by position, and come in one step."""

import pytest

from schemas.events import UNAVAILABLE
from spark_consumers.iceberg import catalog, staging
from tests.marks import long_but
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.test_current import ITEMS, item, rows

pytestmark = pytest.mark.usefixtures("any_table_is_large", "by_spark")


@pytest.fixture(params=long_but(True, [False, True]), ids=["scan", "index"])
def pipeline(new_pipeline: NewPipeline, request: pytest.FixtureRequest) -> Pipeline:
    """The rows that change are found by a scan of the keys, or by the index."""
    return new_pipeline(key_index=request.param)


def filled(pipeline: Pipeline) -> None:
    """Nine rows, and one epoch."""
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        for number in range(9):
            t.insert(ITEMS, item(number))
    pipeline.apply()


def branches(pipeline: Pipeline) -> list[str]:
    """The table's branches for epochs."""
    frame = pipeline.spark.table(f"{pipeline.identifier('items')}.refs")
    return [row.name for row in frame.collect() if row.name.startswith(staging.BRANCH)]


@pytest.mark.long
def test_unchanged_values_and_truncates(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    filled(pipeline)
    with publisher.transaction() as t:
        t.delete(ITEMS, item(0))
        t.update(ITEMS, item(1, "updated", UNAVAILABLE))
        t.insert(ITEMS, item(9))
    pipeline.apply()
    with publisher.transaction() as t:
        t.truncate(ITEMS)
        t.insert(ITEMS, item(10))
    deletes = pipeline.spark.table(f"{pipeline.identifier('items')}.delete_files")
    assert deletes.count() > 0
    assert rows(pipeline)[:2] == [(1, "updated", "b"), (2, "a", "b")]
    assert len(rows(pipeline)) == 9
    pipeline.apply()
    assert rows(pipeline) == [(10, "a", "b")]


@pytest.mark.long
def test_rows_change_places_in_one_step(pipeline: Pipeline) -> None:
    filled(pipeline)
    publisher = pipeline.publisher
    with publisher.transaction() as t:
        t.delete(ITEMS, item(0))
        t.update(ITEMS, item(1, "updated"))
        t.change_key(ITEMS, item(2), item(20))
        t.insert(ITEMS, item(9))
        t.update(ITEMS, item(9, "at once"))
    pipeline.apply()
    expected = [(1, "updated", "b"), *((n, "a", "b") for n in range(3, 9))]
    assert rows(pipeline) == [*expected, (9, "at once", "b"), (20, "a", "b")]
    tag = catalog.tag_name(publisher.commit_lsn)
    tagged = pipeline.spark.sql(
        f"SELECT * FROM {pipeline.identifier('items')} VERSION AS OF '{tag}'"
    )
    assert tagged.count() == 9
    assert not branches(pipeline)
    with publisher.transaction() as t:
        for number in (1, *range(3, 10), 20):
            t.delete(ITEMS, item(number))
    pipeline.apply()
    assert rows(pipeline) == []


@pytest.mark.long
def test_killed_between_its_commits(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(pipeline)
    before = rows(pipeline)
    with pipeline.publisher.transaction() as t:
        t.update(ITEMS, item(1, "updated"))
        t.delete(ITEMS, item(2))
    for place in ("iceberg.delete_insert.insert", "iceberg.staging.Staging.adopt"):
        with monkeypatch.context() as patch:
            patch.setattr(f"spark_consumers.{place}", killed)
            with pytest.raises(RuntimeError):
                pipeline.apply()
        assert rows(pipeline) == before
        assert branches(pipeline)
        pipeline.restart()
    pipeline.apply()
    assert rows(pipeline) == [before[0], (1, "updated", "b"), *before[3:]]
    assert not branches(pipeline)


@pytest.mark.long
def test_a_large_table_stays_large(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_consumers.iceberg.tables.COPIED_BYTES_MAX", 2**30)
    monkeypatch.setattr("spark_consumers.iceberg.tables.COPIED_ROWS_MAX", 8)
    filled(pipeline)
    for epoch in range(3):
        with pipeline.publisher.transaction() as t:
            t.update(ITEMS, item(epoch, "updated"))
        assert pipeline.apply().tables["public.items"].way in ("scan", "index")
        table = catalog.load(pipeline.spark, pipeline.identifier("items"))
        assert catalog.summary(table)["total-records"] == str(10 + epoch)
        assert pipeline.runner.states["public.items"].large
    assert len(rows(pipeline)) == 9


def killed(*_: object, **__: object) -> None:
    raise RuntimeError("killed")


@pytest.mark.long
def test_rows_of_a_snapshot_and_inserts_of_them(pipeline: Pipeline) -> None:
    filled(pipeline)
    with pipeline.publisher.transaction() as t:
        t.update(ITEMS, item(3, "updated"))
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.read(ITEMS, item(1, "read"))
        t.read(ITEMS, item(9, "read"))
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, item(9, "inserted"))
    pipeline.apply()
    names = [row[1] for row in rows(pipeline)]
    assert names == ["a", "read", "a", "updated", *["a"] * 5, "inserted"]
