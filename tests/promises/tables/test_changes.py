"""Events to changes, as DataFrames without Kafka or tables."""

from typing import Any, Literal

import pytest
from pyspark.sql import DataFrame, SparkSession

from schemas.events import UNAVAILABLE
from spark_consumers.events import changes
from spark_consumers.events.shape import CommitPosition, Shape
from tests.promises.tables.publisher import SourceTable, envelope

TABLE = SourceTable("t", {"id": ("int4", -1), "n": ("int4", -1), "body": ("text", -1)})
SHAPE = Shape.from_event(TABLE.shape_event(0))
Op = Literal["c", "u", "d", "t"]


def events(
    spark: SparkSession,
    *given: tuple[Op, int, dict[str, Any] | None],
    after_lsn: int = 0,
    upto_lsn: int = 100,
    named: str | None = None,
) -> DataFrame:
    """Events (op, commit_lsn, row) of one partition, in that order; the key is the row's id.

    `named`: the header of them all that names values which are the placeholder's text.
    """
    records: list[tuple[str, int, int, bytearray | None, bytearray | None, str | None]] = []
    for offset, (op, lsn, row) in enumerate(given):
        before, after = (row, None) if op == "d" else (None, row)
        value = envelope("p", TABLE, op, before, after, lsn, 0).model_dump_json(by_alias=True)
        key = None if row is None else bytearray(str(row["id"]).encode())
        records.append(("p.public.t", 0, offset, key, bytearray(value.encode()), named))
    records.append(("p.public.t", 0, len(records), bytearray(b"tombstone"), None, None))
    schema = "topic string, partition int, offset bigint, key binary, value binary"
    schema += ", placeholder_values string"
    return changes.events(spark.createDataFrame(records, schema), after_lsn, upto_lsn)


def row(number: int, n: int | None, body: str | None = "b") -> dict[str, Any]:
    return {"id": number, "n": n, "body": body}


def found(frame: DataFrame) -> list[tuple[Any, ...]]:
    """op, commit_lsn, id, n, body, whether body is available."""
    return sorted(map(tuple, frame.select("op", "commit_lsn", "c0", "c1", "c2", "a2").collect()))


@pytest.mark.long
def test_a_value_that_is_the_placeholder_is_stored_where_the_bridge_names_it(
    spark: SparkSession,
) -> None:
    change: tuple[Op, int, dict[str, Any]] = ("u", 9, row(1, 9, UNAVAILABLE))
    for named, expected in (
        ('["body"]', ("u", 9, 1, 9, UNAVAILABLE, True)),
        ('["n"]', ("u", 9, 1, 9, None, False)),
        (None, ("u", 9, 1, 9, None, False)),
    ):
        given = events(spark, change, named=named)
        assert found(changes.row_changes(given, [SHAPE], unavailable=True)) == [expected]
        assert found(changes.row_changes(given, [SHAPE], unavailable=False)) == [expected]


@pytest.mark.long
def test_an_old_row_with_the_text_of_the_placeholder_is_kept_as_it_was(
    spark: SparkSession,
) -> None:
    given = events(spark, ("d", 9, row(1, 9, UNAVAILABLE)))
    assert found(changes.parsed(given, [SHAPE])) == [("d", 9, 1, 9, UNAVAILABLE, True)]


@pytest.mark.long
def test_the_last_change_of_a_key_is_left(spark: SparkSession) -> None:
    given = events(
        spark,
        ("u", 9, row(1, 9)),
        ("c", 5, row(1, 5)),
        ("c", 6, row(2, 6)),
        ("t", 3, None),
        ("d", 8, row(2, None, None)),
        ("c", 7, row(3, 7, None)),
    )
    expected = [
        ("c", 7, 3, 7, None, True),
        ("d", 8, 2, None, None, True),
        ("u", 9, 1, 9, "b", True),
    ]
    assert found(changes.row_changes(given, [SHAPE], unavailable=False)) == expected
    assert found(changes.row_changes(given, [SHAPE], unavailable=True)) == expected


def test_an_unavailable_value_comes_from_the_same_row_only(spark: SparkSession) -> None:
    given = events(
        spark,
        ("u", 1, row(1, 1, "lent")),
        ("u", 2, row(1, 2, UNAVAILABLE)),
        ("u", 3, row(1, 3, UNAVAILABLE)),
        ("u", 4, row(2, 4, UNAVAILABLE)),
        ("c", 5, row(3, 5, "of a row that is gone")),
        ("d", 6, row(3, None, None)),
        ("c", 7, row(3, 7, UNAVAILABLE)),
        ("u", 8, row(4, 8, None)),
        ("u", 9, row(4, 9, UNAVAILABLE)),
    )
    assert found(changes.row_changes(given, [SHAPE], unavailable=True)) == [
        ("c", 7, 3, 7, None, False),
        ("u", 3, 1, 3, "lent", True),
        ("u", 4, 2, 4, None, False),
        ("u", 9, 4, 9, None, True),
    ]


@pytest.mark.long
def test_the_summary_tells_what_an_epoch_brings(spark: SparkSession) -> None:
    given = events(
        spark,
        ("c", 3, row(9, 9)),
        ("c", 5, row(1, 1)),
        ("t", 6, None),
        ("u", 7, row(1, 2, UNAVAILABLE)),
        ("d", 8, row(1, None)),
        ("c", 9, row(2, 1)),
        after_lsn=4,
        upto_lsn=8,
    )
    (part,) = changes.summary(given).collect()
    assert (part.topic, part.partition, part.next_offset) == ("p.public.t", 0, 5)
    assert (part.late, part.events, part.rows, part.counted_rows) == (1, 4, 3, 3)
    assert (part.identified_rows, part.snapshot_rows, part.keyless_rows) == (2, 0, 0)
    assert part.seen_lsn is None
    assert [tuple(t)[:2] for t in part.truncates] == [(6, 0)]
    assert (part.lsn_max, part.refused_offset, part.unavailable) == (8, None, True)
    assert [tuple(name) for name in part.tables] == [("public", "t")]
    own = changes.own_events(given, "p.public.t")
    assert [row.commit_lsn for row in own.collect()] == [5, 6, 7, 8]
    later = changes.after(own, CommitPosition(7, 0))
    assert [row.commit_lsn for row in later.collect()] == [8]


@pytest.mark.long
def test_events_are_read_by_the_shape_they_were_written_with(spark: SparkSession) -> None:
    old = Shape.from_event(SourceTable("t", TABLE.columns).shape_event(0))
    columns = {"id": ("int8", -1), "m": ("int4", -1), "body": ("text", -1), "new": ("bool", -1)}
    renamed = SourceTable("t", {"id": ("int4", -1), "m": ("int4", -1), "body": ("text", -1)})
    shapes = [
        old,
        Shape.from_event(renamed.shape_event(6)),
        Shape.from_event(SourceTable("t", columns).shape_event(8)),
    ]
    given = events(
        spark,
        ("c", 5, row(1, 5)),
        ("c", 6, {"id": 2, "m": 6, "body": "b"}),
        ("u", 7, {"id": 1, "m": 7, "body": UNAVAILABLE}),
        ("c", 8, {"id": 3, "m": 8, "body": "b", "new": True}),
    )
    folded = changes.row_changes(given, shapes, unavailable=True).orderBy("c0")
    assert [tuple(x) for x in folded.select("c0", "c1", "c2", "c3").collect()] == [
        (1, 7, "b", None),
        (2, 6, "b", None),
        (3, 8, "b", True),
    ]
    assert folded.schema["c0"].dataType.simpleString() == "bigint"
