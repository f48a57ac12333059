"""The streaming job: tables that appear while it runs, its metrics, its ends."""

import contextlib
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import structlog
from confluent_kafka.admin import AdminClient
from pyspark.errors import PySparkException

from schemas.errors import BadInput, OperatorNeeded, Retryable, SetupError
from schemas.events import (
    dead_topic,
    divergence_topic,
    schema_topic,
    transaction_topic,
)
from services.testbed.ports import free_port
from spark_consumers.audit.cut import Cuts
from spark_consumers.blame import blame
from spark_consumers.epochs import job
from spark_consumers.epochs.epoch_runner import EpochRunner
from spark_consumers.epochs.report import EpochReport
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.transaction_topic import TransactionTopic
from spark_consumers.restore.restoration import restore
from spark_consumers.status import read_run_status
from spark_consumers.verify.as_of import verify_as_of
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable
from tests.providers.waiting import eventually, patient
from tests.spark_consumers.test_failures import LOST

ONE = SourceTable("one", {"id": ("int4", -1), "v": ("text", -1)})
TWO = SourceTable("two", {"id": ("int4", -1), "v": ("text", -1)}, schema="other")
THREE = SourceTable("three", {"id": ("int4", -1)})
WIDER = SourceTable("three", {"id": ("int4", -1), "v": ("text", -1)})


class Running:
    """A job in a thread."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._stop = threading.Event()
        self.reports: list[EpochReport] = []
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(pipeline,))

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=patient(300))
        assert not self._thread.is_alive()

    @property
    def events(self) -> int:
        """How many events it has applied."""
        return sum(table.events for report in self.reports for table in report.tables.values())

    def _run(self, pipeline: Pipeline) -> None:
        try:
            job.run_epochs(
                pipeline.spark, pipeline.settings, report=self.reports.append, stop=self._stop
            )
        except Exception as error:
            self.failure = error

    def sound(self) -> None:
        """Raise what it ended with, with its own trace."""
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def running(pipeline: Pipeline) -> Iterator[Running]:
    with Running(pipeline) as run:
        yield run


def insert(pipeline: Pipeline, table: SourceTable, *numbers: int) -> None:
    with pipeline.publisher.transaction() as t:
        for number in numbers:
            t.insert(table, dict.fromkeys(table.columns, number))


@pytest.mark.long
def test_tables_appear_while_it_runs_and_a_restart_goes_on(
    pipeline: Pipeline, running: Running
) -> None:
    pipeline.publisher.announce(ONE)
    insert(pipeline, ONE, 1, 2)
    eventually(lambda: running.failure or running.events == 2, what="one arrives", timeout_s=60)
    pipeline.publisher.announce(TWO)
    insert(pipeline, TWO, 3)
    eventually(lambda: running.failure or running.events == 3, what="two arrives", timeout_s=60)
    running.__exit__()
    running.sound()
    assert [tuple(row) for row in pipeline.rows("one")] == [(1, "1"), (2, "2")]
    assert [tuple(row) for row in pipeline.rows("other__two")] == [(3, "3")]
    insert(pipeline, ONE, 4)
    reports = pipeline.stream()
    assert [list(report.tables) for report in reports] == [["public.one"]]
    assert reports[0].document()["events"] == 1
    assert len(pipeline.rows("one")) == 3


def read(port: int) -> dict[str, float]:
    """The metrics that are served there."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


@pytest.mark.long
def test_an_epoch_tells_how_far_it_is_before_it_is_there(new_pipeline: NewPipeline) -> None:
    """A first fill is one epoch, which may take long: its events and tables are counted."""
    port = free_port()
    pipeline = new_pipeline(http_port=port)
    for table in (ONE, TWO, THREE):
        pipeline.publisher.announce(table)
        insert(pipeline, table, 1, 2)
    seen: set[tuple[float, float]] = set()
    with Running(pipeline) as running:

        def arrived() -> bool:
            with contextlib.suppress(OSError):
                now = read(port)
                seen.add((now["slottables_epoch_events"], now["slottables_epoch_tables"]))
                seen.add(
                    (now["slottables_epoch_events_read"], now["slottables_epoch_tables_written"])
                )
            return bool(running.failure) or running.events == 6

        eventually(arrived, what="three tables arrive", interval_s=0.01)
        after = read(port)
    running.sound()
    assert (6, 3) in seen
    assert {name for name, value in after.items() if "slottables_epoch_" in name and value} <= {
        name for name in after if "seconds" in name
    }


