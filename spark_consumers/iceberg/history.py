"""Writes histories (SCD type 2): one row per version of a row, closed by the event that ended it.

A version holds from its event up to, not with, the one that ended it: the next event of its key, or
a truncate. Versions of one transaction have the same times; (_commit_lsn, _seq) orders them.
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from spark_consumers.iceberg.catalog import completed, viewed
from spark_consumers.iceberg.current import missing
from spark_consumers.iceberg.layout import Layout, quoted

Truncate = tuple[int, int, int]
_END = "struct<lsn: bigint, seq: bigint, us: bigint, op: string>"


def write(
    identifier: str,
    layout: Layout,
    rows: DataFrame,
    truncates: Sequence[Truncate],
    *,
    unavailable: bool,
    snapshot_rows: bool,
) -> None:
    """Close the versions that ended and add the new ones, in one commit."""
    if snapshot_rows:
        rows = _without_known(identifier, layout, rows)
    if unavailable:
        rows = _filled(layout, rows, _open_rows(identifier, layout, rows))
    source = _versions(layout, rows, truncates)
    with viewed(source, identifier) as view:
        source.sparkSession.sql(_merge_sql(identifier, layout, view, truncates))


def replace(
    identifier: str, layout: Layout, rows: DataFrame, truncates: Sequence[Truncate]
) -> None:
    """Put the versions of all events since ever in place of what the table had, in one commit."""
    rows = _filled(layout, rows, _open_rows(identifier, layout, rows).limit(0))
    begun = _versions(layout, rows, truncates).where("b")
    rows = begun.select(
        *(F.col(f"c{field.place}").alias(field.name) for field in layout.fields),
        F.col("commit_lsn").alias("_commit_lsn"),
        F.col("seq").alias("_seq"),
        F.col("op").alias("_op"),
        F.timestamp_micros("ts_us").alias("_valid_from"),
        F.timestamp_micros("end.us").alias("_valid_to"),
        F.col("end.lsn").alias("_end_lsn"),
        F.col("end.seq").alias("_end_seq"),
        F.col("end.op").alias("_end_op"),
    )
    completed(identifier, rows).writeTo(identifier).overwrite(F.lit(True))


def _keys(layout: Layout) -> list[str]:
    return [f"c{field.place}" for field in layout.key]


def _open_rows(identifier: str, layout: Layout, rows: DataFrame) -> DataFrame:
    """The versions that hold, in the columns k0, k1 … (key) and t<place>."""
    table = rows.sparkSession.table(identifier).where(F.col("_valid_to").isNull())
    return table.select(
        *(F.col(quoted(f.name)).alias(f"k{n}") for n, f in enumerate(layout.key)),
        *(F.col(quoted(f.name)).alias(f"t{f.place}") for f in layout.fields),
    )


def _same_key(layout: Layout, rows: DataFrame, table: DataFrame) -> Column:
    pairs = [rows[f"c{f.place}"] == table[f"k{n}"] for n, f in enumerate(layout.key)]
    match = pairs[0]
    for pair in pairs[1:]:
        match = match & pair
    return match


def _without_known(identifier: str, layout: Layout, rows: DataFrame) -> DataFrame:
    """A snapshot's row begins a version only where none holds."""
    table = _open_rows(identifier, layout, rows)
    read = rows.where(F.col("op") == "r")
    new = read.join(table, _same_key(layout, read, table), "left_anti")
    return rows.where(F.col("op") != "r").unionByName(new)


