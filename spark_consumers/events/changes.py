"""Events to row changes, DataFrame -> DataFrame. Pure: no I/O, no UDF, nothing collected.

    records   Kafka's: topic partition offset key value, and `placeholder_values`, the text of that
              header
    events    EVENT_COLUMNS: what is read from the value, once; `image` the row it tells of, column
              -> JSON form; `value` itself only where asked for
    rows      ROW_COLUMNS, then c0, c1 … (the columns' values, typed) and a0, a1 … (false where the
              UPDATE left an out-of-line value unchanged and the WAL does not hold it)
    changes   rows, at most one for each key

Within a partition events are in order; (commit_lsn, seq) orders them everywhere.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_consumers.events.columns import ColumnShape, available, mentions_unavailable, typed
from spark_consumers.events.shape import CommitPosition, Shape, filled, survivors_of
from spark_consumers.sql import literal, literals, quoted

REFUSED = "slottables refuses"
"""How the error of a value that does not fit begins, in Spark's own exceptions."""
EVENT_COLUMNS = (
    *("topic", "partition", "offset", "key", "value", "image", "unchanged", "placeholder_values"),
    *("op", "commit_lsn", "seq", "ts_us", "lsn", "schema", "table", "beyond", "earlier", "late"),
)
PLACE_COLUMNS = ("topic", "partition", "offset")
ROW_COLUMNS = ("op", "commit_lsn", "seq", "ts_us")
_HEAD_OF_OTHERS = "CASE WHEN event.op IS NULL THEN left(value, 8) END AS value"
"""What is kept of a record that is not an event: it may begin with a schema registry's id."""
ROW_OPERATIONS = ("c", "r", "u", "d")
_VALUE = (
    "op string, source struct<schema: string, `table`: string, lsn: bigint, ts_us: bigint,"
    " commit_lsn: bigint, seq: bigint>, before map<string, string>, after map<string, string>"
)
_POSITION = "struct(commit_lsn, seq)"
_IS_ROW = f"op IN ({literals(ROW_OPERATIONS)})"
IS_EVENT = (
    f"coalesce(op IN ({literals((*ROW_OPERATIONS, 't'))}) AND commit_lsn IS NOT NULL"
    " AND seq IS NOT NULL AND schema IS NOT NULL AND `table` IS NOT NULL, false)"
)
"""Whether a record is an event of a table."""
_OWN = f"({IS_EVENT} AND NOT beyond AND NOT late)"
_OWN_ROW = f"({_OWN} AND {_IS_ROW})"
_COUNTED = f"({_OWN_ROW} AND NOT earlier)"


def events(
    records: DataFrame,
    after_lsn: int,
    upto_lsn: int,
    lsn_of_topics: Mapping[str, int] | None = None,
    *,
    counted: Mapping[str, int] | None = None,
    whole: bool = False,
) -> DataFrame:
    """Read each record; tombstones are left out. `whole`: keep the values, for the quarantine.

    `beyond`: of a transaction after `upto_lsn`, which is not of this epoch; `late`: of one at or
    before `after_lsn` (or the topic's in `lsn_of_topics`), so that the table has had it;
    `earlier`: at or before `after_lsn` (of topics in `counted`: at or before that), so that the
    epoch does not count it.
    `image`: the row, of a delete the old one; `unchanged`: it may lack values that the UPDATE left
    unchanged. A record that is not an event keeps NULL in `op`, `commit_lsn` or `seq`:
    `summary` tells.
    """
    return (
        records.where("value IS NOT NULL")
        .selectExpr(
            *PLACE_COLUMNS,
            "CAST(key AS string) AS key",
            "CAST(value AS string) AS value",
            "placeholder_values",
        )
        .selectExpr("*", f"from_json(value, {literal(_VALUE)}) AS event")
        .selectExpr(
            *PLACE_COLUMNS,
            "key",
            "value" if whole else _HEAD_OF_OTHERS,
            "CASE WHEN event.op = 'd' THEN event.before ELSE event.after END AS image",
            f"{mentions_unavailable('value')} AS unchanged",
            "from_json(placeholder_values, 'array<string>') AS placeholder_values",
            "event.op",
            "event.source.*",
        )
        .selectExpr(
            *map(quoted, EVENT_COLUMNS[:-3]),
            f"{_beyond(upto_lsn)} AS beyond",
            f"{_upto(after_lsn, counted or {})} AS earlier",
            f"{_upto(after_lsn, lsn_of_topics or {})} AS late",
        )
    )


