"""Large tables whose changed rows are found by the key index: always the fold of their events."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from schemas.errors import BadInput, OperatorNeeded, Retryable, SlotbridgeError
from schemas.events import UNAVAILABLE
from spark_consumers.epochs.stage import INDEXES
from spark_consumers.failures import translated
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.maintenance import maintain
from spark_consumers.iceberg.table_index import KeyIndex
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.kills import kill
from tests.promises.tables.publisher import SourceTable

COLUMNS = {"a": ("text", -1), "n": ("int8", -1), "day": ("date", -1), "v": ("text", -1)}
PAIRS = SourceTable("pairs", COLUMNS, key=("a", "n", "day"))
ITEMS = SourceTable("items", {"id": ("int4", -1), "v": ("text", -1)})
NAMES = SourceTable("names", {"name": ("text", -1), "v": ("text", -1)}, key=("name",))
REALS = SourceTable("reals", {"x": ("float8", -1), "v": ("text", -1)}, key=("x",))


pytestmark = pytest.mark.usefixtures("any_table_is_large", "by_spark")


@pytest.fixture
def pipeline(new_pipeline: NewPipeline) -> Pipeline:
    return new_pipeline(
        key_index=True, compact_files_min=2, rules={"public.pairs": {"partition": ["bucket(3, n)"]}}
    )


def killed(*_: object, **__: object) -> None:
    raise RuntimeError("killed")


class Fold:
    """What the tables are to be, by table and key; and events that make it so."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self._pipeline, self._random, self._version = pipeline, random.Random(seed), 0
        self.rows: dict[str, dict[Any, dict[str, Any]]] = {"items": {}, "names": {}, "pairs": {}}

    def row(self, table: SourceTable, number: int) -> dict[str, Any]:
        """The row of a key, with a new value."""
        self._version += 1
        keys: dict[str, dict[str, Any]] = {
            "items": {"id": number},
            "names": {"name": f"é{number}"},
            "pairs": {"a": f"{number % 3}", "n": number, "day": number % 5},
        }
        return {**keys[table.name], "v": f"{self._version}"}

    def transaction(self) -> None:
        """Changes of each table."""
        with self._pipeline.publisher.transaction() as t:
            for table in (ITEMS, NAMES, PAIRS):
                known = self.rows[table.name]
                for number in self._random.sample(range(12), 4):
                    old, new = known.get(number), self.row(table, number)
                    if old is None:
                        t.insert(table, new)
                    elif self._random.random() < 0.3:
                        t.delete(table, old)
                        del known[number]
                        continue
                    else:
                        t.update(table, new)
                    known[number] = new

    def require(self) -> None:
        """The tables are what they are to be."""
        for name, rows in self.rows.items():
            found = sorted(row.v for row in self._pipeline.rows(name))
            assert found == sorted(row["v"] for row in rows.values()), name


TABLES_ALONE = "the tables alone are published"


