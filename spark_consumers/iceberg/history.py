"""Writes histories (SCD type 2): one row per version of a row, closed by the event that ended it.

A version holds from its event up to, not with, the one that ended it: the next event of its key, or
a truncate. Versions of one transaction have the same times; (_commit_lsn, _seq) orders them.
"""

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_consumers.iceberg.catalog import completed, viewed
from spark_consumers.iceberg.current import missing
from spark_consumers.iceberg.layout import Layout
from spark_consumers.sql import quoted

Truncate = tuple[int, int, int]
_END = "struct<lsn: bigint, seq: bigint, us: bigint, op: string>"


def write_versions(
    identifier: str,
    layout: Layout,
    rows: DataFrame,
    truncates: Sequence[Truncate],
    *,
    unavailable: bool,
    snapshot_rows: bool,
) -> None:
    """Close the versions that ended and add the new ones, in one commit."""
    table = _open_rows(identifier, layout, rows)
    if unavailable:
        rows = _filled(layout, rows, table)
    if snapshot_rows:
        rows = _without_restated(layout, rows, table, truncates)
    source = _versions(layout, rows, truncates)
    with viewed(source, identifier) as view:
        source.sparkSession.sql(_merge_sql(identifier, layout, view, truncates))


def replace(
    identifier: str,
    layout: Layout,
    rows: DataFrame,
    truncates: Sequence[Truncate],
    *,
    snapshot_rows: bool,
) -> None:
    """Replace the table's rows by the versions of all events in Kafka, in one commit."""
    nothing = _open_rows(identifier, layout, rows).limit(0)
    rows = _filled(layout, rows, nothing)
    if snapshot_rows:
        rows = _without_restated(layout, rows, nothing, truncates)
    begun = _versions(layout, rows, truncates).where("b")
    rows = begun.selectExpr(
        *layout.values,
        "commit_lsn AS _commit_lsn",
        "seq AS _seq",
        "op AS _op",
        "timestamp_micros(ts_us) AS _valid_from",
        "timestamp_micros(ended.us) AS _valid_to",
        "ended.lsn AS _end_lsn",
        "ended.seq AS _end_seq",
        "ended.op AS _end_op",
    )
    completed(identifier, rows, layout.kept).writeTo(identifier).overwrite(F.lit(True))


def _window(layout: Layout, *more: str) -> str:
    """Return the SQL window of one key's events in their order."""
    keys = ", ".join((*(f"c{field.source_index}" for field in layout.key), *more))
    return f"PARTITION BY {keys} ORDER BY commit_lsn, seq"


def _open_rows(identifier: str, layout: Layout, rows: DataFrame) -> DataFrame:
    """Return the versions that hold, in the columns k0, k1 … (key) and t<source_index>."""
    table = rows.sparkSession.table(identifier).where("_valid_to IS NULL")
    return table.selectExpr(
        *(f"{quoted(f.name)} AS k{n}" for n, f in enumerate(layout.key)),
        *(f"{quoted(f.name)} AS t{f.source_index}" for f in layout.fields),
        "true AS held",
    )


def _same_key(layout: Layout) -> str:
    return " AND ".join(f"c{f.source_index} = k{n}" for n, f in enumerate(layout.key))


def _without_restated(
    layout: Layout, rows: DataFrame, table: DataFrame, truncates: Sequence[Truncate]
) -> DataFrame:
    """Leave out a snapshot's rows that are equal to the version of their key: they begin none.

    That version is of the event before, or the one in the table, and no truncate has ended it.
    """
    columns = ", ".join(f"c{field.source_index}" for field in layout.fields)
    before = f"lag(struct(op, commit_lsn, seq, {columns})) OVER ({_window(layout)}) AS before"
    joined = rows.selectExpr("*", before).join(table, F.expr(_same_key(layout)), "left")
    same_event, same_row = (
        " AND ".join(
            f"c{field.source_index} <=> {other}{field.source_index}" for field in layout.fields
        )
        for other in ("before.c", "t")
    )
    cuts = ", ".join(f"struct({lsn}L AS lsn, {seq}L AS seq)" for lsn, seq, _ in truncates)
    place = "struct(commit_lsn AS lsn, seq AS seq)"
    ended = f"exists(array({cuts}), cut -> cut < {place}%s)" if truncates else "false"
    since = " AND cut > struct(before.commit_lsn AS lsn, before.seq AS seq)"
    restated = (
        f"CASE WHEN op <> 'r' THEN false WHEN before IS NULL THEN coalesce(held, false) AND"
        f" {same_row} AND NOT {ended.replace('%s', '')} ELSE before.op <> 'd' AND {same_event}"
        f" AND NOT {ended.replace('%s', since)} END"
    )
    return joined.where(f"NOT ({restated})").select(*rows.columns)


