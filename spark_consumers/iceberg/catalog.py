"""Iceberg's own interface, through Spark's Java: tables, properties, snapshots, tags.

What Spark's SQL has no word for is done here, and what SQL would need several commits for.
"""

import contextlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from schemas.errors import ExitCode, Retryable, SlotbridgeError
from schemas.lsn import format_lsn
from schemas.settings import KafkaSettings
from schemas.tables import TablesSettings
from spark_consumers.java import java_class
from spark_consumers.session import CATALOG
from spark_consumers.sql import null, quoted

SOURCE = "slotbridge.source"
SHAPE = "slotbridge.shape"
RULE = "slotbridge.rule"
KEPT = "slotbridge.kept"
REBUILD = "slotbridge.rebuild"
REPLACED = "slotbridge.replaced"
FILLS = "slotbridge.fills"
DROPS = "slotbridge.drops"
SEEN_LSN = "slotbridge.seen_lsn"
SUMS = "slotbridge.sums"
WRITER = "slotbridge.writer"
EPOCH = "slotbridge.epoch"
COMMIT_LSN = "slotbridge.commit_lsn"
"""Names of table properties; the last two are also in the summary of each snapshot. The note on
the table's state is another one (table_note). KEPT: columns that nothing fills any more.
FILLS: what the next epoch puts into added columns of all rows (fills.py). DROPS: those of KEPT that
the next epoch drops. SEEN_LSN: inserts that commit before it may be of rows that a snapshot
brought. SUMS: the settings by which a table of sums is computed. Only in the summaries of
snapshots: WRITER, the branch that they were written to, and REBUILD where a rebuild has written
them."""
SUMMARY_OPTION = "spark.sql.iceberg.snapshot-property."
_TAG = "lsn_"
_OWN_TAG = re.compile(_TAG + "[0-9A-F]{1,8}_[0-9A-F]{1,8}")


def namespace(kafka: KafkaSettings, tables: TablesSettings) -> str:
    """Return the Iceberg namespace of the tables: the configured one, else the topic prefix."""
    return tables.namespace or re.sub(r"[.-]", "_", kafka.topic_prefix)


def table_name(schema: str, table: str) -> str:
    """Return `table` for schema public, else `schema__table`, with `_` for illegal characters.

    The legal ones are A-Z, a-z, 0-9, `_` and `-`.
    """
    name = table if schema == "public" else f"{schema}__{table}"
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def identifier(space: str, name: str) -> str:
    """Return the quoted name of an Iceberg table."""
    return f"{CATALOG}.{quoted(space)}.{quoted(name)}"


def tag_name(commit_lsn: int) -> str:
    """Return the name of the tag that every table has as of a commit LSN, e.g. `lsn_0_16B3748`."""
    return _TAG + format_lsn(commit_lsn).replace("/", "_")


def load(spark: SparkSession, identifier: str) -> Any:
    """Load the Java table as it is now."""
    session = spark._jsparkSession
    return java_class(session, "org.apache.iceberg.spark.Spark3Util").loadIcebergTable(
        session, identifier
    )


def forget(spark: SparkSession, space: str, name: str) -> None:
    """Take a table out of the catalog without a look at it: its metadata may be gone."""
    session = spark._jsparkSession
    loader = java_class(session, "org.apache.iceberg.spark.Spark3Util")
    identifiers = java_class(session, "org.apache.iceberg.catalog.TableIdentifier")
    separator = java_class(session, "java.util.regex.Pattern").compile("\n")  # makes Java's arrays
    place = identifiers.of(separator.split(f"{space}\n{name}"))
    loader.loadIcebergCatalog(session, CATALOG).dropTable(place, False)


def properties(table: Any) -> dict[str, str]:
    """Return a table's properties as a dict."""
    return _texts(table.properties())


def reached(properties: Mapping[str, str]) -> tuple[int, int]:
    """Return the epoch and the commit LSN that a table with these properties has, -1 for none."""
    return int(properties.get(EPOCH, -1)), int(properties.get(COMMIT_LSN, -1))


