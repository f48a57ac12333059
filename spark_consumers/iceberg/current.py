"""Writes current-state tables: one row per key, that of its last event."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_consumers.events.changes import REFUSED
from spark_consumers.iceberg.catalog import completed, viewed
from spark_consumers.iceberg.layout import Layout
from spark_consumers.sql import literal, quoted


def insert(identifier: str, layout: Layout, changes: DataFrame) -> None:
    """Append changes that are all of new rows."""
    completed(identifier, _rows(layout, changes), layout.kept).writeTo(identifier).append()


def replace(identifier: str, layout: Layout, changes: DataFrame) -> None:
    """Put the rows that the changes leave in place of all that the table had, in one commit."""
    rows = changes.where("op <> 'd'")
    completed(identifier, _rows(layout, rows), layout.kept).writeTo(identifier).overwrite(
        F.lit(True)
    )


def merge(identifier: str, layout: Layout, changes: DataFrame, *, unavailable: bool) -> None:
    """Bring changes into the table; `unavailable`: some values may be missing from them."""
    with viewed(changes, identifier) as view:
        changes.sparkSession.sql(_merge_sql(identifier, layout, view, unavailable=unavailable))


def _rows(layout: Layout, changes: DataFrame) -> DataFrame:
    """Convert changes to the table's columns; raise for an unchanged value that is nowhere."""
    values = []
    for field in layout.fields:
        value, column = f"c{field.source_index}", layout.shape.columns[field.source_index]
        if column.may_be_unavailable:
            lacks = missing(layout, column.name, "commit_lsn")
            value = f"CASE WHEN a{field.source_index} THEN {value} ELSE {lacks} END"
        values.append(f"{value} AS {quoted(field.name)}")
    return changes.selectExpr(*values, "commit_lsn AS _commit_lsn", "seq AS _seq")


def missing(layout: Layout, column: str, commit_lsn: str) -> str:
    """Return SQL that raises because neither the changes nor the table have an unchanged value."""
    before = literal(f"{REFUSED}|{layout.shape.name}|||")
    return f"raise_error(concat({before}, {commit_lsn}, {literal(f'|column {column}')}))"


def _merge_sql(identifier: str, layout: Layout, view: str, *, unavailable: bool) -> str:
    """Return the MERGE of each key's last event into a table of rows, by commit LSN and seq.

    Columns that an event has as unavailable keep the table's value.
    """
    columns = [quoted(name) for name in layout.names]
    values = [*(f"s.c{field.source_index}" for field in layout.fields), "s.commit_lsn", "s.seq"]
    kept = values.copy()
    for n, field in enumerate(layout.fields):
        column = layout.shape.columns[field.source_index]
        if unavailable and column.may_be_unavailable:
            has, value = f"s.a{field.source_index}", f"s.c{field.source_index}"
            kept[n] = f"if({has}, {value}, t.{quoted(field.name)})"
            values[n] = f"if({has}, {value}, {missing(layout, column.name, 's.commit_lsn')})"
    match = " AND ".join(
        f"t.{quoted(field.name)} = s.c{field.source_index}" for field in layout.key
    )
    later = "(s.commit_lsn > t._commit_lsn OR s.commit_lsn = t._commit_lsn AND s.seq > t._seq)"
    sets = ", ".join(f"t.{c} = {v}" for c, v in zip(columns, kept, strict=True))
    return (
        f"MERGE INTO {identifier} t USING {view} s ON {match}"  # noqa: S608 - names are quoted
        f" WHEN MATCHED AND {later} AND s.op = 'd' THEN DELETE"
        f" WHEN MATCHED AND {later} THEN UPDATE SET {sets}"
        f" WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT ({', '.join(columns)})"
        f" VALUES ({', '.join(values)})"
    )