@pytest.mark.long
def test_metrics_tell_where_the_tables_are(new_pipeline: NewPipeline) -> None:
    port = free_port()
    pipeline = new_pipeline(http_port=port)
    pipeline.publisher.announce(ONE)
    insert(pipeline, ONE, 1, 2)
    with Running(pipeline) as running:
        eventually(lambda: running.failure or running.events == 2, what="one arrives")
        with pipeline.publisher.transaction() as t:
            t.insert(ONE, {"id": 3, "v": "3"})
            t.delete(ONE, {"id": 1, "v": "1"})
        eventually(lambda: running.failure or running.events == 4, what="more arrives")
        with pytest.raises(SetupError, match="can't be bound"):
            pipeline.stream()
        what = "Spark has told of both micro-batches"
        eventually(lambda: read(port)["slottables_transaction_records_total"] >= 4, what=what)
        values = read(port)
    running.sound()
    assert values["slottables_epoch"] == len(running.reports)
    assert values["slottables_commit_lsn"] == pipeline.publisher.commit_lsn
    assert values["slottables_events_total"] == 4
    assert values["slottables_transactions_total"] == 2
    assert values["slottables_epoch_seconds_count"] == len(running.reports)
    assert values["slottables_batch_seconds_count"] >= 2
    assert values['slottables_batch_phase_seconds_total{phase="addBatch"}'] > 0
    names = ("lag_bytes", "lag_seconds", "offsets_behind", "duplicates_total", "quarantined_total")
    for name in names:
        assert values[f"slottables_{name}"] == 0


@pytest.mark.long
def test_the_status_after_a_start_is_that_of_the_last_epoch(new_pipeline: NewPipeline) -> None:
    """Also if no transaction comes any more."""
    pipeline = new_pipeline(http_port=free_port())
    pipeline.publisher.announce(ONE)
    insert(pipeline, ONE, 1, 2)
    reports = pipeline.stream()
    tables = pipeline.tables.model_copy(update={"http_port": free_port()})
    pipeline.settings = pipeline.settings.model_copy(update={"tables": tables})
    with Running(pipeline) as running:

        def known() -> bool:
            running.sound()
            with contextlib.suppress(Retryable):
                return read_run_status(tables).lag_bytes is not None
            return False

        eventually(known, what="the lag is known", timeout_s=60)
        status = read_run_status(tables)
    running.sound()
    assert (status.epoch, status.commit_lsn) == (reports[-1].epoch, pipeline.publisher.commit_lsn)
    assert (status.lag_bytes, status.lag_seconds) == (0, 0)
    assert status.events_since_start == {"public.one": 0}


