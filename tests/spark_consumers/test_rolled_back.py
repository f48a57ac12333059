"""A table that somebody rolls back: its properties still tell the epoch that its rows lack."""

from typing import Any

import pytest

from schemas.errors import OperatorNeeded
from spark_consumers.iceberg import catalog
from spark_consumers.operations import Operator
from tests.spark_consumers.conftest import NewPipeline, Pipeline
from tests.spark_consumers.publisher import SourceTable

GOOD = SourceTable("good", {"id": ("int4", -1)})
BACK = SourceTable("back", {"id": ("int4", -1)})
NAME = "public.back"


@pytest.fixture
def pipeline(new_pipeline: NewPipeline) -> Pipeline:
    """Both tables have three epochs, of one row each."""
    made = new_pipeline(on_refused_table="park")
    made.publisher.announce(GOOD, BACK)
    for number in (1, 2, 3):
        both(made, number)
    return made


def both(pipeline: Pipeline, number: int) -> None:
    with pipeline.publisher.transaction() as t:
        for table in (GOOD, BACK):
            t.insert(table, {"id": number})
    pipeline.apply()


def back(pipeline: Pipeline) -> Any:
    return catalog.load(pipeline.spark, pipeline.identifier("back"))


def call(pipeline: Pipeline, procedure: str, snapshot: int) -> None:
    name = pipeline.identifier("back").partition(".")[2]
    pipeline.spark.sql(f"CALL slotbridge.system.{procedure}('{name}', {snapshot})")


def roll_back(pipeline: Pipeline) -> int:
    """Roll the table back by one epoch; return the snapshot that it had."""
    table = back(pipeline)
    had = catalog.snapshot_id(table)
    assert had is not None
    call(pipeline, "rollback_to_snapshot", int(table.currentSnapshot().parentId()))
    return had


def ids(pipeline: Pipeline, table: str = "back") -> list[int]:
    return [row.id for row in pipeline.rows(table)]


def operator(pipeline: Pipeline) -> Operator:
    return Operator(pipeline.spark, pipeline.settings)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("remedy", ["rebuild", "roll forward"])
def test_a_table_that_was_rolled_back_is_parked_until_it_is_whole(
    pipeline: Pipeline, remedy: str, *, restart: bool
) -> None:
    had = roll_back(pipeline)
    if restart:
        pipeline.restart()
        assert NAME in pipeline.runner.parking.tables, "at the start, whatever Kafka has"
    both(pipeline, 4)
    assert "rolled back" in pipeline.runner.parking.tables[NAME].parked.reason
    assert (ids(pipeline, "good"), ids(pipeline)) == ([1, 2, 3, 4], [1, 2])
    list(operator(pipeline).unpark([NAME]))
    pipeline.restart()
    both(pipeline, 5)
    assert ids(pipeline) == [1, 2], "without the remedy it stays parked"
    if remedy == "rebuild":
        list(operator(pipeline).rebuild([NAME]))
        pipeline.stream()
    else:
        call(pipeline, "set_current_snapshot", had)
        list(operator(pipeline).unpark([NAME]))
        pipeline.restart()
    both(pipeline, 6)
    assert not pipeline.runner.parking.tables
    assert ids(pipeline) == [1, 2, 3, 4, 5, 6]


def test_a_start_tells_of_the_rollback_and_a_rebuild_needs_no_transaction(
    pipeline: Pipeline,
) -> None:
    roll_back(pipeline)
    with pytest.raises(OperatorNeeded, match=r"the table is parked: .* rolled back"):
        pipeline.stream()
    list(operator(pipeline).rebuild([NAME]))
    pipeline.stream()
    assert ids(pipeline) == [1, 2, 3]


def test_a_table_that_was_rolled_back_stops_the_others_where_that_is_wanted(
    pipeline: Pipeline, new_pipeline: NewPipeline
) -> None:
    roll_back(pipeline)
    stopping = new_pipeline(on_refused_table="stop")
    with pytest.raises(OperatorNeeded, match="rolled back"):
        stopping.stream()


@pytest.mark.parametrize("tagged", [False, True])
def test_rows_of_somebody_else_on_top_do_not_hide_it(pipeline: Pipeline, *, tagged: bool) -> None:
    roll_back(pipeline)
    table = back(pipeline)
    if not tagged:
        manage = table.manageSnapshots()
        manage.removeTag(catalog.own_tags(table)[-1]).commit()
    for name in (catalog.EPOCH, catalog.COMMIT_LSN):  # somebody else's session has none
        pipeline.spark.conf.unset(catalog.SUMMARY_OPTION + name)
    frame = pipeline.spark.table(pipeline.identifier("back")).where("id = 1")
    frame.writeTo(pipeline.identifier("back")).append()
    pipeline.restart()
    assert NAME in pipeline.runner.parking.tables


def test_what_is_not_a_rollback_goes_on(pipeline: Pipeline) -> None:
    """Compaction, expiry of all snapshots but the last, an epoch that wrote the table nothing."""
    rows = pipeline.identifier("back")
    pipeline.spark.sql(
        f"CALL slotbridge.system.rewrite_data_files(table => '{rows}',"
        " options => map('rewrite-all', 'true'))"
    )
    table = back(pipeline)
    catalog.forget(table, catalog.own_tags(table)[:-1])
    table.refresh()
    catalog.expire(table, keep=1, older_than_ms=2**60)
    pipeline.restart()
    both(pipeline, 4)
    table = back(pipeline)
    catalog.forget(table, catalog.own_tags(table))
    table.refresh()
    catalog.expire(table, keep=1, older_than_ms=2**60)
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.counts[NAME] += 0
        t.insert(GOOD, {"id": 5})
    pipeline.apply()
    both(pipeline, 6)
    pipeline.restart()
    assert not pipeline.runner.parking.tables
    assert ids(pipeline) == [1, 2, 3, 4, 6]
