"""A schema registry that is asked one question at a time.

Apicurio keeps its schemas in an H2 database in memory and answers 500 where two clients register at
once. This front holds each request until the one before has its answer.
"""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from tests.providers.registry import registry
from tests.providers.waiting import patient

_OF_ONE_CONNECTION: Final = {
    *("host", "content-length", "connection", "transfer-encoding", "upgrade", "http2-settings"),
    *("date", "server"),
}


class SerialRegistry(NamedTuple):
    """Where clients find it: `url` is Confluent's API, `native_url` Apicurio's own."""

    url: str
    native_url: str


class _Front(BaseHTTPRequestHandler):
    """Pass on a request, with its headers, and its answer."""

    address = ""
    lock: threading.Lock
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass_on()

    do_POST = do_PUT = do_DELETE = do_GET

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        sent = {k: v for k, v in self.headers.items() if k.lower() not in _OF_ONE_CONNECTION}
        with self.lock:
            connection = http.client.HTTPConnection(self.address, timeout=patient(60))
            connection.request(self.command, self.path, body, sent)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_ONE_CONNECTION:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serial_registry(folder: Path) -> Iterator[SerialRegistry]:
    """Run a registry in an empty folder, and its front."""
    with registry(folder) as behind:
        address = urlsplit(behind.url).netloc
        handler = type("Front", (_Front,), {"address": address, "lock": threading.Lock()})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            front = f"127.0.0.1:{server.server_port}"
            try:
                yield SerialRegistry(
                    behind.url.replace(address, front), behind.native_url.replace(address, front)
                )
            finally:
                server.shutdown()
                thread.join()
