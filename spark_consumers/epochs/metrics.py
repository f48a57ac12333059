"""The Prometheus metrics of `slottables run`."""

import math
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route

from schemas.tables import TablesSettings
from schemas.version import version
from services.runtime.http_server import HttpServer
from services.runtime.process import metrics_route
from services.runtime.tracing import HELP as SPANS_HELP
from spark_consumers.epochs.audit_metrics import AuditMetrics
from spark_consumers.epochs.audit_result import AuditResult
from spark_consumers.epochs.health import Health
from spark_consumers.epochs.report import EpochReport, late_described
from spark_consumers.epochs.table_metrics import TableMetrics
from spark_consumers.epochs.wait_page import TablesState
from spark_consumers.liveness import under_way

if TYPE_CHECKING:
    from spark_consumers.epochs.ledger import EpochRecord, ParkedTable

log = structlog.get_logger()
_SECONDS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)

_COUNTERS = {
    "rows": "Rows written to the tables.",
    "events": "Events read from Kafka and applied to the tables.",
    "transactions": "Source transactions applied to the tables.",
    "duplicates": "Events skipped because the tables already had them.",
    "quarantined": "Events put into the quarantine instead of a table.",
    "dead_letters": "Events that Kafka refused and that the tables therefore lack.",
}
_UNDER_WAY = {
    "events": "Events that the epoch brings",
    "events_read": "Records of them that Spark has read for the epoch",
    "tables": "Tables that the epoch writes",
    "tables_written": "Tables that are written, and not yet sealed, of the epoch",
}


