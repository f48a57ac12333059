"""Folders of key indexes: one program at a time has one, and those of gone tables are removed."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from spark_consumers.epochs.stage import INDEXES
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.table_index import KeyIndex
from spark_consumers.key_index import folders
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.test_indexed_delete import ITEMS, NAMES, change, killed, ways


def made(parent: Path) -> Path:
    """A folder that a program has had and left."""
    folder = parent / str(uuid4())
    lock = folders.take(folder)
    assert lock is not None
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").touch()
    os.close(lock)
    return folder


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Path]:
    """A folder that a program has."""
    folder = made(tmp_path)
    lock = folders.take(folder)
    assert lock is not None
    yield folder
    os.close(lock)


def test_only_folders_that_nobody_has_and_nobody_keeps_are_removed(
    tmp_path: Path, taken: Path
) -> None:
    lost, kept = made(tmp_path), made(tmp_path)
    of_others = tmp_path / "another namespace"
    of_others.mkdir()
    left = made(tmp_path)
    shutil.rmtree(left)  # its lock alone is there
    assert list(folders.remove_others(tmp_path, {kept.name})) == [lost]
    assert not list(folders.remove_others(tmp_path / "nowhere", ()))
    found = {path.name for path in tmp_path.iterdir()}
    locks = {f"{folder.name}.lock" for folder in (taken, kept)}
    assert found == {taken.name, kept.name, of_others.name} | locks


def test_a_folder_that_another_program_has_is_not_taken(taken: Path) -> None:
    assert folders.take(taken) is None


def test_a_lock_that_is_removed_under_way_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = tmp_path / "one", tmp_path / "one.lock"
    flock = fcntl.flock
    removals = iter([path.unlink])

    def late(lock: int, operation: int) -> None:
        for remove in removals:
            remove()
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = folders.take(folder)
    assert lock is not None
    assert os.path.samestat(os.fstat(lock), path.stat())
    os.close(lock)


def configure(pipeline: Pipeline, **values: object) -> None:
    """Change settings of the tables, which the next runner has."""
    tables = pipeline.tables.model_copy(update=values)
    pipeline.settings = pipeline.settings.model_copy(update={"tables": tables})


@pytest.mark.long
@pytest.mark.usefixtures("any_table_is_large", "by_spark")
def test_indexes_of_tables_that_are_gone_or_not_followed_are_removed(
    new_pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(key_index=True)
    pipeline.publisher.announce(ITEMS, NAMES)
    for value in "ab":
        with pipeline.publisher.transaction() as t:
            (t.insert if value == "a" else t.update)(ITEMS, {"id": 1, "v": value})
            (t.insert if value == "a" else t.update)(NAMES, {"name": "x", "v": value})
        found = ways(pipeline)
    assert set(found.values()) == {"index"}
    parent = Path(pipeline.tables.warehouse) / INDEXES / pipeline.kafka.topic_prefix
    items, names = (
        parent / str(catalog.load(pipeline.spark, pipeline.identifier(table)).uuid())
        for table in ("items", "names")
    )
    assert items.is_dir()
    assert names.is_dir()
    configure(pipeline, tables=["public.items"])
    other = Pipeline(pipeline.spark, pipeline.settings, pipeline.publisher)
    assert other.runner
    assert names.is_dir(), "the running writer has it"
    with capture_logs() as logs:
        pipeline.restart()
        pipeline.runner.maintain()
    assert [log["folder"] for log in logs if "removed the key index" in log["event"]] == [
        str(names)
    ]
    assert not names.exists()
    with monkeypatch.context() as patch:
        patch.setattr(KeyIndex, "_build", killed)
        assert change(pipeline, "c", 1) == "index"
