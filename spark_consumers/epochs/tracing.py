"""A span for each epoch; imported only while tracing is on."""

import time

from opentelemetry.trace import SpanKind

from schemas.lsn import format_lsn
from schemas.tracing import trace_id
from services.runtime.otlp import Spans
from spark_consumers.epochs.report import EpochReport


def trace_epoch(spans: Spans, prefix: str, namespace: str, report: EpochReport) -> None:
    """Export the span of an epoch that is done, linked to the spans of its Kafka transactions.

    Its trace is the same if the epoch is brought again after a kill.
    """
    seconds_us = int(report.seconds * 1e6)
    span = spans.start(
        "slottables epoch",
        SpanKind.CONSUMER,
        trace_id("epoch", prefix, namespace, report.commit_lsn),
        time.time_ns() // 1000 - seconds_us,
        report.traces,
    )
    found = report.document()
    span.set_attributes(
        {
            "messaging.system": "kafka",
            "slotbridge.namespace": namespace,
            "slotbridge.epoch": report.epoch,
            "slotbridge.last_commit_lsn": format_lsn(report.commit_lsn),
            "slotbridge.transactions": report.transactions,
            "slotbridge.rows": int(str(found["rows"])),
            "slotbridge.events": int(str(found["events"])),
            "slotbridge.tables": len(report.tables),
        }
    )
    span.end()
