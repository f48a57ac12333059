"""Tables of sums whose source is made anew, and whose settings are changed."""

from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.errors import OperatorNeeded
from schemas.events import schema_topic
from spark_consumers.epochs.metrics import Metrics
from spark_consumers.epochs.stream import show_behind
from spark_consumers.iceberg import catalog
from spark_consumers.operations import Operator
from tests.marks import long_but
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.test_without_record import put_back
from tests.providers.waiting import patient

LEFT = SourceTable("left_one", {"id": ("int4", -1), "v": ("int4", -1), "w": ("int4", -1)})
RIGHT = SourceTable("right_one", {"id": ("int4", -1), "v": ("int4", -1), "w": ("int4", -1)})


def sums(source: str, **columns: str) -> dict[str, Any]:
    return {"totals": {"source": f"public.{source}", "group_by": ["id"], "sums": columns}}


def both(pipeline: Pipeline, number: int) -> None:
    """One epoch with a row of each table."""
    with pipeline.publisher.transaction() as t:
        for factor, table in ((1, LEFT), (100, RIGHT)):
            t.insert(table, {"id": number, "v": factor * number, "w": factor * number * 10})
    pipeline.apply()


def totals(pipeline: Pipeline, *columns: str) -> list[tuple[int, ...]]:
    frame = pipeline.spark.table(pipeline.identifier("totals")).select("id", *columns)
    return sorted(tuple(row) for row in frame.collect())


def begun(new_pipeline: NewPipeline, **settings: Any) -> Pipeline:
    pipeline = new_pipeline(sums=sums("left_one", total="v", other="w"), **settings)
    pipeline.publisher.announce(LEFT, RIGHT)
    for number in (1, 2):
        both(pipeline, number)
    assert totals(pipeline, "total", "other", "_rows") == [(1, 1, 10, 1), (2, 2, 20, 1)]
    return pipeline


@pytest.mark.long
def test_sums_of_a_table_that_was_dropped_are_those_of_the_table_made_anew(
    new_pipeline: NewPipeline,
) -> None:
    pipeline = begun(new_pipeline)
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('left_one')} PURGE")
    pipeline.restart()
    both(pipeline, 3)
    assert [row.id for row in pipeline.rows("left_one")] == [1, 2, 3]
    assert totals(pipeline, "total", "_rows") == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]


@pytest.mark.long
@pytest.mark.parametrize(
    "others",
    [
        {"v": ("int4", -1), "renamed": ("int4", -1)},
        {"v": ("int8", -1), "w": ("int4", -1), "added": ("text", -1)},
    ],
    ids=["one renamed", "one widened, one added"],
)
def test_sums_lose_the_rows_that_were_written_before_their_table_got_other_columns(
    new_pipeline: NewPipeline, others: dict[str, tuple[str, int]]
) -> None:
    """The schema topic was compacted meanwhile, so that the epoch has one shape."""
    before = SourceTable("left_one", LEFT.columns, oid=1)
    after = SourceTable("left_one", {"id": ("int4", -1), **others}, oid=1)
    pipeline = new_pipeline(sums=sums("left_one", total="v"))
    pipeline.publisher.announce(before)
    with pipeline.publisher.transaction() as t:
        for number in (1, 2, 3):
            t.insert(before, {"id": number, "v": number, "w": number})
    pipeline.apply()
    compacted = [TopicPartition(schema_topic(pipeline.kafka.topic_prefix), 0, -1)]
    admin = AdminClient({"bootstrap.servers": pipeline.kafka.bootstrap_servers})
    for future in admin.delete_records(compacted).values():
        future.result(patient(30))
    pipeline.publisher.reshape(after)
    pipeline.restart()
    row = dict.fromkeys(after.columns)
    with pipeline.publisher.transaction() as t:
        t.update(after, row | {"id": 1, "v": 9})
        t.delete(after, row | {"id": 3})
    pipeline.apply()
    assert [*pipeline.rows("left_one")[0].asDict()] == [*after.columns]
    assert totals(pipeline, "total", "_rows") == [(1, 9, 1), (2, 2, 1)]


