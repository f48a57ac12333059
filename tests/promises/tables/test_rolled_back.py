"""A table that somebody rolls back: its properties still tell the epoch that its rows lack."""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from schemas.errors import OperatorNeeded
from spark_consumers.iceberg import catalog, commits
from spark_consumers.iceberg.table_note import FOLLOWING
from spark_consumers.operations import Operator
from tests.marks import long_but
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import kill
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.test_job import Running
from tests.providers.waiting import eventually, patient

GOOD = SourceTable("good", {"id": ("int4", -1)})
BACK = SourceTable("back", {"id": ("int4", -1)}, oid=1)
NAME = "public.back"


@pytest.fixture
def pipeline(new_pipeline: NewPipeline) -> Pipeline:
    """Both tables have three epochs, of one row each."""
    made = new_pipeline(parks=True)
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


@pytest.mark.long
@pytest.mark.parametrize("restart", long_but(True, [False, True]))
def test_a_table_that_was_rolled_back_is_parked_until_it_is_made_anew(
    pipeline: Pipeline, *, restart: bool
) -> None:
    roll_back(pipeline)
    if restart:
        pipeline.restart()
        assert NAME in pipeline.runner.parking.tables, "at the start, whatever Kafka has"
    both(pipeline, 4)
    assert "rolled back" in pipeline.runner.parking.tables[NAME].parked.reason
    assert (ids(pipeline, "good"), ids(pipeline)) == ([1, 2, 3, 4], [1, 2])
    pipeline.restart()
    both(pipeline, 5)
    assert ids(pipeline) == [1, 2], "a restart alone is no remedy"
    assert list(operator(pipeline).rebuild([NAME])) == [(NAME, True)]
    pipeline.stream()
    both(pipeline, 6)
    assert not pipeline.runner.parking.tables
    assert ids(pipeline) == [1, 2, 3, 4, 5, 6]
    assert pipeline.note("back") == FOLLOWING


@pytest.mark.long
def test_a_table_whose_topic_has_lost_its_beginning_is_made_of_what_kafka_has(
    pipeline: Pipeline,
) -> None:
    """And says so; a snapshot brings the rows that it lacks."""
    roll_back(pipeline)
    pipeline.publisher.forget(BACK)
    pipeline.restart()
    both(pipeline, 4)
    assert list(operator(pipeline).rebuild([NAME])) == [(NAME, True)]
    with pytest.raises(OperatorNeeded, match="no longer has the first events"):
        pipeline.stream()
    assert "slotbridge snapshot start" in pipeline.runner.parking.tables[NAME].parked.remedy
    assert list(operator(pipeline).rebuild([NAME])) == [(NAME, True)]
    pipeline.stream()
    assert ids(pipeline) == [4]
    incomplete = pipeline.note("back").incomplete
    assert incomplete is not None
    assert "first events" in incomplete.why
    assert pipeline.note("back").state == "following"


@pytest.mark.long
def test_a_start_tells_of_the_rollback_and_a_rebuild_needs_no_transaction(
    pipeline: Pipeline,
) -> None:
    roll_back(pipeline)
    with pytest.raises(OperatorNeeded, match=r"the table is parked: .* rolled back"):
        pipeline.stream()
    list(operator(pipeline).rebuild([NAME]))
    pipeline.stream()
    assert ids(pipeline) == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("snapshot", ["", "after", "before"])
def test_a_name_that_another_table_took_over_is_not_made_anew_without_its_rows(
    pipeline: Pipeline, snapshot: str
) -> None:
    """Nor refused again where a snapshot has brought them `before` the rebuild, or `after` one."""
    roll_back(pipeline)
    pipeline.restart()
    other, swapped = replace(BACK, name="other", oid=2), replace(BACK, oid=2)

    def rebuild() -> None:
        assert list(operator(pipeline).rebuild([NAME])) == [(NAME, True)]
        pipeline.restart()
        while pipeline.runner.works_alone:
            pipeline.step()

    def send_rows() -> None:
        with pipeline.publisher.transaction() as t:
            for number in (7, 8):
                t.read(swapped, {"id": number})
        pipeline.apply()

    pipeline.publisher.announce(other)
    with pipeline.publisher.transaction() as t:
        t.insert(other, {"id": 7})
    pipeline.publisher.reshape(swapped)
    with pipeline.publisher.transaction() as t:
        t.insert(swapped, {"id": 8})
    pipeline.apply()
    if snapshot == "before":
        send_rows()
    rebuild()
    if snapshot != "before":
        parked = pipeline.runner.parking.tables[NAME].parked
        assert "its rows were published under that name" in parked.reason
        assert ids(pipeline) == [1, 2], "readers have the former rows"
        if snapshot == "after":
            send_rows()
        rebuild()
    assert not pipeline.runner.parking.tables
    assert ids(pipeline) == ([7, 8] if snapshot else [8])
    assert (pipeline.note("back").incomplete is None) == bool(snapshot)


@pytest.mark.long
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


