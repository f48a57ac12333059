"""The streaming query's checkpoint: lost, older, newer or half removed, with kills in between."""

import contextlib
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from schemas.errors import OperatorNeeded
from spark_consumers.epochs.checkpoint import Progress, progress
from spark_consumers.epochs.epoch_runner import EpochRunner
from spark_consumers.epochs.metrics import Metrics
from spark_consumers.epochs.stream import CHECKPOINTS
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import kill
from tests.promises.tables.publisher import SourceTable
from tests.providers.waiting import patient

ITEMS = SourceTable("items", {"id": ("int4", -1)})
LOG = SourceTable("log", {"b": ("int4", -1)}, key=(), identity="nothing")
OTHER = SourceTable("other", {"id": ("int4", -1)})
TOPIC = "p.transaction"


def at(offset: int, topic: str = TOPIC) -> str:
    """A file of Spark's offset log."""
    return f'v1\n{{"batchWatermarkMs":0}}\n{{"{topic}":{{"0":{offset}}}}}'


@pytest.mark.parametrize(
    ("offsets", "commits", "first", "found"),
    [
        ({}, (), None, None),
        ({}, (), at(5), Progress(5)),
        ({0: at(9)}, (), at(5), Progress(5, 9)),
        ({0: at(9)}, (), None, None),
        ({6: at(9), 7: at(12)}, (5, 6, 7), None, Progress(12)),
        ({6: at(9), 7: at(12)}, (5, 6), None, Progress(9, 12)),
        ({6: at(9), 7: at(12)}, (5,), None, None),
        ({6: at(9), 7: at(12)}, (8,), None, None),
        ({6: at(12), 7: at(9)}, (6,), None, None),
        ({6: at(9), 7: ""}, (6,), None, None),
        ({7: at(12, "other")}, (7,), None, None),
        ({7: '{"p.transaction":{"0":1,"1":1}}'}, (7,), None, None),
        ({7: "-"}, (7,), None, None),
    ],
)
def test_where_a_query_would_go_on(
    offsets: dict[int, str], commits: tuple[int, ...], first: str | None, found: Progress | None
) -> None:
    assert progress(offsets, commits, first, TOPIC) == found


def test_a_checkpoint_agrees_where_its_next_batch_begins_or_goes_beyond_what_the_tables_have() -> (
    None
):
    assert [Progress(9).agrees(n) for n in (8, 9, 10)] == [False, True, False]
    found = [Progress(9, 12).agrees(n) for n in (8, 9, 11, 12, 13)]
    assert found == [False, True, True, True, False]


class Case:
    """Tables of which every transaction brings one row each, killed anywhere and started again."""

    def __init__(self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pipeline = pipeline
        self._patch = monkeypatch
        self._numbers: list[int] = []
        self.folder = Path(pipeline.tables.warehouse) / CHECKPOINTS / pipeline.kafka.topic_prefix
        pipeline.publisher.announce(ITEMS, LOG, OTHER)

    def publish(self, transactions: int = 1) -> None:
        for _ in range(transactions):
            self._numbers.append(len(self._numbers))
            with self.pipeline.publisher.transaction() as t:
                t.insert(ITEMS, {"id": self._numbers[-1]})
                t.insert(LOG, {"b": self._numbers[-1]})

    def killed_at(self, place: type, name: str) -> None:
        """Run and end where `place` does `name`, as a kill does."""

        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with self._patch.context() as patch:
            patch.setattr(place, name, killed)
            with pytest.raises(KeyboardInterrupt):
                self.pipeline.stream(once=True)

    def killed_between(self) -> None:
        """Run and end where the tables have the epoch, and the record has not."""
        with self._patch.context() as patch:
            kill(patch, "tables")
            with pytest.raises(KeyboardInterrupt):
                self.pipeline.stream(once=True)

    def run(self, checkpoint: str) -> None:
        """Run to the end, and compare. `checkpoint`: whether it is "taken" or "new"."""
        with capture_logs() as logs:
            self.pipeline.stream(once=True)
        self.require_once()
        found = [line["checkpoint"] for line in logs if line["event"] == "streaming"]
        assert found == [checkpoint], logs

    def require_once(self) -> None:
        """Every row is in every table once."""
        expected = Counter(self._numbers)
        for table, column in (("items", "id"), ("log", "b")):
            rows = self.pipeline.spark.table(self.pipeline.identifier(table)).collect()
            assert Counter(row[column] for row in rows) == expected


@pytest.fixture
def case(new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(new_pipeline(tables=("public.items", "public.log")), monkeypatch)


def test_killed_anywhere_a_checkpoint_is_taken_only_where_the_tables_agree(
    case: Case, tmp_path: Path
) -> None:
    case.publish()
    case.run("new")
    older = tmp_path / "older"
    shutil.copytree(case.folder, older)

    case.publish()  # nothing of the epoch is in the tables; the batch is planned
    case.killed_at(EpochRunner, "_seal")
    case.run("taken")

    case.publish()  # the tables have it, the ledger has not
    case.killed_between()
    shutil.rmtree(case.folder)
    case.run("new")

    case.publish()  # the ledger has it; Spark has not noted the batch's end
    case.killed_at(Metrics, "done")
    case.publish()
    case.run("taken")

    case.publish()
    case.killed_between()
    shutil.rmtree(case.folder)
    shutil.copytree(older, case.folder)
    case.run("new")

    case.publish()  # killed while a checkpoint was removed
    case.killed_at(EpochRunner, "_seal")
    (case.folder / "metadata").unlink()
    case.run("new")

    with case.pipeline.publisher.transaction() as t:  # what comes last brings the tables nothing
        t.insert(OTHER, {"id": 1})
    case.run("taken")
    case.run("taken")


@pytest.mark.long
def test_an_epoch_that_was_begun_is_made_again_of_many_small_batches(case: Case) -> None:
    case.publish()
    case.run("new")
    case.publish(4)
    case.killed_between()
    shutil.rmtree(case.folder)
    tables = case.pipeline.tables.model_copy(update={"transaction_offsets_per_trigger_max": 1})
    case.pipeline.settings = case.pipeline.settings.model_copy(update={"tables": tables})
    case.run("new")
    assert case.pipeline.runner.record.epoch == 2
    case.publish(2)
    case.run("taken")


@contextlib.contextmanager
def restored(pipeline: Pipeline) -> Iterator[Callable[[], None]]:
    """The catalog's database as it is now, which the answer puts back."""
    found = sqlite3.connect(Path(pipeline.tables.warehouse) / "catalog.db", timeout=patient(30))
    namespace = pipeline.kafka.topic_prefix
    select = (
        "SELECT metadata_location, previous_metadata_location, table_name FROM iceberg_tables"
        " WHERE table_namespace = ?"
    )
    rows: list[Any] = found.execute(select, (namespace,)).fetchall()

    def put_back() -> None:
        found.executemany(
            "UPDATE iceberg_tables SET metadata_location = ?, previous_metadata_location = ?"
            f" WHERE table_name = ? AND table_namespace = '{namespace}'",
            rows,
        )
        found.commit()

    try:
        yield put_back
    finally:
        found.close()


@pytest.mark.long
def test_tables_restored_from_before_the_checkpoint_lose_nothing(case: Case) -> None:
    case.publish()
    case.run("new")
    with restored(case.pipeline) as put_back:
        case.publish(2)
        case.run("taken")
        put_back()
    assert [row.id for row in case.pipeline.rows("items")] == [0]
    case.run("new")
    case.publish()
    case.run("taken")
    with pytest.raises(OperatorNeeded, match="deleted events that the tables have not read"):
        case.pipeline.runner.topic.require(10**6)
