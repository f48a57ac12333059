"""Small epochs that the driver applies by itself: always the fold of their events, once."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import OperatorNeeded, Retryable
from schemas.events import UNAVAILABLE
from spark_consumers.epochs import publication
from spark_consumers.epochs.stage import INDEXES
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.maintenance import maintain
from spark_consumers.iceberg.staging import BRANCH
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import kill
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.test_indexed_delete import ITEMS, NAMES, PAIRS, Fold, killed

NOTES = SourceTable("notes", {"note": ("text", -1)}, key=(), identity="nothing")
TABLES_ALONE = "the tables alone are published"
PLACES = (
    "apply.writer.table_files.write_file",
    "epochs.driver_stage.DriverWriter.prepare",
    "epochs.epoch_runner.Ledger.prepare",
    "epochs.epoch_runner.publish",
    "epochs.publication._replace_locations",
    TABLES_ALONE,
    "epochs.driver_stage.DriverWriter.follow",
)


def ways(pipeline: Pipeline) -> dict[str, str]:
    """Bring what is there; why Spark did it for a table, else the way that it took."""
    found = pipeline.apply().tables.items()
    return {name.removeprefix("public."): table.why or table.way for name, table in found}


def insert(pipeline: Pipeline, *numbers: int) -> None:
    with pipeline.publisher.transaction() as t:
        for number in numbers:
            t.insert(ITEMS, {"id": number, "v": "a"})


def update(pipeline: Pipeline, value: str, *numbers: int) -> None:
    with pipeline.publisher.transaction() as t:
        for number in numbers:
            t.update(ITEMS, {"id": number, "v": value})


def items(pipeline: Pipeline) -> str:
    """The values of the items, in the order of their keys."""
    return "".join(row.v for row in pipeline.rows("items"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_any_cut_kill_compaction_or_other_way_leads_to_the_same_rows(
    new_pipeline: NewPipeline, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = new_pipeline(compact_files_min=2)
    chance, fold = random.Random(seed), Fold(pipeline, seed)
    pipeline.publisher.announce(ITEMS, NAMES, PAIRS)
    fold.transaction()
    pipeline.apply()

    def die() -> None:
        with monkeypatch.context() as patch:
            if (place := chance.choice(PLACES)) == TABLES_ALONE:
                kill(patch, "tables", RuntimeError)
            else:
                patch.setattr(f"spark_consumers.{place}", killed)
            with pytest.raises(RuntimeError):
                pipeline.apply()
        pipeline.restart()
        fold.transaction()

    def compact() -> None:
        for state in pipeline.runner.states.values():
            maintain(pipeline.spark, pipeline.tables, state, orphans=False)

    def lose() -> None:
        pipeline.restart()
        shutil.rmtree(Path(pipeline.tables.warehouse) / INDEXES, ignore_errors=True)

    def by_spark() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("spark_consumers.kafka.few_records.RECORDS_MAX", -1)
            pipeline.apply()
        fold.transaction()

    for _ in range(6):
        for _ in range(chance.randrange(1, 3)):
            fold.transaction()
        does = [die, die, die, compact, lose, by_spark, pipeline.restart, None]
        if (what := chance.choice(does)) is not None:
            what()
        pipeline.apply()
        fold.require()


def test_each_table_goes_its_own_way_and_all_have_the_epoch(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(rules={"public.past": {"kind": "history"}})
    past = SourceTable("past", dict(ITEMS.columns))
    tables = (ITEMS, NAMES, NOTES, past)
    pipeline.publisher.announce(*tables)
    for number in range(3):
        with pipeline.publisher.transaction() as t:
            t.insert(NOTES, {"note": f"{number}"})
            for table in (ITEMS, past):
                (t.update if number else t.insert)(table, {"id": 1, "v": f"{number}"})
            (t.update if number else t.insert)(NAMES, {"name": "é", "v": f"{number}"})
        found = ways(pipeline)
        driver = dict.fromkeys(("items", "names", "notes"), "driver")
        assert found == {**driver, "past": "kind history"}
    assert items(pipeline) == "2"
    assert [row.v for row in pipeline.rows("names")] == ["2"]
    assert [row.note for row in pipeline.rows("notes")] == ["0", "1", "2"]
    assert len(pipeline.rows("past")) == 3
    tag = catalog.tag_name(pipeline.publisher.commit_lsn - 100)
    for name, rows in (("items", 1), ("notes", 2), ("past", 2)):
        place = f"{pipeline.identifier(name)} VERSION AS OF '{tag}'"
        assert pipeline.spark.sql(f"SELECT * FROM {place}").count() == rows
    names = set(pipeline.runner.record.tables)
    assert names == {f"public.{table.name}" for table in tables}


def test_what_the_driver_does_not_do_is_done_by_spark_and_said(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ITEMS)
    insert(pipeline, 1, 2)
    assert ways(pipeline) == {"items": "driver"}
    update(pipeline, UNAVAILABLE, 1)
    assert ways(pipeline) == {"items": "unchanged values"}
    with pipeline.publisher.transaction() as t:
        t.truncate(ITEMS)
        t.insert(ITEMS, {"id": 3, "v": "c"})
    assert ways(pipeline) == {"items": "rows are replaced"}
    update(pipeline, "d", 3)
    assert ways(pipeline) == {"items": "driver"}
    assert items(pipeline) == "d"


def test_files_stay_few(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ITEMS)
    insert(pipeline, *range(40))
    pipeline.apply()
    chance, expected = random.Random(1), ["a"] * 40
    for number in range(30):
        places = chance.sample(range(40), 3)
        update(pipeline, f"{number % 10}", *places)
        for place in places:
            expected[place] = f"{number % 10}"
        assert ways(pipeline) == {"items": "driver"}
    assert items(pipeline) == "".join(expected)
    files = pipeline.spark.table(f"{pipeline.identifier('items')}.data_files")
    assert files.count() <= 12
    deletes = pipeline.spark.table(f"{pipeline.identifier('items')}.delete_files").collect()
    assert len({row.referenced_data_file for row in deletes}) == len(deletes)


def test_a_second_writer_is_fenced(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ITEMS)
    insert(pipeline, *range(5))
    pipeline.apply()
    other = Pipeline(pipeline.spark, pipeline.settings, pipeline.publisher)
    update(pipeline, "b", 1)
    other.apply()
    update(pipeline, "c", 2)
    snapshots = pipeline.snapshots("items")
    with pytest.raises(Retryable):
        pipeline.apply()
    assert pipeline.snapshots("items") == snapshots
    pipeline.restart()
    pipeline.apply()
    other.restart()
    assert items(pipeline) == "abcaa"


@pytest.mark.long
def test_a_writer_that_is_overtaken_before_its_commit_changes_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.publisher.announce(ITEMS)
    insert(pipeline, *range(5))
    pipeline.apply()
    update(pipeline, "b", 1)
    replace = publication._replace_locations

    def overtaken(*given: Any) -> bool:
        monkeypatch.setattr(publication, "_replace_locations", replace)
        other = Pipeline(pipeline.spark, pipeline.settings, pipeline.publisher)
        other.apply()
        other.restart()
        return replace(*given)

    monkeypatch.setattr(publication, "_replace_locations", overtaken)
    with pytest.raises(Retryable):
        pipeline.apply()
    pipeline.restart()
    update(pipeline, "c", 1)
    pipeline.apply()
    assert items(pipeline) == "acaaa"
    assert pipeline.runner.record.epoch == 3


@pytest.mark.long
def test_a_commit_whose_answer_is_lost_is_found_and_not_repeated(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is removed: what the database has made of it is not known."""
    pipeline.publisher.announce(ITEMS)
    insert(pipeline, 1)
    pipeline.apply()
    update(pipeline, "b", 1)
    replace = publication._replace_locations

    def lost(*given: Any) -> bool:
        assert replace(*given)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(publication, "_replace_locations", lost)
        with pytest.raises(RuntimeError):
            pipeline.apply()
    snapshots = pipeline.snapshots("items")
    pipeline.restart()
    assert pipeline.runner.record.epoch == 2
    assert pipeline.step() is None
    assert pipeline.snapshots("items") == snapshots
    assert items(pipeline) == "b"


