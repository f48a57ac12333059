"""A table that fails by itself is parked by name, with a remedy that works; the others go on."""

from pathlib import Path
from urllib.parse import urlparse

import pytest

from schemas.errors import SlotbridgeError
from spark_consumers.iceberg import catalog, staging
from spark_consumers.operations import Operator
from spark_consumers.verify.as_of import verify_as_of
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable

GOOD = SourceTable("good", {"id": ("int4", -1), "v": ("text", -1)})
BAD = SourceTable("bad", {"id": ("int4", -1), "v": ("text", -1)})
NAME = "public.bad"


@pytest.fixture
def pipeline(new_pipeline: NewPipeline) -> Pipeline:
    """Both tables have row 1."""
    made = new_pipeline(parks=True)
    made.publisher.announce(GOOD, BAD)
    both(made, 1)
    made.apply()
    return made


def both(pipeline: Pipeline, number: int) -> None:
    """Insert a row into both tables, and change row 1."""
    with pipeline.publisher.transaction() as t:
        for table in (GOOD, BAD):
            t.insert(table, {"id": number, "v": str(number)})
            t.update(table, {"id": 1, "v": f"as of {number}"})


def ids(pipeline: Pipeline, table: str) -> list[int]:
    return [row.id for row in pipeline.rows(table, "id")]


def lose_data(pipeline: Pipeline, table: str) -> None:
    """Remove the data files of a table."""
    for row in pipeline.spark.table(f"{pipeline.identifier(table)}.files").collect():
        Path(urlparse(row.file_path).path).unlink()


def rebuild(pipeline: Pipeline, *, anew: bool) -> None:
    assert list(Operator(pipeline.spark, pipeline.settings).rebuild([NAME])) == [(NAME, anew)]


def finish(pipeline: Pipeline) -> None:
    pipeline.restart()
    while pipeline.runner.works_alone:
        pipeline.step()


@pytest.mark.usefixtures("by_spark")
def test_a_table_without_its_data_file_is_parked_and_made_anew(pipeline: Pipeline) -> None:
    """The first rebuild goes on from the rows, as for what passes; the next one begins anew."""
    lose_data(pipeline, "bad")
    both(pipeline, 2)
    assert "Spark failed with" in pipeline.apply().refused[NAME]
    assert ids(pipeline, "good") == [1, 2]
    note = pipeline.note("bad").parked
    assert note is not None
    assert f"slottables rebuild --table {NAME}" in note.remedy
    rebuild(pipeline, anew=False)
    finish(pipeline)
    assert pipeline.note("bad").state == "parked"
    rebuild(pipeline, anew=True)
    finish(pipeline)
    assert pipeline.note("bad").state == "following"
    both(pipeline, 3)
    assert not pipeline.apply().refused
    assert ids(pipeline, "bad") == [1, 2, 3]


@pytest.mark.long
@pytest.mark.usefixtures("by_spark")
def test_what_two_tables_fail_with_ends_the_run(pipeline: Pipeline) -> None:
    for table in ("good", "bad"):
        lose_data(pipeline, table)
    both(pipeline, 2)
    with pytest.raises(SlotbridgeError, match=r"public\.bad, public\.good"):
        pipeline.apply()
    assert pipeline.note("bad").state == "following"


@pytest.mark.long
def test_a_table_without_its_manifests_is_parked(pipeline: Pipeline) -> None:
    """The commit alone reads them: it is prepared table by table then."""
    identifier = pipeline.identifier("bad")
    for row in pipeline.spark.table(f"{identifier}.manifests").collect():
        Path(urlparse(row.path).path).unlink()
    both(pipeline, 2)
    assert NAME in pipeline.apply().refused
    assert ids(pipeline, "good") == [1, 2]


@pytest.mark.long
def test_a_table_without_its_metadata_is_parked_and_taken_out_of_the_catalog(
    pipeline: Pipeline,
) -> None:
    table = catalog.load(pipeline.spark, pipeline.identifier("bad"))
    place = Path(urlparse(str(table.operations().current().metadataFileLocation())).path)
    place.unlink()
    pipeline.spark.catalog.clearCache()
    pipeline.restart()
    assert NAME in pipeline.runner.parking.tables
    both(pipeline, 2)
    pipeline.apply()
    assert ids(pipeline, "good") == [1, 2]
    lsn = pipeline.runner.record.commit_lsn
    compared = {one.table: one for one in verify_as_of(pipeline.spark, pipeline.settings, lsn)}
    assert compared["public.good"].equal
    assert compared[NAME].not_judged
    rebuild(pipeline, anew=True)
    finish(pipeline)
    assert ids(pipeline, "bad") == [1, 2]
    both(pipeline, 3)
    assert not pipeline.apply().refused
    assert ids(pipeline, "bad") == [1, 2, 3]


def renamed(name: str, oid: int) -> SourceTable:
    return SourceTable(name, BAD.columns, oid=oid)


