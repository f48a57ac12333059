"""The key index of a `run` while another process maintains its tables: rows move, snapshots go."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from pyspark.errors import PySparkException

from schemas.errors import ExitCode, Retryable
from spark_consumers.failures import translated
from spark_consumers.iceberg import catalog, indexed_delete
from spark_consumers.iceberg.indexed_delete import Indexes
from spark_consumers.operations import Operator
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.test_indexed_delete import ITEMS, items, ways

SEAMS: tuple[tuple[Any, str], ...] = (
    (indexed_delete, "delete_rows"),
    (Indexes, "advance"),
)
"""Where an epoch is when maintenance comes."""
OF_THE_EPOCH = (
    "spark.wap.branch",
    *(catalog.SUMMARY_OPTION + name for name in (catalog.EPOCH, catalog.COMMIT_LSN)),
)
"""What the run sets in its session."""


def maintain(pipeline: Pipeline) -> None:
    """Compact the table and expire snapshots, without what the session has of the epoch."""
    conf = pipeline.spark.conf
    epoch = {name: conf.get(name, None) for name in OF_THE_EPOCH}
    for name in epoch:
        conf.unset(name)
    (done,) = Operator(pipeline.spark, pipeline.settings).maintain()
    for name, value in epoch.items():
        if value is not None:
            conf.set(name, value)
    assert done.snapshots <= 2 * pipeline.tables.epochs_kept + 1
    assert done.files_after < done.files_before or done.files_before == 1


def in_turn(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Do the work in this thread."""
    for item in items:
        work(item)


def meet(patch: pytest.MonkeyPatch, place: Any, name: str, pipeline: Pipeline) -> None:
    """Let maintenance come before the next call of a function."""
    original = getattr(place, name)

    def met(*given: Any, **more: Any) -> Any:
        patch.setattr(place, name, original)
        maintain(pipeline)
        return original(*given, **more)

    patch.setattr(place, name, met)


@pytest.mark.long
@pytest.mark.usefixtures("any_table_is_large", "by_spark")
def test_maintenance_of_another_process_leaves_rows_right(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Iceberg compacts only from a thread in which a Spark session is active, as the test's own.
    monkeypatch.setattr("spark_consumers.epochs.stage.at_once", in_turn)
    pipeline = new_pipeline(
        key_index=True, compact_files_min=2, epochs_kept=2, epochs_kept_all_ms=0
    )
    pipeline.publisher.announce(ITEMS)
    expected = dict.fromkeys(range(6), "a")

    def publish(value: str, *numbers: int) -> None:
        with pipeline.publisher.transaction() as t:
            for number in numbers:
                expected[number] = value
                (t.insert if value == "a" else t.update)(ITEMS, {"id": number, "v": value})

    def bring() -> dict[str, str]:
        """What `run` does: an epoch that maintenance has met begins again."""
        try:
            return ways(pipeline)
        except (PySparkException, Retryable) as error:
            assert translated(error, "apply").exit_code == ExitCode.LOCKED, error
            pipeline.restart()
            return ways(pipeline)

    publish("a", *expected)
    bring()
    publish("b", 0, 1)
    assert bring() == {"public.items": "index"}
    for number, (place, name) in enumerate(SEAMS):
        original = getattr(place, name)
        meet(monkeypatch, place, name, pipeline)
        publish(f"{number}", number, (number + 2) % 6)
        bring()
        assert getattr(place, name) is original, "maintenance did not come"
        assert items(pipeline) == "".join(expected.values()), name
    maintain(pipeline)
    publish("c", 0, 5)
    assert bring() == {"public.items": "index"}
    assert items(pipeline) == "".join(expected.values())
