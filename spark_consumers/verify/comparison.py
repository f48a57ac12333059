"""Compares Iceberg tables with their source tables, row by row, in bounded memory.

Both sides become multisets of typed rows in Spark. Rows that are on one side only are, by key:

    missing     at the source, not in the Iceberg table
    extra       in the Iceberg table, not at the source
    different   on both sides, with other values (tables with a key only)
"""

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from schemas.errors import ExitCode, SettingsError
from schemas.naming import Naming, schema_and_table
from schemas.settings import Settings, require
from schemas.tables import TablesSettings
from spark_consumers.events.columns import ColumnShape
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg.layout import layout_of, rule_of
from spark_consumers.iceberg.sums import is_sums
from spark_consumers.iceberg.tables import State, Tables
from spark_consumers.sql import quoted
from spark_consumers.verify import postgres
from spark_consumers.verify.exported_rows import source_rows
from spark_consumers.verify.source_identity import source_not_judged

KINDS = ("missing", "extra", "different")
_FILTERED = (
    "shaping.filters leaves rows out that its source has; compare with Kafka's events: "
    "slottables verify --as-of"
)
CHANGELOG = "a changelog holds events, not rows that can be compared"


@dataclass(frozen=True, slots=True)
class TableComparison:
    """The result of comparing one table.

    `columns` says in words how the columns themselves differ; `examples` has keys of rows that
    differ, as `kind {key}`. `columns_not_judged`: columns that were not compared, as
    their large values are cut or stored elsewhere.
    """

    table: str
    iceberg: str
    source_rows: int
    table_rows: int
    missing: int
    extra: int
    different: int
    columns: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    not_judged: str = ""
    """Why the rows were not compared; "" if they were."""
    columns_not_judged: tuple[str, ...] = ()
    source_not_judged: str = ""
    """Why the source can't be shown to be the server of Kafka's events; "" if it is."""

    @property
    def equal(self) -> bool:
        """Whether both sides have the same columns and rows, and the source is the right one."""
        unknown = self.not_judged or self.source_not_judged
        return not (self.missing or self.extra or self.different or self.columns or unknown)

    def line(self) -> str:
        """Return one line for people, and one more for each example."""
        if self.not_judged:
            return f"{self.table}: not judged: {self.not_judged}"
        counts = f"{self.source_rows} rows at the source, {self.table_rows} in the table"
        found = [f"{getattr(self, kind)} {kind}" for kind in KINDS if getattr(self, kind)]
        verdict = ", ".join((*found, *self.columns)) or "equal"
        if self.columns_not_judged:
            named = ", ".join(self.columns_not_judged)
            verdict += f", not judged (shaping.large_values): {named}"
        if self.source_not_judged:
            verdict += ", the source is not judged"
        return "\n  ".join((f"{self.table}: {verdict} ({counts})", *self.examples))


def verified(comparisons: Sequence[TableComparison]) -> ExitCode:
    """Return the exit code of a comparison; one that judged not even one table is not judged."""
    if all(one.not_judged for one in comparisons):
        return ExitCode.NOT_JUDGED
    return ExitCode.OK if all(one.equal for one in comparisons) else ExitCode.CHECK_FAILED


def verify_lines(comparisons: Sequence[TableComparison], *, as_json: bool) -> Iterator[str]:
    """Yield a comparison as one JSON document, or as lines for people."""
    unknown = next((one.source_not_judged for one in comparisons), "")
    if as_json:
        tables = [asdict(one) | {"equal": one.equal} for one in comparisons]
        document = {"equal": verified(comparisons) == ExitCode.OK, "source_not_judged": unknown}
        yield json.dumps(document | {"tables": tables})
        return
    if unknown:
        yield f"the source is not judged: {unknown}"
    yield from (one.line() for one in comparisons)