def _upto(commit_lsn: int, lsn_of_topics: Mapping[str, int]) -> str:
    """Return SQL: whether an event commits at or before `commit_lsn`, or its topic's own LSN."""
    upto = f"NOT {_beyond(commit_lsn)}"
    own = (
        f" WHEN topic = {literal(topic)} THEN NOT {_beyond(lsn)}"
        for topic, lsn in sorted(lsn_of_topics.items())
    )
    return f"CASE{''.join(own)} ELSE {upto} END" if lsn_of_topics else upto


def summary(events: DataFrame) -> DataFrame:
    """Summarise what an epoch brings: a row for each topic and partition, few enough to collect.

    next_offset            the first offset beyond the epoch, else NULL
    late                   how many events the tables have had before
    events, rows           counts of the others; rows without truncates
    counted_rows           rows that the counts of the epoch's transactions have, and duplicates
    refused_offset         the first offset that holds no event of a table, else NULL
    refused_head           how the text of that record begins
    refused                how many such records there are
    keyless_rows           rows without a Kafka key
    identified_rows        updates, deletes, and rows of a snapshot
    snapshot_rows          of these, rows of a snapshot
    seen_lsn               what commits before it may be in a snapshot's rows already, else NULL
    truncates              positions of truncates, with their commit times
    lsn_max, ts_us_max     the last commit LSN and commit time
    unavailable            whether an unchanged out-of-line value may be among them
    tables                 the tables named by the events
    """
    own, own_row = _OWN, _OWN_ROW
    wanted = {
        "next_offset": "min(CASE WHEN beyond THEN offset END)",
        "late": f"count_if({IS_EVENT} AND late)",
        "events": f"count_if({own})",
        "rows": f"count_if({own_row})",
        "counted_rows": f"count_if({_COUNTED})",
        "refused_offset": f"min(CASE WHEN NOT {IS_EVENT} THEN offset END)",
        "refused_head": f"min_by(left(value, 8), CASE WHEN NOT {IS_EVENT} THEN offset END)",
        "refused": f"count_if(NOT {IS_EVENT})",
        "keyless_rows": f"count_if({own_row} AND key IS NULL)",
        "identified_rows": f"count_if({own} AND op IN ('u', 'd', 'r'))",
        "snapshot_rows": f"count_if({own} AND op = 'r')",
        "seen_lsn": f"max(CASE WHEN {own} AND op = 'r' THEN lsn END)",
        "truncates": f"collect_set(CASE WHEN {own} AND op = 't' THEN"
        " struct(commit_lsn, seq, ts_us) END)",
        "lsn_max": f"max(CASE WHEN {own} THEN commit_lsn END)",
        "ts_us_max": f"max(CASE WHEN {own} THEN ts_us END)",
        "unavailable": f"max({own} AND unchanged)",
        "tables": f"collect_set(CASE WHEN {own} THEN struct(schema, `table`) END)",
    }
    counted = (F.expr(f"{text} AS {name}") for name, text in wanted.items())
    return events.groupBy("topic", "partition").agg(*counted)


def positions(events: DataFrame) -> DataFrame:
    """Count each topic's distinct rows among those that the transactions' ENDs count.

    Return one row for each topic, with the column `distinct_rows`. A duplicate, in whatever
    partition, must not stand in for an event that Kafka does not show yet.
    """
    each = events.where(_COUNTED).select("topic", "commit_lsn", "seq").distinct()
    return each.groupBy("topic").agg(F.expr("count(*) AS distinct_rows"))


def own_events(events: DataFrame, topic: str) -> DataFrame:
    """Return the events of one topic that are of this epoch and that its table needs."""
    return events.where(f"topic = {literal(topic)} AND NOT beyond AND NOT late")


def after(events: DataFrame, position: CommitPosition) -> DataFrame:
    """Return the events after a position, whatever partition they come from."""
    return events.where(_after(position))


def before(events: DataFrame, position: CommitPosition) -> DataFrame:
    """Return the events before a position, whatever partition they come from."""
    return events.where(f"NOT ({_after(position._replace(seq=position.seq - 1))})")


def distinct_events(rows: DataFrame) -> DataFrame:
    """Drop events whose position was seen before."""
    return rows.dropDuplicates(["commit_lsn", "seq"])


def row_changes(events: DataFrame, shapes: Sequence[Shape], *, unavailable: bool) -> DataFrame:
    """Fold the events of one table to at most one change for each key, in the last shape's columns.

    Truncates are left out. With one shape and without `unavailable` values the last event of a key
    tells the whole row, and only that event is parsed.
    """
    events = events.where(_IS_ROW)
    if not unavailable and len(shapes) == 1:
        return rows(latest(events), shapes[-1])
    return folded(parsed(events, shapes), shapes[-1])


