"""Iceberg's own interface, through Spark's Java: tables, properties, snapshots, tags.

What Spark's SQL has no word for is done here, and what SQL would need several commits for.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from py4j.java_gateway import JavaClass  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

from schemas.lsn import format_lsn
from schemas.settings import KafkaSettings
from schemas.tables import TablesSettings
from spark_consumers.session import CATALOG
from spark_consumers.sql import null, quoted

SOURCE = "slotbridge.source"
KEY = "slotbridge.key"
KIND = "slotbridge.kind"
SHAPE = "slotbridge.shape"
REBUILD = "slotbridge.rebuild"
REPLACED = "slotbridge.replaced"
LACKS = "slotbridge.lacks"
EPOCH = "slotbridge.epoch"
COMMIT_LSN = "slotbridge.commit_lsn"
"""Names of table properties; the last two are also in the summary of each snapshot. LACKS: the
commit LSN of an epoch in which an event of the table was left out (a dead letter, the quarantine),
so that the table may have a row that the source has not."""
SUMMARY_OPTION = "spark.sql.iceberg.snapshot-property."
_TAG = "lsn_"


def namespace(kafka: KafkaSettings, tables: TablesSettings) -> str:
    """The Iceberg namespace of the tables."""
    return tables.namespace or re.sub(r"[.-]", "_", kafka.topic_prefix)


def table_name(schema: str, table: str) -> str:
    """`table` for the schema public, else `schema__table`; `_` for all but A-Z a-z 0-9 _ and -."""
    name = table if schema == "public" else f"{schema}__{table}"
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def identifier(space: str, name: str) -> str:
    """The quoted name of an Iceberg table."""
    return f"{CATALOG}.{quoted(space)}.{quoted(name)}"


def tag_name(commit_lsn: int) -> str:
    """The tag that every table has as of a commit LSN, e.g. `lsn_0_16B3748`."""
    return _TAG + format_lsn(commit_lsn).replace("/", "_")


def load(spark: SparkSession, identifier: str) -> Any:
    """The Java table as it is now."""
    session = spark._jsparkSession
    return _java(session, "org.apache.iceberg.spark.Spark3Util").loadIcebergTable(
        session, identifier
    )


def properties(table: Any) -> dict[str, str]:
    """A table's properties."""
    return _texts(table.properties())


def brought(table: Any) -> dict[str, str]:
    """The summary of the last snapshot that brought an epoch; compaction brings none."""
    snapshot = table.currentSnapshot()
    while snapshot is not None:
        found = _texts(snapshot.summary())
        if EPOCH in found:
            return found
        parent = snapshot.parentId()
        snapshot = None if parent is None else table.snapshot(parent)
    return {}


def reached(table: Any) -> tuple[int, int]:
    """The epoch and the commit LSN that the table has, -1 for none: its properties tell it, or,
    between its commit and its seal, the last snapshot."""
    found = properties(table), brought(table)
    epoch, commit_lsn = (
        max(int(place.get(name, -1)) for place in found) for name in (EPOCH, COMMIT_LSN)
    )
    return epoch, commit_lsn


def keep_progress(table: Any) -> None:
    """Make the table's properties tell the epoch that its last snapshot tells.

    Between a table's commit and its seal only that snapshot knows of the epoch, and maintenance may
    remove it.
    """
    known, found = properties(table), brought(table)
    if int(found.get(EPOCH, -1)) > int(known.get(EPOCH, -1)):
        update = table.updateProperties()
        for name in (EPOCH, COMMIT_LSN):
            update.set(name, found[name])
        update.commit()


def summary(table: Any) -> dict[str, str]:
    """The summary of the last snapshot; empty without one."""
    snapshot = table.currentSnapshot()
    return {} if snapshot is None else _texts(snapshot.summary())


def snapshot_id(table: Any) -> int | None:
    """The last snapshot's id."""
    snapshot = table.currentSnapshot()
    return None if snapshot is None else int(snapshot.snapshotId())


