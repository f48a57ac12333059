"""The HTTP server of `slottables run`: it has all its pages before it answers any request."""

import socket
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client.exposition import ThreadingWSGIServer


class _Quiet(WSGIRequestHandler):
    """A handler that writes no line for a request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Drop the line that the base class would write."""


def serve_pages(host: str, port: int, application: Any) -> WSGIServer:
    """Answer requests at a port by a WSGI application, each in a thread of its own.

    prometheus_client's own server answers every path with its metrics until it is given another
    application: a probe or a wait would take that for a yes. Raise OSError where the port is taken.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = found[0]
    kind: type[WSGIServer] = type("_Server", (ThreadingWSGIServer,), {"address_family": family})
    server = make_server(str(address[0]), port, application, kind, handler_class=_Quiet)
    threading.Thread(target=server.serve_forever, name="pages", daemon=True).start()
    return server
