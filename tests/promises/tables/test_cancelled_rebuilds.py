"""`slottables rebuild --cancel`: the table stays as it is, wherever the rebuild was."""

from collections.abc import Callable
from typing import Any

import pytest

from schemas.errors import ExitCode, Retryable, SettingsError
from spark_consumers.epochs import rebuilds
from spark_consumers.iceberg import staging
from spark_consumers.operations import Operator
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.test_rebuilds import (
    ITEMS,
    NAME,
    PART,
    ask,
    asked,
    damage,
    finish,
    load,
    park,
    record,
    require_done,
    tell,
    whole,
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_consumers.epochs.rebuilds.PART_EVENTS", PART)


def cancel(pipeline: Pipeline, *, parked: bool = False) -> None:
    operator = Operator(pipeline.spark, pipeline.settings)
    assert list(operator.cancel_rebuild([NAME])) == [(NAME, parked)]


def assert_as_it_was(pipeline: Pipeline, damaged: list[tuple[Any, ...]]) -> None:
    """The rebuild has left nothing; the table goes on, and can be rebuilt another time."""
    assert not asked(pipeline)
    assert whole(pipeline) == damaged
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 99, "g": 2, "v": "later"})
    pipeline.apply()
    assert not pipeline.runner.works_alone
    assert [row for row in whole(pipeline) if row[0] != 99] == damaged
    assert len(whole(pipeline)) == len(damaged) + 1
    require_done(pipeline)


@pytest.mark.long
@pytest.mark.parametrize("parts", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_cancelled_rebuild_leaves_the_table_as_it_is(pipeline: Pipeline, parts: int) -> None:
    load(pipeline, 5)
    before = damage(pipeline)
    damaged = whole(pipeline)
    ask(pipeline)
    for _ in range(parts):
        pipeline.step()
    cancel(pipeline)
    pipeline.runner.look_for_requests()
    assert_as_it_was(pipeline, damaged)
    ask(pipeline)
    finish(pipeline)
    assert [row for row in whole(pipeline) if row[0] != 99] == before
    require_done(pipeline)


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "function"),
    [
        (rebuilds, "write_table"),
        (staging.Staging, "extend"),
        (staging.Staging, "begin"),
        (staging.Staging, "adopt"),
    ],
)
def test_it_is_cancelled_in_the_middle_of_a_part_or_of_the_last_epoch(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, place: Any, function: str
) -> None:
    load(pipeline, 3)
    damage(pipeline)
    damaged = whole(pipeline)
    ask(pipeline)
    original: Callable[..., Any] = getattr(place, function)
    cancelled: list[str] = []

    def cancelling(*given: Any, **named: Any) -> Any:
        last = function == "adopt"
        rebuilt = not last or NAME.split(".")[1] in given[1].identifier
        if rebuilt and not cancelled and (not last or given[1].side is not None):
            cancelled.append(function)
            cancel(pipeline)
        return original(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(place, function, cancelling)
        for _ in range(40):
            try:
                pipeline.step()
            except Retryable as error:
                assert error.exit_code == ExitCode.LOCKED
                break
    assert cancelled
    pipeline.restart()
    assert_as_it_was(pipeline, damaged)


@pytest.mark.long
def test_maintenance_frees_what_a_cancelled_rebuild_of_a_quiet_table_has_written(
    new_pipeline: NewPipeline,
) -> None:
    """The table has no epoch after it."""
    pipeline = new_pipeline(epochs_kept_all_ms=1)
    load(pipeline, 5)
    before, rows = data_files(pipeline), whole(pipeline)
    ask(pipeline)
    for _ in range(2):
        pipeline.step()
    assert data_files(pipeline) > before
    cancel(pipeline)
    pipeline.runner.look_for_requests()
    pipeline.runner.maintain()
    assert data_files(pipeline) <= before
    assert whole(pipeline) == rows


def data_files(pipeline: Pipeline) -> set[str]:
    """The data files of all snapshots of the table."""
    frame = pipeline.spark.table(f"{pipeline.identifier('items')}.all_data_files")
    return {row.file_path for row in frame.collect()}


@pytest.mark.long
def test_what_is_not_rebuilt_can_not_be_cancelled(pipeline: Pipeline) -> None:
    load(pipeline)
    operator = Operator(pipeline.spark, pipeline.settings)
    with pytest.raises(SettingsError, match=r"public\.items is not being rebuilt") as caught:
        list(operator.cancel_rebuild([NAME]))
    assert caught.value.hint == "tables that are being rebuilt: none"
    with pytest.raises(SettingsError, match=r"public\.other is not being rebuilt"):
        list(operator.cancel_rebuild(["public.other"]))
    assert not asked(pipeline)


@pytest.mark.long
@pytest.mark.parametrize("parts", [0, 1])
@pytest.mark.parametrize("restart", [False, True])
def test_a_parked_table_stays_parked_when_its_rebuild_is_cancelled(
    new_pipeline: NewPipeline, parts: int, *, restart: bool
) -> None:
    pipeline = new_pipeline(parks=True)
    load(pipeline, 4)
    before = whole(pipeline)
    park(pipeline)
    ask(pipeline)
    for _ in range(parts):
        pipeline.step()
    cancel(pipeline, parked=True)
    if restart:
        pipeline.restart()
    else:
        pipeline.runner.look_for_requests()
    assert not asked(pipeline)
    tell(pipeline, 50)
    pipeline.apply()
    assert not pipeline.runner.works_alone
    assert NAME in record(pipeline).parked
    assert pipeline.note("items").state == "parked"
    assert whole(pipeline) == before