def seal(
    table: Any, values: Mapping[str, str], tag: str, kept: int, unset: Collection[str] = ()
) -> int | None:
    """Set properties and tag the last snapshot, in one commit; returns that snapshot's id.

    Of our tags the last `kept` stay.
    """
    transaction = table.newTransaction()
    update = transaction.updateProperties()
    for name, value in values.items():
        update.set(name, value)
    for name in unset:
        update.remove(name)
    update.commit()
    snapshot = snapshot_id(table)
    if snapshot is not None:
        tags = own_tags(table)
        manage = transaction.manageSnapshots()
        if tag in tags:
            manage.replaceTag(tag, snapshot)
        else:
            manage.createTag(tag, snapshot)
        for old in [name for name in tags if name != tag][: max(0, len(tags) + 1 - kept)]:
            manage.removeTag(old)
        manage.commit()
    transaction.commitTransaction()
    return snapshot


def own_tags(table: Any) -> list[str]:
    """Our tags, the oldest LSN first."""
    names = [name for name in _names(table.refs()) if name.startswith(_TAG)]
    return sorted(names, key=lambda name: [int(part, 16) for part in name.split("_")[1:]])


def forget(table: Any, kept: int) -> None:
    """Remove our tags but the last `kept`."""
    old = own_tags(table)[:-kept]
    if old:
        manage = table.manageSnapshots()
        for name in old:
            manage.removeTag(name)
        manage.commit()


def set_property(table: Any, name: str, value: str) -> None:
    """Set one property."""
    update = table.updateProperties()
    update.set(name, value)
    update.commit()


def begin_branch(table: Any, name: str) -> None:
    """A branch at the table's last snapshot, in place of what is there under its name."""
    manage, snapshot = table.manageSnapshots(), snapshot_id(table)
    if name in _names(table.refs()):
        manage.replaceBranch(name, snapshot)
    else:
        manage.createBranch(name, snapshot)
    manage.commit()


def adopt_branch(table: Any, name: str) -> None:
    """Let the table be what the branch is, in one commit; refused where the table was changed."""
    table.refresh()
    transaction = table.newTransaction()
    transaction.manageSnapshots().fastForwardBranch("main", name).commit()
    transaction.manageSnapshots().removeBranch(name).commit()
    transaction.commitTransaction()


def expire(table: Any, *, keep: int, older_than_ms: int) -> None:
    """Remove snapshots, and the files that only they name: all but tagged ones and the last."""
    work = table.expireSnapshots()
    work.retainLast(keep)
    work.expireOlderThan(older_than_ms)
    work.commit()


def column_type(spark: SparkSession, kind: str) -> Any:
    """Iceberg's type of a Spark type's simple string."""
    session = spark._jsparkSession
    java_type = _java(session, "org.apache.spark.sql.types.DataType").fromDDL(kind)
    return _java(session, "org.apache.iceberg.spark.SparkSchemaUtil").convert(java_type)


@contextlib.contextmanager
def viewed(rows: DataFrame, identifier: str) -> Iterator[str]:
    """The quoted name under which SQL finds the rows that are to be merged into a table."""
    view = f"merged_into_{abs(hash(identifier))}"
    rows.createOrReplaceTempView(view)
    try:
        yield quoted(view)
    finally:
        rows.sparkSession.catalog.dropTempView(view)


def completed(identifier: str, rows: DataFrame) -> DataFrame:
    """`rows` with NULL in the columns that only the table has."""
    fields, given = rows.sparkSession.table(identifier).schema.fields, set(rows.columns)
    return rows.selectExpr(
        *(
            quoted(field.name) if field.name in given else null(field.name, field.dataType)
            for field in fields
        )
    )


def _java(known: Any, name: str) -> Any:
    """A class of Java by its whole name, where the object `known` is. As `jvm.org.apache…` each
    part of the name would be looked for as a class first, in all jars."""
    return JavaClass(name, known._gateway_client)


def _texts(values: Any) -> dict[str, str]:
    """A Java map of texts, in a few calls instead of some for each entry."""
    mapper = _java(values, "com.fasterxml.jackson.databind.ObjectMapper")()
    found: dict[str, str] = json.loads(mapper.writeValueAsString(values))
    return found


def _names(values: Any) -> list[str]:
    """The keys of a Java map, likewise."""
    joined = _java(values, "java.lang.String").join("\n", values.keySet())
    return str(joined).split("\n") if joined else []