def _filled(layout: Layout, rows: DataFrame, table: DataFrame) -> DataFrame:
    """Fill unchanged values from the key's earlier event, else the version that held before."""
    lending = [f for f in layout.fields if layout.shape.columns[f.source_index].may_be_unavailable]
    past = "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
    life = f"sum(CASE WHEN op = 'u' THEN 0 ELSE 1 END) OVER ({_window(layout)} {past}) AS life"
    lent = (
        f"last(CASE WHEN a{f.source_index} THEN struct(c{f.source_index} AS v) END, true)"
        f" OVER ({_window(layout, 'life')} {past}) AS l{f.source_index}"
        for f in lending
    )
    began = rows.selectExpr("*", life).selectExpr("*", *lent)
    joined = began.join(table, F.expr(_same_key(layout)), "left")
    columns = {name: name for name in rows.columns}
    for f in lending:
        lacks = missing(layout, layout.shape.columns[f.source_index].name, "commit_lsn")
        columns[f"c{f.source_index}"] = (
            f"CASE WHEN l{f.source_index} IS NOT NULL THEN l{f.source_index}.v"
            f" WHEN life = 0 AND held THEN t{f.source_index}"
            f" WHEN op <> 'd' THEN {lacks} END AS c{f.source_index}"
        )
    return joined.selectExpr(*columns.values())


def _versions(layout: Layout, rows: DataFrame, truncates: Sequence[Truncate]) -> DataFrame:
    """Return the versions for MERGE: the new ones, and the ends of versions in the table.

    `b` is true for a version that begins, false for the end of one in the table; `ended` is the
    position of the event that ends it.
    """
    place = f"CAST(struct(commit_lsn, seq, ts_us, op) AS {_END}) AS place"
    window = _window(layout)
    placed = rows.selectExpr("*", place).selectExpr(
        "*", f"lead(place) OVER ({window}) AS next", f"row_number() OVER ({window}) AS number"
    )
    ended, first = "next", "place"
    if truncates:
        each = (f"CAST(struct({a}, {b}, {us}, 't') AS {_END})" for a, b, us in sorted(truncates))
        cuts = f"array({', '.join(each)})"
        after = f"array_min(filter({cuts}, cut -> cut > place))"
        ended, first = f"least(next, {after})", f"least(place, array_min({cuts}))"
    values = [f"c{field.source_index}" for field in layout.fields]
    kept = [*values, "commit_lsn", "seq", "ts_us", "op"]
    begun = placed.where("op <> 'd'").selectExpr(*kept, f"{ended} AS ended", "true AS b")
    closed = placed.where("number = 1").selectExpr(*kept, f"{first} AS ended", "false AS b")
    return begun.unionByName(closed)


def _merge_sql(identifier: str, layout: Layout, view: str, truncates: Sequence[Truncate]) -> str:
    """Return the MERGE of versions: it ends those that are current and inserts new ones."""
    match = " AND ".join(
        f"t.{quoted(field.name)} = s.c{field.source_index}" for field in layout.key
    )
    columns = ", ".join(quoted(name) for name in layout.names)
    values = ", ".join(f"s.c{field.source_index}" for field in layout.fields)
    sql = (
        f"MERGE INTO {identifier} t USING {view} s"  # noqa: S608 - names are quoted
        f" ON {match} AND NOT s.b AND t._valid_to IS NULL"
        " WHEN MATCHED THEN UPDATE SET t._valid_to = timestamp_micros(s.ended.us),"
        " t._end_lsn = s.ended.lsn, t._end_seq = s.ended.seq, t._end_op = s.ended.op"
        f" WHEN NOT MATCHED AND s.b THEN INSERT ({columns}) VALUES ({values}, s.commit_lsn, s.seq,"
        " s.op, timestamp_micros(s.ts_us), timestamp_micros(s.ended.us), s.ended.lsn, s.ended.seq,"
        " s.ended.op)"
    )
    if truncates:
        lsn, seq, us = min(truncates)
        sql += (
            " WHEN NOT MATCHED BY SOURCE AND t._valid_to IS NULL THEN UPDATE SET"
            f" t._valid_to = timestamp_micros({us}), t._end_lsn = {lsn}, t._end_seq = {seq},"
            " t._end_op = 't'"
        )
    return sql