def _filled(layout: Layout, rows: DataFrame, table: DataFrame) -> DataFrame:
    """Unchanged values from the key's earlier event, else from the version that held before."""
    lending = [f for f in layout.fields if layout.shape.columns[f.place].may_be_unavailable]
    order = Window.partitionBy(*_keys(layout)).orderBy("commit_lsn", "seq")
    past = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    began = rows.withColumn("life", F.sum(F.when(F.col("op") == "u", 0).otherwise(1)).over(past))
    same = Window.partitionBy(*_keys(layout), "life").orderBy("commit_lsn", "seq")
    same = same.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    for f in lending:
        known = F.when(F.col(f"a{f.place}"), F.struct(F.col(f"c{f.place}").alias("v")))
        began = began.withColumn(f"l{f.place}", F.last(known, ignorenulls=True).over(same))
    table = table.withColumn("held", F.lit(True))
    joined = began.join(table, _same_key(layout, began, table), "left")
    first_life = F.col("life") == 0
    for f in lending:
        lent, own = F.col(f"l{f.place}"), F.col(f"t{f.place}")
        column = layout.shape.columns[f.place].name
        value = (
            F.when(lent.isNotNull(), lent.getField("v"))
            .when(first_life & F.col("held"), own)
            .when(F.col("op") != "d", missing(layout, column, F.col("commit_lsn")))
        )
        joined = joined.withColumn(f"c{f.place}", value)
    return joined.select(*rows.columns)


def _versions(layout: Layout, rows: DataFrame, truncates: Sequence[Truncate]) -> DataFrame:
    """What MERGE takes: `begins` true for a new version, false for the end of one in the table."""
    order = Window.partitionBy(*_keys(layout)).orderBy("commit_lsn", "seq")
    place = F.struct(
        F.col("commit_lsn").alias("lsn"), "seq", F.col("ts_us").alias("us"), "op"
    ).cast(_END)
    placed = rows.withColumn("place", place)
    placed = placed.withColumn("next", F.lead("place").over(order))
    placed = placed.withColumn("number", F.row_number().over(order))
    cuts = F.array(
        *(F.struct(*(F.lit(v) for v in (*cut, "t"))).cast(_END) for cut in sorted(truncates))
    )

    def cut_after(position: Column) -> Column:
        return F.array_min(F.filter(cuts, lambda cut: cut > position))

    if truncates:
        end = F.least(F.col("next"), cut_after(F.col("place")))
        first = F.least(F.col("place"), F.array_min(cuts))
    else:
        end, first = F.col("next"), F.col("place")
    values = [f"c{field.place}" for field in layout.fields]
    kept = [*values, "commit_lsn", "seq", "ts_us", "op"]
    begun = placed.where(F.col("op") != "d").select(*kept, end.alias("end"), F.lit(True).alias("b"))
    ended = placed.where(F.col("number") == 1).select(
        *kept, first.alias("end"), F.lit(False).alias("b")
    )
    return begun.unionByName(ended)


def _merge_sql(identifier: str, layout: Layout, view: str, truncates: Sequence[Truncate]) -> str:
    match = " AND ".join(f"t.{quoted(field.name)} = s.c{field.place}" for field in layout.key)
    columns = ", ".join(quoted(name) for name in layout.names)
    values = ", ".join(f"s.c{field.place}" for field in layout.fields)
    sql = (
        f"MERGE INTO {identifier} t USING {view} s"  # noqa: S608 - names are quoted
        f" ON {match} AND NOT s.b AND t._valid_to IS NULL"
        " WHEN MATCHED THEN UPDATE SET t._valid_to = timestamp_micros(s.end.us),"
        " t._end_lsn = s.end.lsn, t._end_seq = s.end.seq, t._end_op = s.end.op"
        f" WHEN NOT MATCHED AND s.b THEN INSERT ({columns}) VALUES ({values}, s.commit_lsn, s.seq,"
        " s.op, timestamp_micros(s.ts_us), timestamp_micros(s.end.us), s.end.lsn, s.end.seq,"
        " s.end.op)"
    )
    if truncates:
        lsn, seq, us = min(truncates)
        sql += (
            " WHEN NOT MATCHED BY SOURCE AND t._valid_to IS NULL THEN UPDATE SET"
            f" t._valid_to = timestamp_micros({us}), t._end_lsn = {lsn}, t._end_seq = {seq},"
            " t._end_op = 't'"
        )
    return sql
