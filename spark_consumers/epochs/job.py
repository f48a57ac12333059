"""Runs epoch after epoch until it is stopped: a streaming query, started anew where it must be."""

import contextlib
import threading
from collections.abc import Callable

import structlog
from pyspark.sql import SparkSession
from starlette.routing import Route

from schemas.errors import ExitCode, Retryable, SettingsError
from schemas.lsn import format_lsn
from schemas.settings import Settings, ValueSettings, require
from services.runtime.tracing import open_spans
from services.runtime.wait_page import PATH as WAIT_PATH
from spark_consumers.epochs.epoch_runner import EpochRunner
from spark_consumers.epochs.ledger import ParkedTable
from spark_consumers.epochs.metrics import Metrics
from spark_consumers.epochs.parking import require_none_parked
from spark_consumers.epochs.report import EpochReport
from spark_consumers.epochs.spark_work import watched
from spark_consumers.epochs.stream import Stream, show_behind
from spark_consumers.epochs.wait_page import KafkaLook, wait_page
from spark_consumers.failures import FOREIGN, ExecutorsLostError, translated
from spark_consumers.iceberg import catalog, sums
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.snapshots import SnapshotTail

log = structlog.get_logger()
_LOSS_PAUSE_S = 0.1
_LOSSES_MAX = 5
"""So often an epoch begins again, one time after the other, before it is an error."""
_LOSS_PAUSE_MAX_S = 10.0


def run_epochs(
    spark: SparkSession,
    settings: Settings,
    *,
    report: Callable[[EpochReport], None],
    stop: threading.Event,
    until_idle_s: float | None = None,
    once: bool = False,
) -> None:
    """Run epochs until `stop` is set; finish the epoch under way first.

    `until_idle_s`: end also when nothing has come for that many seconds. `once`: end when the
    tables have all that Kafka has at the start. Raise a failure as a SlotbridgeError, and
    OperatorNeeded if it ends by itself while tables are parked.
    """
    require_readable(settings)
    metrics, tables = Metrics(), require(settings.tables, "tables")
    slot = None if settings.source is None else settings.source.slot
    wait = wait_page(metrics.state, KafkaLook(require(settings.kafka, "kafka"), slot))
    metrics.serve(tables, [Route(WAIT_PATH, wait.answer)])
    if tables.progress_deadline_ms:
        deadline_ms = tables.progress_deadline_ms + tables.trigger_interval_ms
        metrics.health.expect(deadline_ms / 1000)
    stack = contextlib.ExitStack()
    report = _traced(report, settings, metrics, stack)
    report = _with_lineage(report, spark, settings, metrics, stack)
    losses = 0

    def done(found: EpochReport) -> None:
        nonlocal losses
        losses = 0
        metrics.done(found)
        report(found)

    with stack:
        stack.callback(metrics.health.failed, "`slottables run` has ended")
        stack.enter_context(watched(spark, metrics.health))
        while True:
            try:
                parked = _follow(spark, settings, metrics, done, stop, until_idle_s, once=once)
            except (*FOREIGN, Retryable) as error:
                failure = translated(error, "apply an epoch")
                # Somebody else has changed a table, as maintenance does: what it has is read again.
                again = failure.exit_code == ExitCode.LOCKED
                again |= isinstance(failure, ExecutorsLostError)
                if not again or losses >= _LOSSES_MAX:
                    if failure is error:
                        raise
                    raise failure from error
                losses += 1
                metrics.health.failed(str(failure))
                log.warning("restarting an epoch", error=str(failure), times=losses)
                stop.wait(min(_LOSS_PAUSE_S * 2**losses, _LOSS_PAUSE_MAX_S))
            else:
                log.info("stopped")
                if not stop.is_set():
                    require_none_parked(parked)
                return


