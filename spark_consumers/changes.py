"""Events to row changes: pure DataFrame -> DataFrame. No I/O, no UDF, nothing collected.

    records   Kafka's: topic partition offset key value
    events    EVENT_COLUMNS: records with the position and operation read from the value
    rows      ROW_COLUMNS, then c0, c1 … (the columns' values, typed) and a0, a1 … (false where the
              UPDATE left an out-of-line value unchanged and the WAL does not hold it)
    changes   rows, at most one for each key (or, without a key, for each position)

Within a partition events are in order; (commit_lsn, seq) orders them everywhere.
"""

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_consumers.columns import Shape, available, mentions_unavailable, typed

REFUSED = "slottables refuses"
"""How the error of a value that does not fit begins, in Spark's own exceptions."""
EVENT_COLUMNS = (
    *("topic", "partition", "offset", "key", "value"),
    *("op", "commit_lsn", "seq", "ts_ms", "snapshot", "schema", "table"),
)
ROW_COLUMNS = ("op", "commit_lsn", "seq")
ROW_OPERATIONS = ("c", "r", "u", "d")
_HEAD = (
    T.StructType()
    .add("op", "string")
    .add(
        "source",
        T.StructType()
        .add("schema", "string")
        .add("table", "string")
        .add("snapshot", "string")
        .add("ts_ms", "long")
        .add("commit_lsn", "long")
        .add("seq", "long"),
    )
)


class Position(NamedTuple):
    """Where an event stands: its transaction's commit LSN, its number in the transaction."""

    commit_lsn: int
    seq: int


def events(records: DataFrame) -> DataFrame:
    """Read each record's position and operation; tombstones are left out.

    A record that is no event keeps NULL in `op`, `commit_lsn` or `seq`: `summary` counts it.
    """
    head = F.from_json(F.col("value").cast("string"), _HEAD)
    return (
        records.where(F.col("value").isNotNull())
        .select(
            "topic",
            "partition",
            "offset",
            F.col("key").cast("string").alias("key"),
            F.col("value").cast("string").alias("value"),
            head.alias("head"),
        )
        .select(*EVENT_COLUMNS[:5], "head.op", *(F.col(f"head.source.{n}") for n in _SOURCE))
    )


_SOURCE = ("commit_lsn", "seq", "ts_ms", "snapshot", "schema", "table")


def summary(events: DataFrame) -> DataFrame:
    """One row for each topic and partition: what a batch brings, small enough to be collected.

    events, rows           counts; rows without truncates
    refused_offset         the first offset that holds no event of a table, else NULL
    keyless_rows           rows without a Kafka key
    identified_rows        updates and deletes
    first, last, truncate  positions (commit_lsn, seq): of streamed events, and of truncates
    lsn_min, lsn_max       commit LSNs of all events
    ts_ms_max              the latest commit time
    unavailable            whether an unchanged out-of-line value may be among them
    fields                 the field names of the last row
    tables                 the tables named by the events
    """
    position = F.struct("commit_lsn", "seq")
    is_row = F.col("op").isin(*ROW_OPERATIONS)
    has_after = is_row & (F.col("op") != "d")
    is_event = (is_row | (F.col("op") == "t")) & F.col("commit_lsn").isNotNull()
    is_event = is_event & F.col("seq").isNotNull()
    streamed = F.coalesce(F.col("snapshot") == "false", F.lit(True))
    last_value = F.max_by("value", F.when(has_after, F.col("offset")))
    return events.groupBy("topic", "partition").agg(
        F.count("*").alias("events"),
        F.count_if(is_row).alias("rows"),
        F.min(F.when(~F.coalesce(is_event, F.lit(False)), F.col("offset"))).alias("refused_offset"),
        F.count_if(is_row & F.col("key").isNull()).alias("keyless_rows"),
        F.count_if(F.col("op").isin("u", "d")).alias("identified_rows"),
        F.min(F.when(streamed, position)).alias("first"),
        F.max(F.when(streamed, position)).alias("last"),
        F.max(F.when(F.col("op") == "t", position)).alias("truncate"),
        F.min("commit_lsn").alias("lsn_min"),
        F.max("commit_lsn").alias("lsn_max"),
        F.max("ts_ms").alias("ts_ms_max"),
        F.max(mentions_unavailable(F.col("value"))).alias("unavailable"),
        F.json_object_keys(F.get_json_object(last_value, "$.after")).alias("fields"),
        F.collect_set(F.struct("schema", "table")).alias("tables"),
    )


def dead_letters(events: DataFrame) -> DataFrame:
    """Of events of the dead letters' topic: table, count, first (its position), reason.

    A letter that names no table (a logical message) is left out.
    """
    letter = T.StructType().add("table", "string").add("reason", "string")
    letter = letter.add("commit_lsn", "long").add("seq", "long")
    position = F.struct("letter.commit_lsn", "letter.seq")
    return (
        events.select(F.from_json("value", letter).alias("letter"))
        .where(F.col("letter.table") != "")
        .groupBy(F.col("letter.table").alias("table"))
        .agg(
            F.count("*").alias("count"),
            F.min(position).alias("first"),
            F.min_by("letter.reason", position).alias("reason"),
        )
    )


def duplicates(events: DataFrame, applied: Mapping[int, Position]) -> DataFrame:
    """The events of one table that it has had before.

    `applied` is the last streamed position in the table, by Kafka partition: the streamed events of
    a partition come in order, so that one at or before it came already.
    """
    return events.where(_came_before(applied))


