"""The streaming job: one query that brings every batch into the tables, until it is stopped."""

import threading
import time
from collections.abc import Callable

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from schemas.naming import Naming
from schemas.settings import KafkaSettings, Settings, TablesSettings, require
from spark_consumers.batches import Applier, BatchReport
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.source import stream
from spark_consumers.tables import namespace

log = structlog.get_logger()
_POLL_S = 0.2
_STOP_DEADLINE_S = 120.0
_COMMIT_DEADLINE_S = 5.0
_IDLE_STATUS = "Waiting for"
"""How the message of a query's status begins when a trigger found nothing new."""


def run(
    spark: SparkSession,
    settings: Settings,
    *,
    report: Callable[[BatchReport], None],
    stop: threading.Event,
    until_idle_s: float | None = None,
) -> None:
    """Apply batches until `stop` is set, or until nothing has come for `until_idle_s` seconds.

    The running batch is finished first. Raises what failed as a SlotbridgeError.
    """
    kafka, tables = require(settings.kafka, "kafka"), require(settings.tables, "tables")
    naming = Naming(kafka.topic_prefix, settings.shaping)
    job = _Job(Applier(kafka, naming, tables), report)
    log.info("consuming", topics=kafka.topic_prefix, checkpoint=str(checkpoint(kafka, tables)))
    try:
        query = (
            stream(spark, kafka, naming, tables)
            .writeStream.foreachBatch(job.apply)
            .option("checkpointLocation", str(checkpoint(kafka, tables)))
            .trigger(processingTime=f"{tables.trigger_interval_ms} milliseconds")
            .start()
        )
        job.watch(query, stop, until_idle_s)
    except FOREIGN as error:
        raise translated(job.failure or error, "consume events") from error
    log.info("stopped")


def checkpoint(kafka: KafkaSettings, tables: TablesSettings) -> str:
    """Where the query's offsets are kept: as configured, else in the warehouse by namespace."""
    place = tables.checkpoint or tables.warehouse / "_checkpoints" / namespace(kafka, tables)
    return str(place.resolve())


class _Stopping(Exception):
    """Ends the query between two batches; returning instead would count the batch as done."""


class _Job:
    """What the query's thread and the main thread share."""

    def __init__(self, applier: Applier, report: Callable[[BatchReport], None]) -> None:
        self._applier = applier
        self._report = report
        self._stopping = False
        self._applying = False
        self._active_at = time.monotonic()
        self.failure: Exception | None = None

    def apply(self, records: DataFrame, batch: int) -> None:
        """Apply one batch: called by Spark, in a thread of its own."""
        if self._stopping:
            raise _Stopping
        self._applying = True
        try:
            done = self._applier.apply(records, batch)
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._active_at = time.monotonic()
            self._applying = False
        if done is not None:
            self._report(done)

    def watch(
        self, query: StreamingQuery, stop: threading.Event, until_idle_s: float | None
    ) -> None:
        """Return when `stop` is set or the query was idle long enough; the query has then ended."""
        idle_since: float | None = None
        while query.isActive:
            if stop.wait(_POLL_S):
                break
            if self._waiting(query):
                idle_since = max(idle_since or time.monotonic(), self._active_at)
                if until_idle_s is not None and time.monotonic() - idle_since >= until_idle_s:
                    break
            elif self._applying:
                idle_since = None
        self._end(query)

    def _waiting(self, query: StreamingQuery) -> bool:
        if self._applying:
            return False
        status = query.status
        return not status["isTriggerActive"] and status["message"].startswith(_IDLE_STATUS)

    def _end(self, query: StreamingQuery) -> None:
        """Let the running batch finish, then stop; raises the query's own failure."""
        self._stopping = True
        deadline = time.monotonic() + _STOP_DEADLINE_S
        while self._applying and query.isActive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # Now Spark notes the batch in its checkpoint; were it cut off, the batch would come again.
        deadline = time.monotonic() + _COMMIT_DEADLINE_S
        while query.isActive and not self._waiting(query) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        failure = self.failure or query.exception()
        query.stop()
        if self.failure is not None:
            raise translated(self.failure, "apply a batch") from self.failure
        if failure is not None and _Stopping.__name__ not in str(failure):
            raise translated(failure, "consume events") from failure
