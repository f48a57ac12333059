"""Events to changes, as DataFrames without Kafka or tables."""

from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession

from schemas.events import UNAVAILABLE
from spark_consumers import changes
from spark_consumers.changes import Position
from spark_consumers.columns import Shape
from tests.spark_consumers.publisher import SourceTable, envelope

TABLE = SourceTable("t", {"id": ("int4", -1), "n": ("int4", -1), "body": ("text", -1)})
SHAPE = Shape.from_event(TABLE.shape_event(0))
Op = Literal["c", "u", "d", "t"]


def events(spark: SparkSession, *given: tuple[Op, int, dict[str, Any] | None]) -> DataFrame:
    """Events (op, commit_lsn, row) of one partition, in that order; the key is the row's id."""
    records: list[tuple[str, int, int, bytearray | None, bytearray | None]] = []
    for offset, (op, lsn, row) in enumerate(given):
        before, after = (row, None) if op == "d" else (None, row)
        value = envelope("p", TABLE, op, before, after, lsn, 0).model_dump_json(by_alias=True)
        key = None if row is None else bytearray(str(row["id"]).encode())
        records.append(("p.public.t", 0, offset, key, bytearray(value.encode())))
    records.append(("p.public.t", 0, len(records), bytearray(b"tombstone"), None))
    schema = "topic string, partition int, offset bigint, key binary, value binary"
    return changes.events(spark.createDataFrame(records, schema))


def row(number: int, n: int | None, body: str | None = "b") -> dict[str, Any]:
    return {"id": number, "n": n, "body": body}


def found(frame: DataFrame) -> list[tuple[Any, ...]]:
    """op, commit_lsn, id, n, body, whether body is available."""
    return sorted(map(tuple, frame.select("op", "commit_lsn", "c0", "c1", "c2", "a2").collect()))


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
    assert found(changes.changes(given, SHAPE, unavailable=False)) == expected
    assert found(changes.changes(given, SHAPE, unavailable=True)) == expected


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
    assert found(changes.changes(given, SHAPE, unavailable=True)) == [
        ("c", 7, 3, 7, None, False),
        ("u", 3, 1, 3, "lent", True),
        ("u", 4, 2, 4, None, False),
        ("u", 9, 4, 9, None, True),
    ]


def test_the_summary_tells_what_a_batch_brings(spark: SparkSession) -> None:
    given = events(
        spark,
        ("c", 5, row(1, 1)),
        ("t", 6, None),
        ("u", 7, {**row(1, 2, UNAVAILABLE), "more": 1}),
        ("d", 8, row(1, None)),
    )
    (part,) = changes.summary(given).collect()
    assert (part.topic, part.partition) == ("p.public.t", 0)
    assert (part.events, part.rows, part.identified_rows, part.keyless_rows) == (4, 3, 2, 0)
    assert (tuple(part["first"]), tuple(part["last"])) == ((5, 0), (8, 0))
    assert (tuple(part.truncate), part.lsn_min, part.lsn_max) == ((6, 0), 5, 8)
    assert part.refused_offset is None
    assert part.unavailable
    assert part.fields == ["id", "n", "body", "more"]
    assert [tuple(name) for name in part.tables] == [("public", "t")]


def test_what_came_before_is_known_by_partition_and_position(spark: SparkSession) -> None:
    given = events(spark, *(("c", lsn, row(lsn, 0)) for lsn in range(1, 7)))
    again = changes.duplicates(given, {0: Position(3, 0), 1: Position(9, 0)})
    new = changes.without_duplicates(given, {0: Position(3, 0), 1: Position(9, 0)})
    assert [row.commit_lsn for row in again.collect()] == [1, 2, 3]
    assert [row.commit_lsn for row in new.collect()] == [4, 5, 6]
    late = changes.after_truncate(given, Position(5, 1))
    assert [row.commit_lsn for row in late.collect()] == [6]
