"""Audits beside the epochs of `run`, one after the other, each interval."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import structlog
from pyspark.sql import SparkSession

from schemas.errors import SlotbridgeError
from schemas.lsn import format_lsn
from schemas.settings import Settings, require
from spark_consumers.audit.audit import Audit
from spark_consumers.audit.report import TableAudit
from spark_consumers.audit.source_snapshot import OPERATION
from spark_consumers.epochs.spark_work import BESIDE
from spark_consumers.failures import failure_of

log = structlog.get_logger()
_END_S = 30.0


@contextlib.contextmanager
def scheduled(spark: SparkSession, settings: Settings) -> Iterator[None]:
    """Audit every tables.audit_interval_ms until the block ends; with 0 do nothing.

    An audit that fails is logged, and the next one follows after the interval.
    """
    tables = require(settings.tables, "tables")
    if not tables.audit_interval_ms:
        yield
        return
    stop = threading.Event()
    audit = Audit(spark, settings, stop=stop)

    def work() -> None:
        spark.sparkContext.setJobGroup(BESIDE, "an audit beside the epochs")
        for found in repeated(audit.run, tables.audit_interval_ms / 1000, stop):
            log_findings(found)

    thread = threading.Thread(target=work, name="audit", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_END_S)


def repeated(
    audit: Callable[[], list[TableAudit]], interval_s: float, stop: threading.Event
) -> Iterator[list[TableAudit] | SlotbridgeError]:
    """Yield what each audit found, or how it failed; one begins each interval, at the soonest.

    Whatever an audit fails with, the next one follows.
    """
    while not stop.is_set():
        began = time.monotonic()
        found: list[TableAudit] | SlotbridgeError
        try:
            found = audit()
        except Exception as error:
            found = failure_of(error, OPERATION)
        yield found
        stop.wait(max(0.0, began + interval_s - time.monotonic()))


def log_findings(result: list[TableAudit] | SlotbridgeError) -> None:
    """Log the result of an audit: no keys, and no values."""
    if isinstance(result, SlotbridgeError):
        log.warning("the audit failed", error=str(result), exit_code=int(result.exit_code))
        return
    for one in result:
        if one.differences:
            log.error(
                "a table differs from its source",
                table=one.table,
                lsn=format_lsn(one.lsn),
                missing=one.missing,
                extra=one.extra,
                different=one.different,
                hint="slottables audit names the keys; slottables rebuild repairs the table",
            )
        elif one.reason and not one.by_design:
            log.warning("a table was not judged", table=one.table, reason=one.reason)
    equal = sum(one.verdict == "equal" for one in result)
    log.info("audited", tables=len(result), equal=equal)