@pytest.mark.long
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_table_swapped_by_renames_is_parked_until_a_snapshot_has_brought_its_rows(
    new_pipeline: NewPipeline, *, snapshot: bool
) -> None:
    """Else it is incomplete, and says so."""
    pipeline = new_pipeline(parks=True)
    old, new = renamed("bad", 1), renamed("bad_new", 2)
    pipeline.publisher.announce(GOOD, old)
    with pipeline.publisher.transaction() as t:
        t.insert(old, {"id": 1, "v": "old"})
    pipeline.apply()
    pipeline.publisher.announce(new)
    with pipeline.publisher.transaction() as t:
        t.insert(new, {"id": 1, "v": "copied"})
        t.insert(new, {"id": 2, "v": "copied"})
    swapped = renamed("bad", 2)
    pipeline.publisher.reshape(swapped)
    with pipeline.publisher.transaction() as t:
        t.update(swapped, {"id": 2, "v": "changed"})
    report = pipeline.apply()
    assert "its rows were published under that name" in report.refused[NAME]
    assert [row.v for row in pipeline.rows("bad")] == ["old"], "readers have the former rows"
    note = pipeline.note("bad").parked
    assert note is not None
    assert f"slotbridge snapshot start {NAME}" in note.remedy
    if snapshot:
        with pipeline.publisher.transaction() as t:
            t.read(swapped, {"id": 1, "v": "copied"})
            t.read(swapped, {"id": 2, "v": "changed"})
    rebuild(pipeline, anew=False)
    finish(pipeline)
    with pipeline.publisher.transaction() as t:
        t.insert(swapped, {"id": 3, "v": "later"})
    assert not pipeline.apply().refused
    there = {row.id: row.v for row in pipeline.rows("bad")}
    assert there == ({1: "copied"} if snapshot else {}) | {2: "changed", 3: "later"}
    assert (pipeline.note("bad").incomplete is None) == snapshot
    rebuild(pipeline, anew=True)
    finish(pipeline)
    assert not pipeline.runner.parking.tables, "what is known is not refused again"
    assert {row.id: row.v for row in pipeline.rows("bad")} == there
    assert (pipeline.note("bad").incomplete is None) == snapshot


@pytest.mark.long
def test_a_renamed_table_is_parked_and_one_made_again_is_not(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(parks=True)
    first = renamed("bad", 1)
    pipeline.publisher.announce(first)
    with pipeline.publisher.transaction() as t:
        t.insert(first, {"id": 1, "v": "first"})
    again = renamed("bad", 2)
    pipeline.publisher.reshape(again)
    with pipeline.publisher.transaction() as t:
        t.insert(again, {"id": 2, "v": "again"})
    assert not pipeline.apply().refused
    assert ids(pipeline, "bad") == [2]
    moved = renamed("moved", 2)
    pipeline.publisher.announce(moved)
    with pipeline.publisher.transaction() as t:
        t.insert(moved, {"id": 3, "v": "moved"})
    assert "public.moved is the table that was public.bad" in str(pipeline.apply().refused)
    wider = SourceTable("moved", {**BAD.columns, "w": ("int4", -1)}, oid=2)
    pipeline.publisher.reshape(wider)
    with pipeline.publisher.transaction() as t:
        t.insert(wider, {"id": 4, "v": "moved", "w": 1})
    pipeline.apply()
    operator = Operator(pipeline.spark, pipeline.settings)
    assert list(operator.rebuild(["public.moved"])) == [("public.moved", False)]
    finish(pipeline)
    assert ids(pipeline, "moved") == [3, 4]
    assert pipeline.note("moved").incomplete


@pytest.mark.long
def test_a_table_that_has_its_name_back_is_parked(new_pipeline: NewPipeline) -> None:
    """Nothing was published of it under another name; its rows were replaced meanwhile."""
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(renamed("bad", 1))
    for oid in (1, 2):
        table = renamed("bad", oid)
        pipeline.publisher.reshape(table)
        with pipeline.publisher.transaction() as t:
            t.insert(table, {"id": oid, "v": "of this table"})
        assert not pipeline.apply().refused
        assert ids(pipeline, "bad") == [oid]
    back = renamed("bad", 1)
    pipeline.publisher.reshape(back)
    with pipeline.publisher.transaction() as t:
        t.insert(back, {"id": 3, "v": "of the first table"})
    assert "had the name before another one" in pipeline.apply().refused[NAME]
    assert ids(pipeline, "bad") == [2]


@pytest.mark.long
@pytest.mark.parametrize("taken", ["bad", "moved"])
def test_a_kill_before_it_is_parked_does_not_hide_that_a_name_was_taken_over(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    """Whether the name had an Iceberg table, or is to get one."""
    pipeline = new_pipeline(parks=True)
    tables = renamed("bad", 1), renamed("bad_new", 2)
    pipeline.publisher.announce(*tables)
    with pipeline.publisher.transaction() as t:
        for table in tables:
            t.insert(table, {"id": 1, "v": table.name})
    pipeline.apply()
    swapped = renamed(taken, 2)
    pipeline.publisher.announce(swapped)
    with pipeline.publisher.transaction() as t:
        t.insert(swapped, {"id": 2, "v": "later"})

    def killed(*_given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging, "park", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.apply()
    pipeline.restart()
    assert f"public.{taken} is the table that was public.bad_new" in str(pipeline.apply().refused)