@pytest.mark.long
def test_what_is_not_a_rollback_goes_on(pipeline: Pipeline) -> None:
    """Compaction, expiry of all snapshots but the last, an epoch that wrote the table nothing."""
    rows = pipeline.identifier("back")
    pipeline.spark.sql(
        f"CALL slotbridge.system.rewrite_data_files(table => '{rows}',"
        " options => map('rewrite-all', 'true'))"
    )
    table = back(pipeline)
    commits.forget(table, catalog.own_tags(table)[:-1])
    table.refresh()
    catalog.expire(table, keep=1, older_than_ms=2**60)
    pipeline.restart()
    both(pipeline, 4)
    table = back(pipeline)
    commits.forget(table, catalog.own_tags(table))
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


@pytest.mark.long
def test_a_compacted_table_goes_on_where_the_record_of_epochs_was_lost(
    pipeline: Pipeline,
) -> None:
    """The record then names what the table has now, which may be a compaction without a tag."""
    rows = pipeline.identifier("back")
    pipeline.spark.sql(
        f"CALL slotbridge.system.rewrite_data_files(table => '{rows}',"
        " options => map('rewrite-all', 'true'))"
    )
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('_epochs')} PURGE")
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 4})
    pipeline.apply()
    pipeline.restart()
    assert not pipeline.runner.parking.tables
    both(pipeline, 5)
    assert ids(pipeline) == [1, 2, 3, 5]


@contextlib.contextmanager
def kept(pipeline: Pipeline, *names: str) -> Iterator[Callable[[], None]]:
    """Tables in the catalog's database as they are now, which the answer puts back."""
    found = sqlite3.connect(Path(pipeline.tables.warehouse) / "catalog.db", timeout=patient(30))
    where = "table_namespace = ? AND table_name = ?"
    select = f"SELECT metadata_location FROM iceberg_tables WHERE {where}"
    places = [(pipeline.kafka.topic_prefix, name) for name in names]
    rows = [(*found.execute(select, place).fetchone(), *place) for place in places]

    def put_back() -> None:
        update = f"UPDATE iceberg_tables SET metadata_location = ? WHERE {where}"
        found.executemany(update, rows)
        found.commit()

    with contextlib.closing(found):
        yield put_back


@pytest.mark.long
@pytest.mark.parametrize("idle", [False, True])
def test_a_table_whose_metadata_was_put_back_is_parked_until_it_is_made_anew(
    pipeline: Pipeline, *, idle: bool
) -> None:
    """Its properties tell an older epoch, which is no other than that of a table without events."""
    with pipeline.publisher.transaction() as t:
        t.insert(GOOD, {"id": 4})
    pipeline.apply()
    with kept(pipeline, "back") as put_back:
        both(pipeline, 5)
        put_back()
    assert ids(pipeline) == [1, 2, 3]
    if idle:
        with pytest.raises(OperatorNeeded, match="rolled back or restored"):
            pipeline.stream()
    with pipeline.publisher.transaction() as t:
        for table in (GOOD, BACK):
            t.insert(table, {"id": 6})
    with pytest.raises(OperatorNeeded, match="the table is parked"):
        pipeline.stream()
    assert ids(pipeline) == [1, 2, 3]
    list(operator(pipeline).rebuild([NAME]))
    pipeline.restart()
    both(pipeline, 8)
    pipeline.stream()
    assert ids(pipeline) == [1, 2, 3, 5, 6, 8]
    both(pipeline, 7)
    assert ids(pipeline) == [1, 2, 3, 5, 6, 7, 8]


@pytest.mark.long
def test_a_table_that_was_put_back_by_one_commit_is_parked(pipeline: Pipeline) -> None:
    """It knows the epoch's snapshot then, which is on the epoch's branch."""
    both(pipeline, 4)
    recorded = pipeline.runner.record.tables[NAME].snapshot
    with contextlib.closing(
        sqlite3.connect(Path(pipeline.tables.warehouse) / "catalog.db", timeout=patient(30))
    ) as found:
        found.execute(
            "UPDATE iceberg_tables SET metadata_location = previous_metadata_location"
            " WHERE table_namespace = ? AND table_name = 'back'",
            [pipeline.kafka.topic_prefix],
        )
        found.commit()
    assert ids(pipeline) == [1, 2, 3]
    assert back(pipeline).snapshot(recorded) is not None
    pipeline.restart()
    assert NAME in pipeline.runner.parking.tables


@pytest.mark.long
def test_a_record_may_name_a_compaction(pipeline: Pipeline) -> None:
    """As one that was made after the record of epochs had been lost."""
    pipeline.spark.sql(
        "CALL slotbridge.system.rewrite_data_files(table => "
        f"'{pipeline.identifier('back')}', options => map('rewrite-all', 'true'))"
    )
    pipeline.restart()
    runner, compaction = pipeline.runner, catalog.snapshot_id(back(pipeline))
    record, state = runner.record, runner.states[NAME]
    place = record.tables[NAME]
    assert compaction not in (None, place.snapshot)
    for snapshot, restored in ((compaction, False), (place.snapshot, False), (7, True)):
        named = replace(record, tables={NAME: place._replace(snapshot=snapshot)})
        assert runner.parking._is_restored(state, named) == restored, snapshot


