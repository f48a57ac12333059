"""The record of epochs: an Iceberg table without rows whose snapshots tell what each epoch is.

    _epochs' snapshot summary   slotbridge.epoch, .commit_lsn, .commit_ts_ms, .tag
                                slotbridge.tables    {source: {table, snapshot}}
                                slotbridge.offsets   {topic: {partition: offset}}
                                slotbridge.transaction_offset

An epoch is done, and there for readers, when its snapshot is: one commit, after all tables'.
It is also all that a start needs; without it, the tables themselves tell what they have.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from schemas.lsn import format_lsn
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.tables import NEVER
from spark_consumers.kafka.reader import Offsets

NAME = "_epochs"
_EXPIRED_EVERY = 64


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """An epoch that is done: all tables have everything up to `commit_lsn`, and nothing after it.

    `offsets` are where the next events are; `transaction_offset` where the next transaction is,
    None: at the beginning. `tables`: source table -> (Iceberg table, snapshot).
    """

    epoch: int
    commit_lsn: int
    commit_ts_ms: int
    offsets: Offsets
    transaction_offset: int | None
    tables: dict[str, tuple[str, int | None]]


class Ledger:
    """Reads and writes the record of epochs of one namespace."""

    def __init__(self, namespace: str, kept: int) -> None:
        self.identifier = catalog.identifier(namespace, NAME)
        self._kept = kept

    def last(self, spark: SparkSession) -> EpochRecord | None:
        """The last epoch, None before the first."""
        if not spark.catalog.tableExists(self.identifier):
            return None
        return _record(catalog.summary(catalog.load(spark, self.identifier)))

    def all(self, spark: SparkSession) -> list[EpochRecord]:
        """The epochs that are kept, the oldest first."""
        if not spark.catalog.tableExists(self.identifier):
            return []
        snapshots = catalog.load(spark, self.identifier).snapshots()
        found = (_record(dict(snapshot.summary())) for snapshot in snapshots)
        return sorted((r for r in found if r is not None), key=lambda r: r.epoch)

    def write(self, spark: SparkSession, record: EpochRecord) -> None:
        """Make an epoch known; a crash before this leaves it undone."""
        if not spark.catalog.tableExists(self.identifier):
            spark.sql(
                f"CREATE TABLE {self.identifier} (note string) USING iceberg TBLPROPERTIES ("
                "'write.metadata.delete-after-commit.enabled' = 'true',"
                " 'write.metadata.previous-versions-max' = '5')"
            )
        table = catalog.load(spark, self.identifier)
        append = table.newFastAppend()
        for name, value in _values(record).items():
            append.set(f"slotbridge.{name}", value)
        append.commit()
        if record.epoch % _EXPIRED_EVERY == 0:
            table.refresh()
            catalog.expire(table, keep=self._kept, older_than_ms=int(time.time() * 1000))


def _values(record: EpochRecord) -> dict[str, str]:
    tables = {
        source: {"table": name.replace("`", ""), "snapshot": snapshot}
        for source, (name, snapshot) in sorted(record.tables.items())
    }
    return {
        "epoch": str(record.epoch),
        "commit_lsn": str(record.commit_lsn),
        "lsn": format_lsn(record.commit_lsn),
        "commit_ts_ms": str(record.commit_ts_ms),
        "tag": catalog.tag_name(record.commit_lsn),
        "tables": json.dumps(tables),
        "offsets": json.dumps(record.offsets),
        "transaction_offset": json.dumps(record.transaction_offset),
    }


def _record(summary: dict[str, str]) -> EpochRecord | None:
    if catalog.EPOCH not in summary:
        return None
    given: dict[str, Any] = {
        name: json.loads(summary[f"slotbridge.{name}"])
        for name in ("offsets", "tables", "transaction_offset", "commit_ts_ms")
    }
    return EpochRecord(
        int(summary[catalog.EPOCH]),
        int(summary.get(catalog.COMMIT_LSN, NEVER)),
        given["commit_ts_ms"],
        {topic: {int(p): o for p, o in parts.items()} for topic, parts in given["offsets"].items()},
        given["transaction_offset"],
        {name: (place["table"], place["snapshot"]) for name, place in given["tables"].items()},
    )
