"""The common frame of long-running parts: logging, signals, exit codes, HTTP probes.

Libraries that only some commands need are imported where they are used: a failover is timed from
its start, and they would double that.
"""

import contextlib
import functools
import json
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from schemas.errors import ExitCode, SlotbridgeError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

Stop = threading.Event

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """Return a text whose control characters are shown: names of others may steer a terminal."""
    return text.translate(_CONTROLS)


def configure_logging(*, json_lines: bool, verbose: bool = False) -> None:
    """Send structured logs to stderr: JSON lines for machines, aligned text for people."""
    import structlog

    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json_lines
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if verbose else logging.INFO
        ),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # as it is at each line
    )


@functools.cache
def warn_once(logger: Any, event: str, **fields: str | int) -> None:
    """Log a warning once in a process, not at each new session."""
    logger.warning(event, **fields)


def stop_on_signals() -> Stop:
    """Return an event that SIGTERM and SIGINT set; a second signal of either kills the process."""
    stop = Stop()

    def handle(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stop


@contextlib.contextmanager
def exit_codes(*, as_json: bool = False) -> Iterator[None]:
    """Turn a SlotbridgeError into one line on stderr and its exit code (raises SystemExit)."""
    try:
        yield
    except SlotbridgeError as error:
        if as_json:
            report = {
                "error": error.message,
                "operation": error.operation,
                "subject": error.subject,
                "lsn": error.lsn,
                "hint": error.hint,
                "exit_code": int(error.exit_code),
            }
            sys.stdout.write(json.dumps(report) + "\n")
        sys.stderr.write(visible(f"error: {error}\n"))
        raise SystemExit(int(error.exit_code)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("click", "typer"):
            raise  # the command line's own way to end
        traceback.print_exc()
        sys.stderr.write(
            f"internal error: {type(error).__name__}. This is a bug in slotbridge; please report it"
            " with the traceback above\n"
        )
        raise SystemExit(int(ExitCode.BUG)) from error


class Probes:
    """/healthz (the loop is fresh), /readyz (it serves) and /metrics, in a thread of their own.

    /readyz answers with `waiting_for` while it fails, and with `remark` once it passes. /availablez
    passes if `available` says that the process serves, or stands by for one that does; without
    `available` it is as /readyz. `routes` are served beside them; `registry` holds the
    metrics (None: the process's own).
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        healthy: Callable[[], bool],
        ready: Callable[[], bool],
        available: Callable[[], bool] | None = None,
        waiting_for: Callable[[], str] = lambda: "",
        remark: Callable[[], str] = lambda: "",
        routes: "Sequence[BaseRoute]" = (),
        registry: "CollectorRegistry | None" = None,
    ) -> None:
        from starlette.routing import Route

        from services.runtime.http_server import HttpServer

        self._healthy = healthy
        self._ready = ready
        self._available = available or ready
        self._waiting_for = waiting_for
        self._remark = remark
        probes = [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/availablez", self._availablez),
            metrics_route(registry),
        ]
        self._server = HttpServer(host, port, [*probes, *routes])
        self.port = self._server.port

    def __enter__(self) -> "Probes":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.end()

    async def _healthz(self, _request: "Request") -> "Response":
        return _probe(self._healthy())

    async def _readyz(self, _request: "Request") -> "Response":
        return _probe(self._ready(), self._waiting_for(), self._remark())

    async def _availablez(self, _request: "Request") -> "Response":
        return _probe(self._available())


def metrics_route(registry: "CollectorRegistry | None") -> "BaseRoute":
    """Return the route /metrics of a registry, None for the process's own."""
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
    from starlette.responses import Response
    from starlette.routing import Route

    async def answer(_request: "Request") -> "Response":
        return Response(generate_latest(registry or REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", answer)


def _probe(passed: bool, why_not: str = "", remark: str = "") -> "Response":
    from starlette.responses import PlainTextResponse

    text = ": ".join(filter(None, ("ok", remark) if passed else ("no", why_not)))
    return PlainTextResponse(text, status_code=200 if passed else 503)


__all__ = [
    "ExitCode",
    "Probes",
    "Stop",
    "configure_logging",
    "exit_codes",
    "metrics_route",
    "stop_on_signals",
    "visible",
]
