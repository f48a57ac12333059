"""Events to row changes: pure DataFrame -> DataFrame. No I/O, no UDF, nothing collected.

    records   Kafka's: topic partition offset key value
    events    EVENT_COLUMNS: records with the position and operation read from the value
    rows      ROW_COLUMNS, then c0, c1 … (the columns' values, typed) and a0, a1 … (false where the
              UPDATE left an out-of-line value unchanged and the WAL does not hold it)
    changes   rows, at most one for each key

Within a partition events are in order; (commit_lsn, seq) orders them everywhere.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_consumers.events.columns import available, mentions_unavailable, typed
from spark_consumers.events.shape import Position, Shape, renamed

REFUSED = "slottables refuses"
"""How the error of a value that does not fit begins, in Spark's own exceptions."""
EVENT_COLUMNS = (
    *("topic", "partition", "offset", "key", "value"),
    *(
        "op",
        "commit_lsn",
        "seq",
        "ts_us",
        "snapshot",
        "schema",
        "table",
        "beyond",
        "earlier",
        "late",
    ),
)
PLACE_COLUMNS = ("topic", "partition", "offset")
ROW_COLUMNS = ("op", "commit_lsn", "seq", "ts_us")
ROW_OPERATIONS = ("c", "r", "u", "d")
_SOURCE = ("commit_lsn", "seq", "ts_us", "snapshot", "schema", "table")
_HEAD = (
    T.StructType()
    .add("op", "string")
    .add(
        "source",
        T.StructType()
        .add("schema", "string")
        .add("table", "string")
        .add("snapshot", "string")
        .add("ts_us", "long")
        .add("commit_lsn", "long")
        .add("seq", "long"),
    )
)
_IMAGE = T.MapType(T.StringType(), T.StringType())


def events(
    records: DataFrame, after_lsn: int, upto_lsn: int, others: Mapping[str, int] | None = None
) -> DataFrame:
    """Read each record's position and operation; tombstones are left out.

    `beyond`: of a transaction after `upto_lsn`, which is not of this epoch; `late`: of one at or
    before `after_lsn` (of topics in `others`: at or before that), so that the table has had it;
    `earlier`: at or before `after_lsn` in any topic. Rows of a snapshot are never late. A record
    that is no event keeps NULL in `op`, `commit_lsn` or `seq`: `summary` tells.
    """
    head = F.from_json(F.col("value").cast("string"), _HEAD)
    streamed = F.coalesce(F.col("snapshot") == "false", F.lit(True))
    late = ~_beyond(after_lsn)
    for topic, lsn in sorted((others or {}).items()):
        late = F.when(F.col("topic") == topic, ~_beyond(lsn)).otherwise(late)
    return (
        records.where(F.col("value").isNotNull())
        .select(
            *PLACE_COLUMNS,
            F.col("key").cast("string").alias("key"),
            F.col("value").cast("string").alias("value"),
            head.alias("head"),
        )
        .select(*EVENT_COLUMNS[:5], "head.op", *(F.col(f"head.source.{n}") for n in _SOURCE))
        .withColumn("beyond", _beyond(upto_lsn))
        .withColumn("earlier", ~_beyond(after_lsn) & streamed)
        .withColumn("late", late & streamed)
    )


