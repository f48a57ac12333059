"""A collector of traces: OTLP over HTTP, its protobuf decoded."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


class Received(NamedTuple):
    """A span as the collector has it; ids as hexadecimal digits."""

    service: str
    name: str
    trace: str
    span: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int]
    links: list[tuple[str, str]]


class Collector:
    """What has come so far. `frozen`: requests are taken and never answered."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.frozen = False
        self.over = threading.Event()
        self.url = ""

    @property
    def environment(self) -> dict[str, str]:
        """What sends a service's spans here, soon."""
        return {
            "SLOTBRIDGE_TRACING__ENABLED": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def take(self, body: bytes) -> None:
        """Decode a request."""
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = str(_plain(of_resource.resource.attributes)["service.name"])
            for scope in of_resource.scope_spans:
                self.spans += [
                    Received(
                        *(service, span.name, span.trace_id.hex(), span.span_id.hex()),
                        *(span.start_time_unix_nano, span.end_time_unix_nano),
                        _plain(span.attributes),
                        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    )
                    for span in scope.spans
                ]


def _plain(attributes: Iterable[KeyValue]) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens on a free port."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            if made.frozen:
                made.over.wait()
                return
            made.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