def require_known(table: Any, identifier: str, sealed: tuple[int, int]) -> dict[str, str]:
    """Return the table's properties.

    Raise Retryable (LOCKED) where the table has another epoch than `sealed`, the writer's.
    """
    found = properties(table)
    if reached(found) != sealed:
        raise overtaken(identifier)
    return found


def load_known(spark: SparkSession, identifier: str, sealed: tuple[int, int]) -> Any:
    """Load a table that its writer is to change before, or outside, an epoch's commit.

    Raise Retryable (LOCKED) where the table has another epoch than `sealed`, the writer's.
    """
    table = load(spark, identifier)
    require_known(table, identifier, sealed)
    return table


def overtaken(identifier: str) -> Retryable:
    """Return the error of a writer whose knowledge of the table is out of date."""
    return Retryable(
        "another program has changed the table since the last epoch",
        operation="apply an epoch",
        subject=identifier.replace("`", ""),
        hint="run one slottables for each namespace; it goes on by itself after maintenance from "
        "outside",
        exit_code=ExitCode.LOCKED,
    )


def summary(table: Any) -> dict[str, str]:
    """Return the summary of the table's last snapshot, {} without one."""
    return summary_of(table.currentSnapshot())


def summary_of(snapshot: Any) -> dict[str, str]:
    """Return the summary of a snapshot, {} for None."""
    return {} if snapshot is None else _texts(snapshot.summary())


def snapshot_id(table: Any) -> int | None:
    """Return the id of the table's last snapshot, None without one."""
    snapshot = table.currentSnapshot()
    return None if snapshot is None else int(snapshot.snapshotId())


def latest_of_epoch(table: Any, snapshot: int, epoch: int) -> int:
    """Return the table's last snapshot that has no epoch after `epoch`, which `snapshot` is of.

    Later snapshots than `snapshot` are those of compaction, and of whoever else has written: that
    is what readers get. A table that was rolled back behind `snapshot` has its present one.
    """
    current = table.currentSnapshot()
    found, brought = None, -1
    while current is not None:
        if int(current.snapshotId()) == snapshot:
            return snapshot if found is None else found
        summary = summary_of(current)
        # What a rebuild wrote is of no epoch: it became the table later.
        number = sys.maxsize if REBUILD in summary else int(summary.get(EPOCH, -1))
        if number > epoch:
            found = None
        elif found is None:
            found = int(current.snapshotId())
        brought = max(brought, number)
        parent = current.parentId()
        current = None if parent is None else table.snapshot(parent)
    rolled_back = found is not None and brought <= epoch
    return found if found is not None and rolled_back else snapshot


def as_of(spark: SparkSession, identifier: str, snapshot: int) -> DataFrame:
    """Return a table as it was: its rows, and the columns that it had."""
    return spark.read.option("versionAsOf", str(snapshot)).table(identifier)


def rows_before(spark: SparkSession, identifier: str, snapshot: int) -> DataFrame:
    """Return the rows that a table had, in the columns that it has now.

    A column that the table did not have is NULL.
    """
    table, rows = load(spark, identifier), as_of(spark, identifier, snapshot)
    found = table.snapshot(snapshot)
    number = None if found is None else found.schemaId()
    if number is None or int(number) == int(table.schema().schemaId()):
        return rows
    former, columns = _fields(table.schemas()[int(number)]), _fields(table.schema())
    types = {field.name: field.dataType for field in spark.table(identifier).schema.fields}
    return rows.select(
        *(
            (F.col(quoted(former[key])) if key in former else F.lit(None))
            .cast(types[name])
            .alias(name)
            for key, name in columns.items()
        )
    )


def ref_names(table: Any) -> list[str]:
    """Return the names of a table's branches and tags."""
    return _names(table.refs())


def ref_snapshot(table: Any, name: str) -> int | None:
    """Return the id of the snapshot of a branch or tag, None if the table has no such reference."""
    found = table.refs().get(name)
    return None if found is None else int(found.snapshotId())


def own_tags(table: Any) -> list[str]:
    """Return the tags that slottables made, the oldest LSN first."""
    return own_tags_of(ref_names(table))