def latest(events: DataFrame) -> DataFrame:
    """Return the last event of each Kafka key by position, without columns for `summary` alone."""
    columns = ", ".join(map(quoted, (*PLACE_COLUMNS, *ROW_COLUMNS, "image", "placeholder_values")))
    last = F.expr(f"max_by(struct({columns}), {_POSITION}) AS last")
    return events.groupBy("key").agg(last).select("last.*")


def parsed(events: DataFrame, shapes: Sequence[Shape], *, as_events: bool = False) -> DataFrame:
    """Return `rows` of events, each parsed by the shape it was written with, in the last shape.

    A column that was added later has the value that older rows got; with `as_events` it is NULL, as
    in the event.
    """
    events = events.where(_IS_ROW)
    parts = [
        _aligned(rows(own, shape), shapes[place:], as_events=as_events)
        for place, (own, shape) in enumerate(by_shape(events, shapes))
    ]
    return reduce(DataFrame.unionByName, parts)


def by_shape(events: DataFrame, shapes: Sequence[Shape]) -> list[tuple[DataFrame, Shape]]:
    """Split the events by the shape that they were written with, in the order of the shapes."""
    found = []
    for place, shape in enumerate(shapes):
        own = events
        if place:
            own = own.where(_after(shape.since, inclusive=True))
        if place + 1 < len(shapes):
            own = own.where(f"NOT {_after(shapes[place + 1].since, inclusive=True)}")
        found.append((own, shape))
    return found


def rows(events: DataFrame, shape: Shape) -> DataFrame:
    """Parse the events of one table: the one select that is the contract of its columns.

    A value that does not fit its column, a column that is missing or unknown: raises, at the
    action, an error that begins with REFUSED and names topic, partition, offset, commit LSN and
    column, but no value.
    """
    columns = [_read(column) for column in shape.columns]
    return events.selectExpr(
        "op",
        f"CASE WHEN {_is_whole(shape)} THEN commit_lsn ELSE {_refusal('the row')} END"
        " AS commit_lsn",
        *ROW_COLUMNS[2:],
        *(f"{value} AS c{number}" for number, (value, _) in enumerate(columns)),
        *(f"{present} AS a{number}" for number, (_, present) in enumerate(columns)),
    )


def _read(column: ColumnShape) -> tuple[str, str]:
    """Return SQL of a column's value, which raises if it does not fit, and of its presence."""
    raw = _raw(column)
    present = available(raw, column)
    if column.may_be_unavailable:  # An old row has all its values: PostgreSQL logs it whole.
        present = f"({present} OR op = 'd' AND {typed(raw, column)} IS NOT NULL)"
    wrong = f"CASE WHEN {raw} IS NOT NULL AND {present} THEN {_refusal(_column(column.name))} END"
    read = [typed(raw, column), wrong]
    if column.key:
        read.append(_refusal(f"key {_column(column.name)}"))
    return f"CASE WHEN {present} THEN coalesce({', '.join(read)}) END", present


def problems(events: DataFrame, shape: Shape) -> DataFrame:
    """Return the events that `rows` would refuse: EVENT_COLUMNS and `reason`.

    The reason names a column, never a value.
    """
    reasons = [f"CASE WHEN NOT {_is_whole(shape)} THEN 'the row' END"]
    for column in shape.columns:
        raw = _raw(column)
        wrong = f"{typed(raw, column)} IS NULL"
        if not column.key:
            wrong = f"{raw} IS NOT NULL AND {available(raw, column)} AND {wrong}"
        reasons.append(f"CASE WHEN {wrong} THEN {literal(_column(column.name))} END")
    columns = [quoted(name) for name in EVENT_COLUMNS]
    found = events.where(_IS_ROW).selectExpr(*columns, f"coalesce({', '.join(reasons)}) AS reason")
    return found.where("reason IS NOT NULL")


def has_key(shape: Shape, key: Sequence[str]) -> str:
    """Return SQL that is true if an event is of the row with a key, given as texts."""
    columns = [shape.columns[place] for place in shape.key_positions]
    return " AND ".join(
        f"{typed(_raw(column), column)} = {given(column, text)}"
        for column, text in zip(columns, key, strict=True)
    )


def given(column: ColumnShape, text: str) -> str:
    """Return SQL that reads a text as a value of a column; NULL where it does not fit."""
    return f"try_cast({literal(text)} AS {column.data_type.simpleString()})"


def _raw(column: ColumnShape) -> str:
    return f"image[{literal(column.name)}]"


