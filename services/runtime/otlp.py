"""Spans by the OpenTelemetry SDK, to a collector that may be slow or down without any harm.

The SDK's own thread exports. At most OTEL_BSP_MAX_QUEUE_SIZE spans wait for it; one that finds no
room is dropped and counted. Nobody waits for a collector, but `close` for CLOSE_S.
"""

import logging
import os
import threading
from collections.abc import Sequence
from typing import Final

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, Span, SpanKind, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter

from schemas.tracing import TRACEPARENT
from schemas.version import version

CLOSE_S: Final = 2.0
"""How long `close` waits for the collector to take what it does not have yet."""
QUEUE_SPANS: Final = 2048
"""How many spans wait for the exporter at most; OpenTelemetry's default."""
_LIBRARY: Final = logging.getLogger("opentelemetry")
_CONTEXT: Final = TraceContextTextMapPropagator()
logger = structlog.get_logger(__name__)


class Spans:
    """Makes a service's spans, each in a given trace. For one thread."""

    def __init__(self, service: str, outcomes: Counter) -> None:
        """`outcomes` counts the spans, by its label `outcome`."""
        resource = Resource.create({SERVICE_VERSION: version()})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        self._ids = _TraceIds()
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(_Bounded(_Watched(OTLPSpanExporter(), outcomes)))
        self._tracer = self._provider.get_tracer("slotbridge", version())

    def start(
        self, name: str, kind: SpanKind, trace: int, start_us: int, links: Sequence[str] = ()
    ) -> Span:
        """Begin a span; nothing of it is exported before its `end`.

        `start_us`: when it began (since 1970). `links`: headers `traceparent`, of what led to it.
        """
        self._ids.next = trace
        contexts = [
            get_current_span(_CONTEXT.extract({TRACEPARENT: link})).get_span_context()
            for link in links
        ]
        return self._tracer.start_span(
            name,
            kind=kind,
            links=[Link(context) for context in contexts if context.is_valid],
            start_time=start_us * 1000,
        )

    def close(self) -> None:
        """Export waiting spans, if the collector takes them soon."""
        closing = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def traceparent(span: Span) -> str:
    """Return the `traceparent` header of `span`, "" for a span that is not exported."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _CONTEXT.inject(carrier, set_span_in_context(span))
    return carrier[TRACEPARENT]


class _TraceIds(RandomIdGenerator):
    """Gives the next span the trace `next`."""

    next = 0

    def generate_trace_id(self) -> int:
        return self.next


class _Watched(SpanExporter):
    """An exporter whose outcomes are counted, and logged when they change."""

    def __init__(self, exporter: SpanExporter, outcomes: Counter) -> None:
        self._exporter = exporter
        self._outcomes = outcomes
        self._lock = threading.Lock()
        self._waiting = 0
        self._fails = False
        self._last_message = _LastMessage()
        _LIBRARY.handlers, _LIBRARY.propagate = [self._last_message], False

    def admit(self, waiting_max: int) -> bool:
        """Tell whether one more span may wait for `export`; one that may not is counted."""
        with self._lock:
            admitted = self._waiting < waiting_max
            self._waiting += admitted
        if not admitted:
            self._outcomes.labels("dropped").inc()
        return admitted

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans, count the outcome, and log when it begins to fail or to succeed."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            with self._lock:
                self._waiting -= len(spans)
            fails = result is not SpanExportResult.SUCCESS
            self._outcomes.labels("failed" if fails else "exported").inc(len(spans))
            if fails and not self._fails:
                logger.warning("the collector takes no spans", reason=self._last_message.text)
            elif self._fails and not fails:
                logger.info("the collector takes spans again")
            self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Bounded(BatchSpanProcessor):
    """The SDK's queue, which never has to drop a span: those without room do not get there."""

    def __init__(self, exporter: _Watched) -> None:
        self._waiting_max = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or QUEUE_SPANS)
        super().__init__(exporter, max_queue_size=self._waiting_max)
        self._watched = exporter

    def on_end(self, span: ReadableSpan) -> None:
        sampled = span.context is not None and span.context.trace_flags.sampled
        if sampled and self._watched.admit(self._waiting_max):
            super().on_end(span)


class _LastMessage(logging.Handler):
    """The last log message of the library, in place of lines on stderr that are not ours."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