def summary(events: DataFrame) -> DataFrame:
    """One row for each topic and partition: what an epoch brings, small enough to be collected.

    next_offset            the first offset beyond the epoch, else NULL
    late                   how many events the tables have had before
    events, rows           counts of the others; rows without truncates
    counted_rows           rows that the counts of the epoch's transactions have
    refused_offset         the first offset that holds no event of a table, else NULL
    refused                how many such records there are
    keyless_rows           rows without a Kafka key
    identified_rows        updates, deletes, and rows of a snapshot
    snapshot_rows          rows of a snapshot
    truncates              positions of truncates, with their commit times
    lsn_max, ts_us_max     the last commit LSN and commit time
    unavailable            whether an unchanged out-of-line value may be among them
    tables                 the tables named by the events
    """
    op, beyond, late = F.col("op"), F.col("beyond"), F.col("late")
    is_row = op.isin(*ROW_OPERATIONS)
    own = is_event() & ~beyond & ~late
    own_row = own & is_row
    truncate = F.struct("commit_lsn", "seq", "ts_us")
    return events.groupBy("topic", "partition").agg(
        F.min(F.when(beyond, F.col("offset"))).alias("next_offset"),
        F.count_if(is_event() & late).alias("late"),
        F.count_if(own).alias("events"),
        F.count_if(own_row).alias("rows"),
        F.count_if(own_row & ~F.col("earlier") & (op != "r")).alias("counted_rows"),
        F.min(F.when(~is_event(), F.col("offset"))).alias("refused_offset"),
        F.count_if(~is_event()).alias("refused"),
        F.count_if(own_row & F.col("key").isNull()).alias("keyless_rows"),
        F.count_if(own & op.isin("u", "d", "r")).alias("identified_rows"),
        F.count_if(own & (op == "r")).alias("snapshot_rows"),
        F.collect_set(F.when(own & (op == "t"), truncate)).alias("truncates"),
        F.max(F.when(own, F.col("commit_lsn"))).alias("lsn_max"),
        F.max(F.when(own, F.col("ts_us"))).alias("ts_us_max"),
        F.max(own & mentions_unavailable(F.col("value"))).alias("unavailable"),
        F.collect_set(F.when(own, F.struct("schema", "table"))).alias("tables"),
    )


def is_event() -> Column:
    """Whether a record is an event of a table."""
    has_place = F.col("commit_lsn").isNotNull() & F.col("seq").isNotNull()
    return F.coalesce(F.col("op").isin(*ROW_OPERATIONS, "t") & has_place, F.lit(False))


def own_events(events: DataFrame, topic: str) -> DataFrame:
    """The events of one topic that are of this epoch and that its table needs."""
    return events.where((F.col("topic") == topic) & ~F.col("beyond") & ~F.col("late"))


def after(events: DataFrame, position: Position) -> DataFrame:
    """The events after a position, whatever partition they come from."""
    return events.where(_after(position))


def distinct_events(rows: DataFrame) -> DataFrame:
    """Without events that are there twice."""
    return rows.dropDuplicates(["commit_lsn", "seq"])


def row_changes(events: DataFrame, shapes: Sequence[Shape], *, unavailable: bool) -> DataFrame:
    """The events of one table as at most one change for each key, in the columns of the last shape.

    Truncates are left out. Without `unavailable` and with one shape the last event of a key says it
    all, and only that one is parsed.
    """
    events = events.where(F.col("op").isin(*ROW_OPERATIONS))
    if not unavailable and len(shapes) == 1:
        return rows(latest(events), shapes[-1])
    return folded(parsed(events, shapes), shapes[-1])


def latest(events: DataFrame) -> DataFrame:
    """The last event of each Kafka key, by position."""
    last = F.max_by(F.struct(*EVENT_COLUMNS), F.struct("commit_lsn", "seq"))
    return events.groupBy(F.col("key").alias("_key")).agg(last.alias("last")).select("last.*")


def parsed(events: DataFrame, shapes: Sequence[Shape]) -> DataFrame:
    """`rows`, each event by the shape that it was written with, in the columns of the last one."""
    events = events.where(F.col("op").isin(*ROW_OPERATIONS))
    parts = [
        _aligned(rows(own, shape), shapes[place:])
        for place, (own, shape) in enumerate(by_shape(events, shapes))
    ]
    return reduce(DataFrame.unionByName, parts)


def by_shape(events: DataFrame, shapes: Sequence[Shape]) -> list[tuple[DataFrame, Shape]]:
    """The events that were written with each of the shapes, in their order."""
    found = []
    for place, shape in enumerate(shapes):
        own = events
        if place:
            own = own.where(_after(shape.since, inclusive=True))
        if place + 1 < len(shapes):
            own = own.where(~_after(shapes[place + 1].since, inclusive=True))
        found.append((own, shape))
    return found


