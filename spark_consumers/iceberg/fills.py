"""Gives the rows of an Iceberg table their values in columns that were added with a default.

PostgreSQL does not write a constant default into the rows that are there, and the WAL has none of
it; the schema event tells the value. All rows are written anew with it, in the epoch's branch and
before its changes. Iceberg's initial-default would not write anything, but readers up to Iceberg
1.11 leave out the rows that have it once a query filters by the column (apache/iceberg#16690).
"""

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import structlog
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from schemas.tables import TablesSettings
from spark_consumers.events.columns import ColumnShape, typed
from spark_consumers.events.shape import Shape, filled, unsent_columns
from spark_consumers.iceberg.layout import Layout
from spark_consumers.sql import literal, quoted

log = structlog.get_logger()


class Fill(NamedTuple):
    """A value for all rows: its JSON form as text, of a column with this PostgreSQL type."""

    type: str
    typmod: int
    text: str


def fills_for(old: Layout, new: Layout) -> dict[str, Fill]:
    """Return the fills (Iceberg column -> value) that a change of shape asks for. Pure.

    A changelog needs none: its rows are events, which do not tell columns that came later.
    """
    if new.kind == "changelog":
        return {}
    values = filled(old.shape, new.shape)
    columns = ((field.name, new.shape.columns[field.source_index]) for field in new.fields)
    return {
        name: Fill(column.type, column.typmod, values[column.name])
        for name, column in columns
        if column.name in values
    }


def fills_from(document: str | None) -> dict[str, Fill]:
    """Read fills that a table's property has kept, none without that property."""
    return {name: Fill(*fill) for name, fill in json.loads(document or "{}").items()}


def wanted(settings: TablesSettings, table: str, fills: Mapping[str, Fill]) -> Mapping[str, Fill]:
    """Return the fills that the settings want; log those of a source table that they do not."""
    if fills and settings.on_column_default == "null":
        warn_unfilled(table, fills)
        return {}
    return fills


def fill(spark: SparkSession, identifier: str, fills: Mapping[str, Fill]) -> None:
    """Write all rows anew, with the values in their columns, in one commit."""
    rows = spark.table(identifier)
    values = {field.name: quoted(field.name) for field in rows.schema.fields}
    for field in rows.schema.fields:
        if found := fills.get(field.name):
            column = ColumnShape(field.name, found.type, found.typmod, key=False)
            value = f"CAST({typed(literal(found.text), column)} AS {field.dataType.simpleString()})"
            if spark.sql(f"SELECT {value} IS NULL AS unfit").collect()[0].unfit:
                log.warning(
                    "a default does not fit its column: rows that were there have NULL",
                    table=identifier.replace("`", ""),
                    column=field.name,
                    hint="events with this value are refused, too: change it at the source",
                )
            else:
                values[field.name] = f"{value} AS {quoted(field.name)}"
    rows.selectExpr(*values.values()).writeTo(identifier).overwrite(F.lit(True))
    log.info("wrote added columns into all rows", table=identifier, columns=[*fills])


def warn_unfilled(table: str, fills: Iterable[str]) -> None:
    """Log that rows keep NULL in columns where the source has a value."""
    log.warning(
        "rows that were there have NULL in added columns, and a default at the source",
        table=table,
        columns=[*fills],
        hint=f"`slottables rebuild --table {table}` or `slotbridge snapshot start {table}` fills "
        "the columns; tables.on_column_default: fill does so at once",
    )


def warn_unsent(before: Shape, shape: Shape, changed: Iterable[str]) -> None:
    """Log that values of added or changed columns are in no event, if the shapes say so."""
    unsent = unsent_columns(before, shape)
    columns = [name for name in changed if name in unsent]
    if columns:
        log.warning(
            "rows that were there may lack the values that the source has in these columns: "
            "PostgreSQL wrote them without an event (a volatile default, ALTER TYPE), or "
            "the bridge was too late to see them, or the schema topic has lost their event",
            table=shape.name,
            columns=columns,
            hint=f"`slotbridge snapshot start {shape.name}` sends all rows anew; `slottables "
            f"audit {shape.name}` tells whether any differ (docs/guides/tables.md)",
        )
