"""Every PostgreSQL type, from the bridge's JSON form to the Iceberg column."""

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from schemas.events import UNAVAILABLE
from schemas.infinities import (
    DATE_INFINITY_DAYS,
    DATE_NEGATIVE_INFINITY_DAYS,
    INFINITY_MICROSECONDS,
    NEGATIVE_INFINITY_MICROSECONDS,
)
from spark_consumers.events import changes
from spark_consumers.events.columns import ColumnShape
from spark_consumers.events.shape import Shape
from spark_consumers.failures import translated
from tests.promises.tables.conftest import Pipeline
from tests.promises.tables.publisher import SourceTable, envelope


def numeric(precision: int, scale: int) -> int:
    """The typmod of numeric(precision, scale)."""
    return (precision << 16 | scale & 0x7FF) + 4


def local(text: str) -> dt.datetime:
    """A date and time without a zone."""
    return dt.datetime.fromisoformat(text)


# column: PostgreSQL type, typmod, JSON form, Iceberg type, value
TYPES: dict[str, tuple[str, int, Any, str, Any]] = {
    "truth": ("bool", -1, True, "boolean", True),
    "small": ("int2", -1, -32768, "int", -32768),
    "middle": ("int4", -1, 2147483647, "int", 2147483647),
    "big": ("int8", -1, -(2**63), "bigint", -(2**63)),
    "oid": ("oid", -1, 4294967295, "bigint", 4294967295),
    "real": ("float4", -1, 0.5, "float", 0.5),
    "double": ("float8", -1, 1e300, "double", 1e300),
    "infinite": ("float8", -1, "-Infinity", "double", -math.inf),
    "price": ("numeric", numeric(12, 2), "-1234567890.12", "decimal(12,2)",
              Decimal("-1234567890.12")),
    "exact": ("numeric", numeric(38, 38), "0." + "9" * 38, "decimal(38,38)",
              Decimal("0." + "9" * 38)),
    "rounded": ("numeric", numeric(3, -2), "12300", "decimal(5,0)", Decimal(12300)),
    "tiny": ("numeric", numeric(2, 4), "0.0012", "decimal(4,4)", Decimal("0.0012")),
    "wide": ("numeric", numeric(39, 0), "9" * 39, "string", "9" * 39),
    "free": ("numeric", -1, "NaN", "string", "NaN"),
    "money": ("money", -1, "1.00", "string", "1.00"),
    "day": ("date", -1, -1, "date", dt.date(1969, 12, 31)),
    "at": ("timestamp", -1, 1_700_000_000_000_001, "timestamp_ntz",
           local("2023-11-14 22:13:20.000001")),
    "ancient": ("timestamp", 0, -62_135_596_800_000_000, "timestamp_ntz",
                local("0001-01-01 00:00:00")),
    "instant": ("timestamptz", -1, "2026-01-31T12:00:00.123456Z", "timestamp",
                local("2026-01-31 12:00:00.123456")),
    "clock": ("time", -1, 86_399_999_999, "bigint", 86_399_999_999),
    "zoned": ("timetz", -1, "08:20:30.5Z", "string", "08:20:30.5Z"),
    "bytes": ("bytea", -1, "AP+A", "binary", bytearray(b"\x00\xff\x80")),
    "text": ("text", -1, 'a "b"\\\n\t,é💡', "string", 'a "b"\\\n\t,é💡'),
    "padded": ("bpchar", 8, "ab  ", "string", "ab  "),
    "document": ("jsonb", -1, '{"a": [1, null]}', "string", '{"a": [1, null]}'),
    "list": ("_int4", -1, [1, 2, None], "string", "[1,2,null]"),
    "matrix": ("_text", -1, [["a \"b", ""], ["é", None]], "string", '[["a \\"b",""],["é",null]]'),
    "kind": ("public.mood", -1, "sad", "string", "sad"),
    "number": ("public.positive", -1, 7, "string", "7"),
}  # fmt: skip