def ways(pipeline: Pipeline) -> dict[str, str]:
    """Bring what is there; the way that each table took."""
    return {name: table.way for name, table in pipeline.apply().tables.items()}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_index_stays_true_through_any_cut_kill_or_compaction(
    pipeline: Pipeline, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, fold = random.Random(seed), Fold(pipeline, seed)
    pipeline.publisher.announce(ITEMS, NAMES, PAIRS)
    fold.transaction()
    pipeline.apply()
    places = (
        "iceberg.indexed_delete.table_files.write_file",
        "iceberg.delete_insert.insert",
        "epochs.stage.Staging.adopt",
        "epochs.epoch_runner.Ledger.prepare",
        "epochs.epoch_runner.publish",
        TABLES_ALONE,
        "iceberg.indexed_delete.Indexes.advance",
    )

    def die() -> None:
        with monkeypatch.context() as patch:
            if (place := chance.choice(places)) == TABLES_ALONE:
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
        pipeline.restart()

    def lose() -> None:
        pipeline.restart()
        shutil.rmtree(Path(pipeline.tables.warehouse) / INDEXES, ignore_errors=True)

    for _ in range(5):
        for _ in range(chance.randrange(1, 3)):
            fold.transaction()
        if (what := chance.choice([die, die, compact, lose, pipeline.restart, None])) is not None:
            what()
        pipeline.apply()
        fold.require()


def test_rows_are_found_by_the_index_and_not_by_a_scan(pipeline: Pipeline) -> None:
    fold = Fold(pipeline, 0)
    pipeline.publisher.announce(ITEMS, NAMES, PAIRS)
    fold.transaction()
    assert set(ways(pipeline).values()) == {"append"}
    for _ in range(3):
        fold.transaction()
        assert set(ways(pipeline).values()) == {"index"}
    fold.require()
    for name in fold.rows:
        frame = pipeline.spark.table(f"{pipeline.identifier(name)}.delete_files")
        vectors = frame.select("file_format", "referenced_data_file").collect()
        assert {row.file_format for row in vectors} == {"PUFFIN"}
        assert len({row.referenced_data_file for row in vectors}) == len(vectors)


def change(pipeline: Pipeline, value: str, *numbers: int) -> str:
    """Update items; the way that was taken."""
    with pipeline.publisher.transaction() as t:
        for number in numbers:
            t.update(ITEMS, {"id": number, "v": value})
    return ways(pipeline)["public.items"]


def filled(pipeline: Pipeline) -> None:
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        for number in range(5):
            t.insert(ITEMS, {"id": number, "v": "a"})
    pipeline.apply()
    assert change(pipeline, "b", 0, 1) == "index"


def items(pipeline: Pipeline) -> str:
    """The values of the items, in the order of their keys."""
    return "".join(row.v for row in pipeline.rows("items"))


@pytest.mark.long
def test_what_somebody_else_does_to_a_table_is_followed(pipeline: Pipeline) -> None:
    filled(pipeline)
    identifier = pipeline.identifier("items")
    snapshot = catalog.snapshot_id(catalog.load(pipeline.spark, identifier))
    pipeline.spark.sql(f"DELETE FROM {identifier} WHERE id IN (0, 4)")
    pipeline.restart()
    assert change(pipeline, "c", 0, 1) == "index"
    assert items(pipeline) == "ccaa"
    last = catalog.snapshot_id(catalog.load(pipeline.spark, identifier))
    table = identifier.partition(".")[2]
    pipeline.spark.sql(f"CALL slotbridge.system.rollback_to_snapshot('{table}', {snapshot})")
    pipeline.restart()
    with pytest.raises(OperatorNeeded, match="rolled back"):
        change(pipeline, "d", 1, 2)
    pipeline.spark.sql(f"CALL slotbridge.system.set_current_snapshot('{table}', {last})")
    pipeline.restart()
    assert set(ways(pipeline).values()) == {"index"}
    assert items(pipeline) == "cdda"


@pytest.mark.long
def test_an_index_that_is_lost_under_way_is_made_anew(pipeline: Pipeline) -> None:
    filled(pipeline)
    shutil.rmtree(Path(pipeline.tables.warehouse) / INDEXES)
    assert change(pipeline, "c", 1, 2) == "index"
    assert change(pipeline, "d", 2, 3) == "index"
    assert items(pipeline) == "bcdda"
    assert change(pipeline, "e", 9) == "index"
    assert items(pipeline) == "bcddae"


@pytest.mark.long
def test_an_index_is_taken_again_by_the_next_run(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pipeline)
    pipeline.restart()
    monkeypatch.setattr(KeyIndex, "_build", killed)
    assert change(pipeline, "c", 1, 2) == "index"
    assert items(pipeline) == "bccaa"


@pytest.mark.long
def test_what_the_index_does_not_cover_goes_the_way_without_it(pipeline: Pipeline) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS, REALS)
    with publisher.transaction() as t:
        t.insert(REALS, {"x": 1.5, "v": "a"})
        for number in range(3):
            t.insert(ITEMS, {"id": number, "v": "a"})
    pipeline.apply()
    identifier = pipeline.identifier("items")
    with publisher.transaction() as t:
        t.update(REALS, {"x": 1.5, "v": "b"})
        t.update(ITEMS, {"id": 1, "v": UNAVAILABLE})
        t.insert(ITEMS, {"id": 3, "v": "a"})
    assert ways(pipeline) == {"public.reals": "scan", "public.items": "merge"}
    pipeline.spark.sql(f"INSERT INTO {identifier} SELECT id, 'twice', 0, 0 FROM {identifier}")
    pipeline.restart()
    assert change(pipeline, "b", 1, 2) == "scan"
    assert sorted(row.v for row in pipeline.rows("items")) == ["a", "a", "b", "b", "twice", "twice"]
    with publisher.transaction() as t:
        t.truncate(ITEMS)
        t.insert(ITEMS, {"id": 0, "v": "a"})
    assert ways(pipeline) == {"public.items": "replace"}
    change(pipeline, "c", 0)
    assert items(pipeline) == "c"


