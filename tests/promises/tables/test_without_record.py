"""Tables without a record of epochs, each at another commit LSN: what each lacks is counted."""

from collections import Counter
from unittest.mock import create_autospec

import pytest
import structlog
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.errors import OperatorNeeded
from schemas.events import transaction_topic
from schemas.tables import TablesSettings
from spark_consumers.epochs import incomplete_tables
from spark_consumers.epochs.parking import Parking
from spark_consumers.events.shape import CommitPosition
from spark_consumers.iceberg import catalog, commits
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.shapes import DeadLetters, Lacking
from spark_consumers.kafka.transaction_topic import TransactionTopic
from spark_consumers.kafka.transactions import Cut, EndEvent, Transactions
from spark_consumers.operations import Operator
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.test_job import make_again
from tests.providers.waiting import eventually, patient

TABLES = [SourceTable(name, {"id": ("int4", -1)}) for name in ("first", "second", "third")]


def every(pipeline: Pipeline, number: int) -> None:
    with pipeline.publisher.transaction() as t:
        for table in TABLES:
            t.insert(table, {"id": number})


def bring_second_alone(pipeline: Pipeline) -> None:
    """An epoch that brings rows to every table, and one for a single table."""
    pipeline.publisher.announce(*TABLES)
    every(pipeline, 1)
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.insert(TABLES[1], {"id": 2})
    pipeline.apply()


def put_back(pipeline: Pipeline, name: str, epochs: int) -> None:
    """Make a table what it was some epochs ago, as one of a restored catalog is."""
    table = catalog.load(pipeline.spark, pipeline.identifier(name))
    tags = catalog.own_tags(table)
    gone, last = tags[-epochs:], tags[-epochs - 1]
    snapshot = catalog.ref_snapshot(table, last)
    number = int(catalog.properties(table)[catalog.EPOCH]) - epochs
    place = pipeline.identifier(name).partition(".")[2]
    pipeline.spark.sql(f"CALL slotbridge.system.set_current_snapshot('{place}', {snapshot})")
    table.refresh()
    commits.forget(table, gone)
    values = {catalog.EPOCH: str(number), catalog.COMMIT_LSN: str(catalog.tag_lsn(last))}
    catalog.set_properties(table, values)


def without_epochs(pipeline: Pipeline) -> None:
    """Lose the record of epochs between two runs."""
    pipeline.restart()
    pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('_epochs')} PURGE")


def at_one_lsn(pipeline: Pipeline) -> None:
    """Leave all tables at the first epoch, and no record of epochs."""
    pipeline.publisher.announce(*TABLES)
    every(pipeline, 1)
    pipeline.apply()
    without_epochs(pipeline)


def at_three_lsns(pipeline: Pipeline) -> None:
    """Leave each table at an epoch of its own, and no record of epochs."""
    pipeline.publisher.announce(*TABLES)
    for number in (1, 2, 3):
        every(pipeline, number)
        pipeline.apply()
    without_epochs(pipeline)
    put_back(pipeline, "first", 2)
    put_back(pipeline, "second", 1)