class Metrics:
    """The metrics of one run; the lag in seconds is computed at each scrape."""

    _waiting_since_ms: int | None = None

    def __init__(self) -> None:
        self.registry, self.health, self.state = CollectorRegistry(), Health(), TablesState()
        self._epoch = self._gauge(
            "epoch", "Number of the last committed epoch, 0 before the first. NaN: not known yet."
        )
        self._lsn = self._gauge(
            "commit_lsn",
            "Commit LSN that all tables but parked ones have reached. NaN: not known yet.",
        )
        self._bytes = self._gauge(
            "lag_bytes",
            "Bytes of WAL between the tables' commit LSN and the last transaction that was read. "
            "NaN: not known yet.",
        )
        self._show_build()
        self._gauge(
            "lag_seconds",
            "Seconds since the commit of the oldest transaction that the tables lack, parked ones "
            "apart. NaN: not known yet.",
        ).set_function(self._lag_seconds)
        self._seconds = Histogram(
            "slottables_epoch_seconds",
            "Seconds that an epoch took.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._counters = {
            name: Counter(f"slottables_{name}", text, registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self._count_ways()
        self._tables = TableMetrics(self.registry)
        self._audits = AuditMetrics(self.registry)
        self._batch_seconds = Histogram(
            "slottables_batch_seconds",
            "Seconds that a micro-batch of the streaming query took, its epochs included.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._phases = Counter(
            "slottables_batch_phase_seconds",
            "Seconds that micro-batches spent in each phase that Spark names (durationMs).",
            ["phase"],
            registry=self.registry,
        )
        self._records = Counter(
            "slottables_transaction_records",
            "Records of the transaction topic that the streaming query has read.",
            registry=self.registry,
        )
        self._behind = self._gauge(
            "offsets_behind",
            "Offsets of the transaction topic that the last micro-batch did not reach. NaN: not "
            "known yet.",
        )
        self.spans = Counter("slottables_spans", SPANS_HELP, ["outcome"], registry=self.registry)
        self.lineage_events = Counter(
            "slottables_lineage_events",
            "Events of OpenLineage, by outcome: sent, failed (the receiver did not take them), "
            "dropped (too many waited for the receiver). No series while tables.openlineage is "
            "off.",
            ["outcome"],
            registry=self.registry,
        )

    def _count_ways(self) -> None:
        """Make the counters of the ways in which epochs came into tables."""
        self._writes = Counter(
            "slottables_table_writes",
            "Writes of epochs into tables, by method: driver (without Spark); append, replace, "
            "merge; index or scan if rows were deleted by position, which the key index or a scan "
            "of the table found.",
            ["way"],
            registry=self.registry,
        )
        self._by_spark = Counter(
            "slottables_table_by_spark",
            "Writes of epochs into tables that Spark made, by the reason why the driver did not.",
            ["reason"],
            registry=self.registry,
        )

    def _show_build(self) -> None:
        """Show the build, and how far the epoch under way is."""
        build = Gauge(
            "slottables_build_info",
            "1, with the version of slottables and of Python.",
            ["version", "python"],
            registry=self.registry,
        )
        build.labels(version(), platform.python_version()).set(1)
        for name, text in _UNDER_WAY.items():
            gauge = self._gauge(f"epoch_{name}", f"{text} that is under way; 0 between epochs.")
            gauge.set_function(partial(getattr, under_way, name))

    def serve(self, tables: TablesSettings, pages: Sequence[BaseRoute] = ()) -> None:
        """Answer /metrics, /healthz, /readyz (`epochs.health` says when they pass) and `pages`.

        Raise SetupError where the address can't be bound.
        """
        if tables.http_port is None:
            return
        probes = [Route(path, self._probe) for path in ("/healthz", "/readyz")]
        routes = [metrics_route(self.registry), *probes, *pages]
        server = HttpServer(tables.http_host, tables.http_port, routes)
        server.start()
        log.info("serving /metrics, /healthz and /readyz", host=tables.http_host, port=server.port)

    async def _probe(self, request: Request) -> PlainTextResponse:
        passed, text = self.health.answer(request.url.path)
        return PlainTextResponse(text, 200 if passed else 503)

    def begun(self, record: "EpochRecord", tables: Iterable[str]) -> None:
        """Record the last epoch at the start, as `_epochs` tells it, and the tables there are."""
        self._epoch.set(record.epoch)
        self._lsn.set(max(record.commit_lsn, 0))
        # The offset is parked once the topic is known to be the one that the tables have read.
        self.state.commit_lsn, self.state.offset = record.commit_lsn, 0
        for name in tables:
            self._tables.rows.labels(name)
        self.health.known()

    def parked(self, tables: Mapping[str, "ParkedTable"], late: Mapping[str, int]) -> None:
        """Record which tables are parked, and which lack something until the next epoch.

        `late`: source table -> the commit LSN of its last epoch. Only waits name them.
        """
        parked = {name: late_described(lsn) for name, lsn in late.items()}
        self.state.parked = parked | {n: found.parked.described() for n, found in tables.items()}
        self.health.remark = self._tables.parked(tables)

    def done(self, report: EpochReport) -> None:
        """Record the report of a committed epoch."""
        document = report.document()
        for name, counter in self._counters.items():
            counter.inc(float(str(document[name])))
        for name, table in report.tables.items():
            self._tables.rows.labels(name).inc(table.rows)
            if table.way:
                self._writes.labels(table.way).inc()
            if table.why:
                self._by_spark.labels(table.why.partition(":")[0]).inc()
        self._epoch.set(report.epoch)
        self._lsn.set(report.commit_lsn)
        self.state.commit_lsn = report.commit_lsn
        self._seconds.observe(report.seconds)
        under_way.begin(0)
        self.health.got_on()

    def read_to(self, offset: int) -> None:
        """Note that the tables have all transactions before an offset of their topic."""
        self.state.offset = offset

    def batch(self, durations_ms: Mapping[str, int], records: int, behind: float) -> None:
        """Record what Spark reports of a micro-batch."""
        for phase, spent_ms in durations_ms.items():
            if phase == "triggerExecution":
                self._batch_seconds.observe(spent_ms / 1000)
            else:
                self._phases.labels(phase).inc(spent_ms / 1000)
        self._records.inc(records)
        self._behind.set(behind)
        self.health.got_on()

    def rebuilding(self, tables: Mapping[str, float]) -> None:
        """Record which tables are made anew, each with how much of its topic is read (0 to 1)."""
        self._tables.rebuilding(tables)

    def filling(self, tables: Iterable[str]) -> None:
        """Record which tables lack rows that a snapshot of the bridge has yet to bring."""
        self._tables.filling(tables)

    def reached(self, lsns: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Record how far each table is, and how long their parts of the last epoch took."""
        self._tables.reached(lsns, seconds)

    def audited(self, findings: Mapping[str, AuditResult]) -> None:
        """Record what the last audit of each source table found."""
        self._audits.show(findings)

    def waiting(self, since_ms: int, lag_bytes: int) -> None:
        """Record the lag: the oldest waiting transaction's commit time (0: none) and the bytes."""
        self._waiting_since_ms = since_ms
        self._bytes.set(lag_bytes)

    def idle(self) -> None:
        """Record that the query has looked and found nothing: no lag, if none is known yet."""
        self.health.got_on()
        if self._waiting_since_ms is None:
            self.waiting(0, 0)

    def _lag_seconds(self) -> float:
        since_ms = self._waiting_since_ms
        if since_ms is None:
            return math.nan
        return max(0.0, time.time() - since_ms / 1000) if since_ms else 0.0

    def _gauge(self, name: str, what: str) -> Gauge:
        """Return a gauge that is NaN until it is set."""
        gauge = Gauge(f"slottables_{name}", what, registry=self.registry)
        gauge.set(math.nan)
        return gauge
