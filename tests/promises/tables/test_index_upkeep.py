"""The key index in a folder that is full or torn, after maintenance, and after many epochs."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import DataFrame
from structlog.testing import capture_logs

from spark_consumers.epochs.stage import INDEXES
from spark_consumers.iceberg import catalog, table_index
from spark_consumers.iceberg.table_index import KeyIndex
from spark_consumers.key_index import segment_files
from spark_consumers.key_index.segments import Segment
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.test_indexed_delete import (
    ITEMS,
    NAMES,
    PAIRS,
    Fold,
    change,
    filled,
    items,
    killed,
    ways,
)
from tests.spark_consumers.key_index.test_segments import text_keys

pytestmark = pytest.mark.usefixtures("any_table_is_large", "by_spark")


@pytest.fixture
def pipeline(new_pipeline: NewPipeline) -> Pipeline:
    return new_pipeline(
        key_index=True, compact_files_min=2, rules={"public.pairs": {"partition": ["bucket(2, n)"]}}
    )


def folder(pipeline: Pipeline, table: str = "items") -> Path:
    """The folder of a table's index."""
    uuid = catalog.load(pipeline.spark, pipeline.identifier(table)).uuid()
    return Path(pipeline.tables.warehouse) / INDEXES / pipeline.kafka.topic_prefix / str(uuid)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.long
def test_a_full_disk_leads_to_the_way_without_the_index(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pipeline)
    monkeypatch.setattr(np, "save", full)
    with capture_logs() as logs:
        assert change(pipeline, "c", 1, 2) == "index"  # the epoch's own rows can't be taken in
        assert change(pipeline, "d", 2, 3) == "scan"
        assert change(pipeline, "e", 3) == "scan"
    assert items(pipeline) == "bcdea"
    told = [log for log in logs if log["event"] == "rows are found by a scan of the table"]
    assert len(told) == 1
    assert told[0]["table"] == "public.items"
    assert "No space left" in told[0]["reason"]
    assert not list(folder(pipeline).glob("*"))


@pytest.mark.long
def test_a_folder_that_cannot_be_made_leads_to_the_way_without_the_index(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", full)
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, {"id": 1, "v": "a"})
    pipeline.apply()
    assert change(pipeline, "b", 1) == "scan"
    assert items(pipeline) == "b"


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def of_another(path: Path) -> None:
    """The file has more rows than the others of its segment."""
    found = np.load(path)
    np.save(path, np.concatenate([found, found]))


@pytest.mark.parametrize("part", ["numbers", "places", "ends", "body"])
@pytest.mark.parametrize("tear", [emptied, cut, of_another, Path.unlink])
def test_a_torn_file_makes_the_index_anew(
    part: str, tear: Callable[[Path], None], tmp_path: Path
) -> None:
    keys = text_keys(["a", "bc", "d"])
    segment_files.write_segment(tmp_path / "one", Segment.of(keys, np.arange(3)))
    tear(tmp_path / f"one-{part}.npy")
    with pytest.raises(table_index.TROUBLES):
        segment_files.read(tmp_path / "one", texts=True)


def test_an_index_with_a_torn_file_is_made_anew(pipeline: Pipeline) -> None:
    filled(pipeline)
    for tear in (emptied, cut, Path.unlink):
        pipeline.restart()
        for path in folder(pipeline).glob("*-numbers.npy"):
            tear(path)
        assert change(pipeline, "c", 1, 2) == "index"
    assert items(pipeline) == "bccaa"


@pytest.mark.long
def test_a_key_with_null_that_somebody_else_writes(pipeline: Pipeline) -> None:
    filled(pipeline)
    pipeline.spark.sql(f"INSERT INTO {pipeline.identifier('items')} VALUES (NULL, 'z', 0, 0)")
    assert change(pipeline, "c", 1, 2) == "scan"
    assert sorted(items(pipeline)) == sorted("zbccaa")


@pytest.mark.long
def test_a_table_that_was_refused_costs_nothing_more(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pipeline)
    identifier = pipeline.identifier("items")
    pipeline.spark.sql(f"INSERT INTO {identifier} SELECT id, 'z', 0, 0 FROM {identifier}")
    monkeypatch.setattr(DataFrame, "toArrow", killed)
    assert change(pipeline, "c", *range(5)) == "scan"
    monkeypatch.setattr(KeyIndex, "_build", killed)
    assert change(pipeline, "d", 1) == "scan"
    assert items(pipeline) == "cdccc"


@pytest.mark.long
@pytest.mark.parametrize("restarted", ["never", "before", "after"])
def test_maintenance_and_a_restart_leave_the_index(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, restarted: str
) -> None:
    fold = Fold(pipeline, 1)
    pipeline.publisher.announce(ITEMS, NAMES, PAIRS)
    for _ in range(4):
        fold.transaction()
        pipeline.apply()
    monkeypatch.setattr(KeyIndex, "_build", killed)
    if restarted == "before":
        pipeline.restart()
    pipeline.runner.maintain()
    if restarted == "after":
        pipeline.restart()
    fold.transaction()
    assert set(ways(pipeline).values()) == {"index"}
    fold.require()


@pytest.mark.long
def test_an_index_that_a_kill_leaves_behind_its_table_follows(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pipeline)
    with monkeypatch.context() as patch:
        patch.setattr(KeyIndex, "advance", killed)
        with pytest.raises(RuntimeError):
            change(pipeline, "c", 1, 2)
        patch.setattr(KeyIndex, "_save", lambda _: None)  # a kill writes nothing down
        pipeline.restart()
    assert not pipeline.runner.redoes, "readers wait for the index"
    assert items(pipeline) == "bccaa"
    monkeypatch.setattr(KeyIndex, "_build", killed)
    assert change(pipeline, "d", 2, 3) == "index"
    assert items(pipeline) == "bcdda"


@pytest.mark.long
def test_epochs_that_only_append_are_followed(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pipeline)
    monkeypatch.setattr("spark_consumers.iceberg.table_files.SNAPSHOTS_MAX", 2)
    monkeypatch.setattr(KeyIndex, "_build", killed)
    for number in range(5, 8):
        with pipeline.publisher.transaction() as t:
            t.insert(ITEMS, {"id": number, "v": "a"})
        assert ways(pipeline) == {"public.items": "append"}
    assert change(pipeline, "c", 1, 6) == "index"
    assert items(pipeline) == "bcaaaaca"


@pytest.mark.long
def test_an_index_is_bounded_by_its_table(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_index, "SEGMENT_ROWS_MAX", 5)
    monkeypatch.setattr(table_index, "SURPLUS_MIN", 0)
    filled(pipeline)
    for number in range(4):
        change(pipeline, str(number), *range(5))
    pipeline.restart()
    assert items(pipeline) == "33333"
    assert sum(len(np.load(path)) for path in folder(pipeline).glob("*-places.npy")) <= 15
    for number in range(4):
        change(pipeline, str(number), *range(5))
        pipeline.runner.maintain()
    pipeline.restart()
    assert items(pipeline) == "33333"
    assert json.loads((folder(pipeline) / "manifest.json").read_text())["files"] <= 3