def rows(events: DataFrame, shape: Shape) -> DataFrame:
    """Parse the events of one table: the one select that is the contract of its columns.

    A value that does not fit its column, a column that is missing or unknown: raises, at the
    action, an error that begins with REFUSED and names topic, partition, offset, commit LSN and
    column, but no value.
    """
    images = _images(events)
    values = []
    for number, column in enumerate(shape.columns):
        raw = F.col("image")[column.name]
        present = available(raw, column)
        wrong = F.when(raw.isNotNull() & present, _refusal(_column(column.name)))
        read = F.coalesce(typed(raw, column), wrong)
        if column.key:
            read = F.coalesce(read, _refusal(f"key {_column(column.name)}"))
        values.append(F.when(present, read).alias(f"c{number}"))
        values.append(present.alias(f"a{number}"))
    order = sorted(range(len(values)), key=lambda place: (place % 2, place))
    whole = F.when(_is_whole(shape), F.col("commit_lsn")).otherwise(_refusal("the row"))
    return images.select(
        "op",
        whole.alias("commit_lsn"),
        *ROW_COLUMNS[2:],
        *(values[place] for place in order),
    )


def problems(events: DataFrame, shape: Shape) -> DataFrame:
    """What `rows` would refuse: EVENT_COLUMNS and `reason`, which names a column, never a value."""
    images = _images(events.where(F.col("op").isin(*ROW_OPERATIONS)), *EVENT_COLUMNS)
    reasons = [F.when(~_is_whole(shape), F.lit("the row"))]
    for column in shape.columns:
        raw = F.col("image")[column.name]
        read = typed(raw, column)
        wrong = raw.isNotNull() & available(raw, column) & read.isNull()
        if column.key:
            wrong = read.isNull()
        reasons.append(F.when(wrong, F.lit(_column(column.name))))
    found = images.withColumn("reason", F.coalesce(*reasons))
    return found.where(F.col("reason").isNotNull()).select(*EVENT_COLUMNS, "reason")


def _images(events: DataFrame, *more: str) -> DataFrame:
    """The row that each event tells, column -> JSON form: the old one of a delete."""
    value = F.from_json("value", T.StructType().add("before", _IMAGE).add("after", _IMAGE))
    image = F.when(F.col("op") == "d", F.col("parsed.before")).otherwise(F.col("parsed.after"))
    kept = more or (*PLACE_COLUMNS, *ROW_COLUMNS)
    return events.select(*kept, value.alias("parsed")).select(*kept, image.alias("image"))


def _is_whole(shape: Shape) -> Column:
    """Whether the image has all columns of the shape and no other; a delete's may be the key."""
    found = F.map_keys("image")
    names = F.array(*(F.lit(name) for name in shape.names)).cast("array<string>")
    same = (found == names) | (
        (F.size(found) == len(shape.names)) & (F.size(F.array_except(found, names)) == 0)
    )
    return F.coalesce(F.when(F.col("op") == "d", F.lit(True)).otherwise(same), F.lit(False)) & (
        F.col("image").isNotNull()
    )


def _aligned(rows: DataFrame, shapes: Sequence[Shape]) -> DataFrame:
    """Rows of the first of `shapes` in the columns of the last one; a column that came later is
    NULL, as its type's change is where the values don't fit."""
    names = {name: name for name in shapes[0].names}
    for old, new in pairwise(shapes):
        changes = renamed(old, new)
        names = {
            first: changes.get(name, name)
            for first, name in names.items()
            if changes.get(name, name) in new.names
        }
    places = {names[name]: place for place, name in enumerate(shapes[0].names) if name in names}
    values, present = [], []
    for number, column in enumerate(shapes[-1].columns):
        place = places.get(column.name)
        value, there = F.lit(None), F.lit(True)
        if place is not None:
            value, there = F.col(f"c{place}"), F.col(f"a{place}")
        values.append(value.try_cast(column.data_type).alias(f"c{number}"))
        present.append(there.alias(f"a{number}"))
    return rows.select(*ROW_COLUMNS, *values, *present)


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


def _beyond(commit_lsn: int) -> Column:
    """Whether an event's transaction is after a commit LSN.

    Compared as structures: a number would be written into the code that Spark compiles, which would
    then be compiled anew for every epoch.
    """
    return F.struct("commit_lsn") > F.struct(F.lit(commit_lsn).cast("bigint").alias("commit_lsn"))


def _after(position: Position, *, inclusive: bool = False) -> Column:
    """Whether an event stands after `position`, or at it."""
    lsn, seq = F.col("commit_lsn"), F.col("seq")
    later = seq >= position.seq if inclusive else seq > position.seq
    return (lsn > position.commit_lsn) | ((lsn == position.commit_lsn) & later)


def _column(name: str) -> str:
    return f"column {name}"


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
