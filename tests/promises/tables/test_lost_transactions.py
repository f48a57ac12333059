"""Tables without a record of epochs, where Kafka lacks transactions: nobody is told too much."""

import pytest
import structlog

from schemas.errors import OperatorNeeded
from schemas.events import transaction_topic
from schemas.tables import TableRule
from spark_consumers.epochs import stream
from spark_consumers.epochs.metrics import Metrics
from spark_consumers.iceberg import catalog
from spark_consumers.operations import Operator
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.test_job import make_again
from tests.promises.tables.test_without_record import (
    TABLES,
    bring_second_alone,
    delete_before,
    delete_before_end,
    every,
    lacks,
    without_epochs,
)
from tests.providers.waiting import eventually

ITEMS = SourceTable("items", {"id": ("int4", -1), "b": ("int4", -1)})


@pytest.mark.long
def test_sums_have_the_epoch_behind_one_that_can_not_be_made_again(
    new_pipeline: NewPipeline,
) -> None:
    """It has another number than the last one, which the sums have."""
    pipeline = new_pipeline(
        sums={"total": {"source": "public.items", "group_by": ["b"], "sums": {"of_id": "id"}}},
    )
    pipeline.publisher.announce(ITEMS, TABLES[2])

    def items(*numbers: int) -> None:
        for number in numbers:
            with pipeline.publisher.transaction() as t:
                t.insert(ITEMS, {"id": number, "b": 1})
                if number == 1:
                    t.insert(TABLES[2], {"id": number})

    items(1)
    pipeline.apply()
    items(2)
    pipeline.apply()
    items(4, 8)
    delete_before_end(pipeline, 4)
    without_epochs(pipeline)
    pipeline.apply()
    items(16)
    pipeline.apply()
    assert [row.id for row in pipeline.rows("items")] == [1, 2, 4, 8, 16]
    sums = pipeline.spark.table(pipeline.identifier("total")).collect()
    assert [tuple(row) for row in sums] == [(1, 31, 5)]


@pytest.mark.long
@pytest.mark.parametrize("lost", ["beside a quiet table", "left out", "without a record"])
def test_what_nobody_has_counted_of_a_table_that_is_parked_is_not_judged(
    new_pipeline: NewPipeline, lost: str
) -> None:
    """It is parked by a rule, before the epoch looks whose events were counted."""
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(*TABLES)
    every(pipeline, 1)
    pipeline.apply()
    if lost == "left out":
        pipeline.restart()
        pipeline.set_tables(tables=["public.second", "public.third"])
        every(pipeline, 2)
        pipeline.apply()
        pipeline.publisher.forget(TABLES[0])
        pipeline.set_tables(tables=[])
    elif lost == "without a record":
        every(pipeline, 2)
        pipeline.publisher.forget(TABLES[0])
        delete_before(pipeline, transaction_topic(pipeline.kafka.topic_prefix), -1)
        without_epochs(pipeline)
    pipeline.restart()
    pipeline.set_tables(rules={"public.first": TableRule(kind="history")})
    with pipeline.publisher.transaction() as t:
        for table in TABLES[:2]:
            t.insert(table, {"id": 3})
    assert pipeline.apply().refused
    if lost == "beside a quiet table":
        pipeline.publisher.forget(TABLES[0])
        every(pipeline, 4)
        delete_before_end(pipeline, 3)
        without_epochs(pipeline)
        pipeline.set_tables(rules={})
        pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(rules={})
    assert list(Operator(pipeline.spark, pipeline.settings).rebuild(["public.first"]))
    every(pipeline, 9)
    assert not pipeline.apply().refused
    there = [1, 4, 9] if lost == "beside a quiet table" else [1, 3, 9]
    assert [row.id for row in pipeline.rows("first")] == there
    assert lacks(pipeline, TABLES[0])


def lose_last_transactions(pipeline: Pipeline) -> int:
    """Leave tables without a record, and an empty transaction topic; where the tables are."""
    bring_second_alone(pipeline)
    without_epochs(pipeline)
    make_again(pipeline, transaction_topic(pipeline.kafka.topic_prefix))
    return pipeline.publisher.commit_lsn


@pytest.mark.long
def test_transactions_that_end_before_a_table_are_refused(new_pipeline: NewPipeline) -> None:
    """The topic has lost its last records: a cut before the table's LSN would repeat events."""
    pipeline = new_pipeline()
    last_lsn = lose_last_transactions(pipeline)
    pipeline.publisher.commit_lsn = last_lsn - 150
    with pipeline.publisher.transaction() as t:  # commits before last_lsn
        t.insert(TABLES[0], {"id": 3})
    eventually(lambda: pipeline.step() or pipeline.runner.waiting()[1], what="the END is read")
    with pytest.raises(OperatorNeeded, match="already taken"):
        pipeline.runner.require_redone()
    pipeline.publisher.commit_lsn = last_lsn
    every(pipeline, 4)
    with pytest.raises(OperatorNeeded, match="already taken"):
        pipeline.apply()


@pytest.mark.long
def test_a_gap_between_a_table_and_the_next_transaction_is_refused(
    new_pipeline: NewPipeline,
) -> None:
    """The topic has lost its last records, but has its first ones: it is not retention."""
    pipeline = new_pipeline()
    last_lsn = lose_last_transactions(pipeline)
    pipeline.publisher.commit_lsn = last_lsn - 300
    with pipeline.publisher.transaction():
        pass
    pipeline.publisher.commit_lsn = last_lsn
    every(pipeline, 4)
    with pytest.raises(OperatorNeeded, match="already taken"):
        pipeline.apply()


@pytest.mark.long
def test_an_epoch_that_is_still_to_be_made_again_is_told_though_run_ends_before_the_deadline(
    new_pipeline: NewPipeline,
) -> None:
    pipeline = new_pipeline()
    bring_second_alone(pipeline)
    pipeline.restart()
    table = catalog.load(pipeline.spark, pipeline.identifier("second"))
    ahead = {catalog.EPOCH: "3", catalog.COMMIT_LSN: str(pipeline.publisher.commit_lsn + 50)}
    catalog.set_properties(table, ahead)
    with pytest.raises(OperatorNeeded, match="already taken"):
        pipeline.stream(idle_s=1)


@pytest.mark.long
@pytest.mark.parametrize("at_one_lsn", [False, True])
def test_waits_get_no_answer_before_the_tables_are_read_again(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch, *, at_one_lsn: bool
) -> None:
    """Kafka has no transaction that tells what they lack."""
    pipeline = new_pipeline(tables=[f"public.{table.name}" for table in TABLES])
    pipeline.publisher.announce(*TABLES, ITEMS)
    every(pipeline, 1)
    pipeline.apply()
    if not at_one_lsn:
        with pipeline.publisher.transaction() as t:
            t.insert(TABLES[1], {"id": 2})
        pipeline.apply()
    every(pipeline, 3)
    delete_before(pipeline, transaction_topic(pipeline.kafka.topic_prefix), -1)
    without_epochs(pipeline)
    told: list[int] = []
    monkeypatch.setattr(Metrics, "read_to", lambda _self, offset: told.append(offset))
    monkeypatch.setattr(stream, "_REDO_DEADLINE_S", 1.0)
    with structlog.testing.capture_logs() as logs:
        assert not pipeline.stream(idle_s=1 if at_one_lsn else 5)
    told_of = [one for one in logs if "reads all tables again" in one["event"]]
    assert len(told_of) == (0 if at_one_lsn else 1)
    assert not told
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "b": 1})
    assert len(pipeline.stream()) == 1
    assert told
    assert [row.id for row in pipeline.rows("first")] == [1, 3]