@pytest.mark.long
def test_only_the_configured_tables_and_a_refused_record_ends_it(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(tables=("public.one", "public.three"))
    pipeline.publisher.announce(ONE, TWO)
    insert(pipeline, ONE, 1)
    insert(pipeline, TWO, 1)
    assert [list(report.tables) for report in pipeline.stream()] == [["public.one"]]
    pipeline.publisher.announce(THREE)
    insert(pipeline, THREE, 1)
    with pipeline.publisher.transaction() as t:
        t.insert(ONE, {"id": 2**40, "v": "secret"}, partition=1)
    with pytest.raises(BadInput, match=r"public\.one, partition 1") as raised:
        pipeline.stream()
    assert "secret" not in str(raised.value)


@pytest.mark.long
def test_it_stops_between_two_batches_under_load(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ONE)
    for start in range(0, 2000, 25):
        insert(pipeline, ONE, *range(start, start + 25))
    tables = pipeline.tables.model_copy(update={"offsets_per_trigger_max": 50})
    pipeline.settings = pipeline.settings.model_copy(update={"tables": tables})
    with Running(pipeline) as running:
        eventually(lambda: running.failure or running.reports, what="a batch", timeout_s=60)
    running.sound()
    taken = running.events
    assert 0 < taken < 2000
    assert len(pipeline.rows("one")) == taken


@pytest.mark.long
@pytest.mark.parametrize(
    ("said", "told"),
    [("CommitFailedException: the table has changed", "another writer"), (LOST[0], "executors")],
    ids=["another writer", "lost executors"],
)
def test_meetings_with_another_writer_end_it_only_when_nothing_comes_between(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, said: str, told: str
) -> None:
    step = EpochRunner.step
    met, good = 0, True

    def meets(runner: EpochRunner) -> EpochReport | None:
        """Every epoch is begun twice: the first time, Spark fails."""
        nonlocal met, good
        report = step(runner) if not good else None
        if report is not None:
            good = True
        elif good and runner.waiting()[0]:
            met, good = met + 1, False
            raise PySparkException(said)
        return report

    monkeypatch.setattr(EpochRunner, "step", meets)
    tables = pipeline.tables.model_copy(update={"offsets_per_trigger_max": 1})
    pipeline.settings = pipeline.settings.model_copy(update={"tables": tables})
    pipeline.publisher.announce(ONE)
    for number in range(6):
        insert(pipeline, ONE, number)
    assert len(pipeline.stream()) == met == 6

    def always(runner: EpochRunner) -> None:
        nonlocal met
        if not runner.waiting()[0]:
            return
        met += 1
        raise PySparkException(said)

    monkeypatch.setattr(EpochRunner, "step", always)
    insert(pipeline, ONE, 8)
    with pytest.raises(Retryable, match=told):
        pipeline.stream()
    assert met == 6 + 6


def make_again(pipeline: Pipeline, name: str) -> None:
    """Delete one of the publisher's own topics and create it again."""
    admin = AdminClient({"bootstrap.servers": pipeline.kafka.bootstrap_servers})
    admin.delete_topics([name])[name].result(patient(30))
    eventually(
        lambda: name not in admin.list_topics(timeout=patient(20)).topics,
        what="it is gone",
        timeout_s=60,
    )
    pipeline.publisher.announce()
    eventually(lambda: name in admin.list_topics(timeout=patient(20)).topics, what="it is there")


@pytest.mark.long
@pytest.mark.parametrize("restart", [True, False])
def test_a_transaction_topic_that_was_made_again_is_refused(
    pipeline: Pipeline, *, restart: bool
) -> None:
    """Its offsets go on where the former ones were: the transactions before would be left out."""
    pipeline.publisher.announce(THREE)
    with pipeline.publisher.transaction() as t:
        t.insert(THREE, {"id": 1})
    pipeline.apply()
    if restart:
        pipeline.restart()
    make_again(pipeline, transaction_topic(pipeline.kafka.topic_prefix))
    for number in (2, 3, 4):
        with pipeline.publisher.transaction() as t:
            t.insert(THREE, {"id": number})
    with pytest.raises(OperatorNeeded, match="deleted and made again"):
        pipeline.apply()
    assert [row["id"] for row in pipeline.rows("three")] == [1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("topic", "restart"), [(schema_topic, False), (dead_topic, True), (divergence_topic, True)]
)
def test_a_small_topic_that_was_made_again_is_refused(
    new_pipeline: NewPipeline, topic: Callable[[str], str], *, restart: bool
) -> None:
    """The command ends: no table is parked for it, as none is at fault."""
    pipeline = new_pipeline(parks=True)
    pipeline.publisher.announce(THREE)
    insert(pipeline, THREE, 1)
    pipeline.apply()
    name = topic(pipeline.kafka.topic_prefix)
    make_again(pipeline, name)
    insert(pipeline, THREE, 2)
    if restart:
        with pytest.raises(OperatorNeeded, match=f"deleted and made again.*{name}.*UNSET") as found:
            pipeline.stream(once=True)
        # Accepted by the operator, as a record of an earlier version is: once, and noted.
        assert "slotbridge.small_topic_ids" in str(found.value)
        record = pipeline.identifier("_epochs")
        unset = f"ALTER TABLE {record} UNSET TBLPROPERTIES ('slotbridge.small_topic_ids')"
        pipeline.spark.sql(unset)
        with structlog.testing.capture_logs() as told:
            pipeline.stream(once=True)
            pipeline.stream(once=True)
        assert [line["log_level"] for line in told if "ids were not noted" in line["event"]] == [
            "warning"
        ]
        assert [row["id"] for row in pipeline.rows("three")] == [1, 2]
        return
    with pytest.raises(OperatorNeeded, match=f"deleted and made again.*{name}"):
        pipeline.apply()
    assert [row["id"] for row in pipeline.rows("three")] == [1]


@pytest.mark.long
def test_other_readers_refuse_a_small_topic_that_was_made_again(pipeline: Pipeline) -> None:
    """They know its former id from the record of epochs, as `run` does."""
    spark, settings, prefix = pipeline.spark, pipeline.settings, pipeline.kafka.topic_prefix
    pipeline.publisher.announce(THREE)
    insert(pipeline, THREE, 1)
    pipeline.apply()
    first = pipeline.publisher.commit_lsn
    pipeline.publisher.reshape(WIDER)
    insert(pipeline, WIDER, 2)
    pipeline.apply()
    cuts = Cuts(spark, settings, lambda _: True, threading.Event())
    before = blame(spark, settings, "public.three", ["1"])
    assert [version.operation for version in before] == ["insert"]
    make_again(pipeline, schema_topic(prefix))
    pipeline.publisher.reshape(THREE)
    refused = f"deleted and made again.*{schema_topic(prefix)}.*UNSET"
    with pytest.raises(OperatorNeeded, match=refused):
        blame(spark, settings, "public.three", ["1"])
    with pytest.raises(OperatorNeeded, match=refused):
        verify_as_of(spark, settings, first)
    with pytest.raises(OperatorNeeded, match=refused):
        restore(spark, settings, first, "host=127.0.0.1 port=1 dbname=none")
    # An audit asks for divergences once Kafka has all that commits before the source's snapshot.
    record = pipeline.publisher.progress(first + 10_000)

    def shown() -> bool:
        with contextlib.suppress(Retryable):
            return cuts.progress() == record
        return False

    eventually(shown, what="the progress is there")
    make_again(pipeline, divergence_topic(prefix))
    with (
        contextlib.closing(cuts),
        pytest.raises(OperatorNeeded, match=f"made again.*{divergence_topic(prefix)}.*UNSET"),
    ):
        cuts.epoch_before(first + 5_000, 1)
    unset = "UNSET TBLPROPERTIES ('slotbridge.small_topic_ids')"
    spark.sql(f"ALTER TABLE {pipeline.identifier('_epochs')} {unset}")
    (compared,) = verify_as_of(spark, settings, first)
    assert compared.not_judged.endswith(f"{schema_topic(prefix)} does not tell its columns then")


@pytest.mark.long
def test_a_transaction_topic_whose_id_is_not_known_is_told_as_not_judged(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.publisher.announce(THREE)
    topics = TopicOffsets(pipeline.kafka)
    topic = TransactionTopic(pipeline.kafka, topics, lambda _: True)
    eventually(topic.exists, what="the topic is there")
    with structlog.testing.capture_logs() as told:
        id_ = topic.require_same("", before=False)
        assert id_ and topic.require_same(id_, before=True) == id_
        assert not told
        assert topic.require_same("", before=True) == id_
        monkeypatch.setattr(TopicOffsets, "id", lambda *_: "")
        assert topic.require_same(id_, before=True) == id_
    assert [line["event"] for line in told] == [
        "not judged: whether the topic was deleted and created again since the last epoch"
    ]


@pytest.mark.long
def test_a_transaction_topic_that_kafka_does_not_show_may_come_again(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(THREE)
    topic = TransactionTopic(pipeline.kafka, TopicOffsets(pipeline.kafka), lambda _: True)
    eventually(topic.exists, what="the topic is there")
    id_ = topic.require_same("", before=False)
    admin = AdminClient({"bootstrap.servers": pipeline.kafka.bootstrap_servers})
    admin.delete_topics([topic.name])[topic.name].result(patient(30))
    eventually(lambda: not topic.exists(), what="it is gone", timeout_s=60)
    with pytest.raises(Retryable, match="does not show the topic"):
        topic.require_same(id_, before=True)
