"""Tables without events beside others that are busy: Kafka may delete what brings them nothing."""

import contextlib
from threading import Event
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from schemas.errors import ExitCode, OperatorNeeded, Retryable
from schemas.events import transaction_topic
from spark_consumers.audit.cut import Cuts
from spark_consumers.epochs.ledger import EpochRecord, Ledger
from spark_consumers.kafka.transaction_topic import TransactionTopic
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.providers.waiting import patient

QUIET = SourceTable("quiet", {"id": ("int4", -1)})
BUSY = SourceTable("busy", {"id": ("int4", -1)})
NOTED_MS = "spark_consumers.epochs.quiet.QUIET_MS"


@pytest.fixture
def pipeline(new_pipeline: NewPipeline) -> Pipeline:
    """With one row in the only table that is followed."""
    made = new_pipeline(tables=["public.quiet"])
    made.publisher.announce(QUIET, BUSY)
    insert(made, QUIET, 1)
    made.stream()
    return made


def insert(pipeline: Pipeline, table: SourceTable, *numbers: int) -> None:
    for number in numbers:
        with pipeline.publisher.transaction() as t:
            t.insert(table, {"id": number})


def forget(pipeline: Pipeline) -> None:
    """Delete all records of the transaction topic, as retention does."""
    topic = transaction_topic(pipeline.kafka.topic_prefix)
    admin = AdminClient({"bootstrap.servers": pipeline.kafka.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(topic, 0, -1)]).values():
        future.result(patient(30))


def epochs(pipeline: Pipeline) -> list[EpochRecord]:
    return Ledger(pipeline.kafka.topic_prefix, pipeline.tables).all(pipeline.spark)


@pytest.mark.long
@pytest.mark.parametrize("once", [False, True])
def test_quiet_tables_go_on_after_kafka_has_deleted_what_brought_them_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, *, once: bool
) -> None:
    monkeypatch.setattr(NOTED_MS, 0, raising=False)
    insert(pipeline, BUSY, 1, 2, 3)
    pipeline.stream(once=once)
    forget(pipeline)
    insert(pipeline, BUSY, 4)
    pipeline.stream(once=once)
    forget(pipeline)
    insert(pipeline, QUIET, 2)
    (report,) = [found for found in pipeline.stream(once=once) if found.tables]
    assert report.transactions == 1
    assert [row.id for row in pipeline.rows("quiet")] == [1, 2]
    first, second, third, last = epochs(pipeline)
    assert [*first.tables.values()] == [*second.tables.values()] == [*third.tables.values()]
    assert first.commit_lsn + 300 == second.commit_lsn == third.commit_lsn - 100
    assert last.commit_lsn == pipeline.publisher.commit_lsn


@pytest.mark.long
def test_a_stop_for_longer_than_retention_stays_an_error(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NOTED_MS, 0, raising=False)
    insert(pipeline, BUSY, 1)
    pipeline.stream()
    insert(pipeline, QUIET, 2)
    insert(pipeline, BUSY, 2)
    forget(pipeline)
    with pytest.raises(OperatorNeeded, match="Kafka has deleted events"):
        pipeline.stream()


@pytest.mark.long
def test_tables_that_were_quiet_for_a_moment_get_no_epoch_of_it(pipeline: Pipeline) -> None:
    insert(pipeline, BUSY, 1, 2)
    assert pipeline.stream() == []
    assert len(epochs(pipeline)) == 1


@pytest.mark.long
def test_an_audit_does_not_judge_what_kafka_has_deleted(pipeline: Pipeline) -> None:
    """The deleted transaction may be the last one before the snapshot, by which epochs are cut."""
    insert(pipeline, QUIET, 2)
    lsn = pipeline.publisher.commit_lsn + 1
    forget(pipeline)
    cuts = Cuts(pipeline.spark, pipeline.settings, lambda _: True, Event())
    deleted = pytest.raises(Retryable, match="Kafka has deleted transactions")
    with contextlib.closing(cuts), deleted as raised:
        cuts._target(lsn)
    assert raised.value.exit_code is ExitCode.NOT_JUDGED
    assert "retention.ms" in raised.value.hint


@pytest.mark.long
@pytest.mark.parametrize("after", ["first", "between"])
def test_an_audit_does_not_judge_what_kafka_deletes_while_it_looks(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    insert(pipeline, QUIET, 2)
    lsn = pipeline.publisher.commit_lsn + 1
    whole = getattr(TransactionTopic, after)

    def then_deleted(*arguments: Any) -> Any:
        answer = whole(*arguments)
        forget(pipeline)
        return answer

    monkeypatch.setattr(TransactionTopic, after, then_deleted)
    cuts = Cuts(pipeline.spark, pipeline.settings, lambda _: True, Event())
    deleted = pytest.raises(Retryable, match="Kafka has deleted transactions")
    with contextlib.closing(cuts), deleted as raised:
        cuts._target(lsn)
    assert raised.value.exit_code is ExitCode.NOT_JUDGED
