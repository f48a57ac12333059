"""The requests and results of audits: properties of an Iceberg table without rows.

    slotbridge.audit.cut.<audit>      a position: an epoch is to end before what commits there
    slotbridge.audit.found.<table>    what the last audit of a source table found, as JSON

`run` reads both, so that an audit may be another program. An audit that is killed leaves a request
behind that lies in the past soon, and that later audits remove.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, fields, replace
from typing import Any

import structlog
import tenacity
from pyspark.sql import SparkSession

from spark_consumers.epochs.audit_result import AuditResult
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.layout import FEW_METADATA_FILES
from spark_consumers.sql import pairs

log = structlog.get_logger()
NAME = "_audits"
_CUT = "slotbridge.audit.cut."
_FOUND = "slotbridge.audit.found."
_FIELDS = tuple(field.name for field in fields(AuditResult))
_AGAIN = tenacity.retry(
    retry=tenacity.retry_if_exception_type(FOREIGN),
    wait=tenacity.wait_random(0.1, 0.5),
    stop=tenacity.stop_after_attempt(5),
    reraise=True,
)
"""Two audits may commit at the same moment."""


class AuditLog:
    """Reads and writes the requests and results of audits of one namespace."""

    def __init__(self, namespace: str) -> None:
        self.identifier = catalog.identifier(namespace, NAME)

    def first_cut(self, spark: SparkSession, after_lsn: int) -> int | None:
        """Return the first position after `after_lsn` where an audit wants an epoch to end.

        Return None also where the requests can't be read: the epochs go on without audits.
        """
        try:
            wanted = [lsn for lsn in self._cuts(spark).values() if lsn > after_lsn]
        except FOREIGN as error:
            failure = translated(error, "read the requests of audits")
            log.warning("an epoch is not cut for an audit", error=str(failure))
            return None
        return min(wanted, default=None)

    @_AGAIN
    def ask(self, spark: SparkSession, audit: str, lsn: int, *, past_lsn: int) -> None:
        """Let `run` end an epoch before what commits at `lsn`; forget requests up to `past_lsn`."""
        self._make(spark)
        update = catalog.load(spark, self.identifier).updateProperties()
        for name, asked in self._cuts(spark).items():
            if asked <= past_lsn:
                update.remove(_CUT + name)
        update.set(_CUT + audit, str(lsn)).commit()

    @_AGAIN
    def forget(self, spark: SparkSession, audit: str) -> None:
        """Take back the request of an audit."""
        if audit in self._cuts(spark):
            update = catalog.load(spark, self.identifier).updateProperties()
            update.remove(_CUT + audit).commit()

    @_AGAIN
    def record(self, spark: SparkSession, found: dict[str, AuditResult]) -> None:
        """Record what an audit found, by source table."""
        self._make(spark)
        before = self.findings(spark)
        update = catalog.load(spark, self.identifier).updateProperties()
        for table, one in found.items():
            last = before.get(table)
            one = replace(one, first_ts_ms=last.first_ts_ms if last else one.ts_ms)
            if one.equal:
                one = replace(one, verified_lsn=one.lsn, verified_ts_ms=one.ts_ms)
            elif last is not None:
                one = replace(
                    one, verified_lsn=last.verified_lsn, verified_ts_ms=last.verified_ts_ms
                )
            update.set(_FOUND + table, json.dumps(asdict(one)))
        update.commit()

    @_AGAIN
    def retain(self, spark: SparkSession, tables: Collection[str]) -> None:
        """Remove the results of all other source tables."""
        others = self.findings(spark).keys() - set(tables)
        if others:
            update = catalog.load(spark, self.identifier).updateProperties()
            for table in others:
                update.remove(_FOUND + table)
            update.commit()

    def findings(self, spark: SparkSession) -> dict[str, AuditResult]:
        """Return what the last audit of each source table found.

        Fields of a newer release are ignored: `run` and an audit may be of two releases.
        """
        found = {name: json.loads(value) for name, value in self._under(spark, _FOUND)}
        return {
            name: AuditResult(**{field: one[field] for field in _FIELDS if field in one})
            for name, one in found.items()
        }

    def _cuts(self, spark: SparkSession) -> dict[str, int]:
        return {name: int(value) for name, value in self._under(spark, _CUT)}

    def _under(self, spark: SparkSession, prefix: str) -> Iterable[tuple[str, str]]:
        if not spark.catalog.tableExists(self.identifier):
            return ()
        table: Any = catalog.load(spark, self.identifier)
        found = catalog.properties(table).items()
        return [(n.removeprefix(prefix), value) for n, value in found if n.startswith(prefix)]

    def _make(self, spark: SparkSession) -> None:
        spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self.identifier} (note string) USING iceberg"
            f" TBLPROPERTIES ({pairs(FEW_METADATA_FILES)})"
        )
