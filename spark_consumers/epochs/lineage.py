"""Lineage of the tables, by OpenLineage; imported only with `tables.openlineage`.

Each table is a job, and each of its epochs a run of it: from the table's topic to its Iceberg
table. A thread of its own sends the events. A receiver that is slow or down loses events; it never
delays an epoch, and `close` waits for it no longer than CLOSE_S.
"""

import contextlib
import datetime as dt
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import structlog
from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics
from prometheus_client import Counter

from schemas.errors import SettingsError
from schemas.naming import Naming, schema_and_table
from schemas.settings import KafkaSettings
from schemas.shaping import ShapingSettings
from schemas.version import version
from spark_consumers.epochs.report import EpochReport, TableReport

CLOSE_S: Final = 2.0
EVENTS_WAITING_MAX: Final = 2048
_PRODUCER: Final = f"slottables/{version()}"
_RUNS: Final = uuid.UUID("0b0f5f0a-6c3e-5d0e-9d3c-3f6b1c5f8a11")
"""Namespace of the runs' ids, as UUID version 5 asks for one."""
_NAMESPACE: Final = "OPENLINEAGE_NAMESPACE"
"""Variable by which other producers of OpenLineage also choose the namespace of their jobs."""
log = structlog.get_logger()


class Lineage:
    """Tells OpenLineage of epochs. For one thread."""

    def __init__(
        self,
        kafka: KafkaSettings,
        shaping: ShapingSettings,
        space: str,
        locate: Callable[[str, str], str],
        outcomes: Counter,
    ) -> None:
        """`space`: namespace of the Iceberg tables. `locate(schema, table)`: where its files are.

        `outcomes` counts the events, by its label `outcome`. Raise SettingsError where no receiver
        is configured.
        """
        self._client = _client()
        self._cluster = f"kafka://{kafka.bootstrap_servers.split(',')[0].strip()}"
        self._naming = Naming(kafka.topic_prefix, shaping)
        self._space = space
        self._locate = locate
        self._outcomes = outcomes
        self._outputs: dict[str, tuple[str, str]] = {}
        self._waiting: queue.Queue[RunEvent | None] = queue.Queue(EVENTS_WAITING_MAX)
        self._reached = True
        self._thread = threading.Thread(target=self._send, name="openlineage", daemon=True)
        self._thread.start()

    def report(self, report: EpochReport) -> None:
        """Have START and COMPLETE sent of each table's part in an epoch; FAIL of a refused one."""
        for name, table in sorted(report.tables.items()):
            self._queue(self._events(name, table, report))
        for name in sorted(report.refused):
            nothing = TableReport(0, 0, 0, 0)
            self._queue(self._events(name, nothing, report, RunState.FAIL))

    def _queue(self, events: Iterator[RunEvent]) -> None:
        for event in events:
            try:
                self._waiting.put_nowait(event)
            except queue.Full:
                self._outcomes.labels("dropped").inc()

    def close(self) -> None:
        """Send what waits, if the receiver takes it soon."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _events(
        self,
        name: str,
        table: TableReport,
        report: EpochReport,
        end: RunState = RunState.COMPLETE,
    ) -> Iterator[RunEvent]:
        """Yield both events of a table's run, which is the same one if the epoch is repeated."""
        now = dt.datetime.now(dt.UTC)
        job = Job(os.environ.get(_NAMESPACE, "slotbridge"), f"slottables.{self._space}.{name}")
        run = Run(str(uuid.uuid5(_RUNS, f"{job.namespace} {job.name} {report.commit_lsn}")))
        schema, source = schema_and_table(name)
        topic = InputDataset(self._cluster, self._naming.table(schema, source).name)
        if name not in self._outputs:
            self._outputs[name] = dataset(self._locate(schema, source))
        written = statistics.OutputStatisticsOutputDatasetFacet(rowCount=table.rows)
        output = OutputDataset(*self._outputs[name], outputFacets={"outputStatistics": written})
        began = now - dt.timedelta(seconds=report.seconds)
        for at, state in ((began, RunState.START), (now, end)):
            yield RunEvent(
                eventTime=at.isoformat(),
                eventType=state,
                run=run,
                job=job,
                inputs=[topic],
                outputs=[output],
                producer=_PRODUCER,
            )

    def _send(self) -> None:
        """Send event after event, until `close`; log when the receiver goes and comes."""
        while (event := self._waiting.get()) is not None:
            failure: Any = None
            try:
                self._client.emit(event)
            except Exception as error:  # each transport has its own
                failure = error
            self._outcomes.labels("failed" if failure else "sent").inc()
            if self._reached != (failure is None):
                self._reached = failure is None
                if failure:
                    log.warning("OpenLineage's receiver takes no events", error=str(failure))
                else:
                    log.info("OpenLineage's receiver takes events again")


def dataset(location: str) -> tuple[str, str]:
    """Return namespace and name of a table's folder, as OpenLineage names files."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return "file", location.removeprefix("file:")
    authority, _, path = rest.partition("/")
    return f"{scheme}://{authority}", path


def _client() -> OpenLineageClient:
    """Return a client by the standard variables; raise SettingsError where these name nothing."""
    try:
        client = OpenLineageClient()
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        raise SettingsError(
            f"a variable OPENLINEAGE_* has a value that does not go: {error}",
            operation="begin lineage",
        ) from error
    if client.transport.kind == "console":
        raise SettingsError(
            "tables.openlineage is on, and nothing says where its events go",
            operation="begin lineage",
            hint="set OPENLINEAGE_URL (docs/guides/tracing.md), or tables.openlineage to false",
        )
    return client
