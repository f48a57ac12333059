"""GroupCommit with a span for each Kafka transaction; imported only while tracing is on.

A span begins when the first source transaction in it was committed in PostgreSQL, and ends when
Kafka has committed. What Kafka aborts is never exported, and begins again in the same trace. Each
END event has the span in its header `traceparent`. Events of rows have none: they are many.
"""

import time
from typing import Any

from opentelemetry.trace import Span, SpanKind

from schemas.events import transaction_topic
from schemas.lsn import format_lsn
from schemas.tracing import TRACEPARENT, trace_id
from services.bridge.sink.group_commit import Commit, GroupCommit
from services.bridge.transactions.assembler import EventBatch
from services.runtime.otlp import Spans, traceparent


class TracedGroupCommit(GroupCommit):
    """Groups batches as GroupCommit does, and tells `spans` of each Kafka transaction."""

    def __init__(self, spans: Spans, prefix: str, *grouping: Any, **more: Any) -> None:
        """Take what GroupCommit is made of as `grouping` and `more`."""
        super().__init__(*grouping, **more)
        self._spans = spans
        self._end_topic = transaction_topic(prefix)
        self._span: Span | None = None
        self._header = ""
        self._last_lsn = 0

    def _send(self, batch: EventBatch) -> None:
        """Send a batch; the first with events begins the span that all carry as a header."""
        stamp = batch.ended[0].stamp if batch.ended else batch.stamp
        if self._span is None and batch.events and stamp is not None:
            self._span = self._spans.start(
                "slotbridge transaction",
                SpanKind.PRODUCER,
                trace_id(self._resumed.server.system_identifier, stamp.commit_lsn),
                min(stamp.commit_time_us, time.time_ns() // 1000),
            )
            self._span.set_attribute("slotbridge.first_commit_lsn", format_lsn(stamp.commit_lsn))
            self._header = traceparent(self._span)
        if batch.events and batch.stamp is not None:
            self._last_lsn = batch.stamp.commit_lsn
        if self._header:
            self._mark(batch)
        super()._send(batch)

    def _mark(self, batch: EventBatch) -> None:
        """Put the header into the END events of a batch."""
        if batch.position.seq:
            return
        events = batch.events
        for count in [ended.events for ended in batch.ended] or [len(events)]:
            if count and events[count - 1].topic == self._end_topic:
                end = events[count - 1]
                headers = [*(end.headers or ()), (TRACEPARENT, self._header)]
                events[count - 1] = end._replace(headers=headers)

    def _begin_commit(self) -> None:
        if self._span is not None:
            self._span.add_event("Kafka commit begins")
        super()._begin_commit()

    def _end_commit(self, commit: Commit) -> None:
        if self._span is not None and commit.done.exception() is None:
            self._finish(self._span)
            self._span, self._header = None, ""
        super()._end_commit(commit)

    def _finish(self, span: Span) -> None:
        """End the span of a Kafka transaction, with the slot, positions and counts in it."""
        record = self._resumed
        span.set_attributes(
            {
                "messaging.system": "kafka",
                "messaging.destination.name": self._end_topic,
                "slotbridge.slot": record.slot,
                "slotbridge.system_identifier": record.server.system_identifier,
                "slotbridge.last_commit_lsn": format_lsn(self._last_lsn),
                "slotbridge.transactions": self._transactions,
                "slotbridge.rows": sum(rows for rows, _ in self._rows.values()),
                "slotbridge.events": self._events,
                "slotbridge.bytes": self._bytes,
            }
        )
        span.end()
