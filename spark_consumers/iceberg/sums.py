"""Tables of sums, updated by the changes of their source table.

    <name>   the columns it is grouped by, one column per sum, _rows: how many rows they are of

An epoch's changes are the rows that a key has now, less those that it had at the last epoch, which
the source's snapshot still has. A group without rows is removed. A template for other aggregates:
whatever can be added and taken off again (sums, counts, and averages as both) can be kept so.
"""

import json
from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from schemas.errors import SettingsError
from schemas.tables import SumSettings
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.catalog import viewed
from spark_consumers.iceberg.layout import Layout
from spark_consumers.sql import literal, quoted

SOURCE_MARK = "sums of "
ROWS = "_rows"


def source_of(name: str) -> str:
    """Return the property that marks a table of sums, where other tables name their source."""
    return SOURCE_MARK + name


def definition(sums: SumSettings) -> str:
    """Return the text that tells, in a table of sums, by which settings its rows were computed."""
    return json.dumps(sums.model_dump(), sort_keys=True)


def is_sums(source: str) -> bool:
    """Tell whether a table's source marks it as a table of sums."""
    return source.startswith(SOURCE_MARK)


def make(spark: SparkSession, identifier: str, name: str, sums: SumSettings, layout: Layout) -> Any:
    """Load the table of sums; create it where there is none.

    Raise SettingsError for columns that can't be grouped by or summed, or that the table lacks.
    """
    types = {field.name: field.type for field in layout.fields}
    table = catalog.load(spark, identifier) if spark.catalog.tableExists(identifier) else None
    if table is not None and catalog.properties(table).get(catalog.SUMS) == definition(sums):
        return table
    problem, hint = _problem(sums, types, layout), "correct tables.sums"
    names = {*sums.group_by, *sums.sums, ROWS}
    if not problem and table is not None and names != set(catalog.column_names(table)):
        problem = "the table of sums has other columns"
        hint = "drop it, so that it is made anew by the next epoch of its source; or correct"
        hint += " tables.sums"
    if problem:
        raise SettingsError(problem, operation="read settings", subject=name, hint=hint)
    if table is not None:
        return table
    columns = [f"{quoted(column)} {types[column].simpleString()}" for column in sums.group_by]
    columns += [f"{quoted(n)} {_sum_type(types[c])}" for n, c in sums.sums.items()]
    spark.sql(
        f"CREATE TABLE {identifier} ({', '.join(columns)}, {ROWS} bigint) USING iceberg"
        f" TBLPROPERTIES ({literal(catalog.SOURCE)} = {literal(source_of(name))},"
        " 'write.metadata.delete-after-commit.enabled' = 'true')"
    )
    return catalog.load(spark, identifier)


def recompute(spark: SparkSession, identifier: str, source: str, sums: SumSettings) -> None:
    """Replace the table by the sums of all rows."""
    rows = spark.table(source).selectExpr("*", "1 AS _sign")
    _added(sums, rows).writeTo(identifier).overwrite(F.lit(True))


def add(
    identifier: str,
    sums: SumSettings,
    layout: Layout,
    changes: DataFrame,
    source: str,
    snapshot: int | None,
) -> None:
    """Bring changes (at most one for each key) into the sums; `snapshot`: of the source, before."""
    spark = changes.sparkSession
    now = changes.where("op <> 'd'").selectExpr(*layout.values, "1 AS _sign")
    if snapshot is not None and not layout.shape.keyless:
        before = catalog.rows_before(spark, source, snapshot)
        keys = changes.selectExpr(
            *(f"c{f.source_index} AS _slotbridge_key{n}" for n, f in enumerate(layout.key))
        )
        match = " AND ".join(
            f"{quoted(f.name)} = _slotbridge_key{n}" for n, f in enumerate(layout.key)
        )
        had = before.join(keys, F.expr(match), "left_semi").selectExpr(
            *(quoted(field.name) for field in layout.fields), "-1 AS _sign"
        )
        now = now.unionByName(had)
    with viewed(_added(sums, now), identifier) as view:
        spark.sql(_merge_sql(identifier, view, sums))


def _added(sums: SumSettings, rows: DataFrame) -> DataFrame:
    """Return what rows add to each group: sums and count, with the sign of each row."""
    groups = [quoted(column) for column in sums.group_by]
    totals = [
        f"sum(CASE WHEN _sign > 0 THEN {quoted(c)} ELSE -{quoted(c)} END) AS {quoted(n)}"
        for n, c in sums.sums.items()
    ]
    counted = f"CAST(sum(_sign) AS bigint) AS {ROWS}"
    return rows.groupBy(*groups).agg(*map(F.expr, (*totals, counted)))


def _merge_sql(identifier: str, view: str, sums: SumSettings) -> str:
    """Return the MERGE that adds groups to the sums, and deletes groups without rows."""
    match = " AND ".join(f"t.{quoted(c)} <=> s.{quoted(c)}" for c in sums.group_by)
    names = [quoted(name) for name in sums.sums]
    sets = ", ".join(f"t.{n} = coalesce(t.{n}, 0) + coalesce(s.{n}, 0)" for n in names)
    columns = [*(quoted(c) for c in sums.group_by), *names, ROWS]
    values = ", ".join(f"s.{column}" for column in columns)
    return (
        f"MERGE INTO {identifier} t USING {view} s ON {match}"  # noqa: S608 - names are quoted
        f" WHEN MATCHED AND t.{ROWS} + s.{ROWS} = 0 THEN DELETE"
        f" WHEN MATCHED THEN UPDATE SET {sets}, t.{ROWS} = t.{ROWS} + s.{ROWS}"
        f" WHEN NOT MATCHED AND s.{ROWS} <> 0 THEN INSERT ({', '.join(columns)}) VALUES ({values})"
    )


def _problem(sums: SumSettings, types: Mapping[str, T.DataType], layout: Layout) -> str:
    """Return why these sums can't be kept exactly, "" if they can."""
    missing = [c for c in (*sums.group_by, *sums.sums.values()) if c not in types]
    if missing:
        return f"{layout.shape.name} has no column {missing[0]}"
    exact = (T.IntegerType, T.LongType, T.DecimalType)
    inexact = [c for c in sums.sums.values() if not isinstance(types[c], exact)]
    if inexact:
        return f"column {inexact[0]} is not an integer or decimal, so its sum would not be exact"
    if layout.kind != "current":
        return f"{layout.shape.name} is not a table of kind current"
    return ""


def _sum_type(kind: T.DataType) -> str:
    return f"decimal(38,{kind.scale})" if isinstance(kind, T.DecimalType) else "bigint"