def _is_whole(shape: Shape) -> str:
    """Return SQL that is true if the image has the shape's columns; a delete's may be the key."""
    found, names = "map_keys(image)", f"CAST(array({literals(shape.names)}) AS array<string>)"
    same = (
        f"{found} = {names} OR size({found}) = {len(shape.names)}"
        f" AND size(array_except({found}, {names})) = 0"
    )
    return f"(coalesce(op = 'd' OR {same}, false) AND image IS NOT NULL)"


def _aligned(rows: DataFrame, shapes: Sequence[Shape], *, as_events: bool) -> DataFrame:
    """Convert rows of the first of `shapes` to the columns of the last one.

    A column that was added later is NULL where it is not filled, and so is a value that does not
    fit a column's new type.
    """
    names = {name: name for name in shapes[0].names}
    added: dict[str, str] = {}
    for old, new in pairwise(shapes):
        kept = survivors_of(old, new)
        names = {first: kept[name] for first, name in names.items() if name in kept}
        added = {kept[name]: value for name, value in added.items() if name in kept}
        if not as_events:
            columns = dict(zip(new.names, new.columns, strict=True))
            found = filled(old, new).items()
            added |= {name: typed(literal(text), columns[name]) for name, text in found}
    places = {names[name]: place for place, name in enumerate(shapes[0].names) if name in names}
    values, present = [], []
    for number, column in enumerate(shapes[-1].columns):
        place = places.get(column.name)
        value, there = "NULL", "true"
        if place is not None:
            value, there = f"c{place}", f"a{place}"
        elif column.name in added:
            value = f"CASE WHEN op <> 'd' THEN {added[column.name]} END"
        values.append(f"try_cast({value} AS {column.data_type.simpleString()}) AS c{number}")
        present.append(f"{there} AS a{number}")
    return rows.selectExpr(*ROW_COLUMNS, *values, *present)


def folded(rows: DataFrame, shape: Shape) -> DataFrame:
    """Return each key's last change; take unavailable values from the key's earlier changes.

    An insert or a delete ends what earlier changes can lend: those were of another row.
    """
    numbers = range(len(shape.columns))
    key = [f"c{place}" for place in shape.key_positions]
    lending = {
        f"c{place}": f"a{place}" for place in numbers if shape.columns[place].may_be_unavailable
    }
    others = [
        name
        for place in numbers
        for name in (f"c{place}", f"a{place}")
        if name not in key and f"c{place}" not in lending
    ]
    loans = [
        f"max_by(struct({_POSITION} AS position, {value} AS value),"
        f" CASE WHEN {present} THEN {_POSITION} END) AS loan_{value}"
        for value, present in lending.items()
    ]
    last = f"max_by(struct({', '.join((*ROW_COLUMNS, *others))}), {_POSITION}) AS last"
    reset = f"max(CASE WHEN op <> 'u' THEN {_POSITION} END) AS reset"
    grouped = rows.groupBy(*key).agg(*map(F.expr, (last, reset, *loans)))
    columns = {name: name for name in key} | {name: f"last.{name}" for name in others}
    for value, present in lending.items():
        loan = f"loan_{value}"
        held = f"({loan} IS NOT NULL AND (reset IS NULL OR {loan}.position >= reset))"
        columns[value] = f"CASE WHEN {held} THEN {loan}.value END AS {value}"
        columns[present] = f"{held} AS {present}"
    names = [f"{side}{place}" for side in "ca" for place in numbers]
    return grouped.selectExpr(
        *(f"last.{name}" for name in ROW_COLUMNS), *(columns[name] for name in names)
    )


def _beyond(commit_lsn: int) -> str:
    """Return SQL that is true if an event's transaction is after a commit LSN.

    The two are compared as structures: Spark would write a number into the code that it compiles,
    and compile that code anew for every epoch.
    """
    return f"(struct(commit_lsn) > named_struct('commit_lsn', CAST({commit_lsn} AS bigint)))"


def _after(position: CommitPosition, *, inclusive: bool = False) -> str:
    """Return SQL that is true if an event stands after `position`, or at it if `inclusive`."""
    lsn, seq = position
    later = f"seq {'>=' if inclusive else '>'} {seq}"
    return f"(commit_lsn > {lsn} OR commit_lsn = {lsn} AND {later})"


def _column(name: str) -> str:
    return f"column {name}"


def _refusal(what: str) -> str:
    """Return SQL that raises when it is evaluated; `what` names a column, never a value."""
    places = ", ".join(f"CAST({name} AS string)" for name in (*PLACE_COLUMNS, "commit_lsn"))
    return f"raise_error(concat_ws('|', {literal(REFUSED)}, {places}, {literal(what)}))"