SUMS = {"totals": {"source": NAME, "group_by": ["id"], "sums": {"total": "id"}}}


def totals(pipeline: Pipeline) -> list[int]:
    found = pipeline.spark.table(pipeline.identifier("totals")).collect()
    assert all(row.id == row.total for row in found)
    return sorted(row.id for row in found)


@pytest.fixture
def summed(new_pipeline: NewPipeline) -> Pipeline:
    """As `pipeline`, with sums of the table."""
    made = new_pipeline(parks=True, sums=SUMS)
    made.publisher.announce(GOOD, BACK)
    for number in (1, 2, 3):
        both(made, number)
    assert totals(made) == [1, 2, 3]
    return made


def roll_back_sums(pipeline: Pipeline) -> None:
    table = catalog.load(pipeline.spark, pipeline.identifier("totals"))
    name = pipeline.identifier("totals").partition(".")[2]
    parent = int(table.currentSnapshot().parentId())
    call = f"CALL slotbridge.system.rollback_to_snapshot('{name}', {parent})"
    pipeline.spark.sql(call)


@pytest.mark.long
def test_a_run_on_an_idle_source_tells_of_rollbacks_when_it_maintains_the_tables(
    summed: Pipeline,
) -> None:
    """That of a table, which is parked, and that of its sums, which are computed anew."""
    summed.restart()
    summed.set_tables(maintenance_interval_ms=1_000)
    with Running(summed) as run:
        roll_back_sums(summed)
        eventually(
            lambda: run.failure or totals(summed) == [1, 2, 3],
            what="it computes the sums",
            timeout_s=120,
        )
        run.sound()
        roll_back(summed)
        eventually(lambda: run.failure or NAME in told(run), what="it tells", timeout_s=120)
    run.sound()
    assert totals(summed) == [1, 2, 3]
    assert set(summed.runner.parking.tables) == {NAME, "sums of totals"}


def told(run: Running) -> set[str]:
    """The tables that a run has told to be refused."""
    return {name for report in run.reports for name in report.refused}


@pytest.mark.long
@pytest.mark.parametrize("comes", ["nothing", "of others", "of the source"])
def test_sums_that_were_rolled_back_are_told_and_computed_anew(
    summed: Pipeline, comes: str
) -> None:
    roll_back_sums(summed)
    assert totals(summed) == [1, 2]
    summed.restart()
    if comes != "nothing":
        with summed.publisher.transaction() as t:
            t.insert(GOOD if comes == "of others" else BACK, {"id": 4})
    with capture_logs() as logs:
        reports = summed.stream()
    found = [(line["table"], line["why"]) for line in logs if "computed anew" in line["event"]]
    assert found == [("sums of totals", "it was rolled back")]
    assert totals(summed) == ([1, 2, 3, 4] if comes == "of the source" else [1, 2, 3])
    assert reports and summed.stream() == [], "not again and again"


@pytest.mark.long
def test_sums_whose_metadata_was_put_back_are_computed_anew(summed: Pipeline) -> None:
    with kept(summed, "totals") as put_back:
        both(summed, 4)
        put_back()
    assert totals(summed) == [1, 2, 3]
    summed.stream()
    assert totals(summed) == [1, 2, 3, 4]
    both(summed, 5)
    assert totals(summed) == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_sums_of_a_table_that_was_rolled_back_are_parked_with_it_though_nothing_comes(
    summed: Pipeline,
) -> None:
    roll_back(summed)
    with pytest.raises(OperatorNeeded, match="the table is parked"):
        summed.stream()
    assert set(summed.runner.parking.tables) == {NAME, "sums of totals"}
    assert totals(summed) == [1, 2, 3], "as of the last epoch"
    list(operator(summed).rebuild([NAME]))
    summed.restart()
    both(summed, 4)
    assert not summed.runner.parking.tables
    assert totals(summed) == [1, 2, 3, 4]


@pytest.mark.long
def test_sums_are_not_computed_from_the_rows_of_a_table_that_was_rolled_back(
    summed: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch is made again, which the table had had."""
    with monkeypatch.context() as patch:
        kill(patch, "tables", tables_max=1)
        with pytest.raises(KeyboardInterrupt):
            both(summed, 4)
    assert (ids(summed), totals(summed)) == ([1, 2, 3, 4], [1, 2, 3])
    call(
        summed, "rollback_to_snapshot", int(back(summed).snapshots().iterator().next().snapshotId())
    )
    summed.restart()
    summed.apply()
    assert NAME in summed.runner.parking.tables
    assert totals(summed) == [1, 2, 3], "as of the epoch before"
    list(operator(summed).rebuild([NAME]))
    summed.restart()
    both(summed, 5)
    assert (ids(summed), totals(summed)) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