def _traced(
    report: Callable[[EpochReport], None],
    settings: Settings,
    metrics: Metrics,
    stack: contextlib.ExitStack,
) -> Callable[[EpochReport], None]:
    """Return `report`; where tracing is on, one that first makes a span of the epoch."""
    spans = open_spans(settings.tracing, "slottables", metrics.spans)
    if spans is None:
        return report
    from spark_consumers.epochs.tracing import trace_epoch  # only with tracing

    stack.callback(spans.close)
    kafka = require(settings.kafka, "kafka")
    namespace = catalog.namespace(kafka, require(settings.tables, "tables"))

    def traced(found: EpochReport) -> None:
        trace_epoch(spans, kafka.topic_prefix, namespace, found)
        report(found)

    return traced


def _with_lineage(
    report: Callable[[EpochReport], None],
    spark: SparkSession,
    settings: Settings,
    metrics: Metrics,
    stack: contextlib.ExitStack,
) -> Callable[[EpochReport], None]:
    """Return `report`; with `tables.openlineage`, one that first tells OpenLineage of the epoch.

    Raise SettingsError where that is on and can't be had.
    """
    kafka, tables = require(settings.kafka, "kafka"), require(settings.tables, "tables")
    if not tables.openlineage:
        return report
    try:
        from spark_consumers.epochs.lineage import Lineage
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"tables.openlineage needs the Python package {error.name}",
            operation="begin lineage",
            hint="install slotbridge[openlineage], or set tables.openlineage to false",
        ) from error
    space = catalog.namespace(kafka, tables)

    def locate(schema: str, table: str) -> str:
        name = catalog.identifier(space, catalog.table_name(schema, table))
        return str(catalog.load(spark, name).location())

    lineage = Lineage(kafka, settings.shaping, space, locate, metrics.lineage_events)
    stack.callback(lineage.close)

    def with_lineage(found: EpochReport) -> None:
        try:
            lineage.report(found)
        except FOREIGN as error:  # the catalog did not say where a table's files are
            failure = translated(error, "report lineage")
            log.warning("an epoch was not reported to OpenLineage", error=str(failure))
        report(found)

    return with_lineage


def _follow(
    spark: SparkSession,
    settings: Settings,
    metrics: Metrics,
    report: Callable[[EpochReport], None],
    stop: threading.Event,
    until_idle_s: float | None,
    *,
    once: bool,
) -> dict[str, ParkedTable]:
    """Run epochs until there is a reason to stop; return the tables that are parked then."""
    runner = EpochRunner(spark, settings)
    show_behind(metrics, runner)
    metrics.begun(runner.record, [name for name in runner.states if not sums.is_sums(name)])
    lsn = runner.record.commit_lsn
    log.info(
        "consuming",
        last_epoch=runner.record.epoch,
        commit_lsn=format_lsn(max(0, lsn)),
        shuffle_partitions=spark.conf.get("spark.sql.shuffle.partitions"),
        adaptive=spark.conf.get("spark.sql.adaptive.enabled"),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(runner.close)
        tables, kafka = require(settings.tables, "tables"), require(settings.kafka, "kafka")
        snapshots = None
        if settings.source is not None:
            snapshots = SnapshotTail(kafka, TopicOffsets(kafka), settings.source.slot)
            stack.callback(snapshots.close)
        stream = Stream(spark, tables, runner, metrics, report, stop, snapshots)
        stream.run(until_idle_s=until_idle_s, once=once)
        return runner.parking.tables


def require_readable(settings: Settings) -> None:
    """Raise SettingsError if the bridge of this file writes what slottables can't read."""
    if not settings.bridge.transaction_metadata:
        raise SettingsError(
            "slottables needs <prefix>.transaction, which the bridge does not write",
            operation="read settings",
            hint="set bridge.transaction_metadata to true",
        )
    for name, field in ValueSettings.model_fields.items():
        if getattr(settings.bridge, name) != field.default:
            raise SettingsError(
                f"bridge.{name} is {getattr(settings.bridge, name)}, a form that slottables does "
                "not read",
                operation="read settings",
                hint=f"leave bridge.{name} at {field.default}, or publish for the tables by a "
                "bridge of its own",
            )
