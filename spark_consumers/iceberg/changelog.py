"""Writes changelogs: one row per event, as it came; also tables without a key, which only grow."""

from collections.abc import Iterable

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_consumers.iceberg.catalog import completed
from spark_consumers.iceberg.layout import Layout
from spark_consumers.sql import literal, null


def append(identifier: str, layout: Layout, rows: DataFrame, *, replace: bool) -> None:
    """Append rows, or put them in place of all that the table had."""
    writer = completed(identifier, rows, layout.kept).writeTo(identifier)
    if replace:
        writer.overwrite(F.lit(True))
    else:
        writer.append()


def of_rows(layout: Layout, rows: DataFrame) -> DataFrame:
    """Convert row events to a changelog's columns; a delete has what is known of the old row."""
    columns = layout.shape.columns
    unknown = ", ".join(
        f"CASE WHEN NOT a{field.source_index} THEN {literal(field.name)} END"
        for field in layout.fields
        if columns[field.source_index].may_be_unavailable
    )
    return rows.selectExpr(
        *layout.values,
        "commit_lsn AS _commit_lsn",
        "seq AS _seq",
        "op AS _op",
        "timestamp_micros(ts_us) AS _commit_time",
        f"CAST(array_compact(array({unknown})) AS array<string>) AS _unavailable",
    )


def with_truncates(
    layout: Layout, rows: DataFrame, truncates: Iterable[tuple[int, int, int]]
) -> DataFrame:
    """Add to `rows` one for each truncate (commit LSN, seq, commit time in µs since 1970)."""
    spark = rows.sparkSession
    given = spark.createDataFrame(list(truncates), "_commit_lsn bigint, _seq bigint, us bigint")
    return rows.unionByName(
        given.selectExpr(
            *(null(field.name, field.type) for field in layout.fields),
            "_commit_lsn",
            "_seq",
            "'t' AS _op",
            "timestamp_micros(us) AS _commit_time",
            "CAST(array() AS array<string>) AS _unavailable",
        )
    )
