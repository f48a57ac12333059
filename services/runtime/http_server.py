"""The HTTP server of all services: uvicorn with a bound on what a client may hold or send.

    connections       CONNECTIONS_MAX; one more drops the oldest that waits for its client
    a client          PATIENCE_S to send a whole request, and as long to take its answer
    a request's head  HEAD_BYTES_MAX
    a request's body  as long as its route allows (`json_body`)
    log lines         one a minute about refused requests, one about failures

A connection waits for its client while a request is not whole, or its answer is not taken. One that
is being answered is never dropped: routes that take long bound their own number (`wait_page`).
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import pydantic_core
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute
from uvicorn.protocols.http.h11_impl import H11Protocol

from schemas.errors import ExitCode, SetupError

logger = structlog.get_logger(__name__)

CONNECTIONS_MAX: Final = 128
PATIENCE_S = 10.0
HEAD_BYTES_MAX: Final = 16384
_LINE_EVERY_S: Final = 60.0
_ACCEPTED_MAX: Final = 32
"""How many connections asyncio accepts at a time, before it can drop any of them."""
_BACKLOG: Final = 1024
"""How many connections the kernel lets wait to be accepted."""


class HttpServer:
    """Answers `routes` at a port, in a thread of its own. Port 0: `port` is a free one.

    Raise SetupError (PORT_IN_USE) where the address can't be bound.
    """

    def __init__(self, host: str, port: int, routes: Sequence[BaseRoute]) -> None:
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            Starlette(routes=routes),
            http=_Connection,
            ws="none",
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            backlog=_ACCEPTED_MAX,
            log_config=None,
            access_log=False,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def end(self) -> None:
        """Close the port, and wait a moment for the answers under way."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


class _Server(uvicorn.Server):
    """Uvicorn's server, for which `backlog` is two numbers: asyncio takes them for one."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)


class _Connection(H11Protocol):
    """A connection that is dropped when its client is late, or when there are too many."""

    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; where there are too many, drop the one that has waited longest."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(PATIENCE_S, self._look)
        if len(self.connections) > CONNECTIONS_MAX:
            waiting = [c for c in self.connections if isinstance(c, _Connection) and c._waits]
            oldest = min(waiting, key=lambda connection: connection._timer.when())
            oldest._drop(f"there are more than {CONNECTIONS_MAX} connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._timer.cancel()
        self._timer = self.loop.call_later(PATIENCE_S, self._look)

    @property
    def _waits(self) -> bool:
        """The client is to send or to take something."""
        cycle = self.cycle
        return cycle is None or cycle.more_body or cycle.response_started

    def _look(self) -> None:
        if self._waits:
            self._drop(f"its client was not ready within {PATIENCE_S:.0f} s")
        else:
            self._timer = self.loop.call_later(PATIENCE_S, self._look)

    def _drop(self, why: str) -> None:
        self.logger.warning("an HTTP connection was dropped: %s", why)
        self.connections.discard(self)  # at once: the loop tells it later that it is lost
        self.transport.abort()


async def json_body(request: Request, bytes_max: int) -> Any:
    """Return the JSON document of a request's body, {} where the body is empty.

    Raise ValueError where the body is longer than `bytes_max`, did not come whole, or is not JSON
    of Unicode text without NUL, which PostgreSQL can't store.
    """
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > bytes_max:
                raise ValueError(f"the body has more than {bytes_max} bytes")
    except ClientDisconnect:
        raise ValueError("the body did not come whole") from None
    if rb"\u0000" in body:
        raise ValueError("the text has a NUL")
    return pydantic_core.from_json(body or b"{}")  # refuses half surrogates and deep nesting, too


class _Lines(logging.Handler):
    """Writes lines of uvicorn and asyncio into our log: of each level one a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last: dict[int, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Log the HTTP server's line, at most one of each level in _LINE_EVERY_S."""
        now = time.monotonic()
        if now - self._last.get(record.levelno, -_LINE_EVERY_S) < _LINE_EVERY_S:
            return
        self._last[record.levelno] = now
        text = record.getMessage().strip().partition("\n")[0]
        logger.log(record.levelno, "http", problem=text, exc_info=record.exc_info)


_LINES: Final = _Lines()
for _name in ("uvicorn.error", "asyncio"):
    logging.getLogger(_name).addHandler(_LINES)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raise SetupError where the address is taken."""
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        raise SetupError(
            f"{host}:{port} can't be bound: {error.strerror}",
            operation="serve /metrics",
            hint="another slotbridge may run here with the same file; give this one another "
            "`http_port`, or 0 for a free one, and `http_host` an address of this machine",
            exit_code=ExitCode.PORT_IN_USE,
        ) from None
    return server
