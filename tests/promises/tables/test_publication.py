"""All tables of an epoch and its record become visible at once, where the catalog can do that."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_consumers.epochs import publication
from spark_consumers.epochs.publication import TableCommit
from spark_consumers.iceberg import catalog
from tests.promises.tables.conftest import Pipeline
from tests.promises.tables.kills import PUBLISH
from tests.promises.tables.publisher import SourceTable
from tests.promises.tables.readers import Readers
from tests.providers.waiting import eventually

LEFT = SourceTable("left_one", {"id": ("int4", -1), "v": ("int4", -1)})
RIGHT = SourceTable("right_one", {"id": ("int4", -1), "v": ("int4", -1)})
SUMS = {"left_one": "v", "right_one": "v"}


def epoch(pipeline: Pipeline, number: int) -> None:
    """One transaction that changes both tables alike, in an epoch of its own."""
    with pipeline.publisher.transaction() as t:
        for table in (LEFT, RIGHT):
            t.insert(table, {"id": number, "v": 1 + number})
    pipeline.apply()


class OneByOne:
    """Publish as with a catalog that commits table by table, while readers look."""

    def __init__(self, readers: Readers) -> None:
        self._seen = readers.seen

    def __call__(self, _spark: SparkSession, tables: Sequence[TableCommit], *record: Any) -> bool:
        """Let them look twice after each table: the second look has begun after its commit."""
        for table in tables:
            assert publication.each_alone([table])
            looks = self._seen.looks + 2
            eventually(lambda: self._seen.looks >= looks, what="the readers look")  # noqa: B023
        return publication.one_by_one([], *record)


@pytest.mark.parametrize(
    "at_once", [pytest.param(True, marks=pytest.mark.long), False], ids=["at once", "one by one"]
)
def test_readers_that_ask_once_see_all_tables_at_one_epoch(
    pipeline: Pipeline, warehouse: Path, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    """The other way shows that these readers would see it."""
    pipeline.publisher.announce(LEFT, RIGHT)
    epoch(pipeline, 0)
    namespace = pipeline.kafka.topic_prefix
    with Readers(warehouse / "catalog.db", namespace, SUMS) as readers:
        eventually(lambda: readers.seen.looks, what="the readers see the first epoch")
        if not at_once:
            monkeypatch.setattr(PUBLISH, OneByOne(readers))
        for number in range(1, 8 if at_once else 2):
            epoch(pipeline, number)
        eventually(lambda: readers.seen.epochs > 1, what="they see a later one")
    assert bool(readers.seen.torn) is not at_once


@pytest.mark.long
def test_an_epoch_is_published_though_a_table_was_changed_meanwhile(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not written anew, and leaves no file that no table names."""
    pipeline.publisher.announce(LEFT, RIGHT)
    epoch(pipeline, 0)
    replace, meanwhile = publication._replace_locations, ["one", "two"]

    def beaten(*given: Any) -> bool:
        if meanwhile:
            table = catalog.load(pipeline.spark, pipeline.identifier("left_one"))
            catalog.set_property(table, "somebody.else", meanwhile.pop())
        return replace(*given)

    monkeypatch.setattr(publication, "_replace_locations", beaten)
    written = pipeline.snapshots("right_one")
    epoch(pipeline, 1)
    assert pipeline.snapshots("right_one") == written + 1
    assert pipeline.runner.record.epoch == 2
    for name in ("left_one", "right_one", "_epochs"):
        table = catalog.load(pipeline.spark, pipeline.identifier(name))
        metadata = catalog.metadata(table)
        folder = Path(metadata["location"].removeprefix("file:")) / "metadata"
        there = {path.name for path in folder.glob("*.metadata.json")}
        named = {Path(entry["metadata-file"]).name for entry in metadata["metadata-log"]}
        current = Path(str(table.operations().current().metadataFileLocation())).name
        assert there == named | {current}
        lists = {path.name for path in folder.glob("snap-*.avro")}
        assert lists == {Path(each["manifest-list"]).name for each in metadata["snapshots"]}
    table = catalog.load(pipeline.spark, pipeline.identifier("left_one"))
    assert catalog.properties(table)["somebody.else"] == "one"


@pytest.mark.long
@pytest.mark.parametrize("name", ["left_one", "_epochs"])
def test_where_tables_are_committed_one_by_one_it_is_published_though_one_was_changed_meanwhile(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pipeline.publisher.announce(LEFT, RIGHT)
    epoch(pipeline, 0)
    given: list[bool] = []

    def publish(_spark: SparkSession, tables: Sequence[TableCommit], *record: Any) -> bool:
        if not given:
            table = catalog.load(pipeline.spark, pipeline.identifier(name))
            catalog.set_property(table, "somebody.else", "one")
        given.append(publication.one_by_one(tables, *record))
        return given[-1]

    written = pipeline.snapshots("right_one")
    monkeypatch.setattr(PUBLISH, publish)
    epoch(pipeline, 1)
    assert given == ([True] if name == "_epochs" else [False, True])
    assert pipeline.snapshots("right_one") == written + 1
    assert pipeline.runner.record.epoch == 2
    for each in ("left_one", "right_one"):
        assert [row.id for row in pipeline.rows(each)] == [0, 1]
    table = catalog.load(pipeline.spark, pipeline.identifier(name))
    assert catalog.properties(table)["somebody.else"] == "one"
    assert [found.epoch for found in pipeline.runner._ledger.all(pipeline.spark)] == [1, 2]


@pytest.mark.long
def test_a_table_that_was_dropped_meanwhile_leaves_all_others_where_they_are(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.publisher.announce(LEFT, RIGHT)
    epoch(pipeline, 0)
    replace = publication._replace_locations

    def beaten(*given: Any) -> bool:
        monkeypatch.setattr(publication, "_replace_locations", replace)
        pipeline.spark.sql(f"DROP TABLE {pipeline.identifier('right_one')} PURGE")
        return replace(*given)

    monkeypatch.setattr(publication, "_replace_locations", beaten)
    with pytest.raises(Exception, match=r"right_one|NoSuchTable|TABLE_OR_VIEW_NOT_FOUND"):
        epoch(pipeline, 1)
    assert [row.id for row in pipeline.rows("left_one")] == [0]
    pipeline.restart()
    pipeline.apply()
    assert [row.id for row in pipeline.rows("left_one")] == [0, 1]
    assert [row.id for row in pipeline.rows("right_one")] == [0, 1]
