"""Passes the streaming query's reports of its micro-batches to the metrics."""

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from spark_consumers.epochs.metrics import Metrics


class BatchListener(StreamingQueryListener):
    """Listens to the query of one name; Spark calls it from a thread of its own."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        self._name = name
        self._metrics = metrics

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Ignore the start: nothing is measured yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Count a finished micro-batch of this listener's query in the metrics.

        Spark calls this.
        """
        found = event.progress
        if found.name == self._name:
            behind = max(
                (float(s.metrics.get("maxOffsetsBehindLatest", 0)) for s in found.sources),
                default=0.0,
            )
            self._metrics.batch(found.durationMs, found.numInputRows, behind)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Record that nothing waits, if the lag is not known yet. Spark calls this."""
        self._metrics.idle()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Ignore the end: the caller who started the query knows of it."""