def verify_tables(
    spark: SparkSession,
    settings: Settings,
    *,
    tables: Collection[str] = (),
    examples_max: int = 0,
) -> list[TableComparison]:
    """Compare `tables` (`schema.table`) with their source.

    By default these are the tables of the settings; else every published one and every one in the
    namespace. Both sides must be at rest: what the bridge has still under way counts as a
    difference. The source is read in one snapshot; `source_not_judged` of each comparison tells
    whether it is the server of Kafka's events. Raise Retryable or SetupError when it can't be read.
    """
    source = require(settings.source, "source")
    configured = require(settings.tables, "tables")
    kafka = require(settings.kafka, "kafka")
    own, naming = Tables(kafka, configured), Naming(kafka.topic_prefix, settings.shaping)
    try:
        with postgres.snapshot(source) as connection:
            unknown = source_not_judged(connection, source, kafka)
            published = postgres.published(connection, source.publication)
            existing = {n: s for n, s in own.states(spark).items() if not is_sums(n)}
            wanted = set(tables) or set(configured.tables) or set(published) | set(existing)
            rules = {name: rule_of(configured, *schema_and_table(name)) for name in wanted}
            changelogs = {name for name, rule in rules.items() if rule.kind == "changelog"}
            lost = own.unreadable_of(wanted)
            results = []
            for name in sorted(wanted - (changelogs - set(tables))):
                if name in lost or naming.filtered(*schema_and_table(name)):
                    results.append(
                        not_compared(name, str(lost[name]) if name in lost else _FILTERED)
                    )
                    continue
                computed = naming.computed(*schema_and_table(name))
                side = _side(configured, existing.get(name), computed)
                try:
                    with connection.transaction():  # a savepoint: the others have the snapshot yet
                        row = published.get(name)
                        one = _compare(spark, connection, name, side, row, examples_max, naming)
                except (*FOREIGN, psycopg.DatabaseError) as error:
                    one = not_compared(name, failure_text(error))
                results.append(one)
            return [replace(one, source_not_judged=unknown) for one in results]
    except FOREIGN as error:
        raise translated(error, "compare tables") from error


@dataclass(frozen=True, slots=True)
class _Side:
    """An Iceberg table as its source's rows.

    `names`: source column -> its column. `condition`: SQL that selects the rows that hold.
    """

    iceberg: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, T.DataType] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    computed: frozenset[str] = frozenset()
    key: tuple[str, ...] = ()
    condition: str = "true"


def not_compared(name: str, why: str) -> TableComparison:
    """Return the result of a table whose rows can't be compared."""
    return TableComparison(name, "", 0, 0, 0, 0, 0, not_judged=why)


def failure_text(error: Exception) -> str:
    """Return why one table could not be compared, without values of its rows.

    Raise Retryable where the source does not answer any more: no table can be compared then.
    """
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        raise error
    if isinstance(error, psycopg.Error):
        return f"the source refused a statement (SQLSTATE {error.sqlstate}); its log names it"
    return str(translated(error, "compare tables"))


def _side(settings: TablesSettings, state: State | None, computed: frozenset[str]) -> _Side:
    """Return the Iceberg table's side of a comparison. Raise SettingsError for a changelog."""
    if state is None or state.shape is None:
        return _Side(state.identifier if state else "")
    layout = layout_of(settings, state.shape)
    if layout.kind == "changelog":
        raise SettingsError(
            CHANGELOG,
            operation="compare tables",
            subject=state.source,
            hint="leave it out of --table",
        )
    columns = state.shape.names
    return _Side(
        state.identifier,
        {columns[f.source_index]: f.name for f in layout.fields},
        {columns[f.source_index]: f.type for f in layout.fields},
        frozenset(columns) - {columns[f.source_index] for f in layout.fields},
        computed,
        state.shape.key,
        "_valid_to IS NULL" if layout.kind == "history" else "true",
    )


def _compare(
    spark: SparkSession,
    connection: psycopg.Connection,
    name: str,
    side: _Side,
    published: postgres.PublishedColumns | None,
    examples_max: int,
    naming: Naming,
) -> TableComparison:
    """Compare a source table, exported to files, with its Iceberg table by shared columns."""
    schema, table = schema_and_table(name)
    columns = postgres.source_columns(connection, schema, table)
    if published is not None:
        columns = tuple(column for column in columns if column.name in published.columns)
    columns = tuple(column for column in columns if column.name not in side.left_out)
    iceberg, fields, key = side.iceberg, side.types, side.key
    not_judged = tuple(
        column.name
        for column in columns
        if column.name not in key and naming.changes_values(schema, table, column.name, column.type)
    )
    problems = _column_problems(columns, fields, side.computed) if iceberg and columns else ()
    names = [
        c.name
        for c in columns
        if (not iceberg or fields.get(c.name) == c.data_type) and c.name not in not_judged
    ]
    if not columns:
        problems = ("no such table at the source",)
        names = list(fields)
    with contextlib.ExitStack() as stack:
        right = _table_rows(spark, side, names) if iceberg else None
        if columns:
            shared = tuple(column for column in columns if column.name in names)
            row_filter = published.row_filter if published else None
            prefix = "slottables-verify-"
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
            postgres.export(connection, (schema, table), shared, row_filter, folder)
            left = stack.enter_context(source_rows(spark, folder, shared))
        elif right is not None:
            left = right.limit(0)
        else:
            return TableComparison(name, "", 0, 0, 0, 0, 0, problems)
        places = [names.index(column) for column in key if column in names]
        empty = left.limit(0) if right is None else right
        complete = len(places) == len(key)
        found = compared(
            name, iceberg, left, empty, names, places if complete else (), examples_max, problems
        )
        return replace(found, columns_not_judged=not_judged)