@pytest.mark.long
def test_tables_at_three_lsns_without_a_record_lack_nothing(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_consumers.epochs.event_reader.ARRIVAL_DEADLINE_S", 0.5)
    pipeline = new_pipeline(parks=True)
    at_three_lsns(pipeline)
    pipeline.step()
    assert not pipeline.runner.parking.tables
    every(pipeline, 4)
    pipeline.apply()
    assert not pipeline.runner.parking.tables
    for table in TABLES:
        assert [row.id for row in pipeline.rows(table.name)] == [1, 2, 3, 4]


@pytest.mark.long
def test_events_of_transactions_that_kafka_has_deleted_are_not_judged(
    new_pipeline: NewPipeline,
) -> None:
    """One table was put back to before them, another to where Kafka has all that comes next."""
    pipeline = new_pipeline()
    at_three_lsns(pipeline)
    delete_before_end(pipeline, 2)
    with structlog.testing.capture_logs() as told:
        pipeline.step()
    lines = [one for one in told if "a table is incomplete" in one["event"]]
    assert [line["table"] for line in lines] == ["public.first"]
    assert [lacks(pipeline, table) for table in TABLES] == [True, False, False]
    assert [row.id for row in pipeline.rows("first")] == [1, 2, 3]


@pytest.mark.long
def test_tables_at_one_lsn_without_a_record_are_judged_all(new_pipeline: NewPipeline) -> None:
    """Also one that the first transaction which Kafka still has brings nothing."""
    pipeline = new_pipeline()
    at_one_lsn(pipeline)
    for table, number in ((TABLES[1], 2), (TABLES[0], 3)):
        with pipeline.publisher.transaction() as t:
            t.insert(table, {"id": number})
    delete_before_end(pipeline, 3)
    with structlog.testing.capture_logs() as told:
        pipeline.apply()
    lines = [one for one in told if "a table is incomplete" in one["event"]]
    assert [line["table"] for line in lines] == ["public.first", "public.second", "public.third"]
    assert all(lacks(pipeline, table) for table in TABLES)
    assert [row.id for row in pipeline.rows("first")] == [1, 3]
    assert [row.id for row in pipeline.rows("second")] == [1, 2], "its topic has the event"


@pytest.mark.long
def test_tables_are_not_whole_where_the_first_transaction_comes_behind_a_gap(
    new_pipeline: NewPipeline,
) -> None:
    """The topic was made again: it begins at offset 0, and lacks what came before."""
    pipeline = new_pipeline()
    at_one_lsn(pipeline)
    every(pipeline, 2)
    make_again(pipeline, transaction_topic(pipeline.kafka.topic_prefix))
    every(pipeline, 3)
    with structlog.testing.capture_logs() as told:
        pipeline.apply()
    assert [one for one in told if "a table is incomplete" in one["event"]]
    assert [one for one in told if "deleted and created again since the last" in one["event"]]
    assert all(lacks(pipeline, table) for table in TABLES)


@pytest.mark.long
def test_the_way_on_after_deleted_transactions_is_the_one_that_the_error_names(
    new_pipeline: NewPipeline,
) -> None:
    pipeline = new_pipeline()
    pipeline.publisher.announce(*TABLES)
    every(pipeline, 1)
    pipeline.apply()
    every(pipeline, 2)
    every(pipeline, 3)
    delete_before_end(pipeline, 3)
    with pytest.raises(OperatorNeeded, match="deleted events that the tables have not read") as no:
        pipeline.step()
    assert "drop the table `_epochs` and start" in no.value.hint
    without_epochs(pipeline)
    pipeline.apply()
    assert all(lacks(pipeline, table) for table in TABLES)
    assert list(Operator(pipeline.spark, pipeline.settings).rebuild(["public.first"]))
    pipeline.restart()
    while pipeline.runner.works_alone:
        pipeline.step()
    for table in TABLES:
        assert [row.id for row in pipeline.rows(table.name)] == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("forgotten", [False, True])
def test_the_way_on_leads_on_where_a_table_was_quiet_or_its_topic_has_lost_its_beginning(
    new_pipeline: NewPipeline, *, forgotten: bool
) -> None:
    """Retention removes the records of the tables as it removes those of their transactions."""
    pipeline = new_pipeline(parks=True)
    bring_second_alone(pipeline)
    every(pipeline, 3)
    if forgotten:
        pipeline.publisher.forget(TABLES[0])
    every(pipeline, 4)
    delete_before_end(pipeline, 4)
    with pytest.raises(OperatorNeeded, match="deleted events that the tables have not read"):
        pipeline.step()
    without_epochs(pipeline)
    assert not pipeline.apply().refused
    first = [1, 4] if forgotten else [1, 3, 4]
    assert [row.id for row in pipeline.rows("first")] == first
    assert [row.id for row in pipeline.rows("second")] == [1, 2, 3, 4]
    assert all(lacks(pipeline, table) for table in TABLES)


@pytest.mark.long
def test_without_a_record_and_transactions_nothing_is_done_until_the_next_one(
    new_pipeline: NewPipeline,
) -> None:
    pipeline = new_pipeline()
    bring_second_alone(pipeline)
    delete_before(pipeline, transaction_topic(pipeline.kafka.topic_prefix), -1)
    without_epochs(pipeline)
    with structlog.testing.capture_logs() as told:
        assert not pipeline.stream(once=True)
    assert [one for one in told if "the next one reads all tables again" in one["event"]]
    every(pipeline, 3)
    assert len(pipeline.stream(once=True)) == 1
    assert [row.id for row in pipeline.rows("first")] == [1, 3]
    assert [row.id for row in pipeline.rows("second")] == [1, 2, 3]


@pytest.mark.long
def test_a_table_that_was_left_out_gets_all_that_kafka_has(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(*TABLES)
    every(pipeline, 1)
    pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(tables=["public.second", "public.third"])
    every(pipeline, 2)
    pipeline.apply()
    pipeline.restart()
    pipeline.set_tables(tables=[])
    pipeline.publisher.forget(TABLES[0])
    every(pipeline, 3)
    assert not pipeline.apply().refused
    assert [row.id for row in pipeline.rows("first")] == [1, 3]
    assert lacks(pipeline, TABLES[0])


def lacks(pipeline: Pipeline, table: SourceTable) -> bool:
    """Whether a table says that nobody has counted what it got."""
    incomplete = pipeline.note(table.name).incomplete
    return incomplete is not None and "nobody has counted" in incomplete.why


def delete_before_end(pipeline: Pipeline, number: int) -> None:
    """Delete what comes before a transaction's END in its topic, as retention does.

    Brokers show a transaction a moment after its commit.
    """
    topic = TransactionTopic(pipeline.kafka, TopicOffsets(pipeline.kafka), lambda _: True)

    def read() -> list[EndEvent]:
        found = list(topic.ends(topic.between(pipeline.spark, 0, topic.stable()), -1))
        return found if len(found) >= number else []

    ends = eventually(read, what=f"the topic shows {number} ENDs")
    delete_before(pipeline, topic.name, ends[number - 1].offset)


def delete_before(pipeline: Pipeline, topic: str, offset: int) -> None:
    """Delete the records of a topic's first partition before an offset, -1: all of them."""
    admin = AdminClient({"bootstrap.servers": pipeline.kafka.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(topic, 0, offset)]).values():
        future.result(patient(30))


def test_dead_letters_that_a_table_has_come_past_are_over() -> None:
    letters = [
        Lacking(f"public.{name}", CommitPosition(lsn, 0), "too large")
        for name in ("first", "second")
        for lsn in (150, 250)
    ]
    known = create_autospec(DeadLetters, instance=True)
    known.between.return_value = letters
    parking = create_autospec(Parking, instance=True)
    parking.positions.return_value = {}
    parking.tables = {}
    parking.held.return_value = False
    had = {"public.first": 100, "public.second": 200}
    settings = TablesSettings(warehouse="/w", on_bad_event="quarantine")
    found = incomplete_tables.refused_by_kafka(known, 100, Cut(300, 7), parking, had, settings)
    assert found == {"public.first": 2, "public.second": 1}


def test_what_a_table_has_had_is_not_counted() -> None:
    log = Transactions(None, -1)
    log.take([EndEvent(n, 100 * n, n, n, Counter(a=1, c=2)) for n in range(1, 5)], 100)
    cut = log.upto(300)
    assert cut is not None
    log.leave_out(cut, {"a": -1, "c": 200, "other": 300})
    assert cut.counts == {"a": 3, "c": 2}
