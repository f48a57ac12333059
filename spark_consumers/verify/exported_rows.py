"""Rows that `spark_consumers.verify.postgres` has exported to this machine, as a DataFrame.

Only the driver is sure to see that folder. Where executors are processes of their own, in pods or
on other machines, the driver sends them the lines, a file at a time: they keep these on their disks
until the rows are compared, and the driver keeps none of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_consumers.events.columns import ColumnShape, typed

_LINES = "value string"
# Two copies, so that one executor may die.
_KEPT = StorageLevel.DISK_ONLY_2


@contextmanager
def source_rows(
    spark: SparkSession, folder: Path, columns: Sequence[ColumnShape]
) -> Iterator[DataFrame]:
    """Give the exported rows, typed, in columns c0, c1 and so on, until the end of the block."""
    names = [f"c{number}" for number in range(len(columns))]
    text = T.StructType([T.StructField(name, T.StringType()) for name in names])
    # As events are parsed: the JSON of an array is then written the same on both sides.
    row = F.from_json("value", text, {"mode": "FAILFAST"}).alias("row")
    typed_columns = zip(names, columns, strict=True)
    selected = [f"{_typed(name, column)} AS {name}" for name, column in typed_columns]
    with _lines(spark, folder) as lines:
        yield lines.select(row).select("row.*").selectExpr(*selected)


@contextmanager
def _lines(spark: SparkSession, folder: Path) -> Iterator[DataFrame]:
    """Give the lines of the folder's files, in the column `value`."""
    if _sees_the_folder(spark):
        yield spark.read.text(str(folder))
        return
    sent: list[DataFrame] = []
    try:
        for file in sorted(folder.glob("*.json")):
            content = file.read_bytes()
            if content:
                sent.append(_sent(spark, content))
        empty = spark.createDataFrame([], _LINES)
        yield reduce(DataFrame.unionByName, sent, empty)
    finally:
        for frame in sent:
            _free(frame)


def _sees_the_folder(spark: SparkSession) -> bool:
    """Tell whether the tasks run in the driver's own process."""
    return bool(spark.sparkContext._jsc.isLocal())


def _sent(spark: SparkSession, content: bytes) -> DataFrame:
    """Send the lines of one file to the executors; the driver forgets them."""
    text = pa.array([content.removesuffix(b"\n").decode()], pa.string())
    frame = spark.createDataFrame(pa.table({"value": pc.split_pattern(text, "\n").flatten()}))
    return frame.localCheckpoint(eager=True, storageLevel=_KEPT)


def _free(frame: DataFrame) -> None:
    """Remove the lines from the executors' disks now, and not when Java collects its garbage."""
    plan: Any = frame._jdf.queryExecution().analyzed()
    plan.rdd().unpersist(False)


def _typed(raw: str, column: ColumnShape) -> str:
    """Read the text of `spark_consumers.postgres`; where it is an event's JSON form, as that."""
    if isinstance(column.data_type, T.BinaryType):
        return f"unhex({raw})"
    if isinstance(column.data_type, T.TimestampType):
        return f"timestamp_micros(try_cast({raw} AS bigint))"
    return typed(raw, column)