def compared(
    name: str,
    iceberg: str,
    left: DataFrame,
    right: DataFrame,
    names: Sequence[str],
    key: Sequence[int],
    examples_max: int,
    problems: tuple[str, ...] = (),
) -> TableComparison:
    """Compare `right` (the Iceberg table) with `left`; both have columns c0, c1 and so on.

    `names` are the columns' names, `key` the places of those that identify a row.
    """
    groups = groups_of(left, right, key)
    counts = groups.agg(
        *(F.coalesce(F.sum(c), F.lit(0)).alias(c) for c in ("source", "table", *KINDS))
    ).collect()[0]
    unequal = any(counts[kind] for kind in KINDS)
    examples = _examples(groups, names, examples_max) if unequal and examples_max else ()
    return TableComparison(
        name,
        iceberg.replace("`", ""),
        counts["source"],
        counts["table"],
        counts["missing"],
        counts["extra"],
        counts["different"],
        problems,
        examples,
    )


def _column_problems(
    columns: Sequence[ColumnShape], fields: Mapping[str, T.DataType], computed: Collection[str]
) -> tuple[str, ...]:
    """Return how the columns of source and table differ, in words."""
    names = {column.name for column in columns}
    found = [f"column {c.name} is not in the table" for c in columns if c.name not in fields]
    found += [
        f"column {name} is computed by the bridge, and not judged"
        if name in computed
        else f"column {name} is not at the source"
        for name in fields
        if name not in names
    ]
    found += [
        f"column {c.name} is {fields[c.name].simpleString()} in the table,"
        f" {c.data_type.simpleString()} at the source"
        for c in columns
        if c.name in fields and fields[c.name] != c.data_type
    ]
    return tuple(found)


def _table_rows(spark: SparkSession, side: _Side, names: Sequence[str]) -> DataFrame:
    """Return the Iceberg table's rows in columns c0, c1 and so on."""
    return (
        spark.table(side.iceberg)
        .where(side.condition)
        .select(
            *(
                F.col(quoted(side.names[name])).alias(f"c{number}")
                for number, name in enumerate(names)
            )
        )
    )


def groups_of(left: DataFrame, right: DataFrame, key: Sequence[int]) -> DataFrame:
    """Count how often each key (without one: each row) is on either side, and the rows that differ.

    Columns: the key's, then source, table, missing, extra, different (counts of rows).
    """
    sides = left.withColumn("side", F.lit(1)).unionByName(right.withColumn("side", F.lit(0)))
    values = left.columns
    identity = [values[place] for place in key] or values
    counted = sides.groupBy(*values).agg(
        F.sum("side").alias("source"), F.count_if(F.col("side") == 0).alias("table")
    )
    counted = counted.withColumn("matched", F.least("source", "table"))
    if key:
        counted = counted.groupBy(*identity).agg(
            *(F.sum(name).alias(name) for name in ("source", "table", "matched"))
        )
    left_over, right_over = (F.col(side) - F.col("matched") for side in ("source", "table"))
    different = F.least(left_over, right_over) if key else F.lit(0).cast("bigint")
    return counted.select(
        *identity,
        "source",
        "table",
        (left_over - different).alias("missing"),
        (right_over - different).alias("extra"),
        different.alias("different"),
    )


def _examples(groups: DataFrame, names: Sequence[str], limit: int) -> tuple[str, ...]:
    """Return up to `limit` keys of rows that differ (of a table without a key: whole rows)."""
    identity = [name for name in groups.columns if name.startswith("c")]
    key = F.to_json(
        F.struct(*(F.col(name).alias(names[int(name[1:])]) for name in identity)),
        {"ignoreNullFields": "false"},
    )
    kind = reduce(
        lambda rest, name: F.when(F.col(name) > 0, F.lit(name)).otherwise(rest),
        KINDS,
        F.lit(None).cast("string"),
    )
    found = groups.select(kind.alias("kind"), key.alias("key")).where(F.col("kind").isNotNull())
    return tuple(f"{row['kind']} {row['key']}" for row in found.limit(limit).collect())
