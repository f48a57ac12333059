"""Kinds of tables, and what rules make of their columns."""

from typing import Any

import pytest

from schemas.errors import SettingsError
from schemas.events import UNAVAILABLE
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.publisher import SourceTable

ITEMS = SourceTable("items", {"id": ("int4", -1), "name": ("text", -1), "body": ("text", -1)})
LOG = SourceTable("log", {"note": ("text", -1)}, key=(), identity="nothing")
VERSION = ("_op", "_commit_lsn", "_end_lsn", "_end_op")


def item(number: int, name: str | None = "a", body: str | None = "b") -> dict[str, object]:
    return {"id": number, "name": name, "body": body}


def versions(pipeline: Pipeline) -> list[tuple[Any, ...]]:
    """id, name, body, op, since, until (both in transactions, from 1), what ended it."""
    frame = pipeline.spark.table(pipeline.identifier("items"))
    found = frame.select("id", "name", "body", *VERSION).orderBy("id", "_commit_lsn", "_seq")
    return [
        (*row[:4], row[4] // 100 - 10, row[5] and row[5] // 100 - 10, row[6])
        for row in map(tuple, found.collect())
    ]


def publish_lives(pipeline: Pipeline, *, epoch_each: bool) -> None:
    publisher = pipeline.publisher
    publisher.announce(ITEMS)

    def applied() -> None:
        if epoch_each:
            pipeline.apply()

    with publisher.transaction() as t:  # 1
        for number in (1, 2, 3, 4):
            t.insert(ITEMS, item(number))
    applied()
    with publisher.transaction() as t:  # 2
        t.update(ITEMS, item(1, "u", UNAVAILABLE))
        t.update(ITEMS, item(1, "v", UNAVAILABLE))
        t.delete(ITEMS, item(2))
        t.delete(ITEMS, item(3))
        t.insert(ITEMS, item(3, "again"))
    applied()
    with publisher.transaction() as t:  # 3
        t.insert(ITEMS, item(5))
        t.truncate(ITEMS)
        t.insert(ITEMS, item(1, "new"))
    pipeline.apply()


LIVES = [
    (1, "a", "b", "c", 1, 2, "u"),
    (1, "u", "b", "u", 2, 2, "u"),
    (1, "v", "b", "u", 2, 3, "t"),
    (1, "new", "b", "c", 3, None, None),
    (2, "a", "b", "c", 1, 2, "d"),
    (3, "a", "b", "c", 1, 2, "d"),
    (3, "again", "b", "c", 2, 3, "t"),
    (4, "a", "b", "c", 1, 3, "t"),
    (5, "a", "b", "c", 3, 3, "t"),
]


@pytest.mark.parametrize("epoch_each", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_history_has_every_version(new_pipeline: NewPipeline, epoch_each: bool) -> None:
    pipeline = new_pipeline(rules={"public.items": {"kind": "history"}})
    publish_lives(pipeline, epoch_each=epoch_each)
    assert versions(pipeline) == LIVES
    frame = pipeline.spark.table(pipeline.identifier("items"))
    assert frame.where("_valid_to < _valid_from").count() == 0
    assert frame.where("(_valid_to IS NULL) <> (_end_lsn IS NULL)").count() == 0
    as_of = f"_commit_lsn <= {1100} AND (_end_lsn IS NULL OR _end_lsn > {1100})"
    assert sorted(row.id for row in frame.where(as_of).collect()) == [1, 2, 3, 4]


def test_a_changelog_has_every_event_once(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(rules={"public.*": {"kind": "changelog"}})
    pipeline.publisher.announce(LOG)
    publish_lives(pipeline, epoch_each=True)
    with pipeline.publisher.transaction() as t:
        t.insert(LOG, {"note": "x"})
        t.insert(ITEMS, item(1), commit_lsn=1100, seq=0)
    pipeline.apply()
    frame = pipeline.spark.table(pipeline.identifier("items"))
    rows = frame.select("_op", "id", "name", "body", "_unavailable")
    found = [tuple(row) for row in rows.orderBy("_commit_lsn", "_seq").collect()]
    assert [row[0] for row in found] == [*"cccc", *"uuddc", *"ctc"]
    assert found[4] == ("u", 1, "u", None, ["body"])
    assert found[6] == ("d", 2, None, None, [])
    assert found[10] == ("t", None, None, None, [])
    assert [tuple(row) for row in pipeline.rows("log")] == [("x",)]


@pytest.mark.long
def test_columns_are_chosen_and_renamed_and_tables_partitioned_and_sorted(
    new_pipeline: NewPipeline,
) -> None:
    pipeline = new_pipeline(
        rules={
            "public.items": {
                "exclude": ["bo*"],
                "rename": {"name": "title"},
                "partition": ["bucket(4, id)", "truncate(1, title)"],
                "sort": ["title desc", "id"],
                "properties": {"write.parquet.compression-codec": "gzip"},
            },
        }
    )
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        for number in range(20):
            t.insert(ITEMS, item(number, f"n{number}"))
    pipeline.apply()
    with pipeline.publisher.transaction() as t:
        t.update(ITEMS, item(3, "moved", UNAVAILABLE))
        t.delete(ITEMS, item(4))
    pipeline.apply()
    frame = pipeline.spark.table(pipeline.identifier("items"))
    assert frame.columns == ["id", "title", "_commit_lsn", "_seq"]
    assert {(r.id, r.title) for r in frame.collect()} == {
        *((n, f"n{n}") for n in range(20) if n not in (3, 4)),
        (3, "moved"),
    }
    partitions = pipeline.spark.table(f"{pipeline.identifier('items')}.partitions").collect()
    assert {row.partition.title_trunc for row in partitions} == {"n", "m"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"exclude": ["id"]}, "column id is of the key"),
        ({"rename": {"nane": "x"}}, "there is no column nane"),
        ({"rename": {"name": "_seq"}}, "column _seq has a name that slottables or Iceberg needs"),
        ({"rename": {"name": "body"}}, "two columns would be named body"),
        ({"partition": ["day(at)"]}, "the Iceberg table has no column at"),
        ({"include": ["id"], "sort": ["name"]}, "the Iceberg table has no column name"),
    ],
)
def test_a_rule_that_does_not_fit_is_one_clear_error(
    new_pipeline: NewPipeline, rule: dict[str, Any], expected: str
) -> None:
    pipeline = new_pipeline(rules={"public.*": rule})
    pipeline.publisher.announce(ITEMS)
    with pipeline.publisher.transaction() as t:
        t.insert(ITEMS, item(1))
    with pytest.raises(SettingsError, match=expected) as raised:
        pipeline.apply()
    assert raised.value.subject == "public.items"


@pytest.mark.long
def test_a_history_needs_a_key(new_pipeline: NewPipeline) -> None:
    pipeline = new_pipeline(rules={"public.log": {"kind": "history"}})
    pipeline.publisher.announce(LOG)
    with pipeline.publisher.transaction() as t:
        t.insert(LOG, {"note": "x"})
    with pytest.raises(SettingsError, match="without a key can't have a history"):
        pipeline.apply()