@pytest.mark.long
def test_what_somebody_else_does_to_a_table_is_followed(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ITEMS)
    insert(pipeline, *range(5))
    pipeline.apply()
    identifier = pipeline.identifier("items")
    snapshot = catalog.snapshot_id(catalog.load(pipeline.spark, identifier))
    pipeline.spark.sql(f"DELETE FROM {identifier} WHERE id IN (0, 4)")
    pipeline.spark.sql(f"ALTER TABLE {identifier} CREATE BRANCH {BRANCH}_of_a_kill")
    update(pipeline, "c", 0, 1)
    assert ways(pipeline) == {"items": "driver"}
    assert items(pipeline) == "ccaa"
    table = identifier.partition(".")[2]
    pipeline.spark.sql(f"CALL slotbridge.system.rollback_to_snapshot('{table}', {snapshot})")
    update(pipeline, "d", 1)
    with pytest.raises(OperatorNeeded, match="rolled back"):
        pipeline.apply()
    refs = catalog.ref_names(catalog.load(pipeline.spark, identifier))
    assert not [name for name in refs if name.startswith(BRANCH)]


@pytest.mark.long
def test_a_second_row_of_a_key_that_somebody_else_writes_is_left_to_spark(
    pipeline: Pipeline,
) -> None:
    pipeline.publisher.announce(ITEMS)
    insert(pipeline, *range(3))
    pipeline.apply()
    identifier = pipeline.identifier("items")
    pipeline.spark.sql(f"INSERT INTO {identifier} SELECT id, 'z', 0, 0 FROM {identifier}")
    update(pipeline, "c", 1)
    assert "a key has more than one row" in ways(pipeline)["items"]