def tag_lsn(name: str) -> int:
    """Return the commit LSN of a tag that slottables made."""
    high, low = name.removeprefix(_TAG).split("_")
    return (int(high, 16) << 32) | int(low, 16)


def own_tags_of(refs: Iterable[str]) -> list[str]:
    """Return those references that are tags of slottables, the oldest LSN first. Pure."""
    return sorted(filter(_OWN_TAG.fullmatch, refs), key=tag_lsn)


def metadata(table: Any) -> dict[str, Any]:
    """Return a table's metadata as Iceberg's specification has it, in one call to Java."""
    parser = java_class(table, "org.apache.iceberg.TableMetadataParser")
    found: dict[str, Any] = json.loads(parser.toJson(table.operations().current()))
    return found


def set_property(table: Any, name: str, value: str) -> None:
    """Set one property of a table, or of a transaction of it."""
    set_properties(table, {name: value})


def set_properties(table: Any, values: Mapping[str, str]) -> None:
    """Set properties of a table, in one commit, or of a transaction of it."""
    update = table.updateProperties()
    for name, value in values.items():
        update.set(name, value)
    update.commit()


def column_names(table: Any) -> tuple[str, ...]:
    """Return the names of a table's columns, in one call to Java."""
    return tuple(_fields(table.schema()).values())


def _fields(schema: Any) -> dict[int, str]:
    """Return the columns of one of a table's schemas: the number that they keep -> their name."""
    parser = java_class(schema, "org.apache.iceberg.SchemaParser")
    return {f["id"]: f["name"] for f in json.loads(parser.toJson(schema))["fields"]}


def expire(table: Any, *, keep: int, older_than_ms: int, younger: Collection[int] = ()) -> None:
    """Remove snapshots, and the files that only they name: all but tagged ones and the last.

    `younger`: snapshots that go, too; no tag and no branch may name them.
    """
    work = table.expireSnapshots()
    work.retainLast(keep)
    work.expireOlderThan(older_than_ms)
    for snapshot in younger:
        work.expireSnapshotId(snapshot)
    work.commit()


def column_type(spark: SparkSession, kind: str) -> Any:
    """Return Iceberg's type for a Spark type's simple string."""
    session = spark._jsparkSession
    java_type = java_class(session, "org.apache.spark.sql.types.DataType").fromDDL(kind)
    return java_class(session, "org.apache.iceberg.spark.SparkSchemaUtil").convert(java_type)


@contextlib.contextmanager
def viewed(rows: DataFrame, identifier: str) -> Iterator[str]:
    """Make rows visible to SQL for a merge into a table; yield the quoted name of their view."""
    view = f"merged_into_{abs(hash(identifier))}"
    rows.createOrReplaceTempView(view)
    try:
        yield quoted(view)
    finally:
        rows.sparkSession.catalog.dropTempView(view)


def completed(identifier: str, rows: DataFrame, kept: Collection[str]) -> DataFrame:
    """Return `rows` with NULL in those columns of the table that nothing fills any more (`kept`).

    All other columns must be in `rows`: a value that has no column, or a column without values, is
    a bug.
    """
    fields, given = rows.sparkSession.table(identifier).schema.fields, set(rows.columns)
    names = {field.name for field in fields}
    if given - names or names - given - set(kept):
        wrong = min((given - names) | (names - given - set(kept)))
        raise SlotbridgeError(
            f"column {wrong} is in only one of the table and its new rows",
            operation="write a table",
            subject=identifier.replace("`", ""),
        )
    return rows.selectExpr(
        *(
            quoted(field.name) if field.name in given else null(field.name, field.dataType)
            for field in fields
        )
    )


def _texts(values: Any) -> dict[str, str]:
    """Convert a Java map of texts in a few calls to Java, not in several for each entry."""
    mapper = java_class(values, "com.fasterxml.jackson.databind.ObjectMapper")()
    found: dict[str, str] = json.loads(mapper.writeValueAsString(values))
    return found


def _names(values: Any) -> list[str]:
    """Return the keys of a Java map in a few calls to Java, not in several for each key."""
    joined = java_class(values, "java.lang.String").join("\n", values.keySet())
    return str(joined).split("\n") if joined else []
