"""Writes changelogs: one row per event, as it came; also tables without a key, which only grow."""

from collections.abc import Iterable

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_consumers.iceberg.catalog import completed
from spark_consumers.iceberg.layout import Layout


def append(identifier: str, layout: Layout, rows: DataFrame, *, replace: bool) -> None:
    """Append rows, or put them in place of all that the table had."""
    writer = completed(identifier, rows).writeTo(identifier)
    if replace:
        writer.overwrite(F.lit(True))
    else:
        writer.append()


def of_rows(layout: Layout, rows: DataFrame) -> DataFrame:
    """Row events in the columns of a changelog; a delete has the old row, as far as it is known."""
    values = [F.col(f"c{field.place}").alias(field.name) for field in layout.fields]
    columns = layout.shape.columns
    unknown = [
        F.when(~F.col(f"a{field.place}"), F.lit(field.name))
        for field in layout.fields
        if columns[field.place].may_be_unavailable
    ]
    names = F.array_compact(F.array(*unknown)) if unknown else F.array()
    return rows.select(
        *values,
        F.col("commit_lsn").alias("_commit_lsn"),
        F.col("seq").alias("_seq"),
        F.col("op").alias("_op"),
        F.timestamp_micros("ts_us").alias("_commit_time"),
        names.cast("array<string>").alias("_unavailable"),
    )


def with_truncates(
    layout: Layout, rows: DataFrame, truncates: Iterable[tuple[int, int, int]]
) -> DataFrame:
    """`rows`, and one for each truncate (commit LSN, seq, commit time in µs since 1970)."""
    spark = rows.sparkSession
    given = spark.createDataFrame(list(truncates), "_commit_lsn bigint, _seq bigint, us bigint")
    nulls = [F.lit(None).cast(field.type).alias(field.name) for field in layout.fields]
    return rows.unionByName(
        given.select(
            *nulls,
            "_commit_lsn",
            "_seq",
            F.lit("t").alias("_op"),
            F.timestamp_micros("us").alias("_commit_time"),
            F.array().cast("array<string>").alias("_unavailable"),
        )
    )
