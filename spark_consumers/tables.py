"""The Iceberg tables: one per source table, its current state, written by one MERGE per batch.

    source table     Iceberg table                    properties
    public.t         slotbridge.<namespace>.t         slotbridge.source    schema.table
    s.t              slotbridge.<namespace>.s__t      slotbridge.key       key columns, JSON
                                                      slotbridge.truncate  [commit_lsn, seq]
                                                      slotbridge.applied   {partition: [lsn, seq]}

The properties are written after the MERGE: a crash in between leaves them behind the rows, and the
replayed batch changes no row, as each row carries the position of its last change.
"""

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from schemas.errors import ExitCode, OperatorNeeded, SetupError
from schemas.settings import KafkaSettings, TablesSettings
from spark_consumers.changes import REFUSED, Position
from spark_consumers.columns import METADATA, Shape
from spark_consumers.session import CATALOG

COPIED_BYTES_MAX = 16 * 2**20
"""Up to this size a table is written anew by each merge, which leaves few files and fast reads; a
larger one gets delete files instead, until maintenance puts them together."""
_SIZED_EVERY = 16
_MODE, _COPY, _DELTA = "write.merge.mode", "copy-on-write", "merge-on-read"
_FORMAT = {
    "format-version": "2",
    _MODE: _COPY,
    "write.merge.distribution-mode": "none",
    "write.distribution-mode": "none",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
_SOURCE, _KEY = "slotbridge.source", "slotbridge.key"
_TRUNCATE, _APPLIED = "slotbridge.truncate", "slotbridge.applied"


@dataclass(slots=True)
class Applied:
    """What a table has: its last truncate, and the last streamed event of each Kafka partition;
    `merges` counts this process's."""

    truncate: Position | None = None
    partitions: dict[int, Position] = field(default_factory=dict)
    merges: int = 0


@dataclass(frozen=True, slots=True)
class IcebergTable:
    """A table that fits its shape; `identifier` is quoted for SQL."""

    identifier: str
    shape: Shape
    applied: Applied


class Tables:
    """Opens the tables of one namespace; remembers those it has opened, as their only writer."""

    def __init__(self, kafka: KafkaSettings, tables: TablesSettings) -> None:
        self._namespace = namespace(kafka, tables)
        self._open: dict[str, IcebergTable] = {}
        self._creating = threading.Lock()

    def open(self, spark: SparkSession, shape: Shape) -> IcebergTable:
        """The table of `shape`, made or widened by new columns where it must be.

        Raises SetupError when the source's table changed in another way, or when the Iceberg table
        belongs to another source table.
        """
        known = self._open.get(shape.name)
        if known is not None and known.shape == shape:
            return known
        identifier = self.identifier(shape.schema, shape.table)
        with self._creating:
            if spark.catalog.tableExists(identifier):
                _fit(spark, identifier, shape)
            else:
                spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {CATALOG}.{quoted(self._namespace)}")
                spark.sql(_create_sql(identifier, shape))
        table = IcebergTable(identifier, shape, _applied(properties(spark, identifier)))
        self._open[shape.name] = table
        return table

    def identifier(self, schema: str, table: str) -> str:
        """The quoted name of the Iceberg table of a source table."""
        return f"{CATALOG}.{quoted(self._namespace)}.{quoted(table_name(schema, table))}"

    def existing(self, spark: SparkSession) -> dict[str, str]:
        """source table (`schema.table`) -> identifier, for every table that slottables made."""
        place = f"{CATALOG}.{quoted(self._namespace)}"
        if not spark.catalog.databaseExists(place):
            return {}
        names = [row.tableName for row in spark.sql(f"SHOW TABLES IN {place}").collect()]
        identifiers = [f"{place}.{quoted(name)}" for name in sorted(names)]
        sources = {name: properties(spark, name).get(_SOURCE) for name in identifiers}
        return {source: name for name, source in sources.items() if source is not None}


def namespace(kafka: KafkaSettings, tables: TablesSettings) -> str:
    """The configured namespace, or the topic prefix with `.` and `-` as `_`."""
    return tables.namespace or re.sub(r"[.-]", "_", kafka.topic_prefix)


def table_name(schema: str, table: str) -> str:
    """`table` for the schema public, else `schema__table`; `_` for all but A-Z a-z 0-9 _ and -."""
    name = table if schema == "public" else f"{schema}__{table}"
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def quoted(name: str) -> str:
    """`name` as an identifier in Spark SQL."""
    return f"`{name.replace('`', '``')}`"


def key_columns(properties: Mapping[str, str]) -> tuple[str, ...]:
    """The key that a table was made with, from its properties; empty without one."""
    return tuple(json.loads(properties.get(_KEY, "[]")))


def properties(spark: SparkSession, identifier: str) -> dict[str, str]:
    """The properties of a table."""
    rows = spark.sql(f"SHOW TBLPROPERTIES {identifier}").collect()
    return {row["key"]: row["value"] for row in rows}


def merge(
    table: IcebergTable,
    changes: DataFrame,
    *,
    unavailable: bool,
    truncate: Position | None,
    lsn_min: int,
) -> None:
    """Bring `changes` (spark_consumers.changes) and a new truncate into the table, in one commit.

    A row changes only when the change stands after the row's own last change. `unavailable` tells
    that some values may be missing from the changes; `lsn_min` is the lowest commit LSN in them.
    """
    view = f"changes_of_{table_name(table.shape.schema, table.shape.table)}"
    changes.createOrReplaceTempView(quoted(view))
    spark = changes.sparkSession
    try:
        spark.sql(
            _merge_sql(table, view, unavailable=unavailable, truncate=truncate, lsn_min=lsn_min)
        )
    finally:
        spark.catalog.dropTempView(view)


def record(
    spark: SparkSession,
    table: IcebergTable,
    truncate: Position | None,
    partitions: Mapping[int, Position],
) -> None:
    """Remember, in the table's properties, what the last merge brought; positions only grow.

    Now and then this also chooses, by the table's size, how the next merges write.
    """
    applied = table.applied
    if truncate is not None:
        applied.truncate = max(applied.truncate or truncate, truncate)
    for partition, position in partitions.items():
        known = applied.partitions.get(partition, position)
        applied.partitions[partition] = max(known, position)
    values = {_APPLIED: json.dumps(dict(sorted(applied.partitions.items())))}
    if applied.truncate is not None:
        values[_TRUNCATE] = json.dumps(applied.truncate)
    if applied.merges % _SIZED_EVERY == 0:
        values[_MODE] = _COPY if _bytes(spark, table) <= COPIED_BYTES_MAX else _DELTA
    applied.merges += 1
    spark.sql(f"ALTER TABLE {table.identifier} SET TBLPROPERTIES ({_listed(values)})")


def _bytes(spark: SparkSession, table: IcebergTable) -> int:
    """The size of the table's files, from the summary of its last snapshot; 0 without one."""
    summaries = spark.table(f"{table.identifier}.snapshots").orderBy(F.desc("committed_at"))
    last = summaries.select(F.col("summary")["total-files-size"].alias("bytes")).first()
    return int(last["bytes"] or 0) if last is not None else 0


def _merge_sql(
    table: IcebergTable, view: str, *, unavailable: bool, truncate: Position | None, lsn_min: int
) -> str:
    shape = table.shape
    columns = [*(quoted(name) for name in shape.names), *METADATA]
    values = [*(f"s.c{n}" for n in range(len(shape.columns))), "s.commit_lsn", "s.seq"]
    clauses = []
    if shape.keyless:
        # The lower bound lets Iceberg skip all files of earlier events.
        match = f"t._commit_lsn = s.commit_lsn AND t._seq = s.seq AND t._commit_lsn >= {lsn_min}"
    else:
        match = " AND ".join(f"t.{quoted(shape.names[n])} = s.c{n}" for n in shape.key_positions)
        later = "(s.commit_lsn > t._commit_lsn OR s.commit_lsn = t._commit_lsn AND s.seq > t._seq)"
        kept = values.copy()
        if unavailable:
            kept[: len(shape.columns)] = [
                f"if(s.a{n}, s.c{n}, t.{quoted(column.name)})"
                if column.may_be_unavailable
                else f"s.c{n}"
                for n, column in enumerate(shape.columns)
            ]
            values[: len(shape.columns)] = [
                f"if(s.a{n}, s.c{n}, {_missing(shape, column.name)})"
                if column.may_be_unavailable
                else f"s.c{n}"
                for n, column in enumerate(shape.columns)
            ]
        sets = ", ".join(f"t.{c} = {v}" for c, v in zip(columns, kept, strict=True))
        clauses += [
            f"WHEN MATCHED AND {later} AND s.op = 'd' THEN DELETE",
            f"WHEN MATCHED AND {later} THEN UPDATE SET {sets}",
        ]
    clauses.append(
        f"WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT ({', '.join(columns)})"  # noqa: S608 - names are quoted
        f" VALUES ({', '.join(values)})"
    )
    if truncate is not None:
        lsn, seq = truncate
        clauses.append(
            f"WHEN NOT MATCHED BY SOURCE AND (t._commit_lsn < {lsn}"
            f" OR t._commit_lsn = {lsn} AND t._seq < {seq}) THEN DELETE"
        )
    return f"MERGE INTO {table.identifier} t USING {quoted(view)} s ON {match} {' '.join(clauses)}"


def _missing(shape: Shape, column: str) -> str:
    """SQL that raises: an unchanged value is neither in the changes nor in the table."""
    before = _literal(f"{REFUSED}|{shape.name}|||")
    return f"raise_error(concat({before}, s.commit_lsn, {_literal(f'|column {column}')}))"


def _create_sql(identifier: str, shape: Shape) -> str:
    columns = [f"{quoted(c.name)} {c.data_type.simpleString()}" for c in shape.columns]
    columns += [f"{name} bigint" for name in METADATA]
    table_properties = _FORMAT | {_SOURCE: shape.name, _KEY: json.dumps(shape.key)}
    return (
        f"CREATE TABLE {identifier} ({', '.join(columns)}) USING iceberg"
        f" TBLPROPERTIES ({_listed(table_properties)})"
    )


def _fit(spark: SparkSession, identifier: str, shape: Shape) -> None:
    """Add the shape's new columns to an existing table; raise SetupError for any other change."""
    found = properties(spark, identifier)
    if found.get(_SOURCE) != shape.name:
        raise OperatorNeeded(
            f"the table belongs to {found.get(_SOURCE, 'someone else')}, not to {shape.name}",
            operation="open Iceberg table",
            subject=identifier,
            hint="set another tables.namespace, or rename one of the source tables",
        )
    fields = {f.name: f.dataType for f in spark.table(identifier).schema.fields}
    differences = _differences(fields, shape)
    if key_columns(found) != shape.key:
        before, now = (", ".join(key) or "none" for key in (key_columns(found), shape.key))
        differences.append(f"the key was {before} and is {now}")
    if differences:
        raise SetupError(
            f"the source table changed: {'; '.join(differences)}",
            operation="open Iceberg table",
            subject=shape.name,
            hint=f"only new columns are taken over: drop {identifier} and rebuild it",
            exit_code=ExitCode.RECORD_REFUSED,
        )
    new = [c for c in shape.columns if c.name not in fields]
    if new:
        added = ", ".join(f"{quoted(c.name)} {c.data_type.simpleString()}" for c in new)
        spark.sql(f"ALTER TABLE {identifier} ADD COLUMNS ({added})")


def _differences(fields: Mapping[str, T.DataType], shape: Shape) -> list[str]:
    gone = [f"column {n} is gone" for n in fields if n not in (*shape.names, *METADATA)]
    changed = [
        f"column {c.name} was {fields[c.name].simpleString()} and is {c.data_type.simpleString()}"
        for c in shape.columns
        if c.name in fields and fields[c.name] != c.data_type
    ]
    return gone + changed


def _applied(found: Mapping[str, str]) -> Applied:
    truncate = json.loads(found.get(_TRUNCATE, "null"))
    partitions = json.loads(found.get(_APPLIED, "{}"))
    return Applied(
        Position(*truncate) if truncate else None,
        {int(number): Position(*position) for number, position in partitions.items()},
    )


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{_literal(name)} = {_literal(value)}" for name, value in values.items())


def _literal(text: str) -> str:
    """`text` as a string in Spark SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