@pytest.mark.parametrize("comes", long_but("nothing", ["an epoch", "nothing"]))
@pytest.mark.parametrize("what", long_but("the source", ["the columns", "the source"]))
def test_sums_with_other_settings_are_computed_anew(
    new_pipeline: NewPipeline, what: str, comes: str
) -> None:
    begun(new_pipeline)
    source, columns = "left_one", {"total": "w", "other": "v"}
    if what == "the source":
        source, columns = "right_one", {"total": "v", "other": "w"}
    changed = new_pipeline(sums=sums(source, **columns))
    factor = 10 if what == "the columns" else 100
    numbers = [1, 2]
    if comes == "an epoch":
        numbers.append(3)
        changed.publisher.commit_lsn = 1200
        both(changed, 3)
    else:
        changed.stream()
    assert totals(changed, "total", "_rows") == [(n, n * factor, 1) for n in numbers]


@pytest.mark.long
def test_an_update_with_which_a_table_returns_is_in_its_sums_once(
    new_pipeline: NewPipeline,
) -> None:
    """The table was parked at the last epoch's own LSN, whose record does not have it."""
    pipeline = begun(new_pipeline, parks=True)
    identifier = pipeline.identifier("left_one")
    table = catalog.load(pipeline.spark, identifier)
    before = int(table.currentSnapshot().parentId())
    name = identifier.partition(".")[2]
    pipeline.spark.sql(f"CALL slotbridge.system.rollback_to_snapshot('{name}', {before})")
    with pytest.raises(OperatorNeeded, match="the table is parked"):
        pipeline.stream()
    list(Operator(pipeline.spark, pipeline.settings).rebuild(["public.left_one"]))
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.update(LEFT, {"id": 1, "v": 7, "w": 70})
    pipeline.stream()
    assert totals(pipeline, "total", "other", "_rows") == [(1, 7, 70, 1), (2, 2, 20, 1)]


@pytest.mark.long
def test_sums_that_were_not_put_back_with_the_other_tables_have_the_epochs_behind_theirs(
    new_pipeline: NewPipeline,
) -> None:
    """Else these have numbers of epochs that the sums have had."""
    pipeline = begun(new_pipeline)
    both(pipeline, 3)
    pipeline.restart()
    for name in ("left_one", "right_one"):
        put_back(pipeline, name, 2)
    epochs = catalog.load(pipeline.spark, pipeline.identifier("_epochs"))
    first = catalog.metadata(epochs)["snapshots"][0]["snapshot-id"]
    place = pipeline.identifier("_epochs").partition(".")[2]
    pipeline.spark.sql(f"CALL slotbridge.system.set_current_snapshot('{place}', {first})")
    for number in (4, 5):
        both(pipeline, number)
    numbers = (1, 2, 3, 4, 5)
    assert [row.id for row in pipeline.rows("left_one")] == [*numbers]
    assert totals(pipeline, "total", "_rows") == [(number, number, 1) for number in numbers]


@pytest.mark.long
def test_sums_that_the_settings_left_out_for_a_while_are_computed_anew(
    new_pipeline: NewPipeline,
) -> None:
    pipeline = begun(new_pipeline)
    settings = pipeline.tables.sums
    pipeline.set_tables(sums={})
    pipeline.restart()
    metrics = Metrics()
    show_behind(metrics, pipeline.runner)
    assert not metrics.state.parked, "nobody wants them"
    both(pipeline, 3)
    pipeline.set_tables(sums=settings)
    pipeline.restart()
    with pipeline.publisher.transaction() as t:
        t.insert(RIGHT, {"id": 4, "v": 4, "w": 4})
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.insert(LEFT, {"id": 4, "v": 4, "w": 40})
    pipeline.apply()
    assert totals(pipeline, "total", "_rows") == [(number, number, 1) for number in (1, 2, 3, 4)]
    with pipeline.publisher.transaction() as t:
        t.insert(RIGHT, {"id": 5, "v": 5, "w": 5})
    pipeline.apply()
    pipeline.restart()
    assert not pipeline.runner.parking.sums_anew, "an epoch without events is no reason"