def without_duplicates(events: DataFrame, applied: Mapping[int, Position]) -> DataFrame:
    """The events of one table that it has not had before; see `duplicates`."""
    return events.where(~_came_before(applied))


def after_truncate(events: DataFrame, truncated: Position) -> DataFrame:
    """The events after the table's last truncate, whatever partition they come from.

    The truncate is in every partition, and batches take the partitions unevenly: an older row may
    well come in a later batch than the first copy of the truncate.
    """
    return events.where(_after(truncated))


def changes(events: DataFrame, shape: Shape, *, unavailable: bool) -> DataFrame:
    """The events of one table as at most one change for each key.

    Truncates are left out. Without `unavailable` the last event of a key says it all, and only
    that one is parsed.
    """
    events = events.where(F.col("op").isin(*ROW_OPERATIONS))
    if shape.keyless:
        return rows(events, shape).dropDuplicates(["commit_lsn", "seq"])
    if unavailable:
        return folded(rows(events, shape), shape)
    return rows(latest(events), shape)


def latest(events: DataFrame) -> DataFrame:
    """The last event of each Kafka key, by position."""
    last = F.max_by(F.struct(*EVENT_COLUMNS), F.struct("commit_lsn", "seq"))
    return events.groupBy(F.col("key").alias("_key")).agg(last.alias("last")).select("last.*")


def rows(events: DataFrame, shape: Shape) -> DataFrame:
    """Parse the events of one table: the one select that is the contract of its columns.

    A value that does not fit its column raises, at the action, an error that begins with REFUSED
    and names topic, partition, offset, commit LSN and column, but no value.
    """
    row = T.StructType([T.StructField(column.name, T.StringType()) for column in shape.columns])
    value = F.from_json("value", T.StructType().add("before", row).add("after", row))
    image = F.when(F.col("op") == "d", F.col("parsed.before")).otherwise(F.col("parsed.after"))
    parsed = events.select(*EVENT_COLUMNS[:3], *ROW_COLUMNS, value.alias("parsed")).select(
        *EVENT_COLUMNS[:3], *ROW_COLUMNS, image.alias("image")
    )
    values = []
    for number, column in enumerate(shape.columns):
        raw = F.col("image").getField(column.name)
        present = available(raw, column)
        wrong = F.when(raw.isNotNull() & present, _refusal(f"column {column.name}"))
        read = F.coalesce(typed(raw, column), wrong)
        if column.key:
            read = F.coalesce(read, _refusal(f"key column {column.name}"))
        values.append(F.when(present, read).alias(f"c{number}"))
        values.append(present.alias(f"a{number}"))
    order = sorted(range(len(values)), key=lambda place: (place % 2, place))
    has_image = F.coalesce(F.col("image").isNotNull(), F.lit(False))
    op = F.when(has_image, F.col("op")).otherwise(_refusal("the row"))
    return parsed.select(op.alias("op"), "commit_lsn", "seq", *(values[place] for place in order))


def folded(rows: DataFrame, shape: Shape) -> DataFrame:
    """The last change of each key, its unavailable values taken from the key's earlier changes.

    An insert or a delete ends what earlier changes can lend: they were of another row.
    """
    position = F.struct("commit_lsn", "seq")
    key = [f"c{place}" for place in shape.key_positions]
    lending = {
        f"c{place}": f"a{place}"
        for place, column in enumerate(shape.columns)
        if column.may_be_unavailable
    }
    others = [
        name
        for place in range(len(shape.columns))
        for name in (f"c{place}", f"a{place}")
        if name not in key and f"c{place}" not in lending
    ]
    loans = [
        F.max_by(
            F.struct(position.alias("position"), F.col(value).alias("value")),
            F.when(F.col(present), position),
        ).alias(f"loan_{value}")
        for value, present in lending.items()
    ]
    last = F.max_by(F.struct(*ROW_COLUMNS, *others), position)
    reset = F.max(F.when(F.col("op") != "u", position))
    grouped = rows.groupBy(*key).agg(last.alias("last"), reset.alias("reset"), *loans)
    columns: dict[str, Column] = {name: F.col(name) for name in key}
    columns |= {name: F.col(f"last.{name}") for name in others}
    for value, present in lending.items():
        loan = F.col(f"loan_{value}")
        held = loan.isNotNull() & (
            F.col("reset").isNull() | (loan.getField("position") >= F.col("reset"))
        )
        columns[value] = F.when(held, loan.getField("value"))
        columns[present] = held
    return grouped.select(
        *(F.col(f"last.{name}") for name in ROW_COLUMNS),
        *(columns[name].alias(name) for name in rows.columns[len(ROW_COLUMNS) :]),
    )


def _came_before(applied: Mapping[int, Position]) -> Column:
    streamed = F.coalesce(F.col("snapshot") == "false", F.lit(True))
    return reduce(
        Column.__or__,
        (
            (F.col("partition") == partition) & streamed & ~_after(position)
            for partition, position in sorted(applied.items())
        ),
        F.lit(False),
    )


def _after(position: Position) -> Column:
    """Whether an event stands after `position`."""
    lsn, seq = F.col("commit_lsn"), F.col("seq")
    return (lsn > position.commit_lsn) | ((lsn == position.commit_lsn) & (seq > position.seq))


def _refusal(what: str) -> Column:
    """An expression that raises when it is evaluated; `what` names a column, never a value."""
    return F.raise_error(
        F.concat_ws(
            "|",
            F.lit(REFUSED),
            F.col("topic"),
            F.col("partition").cast("string"),
            F.col("offset").cast("string"),
            F.col("commit_lsn").cast("string"),
            F.lit(what),
        )
    )