def test_every_type_arrives(pipeline: Pipeline) -> None:
    table = SourceTable("types", {"id": ("int8", -1)} | {n: (t[0], t[1]) for n, t in TYPES.items()})
    filled = {"id": 1} | {name: form for name, (_, _, form, _, _) in TYPES.items()}
    pipeline.publisher.announce(table)
    with pipeline.publisher.transaction() as t:
        t.insert(table, filled)
        t.insert(table, {"id": 2} | dict.fromkeys(TYPES))
        t.insert(table, {**filled, "id": 3})
        t.update(
            table,
            {**filled, "id": 3, "text": UNAVAILABLE, "price": UNAVAILABLE,
             "bytes": "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="},
        )  # fmt: skip
    pipeline.apply()
    frame = pipeline.spark.table(pipeline.identifier("types"))
    assert dict(frame.dtypes) == {"id": "bigint", "_commit_lsn": "bigint", "_seq": "bigint"} | {
        name: kind for name, (_, _, _, kind, _) in TYPES.items()
    }
    instant = F.date_format("instant", "yyyy-MM-dd HH:mm:ss.SSSSSS").alias("instant")
    names = [name for name in frame.columns if name != "instant"]
    full, empty, again = (
        row.asDict() for row in frame.orderBy("id").select(*names, instant).collect()
    )
    expected = {name: value for name, (_, _, _, _, value) in TYPES.items()}
    expected["instant"] = expected["instant"].isoformat(" ")
    assert {name: full[name] for name in expected} == expected
    assert {name: again[name] for name in expected} == expected
    assert not any(empty[name] is not None for name in expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "form", "microseconds"),
    [
        ("timestamp", INFINITY_MICROSECONDS, INFINITY_MICROSECONDS),
        ("timestamp", NEGATIVE_INFINITY_MICROSECONDS, NEGATIVE_INFINITY_MICROSECONDS),
        ("timestamptz", "infinity", INFINITY_MICROSECONDS),
        ("timestamptz", "-infinity", NEGATIVE_INFINITY_MICROSECONDS),
        ("timestamptz", "-0043-03-15T12:00:00Z", -63_517_780_800_000_000),
        ("timestamptz", "+12345-01-01T00:00:00.000000Z", 327_403_382_400_000_000),
        ("date", DATE_INFINITY_DAYS, DATE_INFINITY_DAYS),
        ("date", DATE_NEGATIVE_INFINITY_DAYS, DATE_NEGATIVE_INFINITY_DAYS),
    ],
)
def test_the_ends_of_time(spark: SparkSession, kind: str, form: Any, microseconds: int) -> None:
    value = F.col("c0")
    as_number = {
        "timestamp": F.unix_micros(value.cast("timestamp")),
        "timestamptz": F.unix_micros(value),
        "date": F.unix_date(value),
    }
    found = parsed(spark, kind, -1, form).select(as_number[kind].alias("number")).first()
    assert found is not None
    assert found.number == microseconds


def parsed(spark: SparkSession, kind: str, typmod: int, form: Any) -> Any:
    """The rows that one event with one column of that type gives."""
    shape = Shape("public", "t", (ColumnShape("v", kind, typmod, key=False),), ())
    table = SourceTable("t", {"v": (kind, typmod)}, key=())
    value = envelope("p", table, "c", None, {"v": form}, 7, 0).model_dump_json(by_alias=True)
    records = spark.createDataFrame(
        [("p.public.t", 1, 42, None, bytearray(value.encode()), None)],
        "topic string, partition int, offset bigint, key binary, value binary,"
        " placeholder_values string",
    )
    return changes.rows(changes.events(records, 0, 100), shape)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "typmod", "form"),
    [
        ("int4", -1, 2**31),
        ("int4", -1, 1.5),
        ("int8", -1, "x"),
        ("bool", -1, "maybe"),
        ("float8", -1, "1,5"),
        ("numeric", numeric(4, 2), "1.234"),
        ("numeric", numeric(4, 2), "12345"),
        ("numeric", numeric(4, 2), "NaN"),
        ("date", -1, "2026-01-01"),
        ("timestamp", -1, "2026-01-01T00:00:00Z"),
        ("timestamptz", -1, 1_700_000_000_000_000),
        ("bytea", -1, "not base64!"),
    ],
)
def test_a_value_that_does_not_fit_its_type_is_an_error(
    spark: SparkSession, kind: str, typmod: int, form: Any
) -> None:
    with pytest.raises(PySparkException) as raised:
        parsed(spark, kind, typmod, form).collect()
    error = translated(raised.value, "apply")
    assert error.message == "column v has a value that does not fit its type"
    assert (error.subject, error.lsn) == ("p.public.t, partition 1, offset 42", 7)