@pytest.mark.long
def test_a_table_that_is_made_anew_has_another_key(pipeline: Pipeline) -> None:
    columns = {"id": ("int4", -1), "code": ("int4", -1), "v": ("text", -1)}
    first = SourceTable("items", columns, key=("id",), oid=1)
    second = SourceTable("items", columns, key=("code",), oid=2)
    pipeline.publisher.announce(first)
    for table in (first, second):
        pipeline.publisher.reshape(table)
        with pipeline.publisher.transaction() as t:
            for number in range(3):
                t.insert(table, {"id": 2 - number, "code": number, "v": "a"})
        pipeline.apply()
        with pipeline.publisher.transaction() as t:
            t.update(table, {"id": 2, "code": 0, "v": "b"})
            if table is second:
                t.update(table, {"id": 7, "code": 1, "v": "c"})
        assert ways(pipeline) == {"public.items": "index"}
    assert "".join(row.v for row in pipeline.rows("items", "code")) == "bca"


@pytest.mark.long
def test_a_second_row_of_a_key_that_somebody_else_writes_is_noticed(pipeline: Pipeline) -> None:
    filled(pipeline)
    identifier = pipeline.identifier("items")
    pipeline.spark.sql(f"INSERT INTO {identifier} SELECT id, 'z', 0, 0 FROM {identifier}")
    with capture_logs() as logs:
        assert change(pipeline, "c", 1, 2) == "scan"
    assert sorted(items(pipeline)) == sorted("bzccazaz")
    (told,) = [log for log in logs if log["log_level"] == "warning"]
    assert told["table"] == "public.items"
    assert "a key has more than one row" in told["reason"]


@pytest.mark.long
def test_a_second_writer_does_without_the_index(
    pipeline: Pipeline, new_pipeline: NewPipeline
) -> None:
    filled(pipeline)
    other = Pipeline(pipeline.spark, pipeline.settings, pipeline.publisher)
    assert change(other, "c", 1) == "scan"
    with pytest.raises(Retryable):
        change(pipeline, "d", 2)
    pipeline.restart()
    assert change(other, "e", 3) == "index"
    other.restart()
    assert items(pipeline) == "bcdea"


@pytest.mark.long
def test_a_value_that_does_not_fit_is_named(pipeline: Pipeline) -> None:
    filled(pipeline)
    with pipeline.publisher.transaction() as t:
        t.update(ITEMS, {"id": "one", "v": "c"})
    with pytest.raises(SlotbridgeError) as caught:
        pipeline.apply()
    failure = translated(caught.value, "apply an epoch")
    assert isinstance(failure, BadInput)
    assert "id" in str(failure)
    assert items(pipeline) == "bbaaa"


@pytest.mark.long
def test_a_collision_of_hashes_takes_no_other_row(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "spark_consumers.key_index.keys._hashed", lambda texts: np.zeros(len(texts), np.int64)
    )
    fold = Fold(pipeline, 3)
    pipeline.publisher.announce(ITEMS, NAMES, PAIRS)
    for _ in range(3):
        fold.transaction()
        pipeline.apply()
    fold.require()
