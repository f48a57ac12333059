"""Writes current-state tables: one row per key, that of its last event."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark_consumers.events.changes import REFUSED
from spark_consumers.iceberg.catalog import completed, viewed
from spark_consumers.iceberg.layout import Layout, literal, quoted


def insert(identifier: str, layout: Layout, changes: DataFrame) -> None:
    """Append changes that are all of new rows."""
    completed(identifier, _rows(layout, changes)).writeTo(identifier).append()


def replace(identifier: str, layout: Layout, changes: DataFrame) -> None:
    """Put the rows that the changes leave in place of all that the table had, in one commit."""
    rows = changes.where(F.col("op") != "d")
    completed(identifier, _rows(layout, rows)).writeTo(identifier).overwrite(F.lit(True))


def merge(identifier: str, layout: Layout, changes: DataFrame, *, unavailable: bool) -> None:
    """Bring changes into the table; `unavailable`: some values may be missing from them."""
    with viewed(changes, identifier) as view:
        changes.sparkSession.sql(_merge_sql(identifier, layout, view, unavailable=unavailable))


def _rows(layout: Layout, changes: DataFrame) -> DataFrame:
    """In the columns of the table; an unchanged value that nothing has is an error."""
    values = []
    for field in layout.fields:
        value, column = F.col(f"c{field.place}"), layout.shape.columns[field.place]
        if column.may_be_unavailable:
            value = F.when(F.col(f"a{field.place}"), value).otherwise(
                missing(layout, column.name, F.col("commit_lsn"))
            )
        values.append(value.alias(field.name))
    return changes.select(
        *values, F.col("commit_lsn").alias("_commit_lsn"), F.col("seq").alias("_seq")
    )


def missing(layout: Layout, column: str, commit_lsn: Column) -> Column:
    """Raises: an unchanged value is neither in the changes nor in the table."""
    before = F.lit(f"{REFUSED}|{layout.shape.name}|||")
    return F.raise_error(F.concat(before, commit_lsn.cast("string"), F.lit(f"|column {column}")))


def _merge_sql(identifier: str, layout: Layout, view: str, *, unavailable: bool) -> str:
    columns = [quoted(name) for name in layout.names]
    values = [*(f"s.c{field.place}" for field in layout.fields), "s.commit_lsn", "s.seq"]
    kept = values.copy()
    for n, field in enumerate(layout.fields):
        column = layout.shape.columns[field.place]
        if unavailable and column.may_be_unavailable:
            has, value = f"s.a{field.place}", f"s.c{field.place}"
            kept[n] = f"if({has}, {value}, t.{quoted(field.name)})"
            values[n] = f"if({has}, {value}, {_missing_sql(layout, column.name)})"
    match = " AND ".join(f"t.{quoted(field.name)} = s.c{field.place}" for field in layout.key)
    later = "(s.commit_lsn > t._commit_lsn OR s.commit_lsn = t._commit_lsn AND s.seq > t._seq)"
    sets = ", ".join(f"t.{c} = {v}" for c, v in zip(columns, kept, strict=True))
    return (
        f"MERGE INTO {identifier} t USING {view} s ON {match}"  # noqa: S608 - names are quoted
        f" WHEN MATCHED AND {later} AND s.op = 'd' THEN DELETE"
        f" WHEN MATCHED AND {later} THEN UPDATE SET {sets}"
        f" WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT ({', '.join(columns)})"
        f" VALUES ({', '.join(values)})"
    )


def _missing_sql(layout: Layout, column: str) -> str:
    before = literal(f"{REFUSED}|{layout.shape.name}|||")
    return f"raise_error(concat({before}, s.commit_lsn, {literal(f'|column {column}')}))"
