"""The HTTP servers of bridge, watch and tables, as these start them, and clients that mean harm."""

import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from schemas.settings import SourceSettings, WatchSettings
from schemas.tables import TablesSettings
from services.bridge.session.control import Control
from services.bridge.session.runner import Runner
from services.failover.plan.request import Request as PlanRequest
from services.failover.watch.loop import Watch
from services.failover.watch.pause import Ordered, Pause
from services.failover.watch.web.api import Api
from services.runtime import http_server
from services.runtime.http_server import CONNECTIONS_MAX, HEAD_BYTES_MAX
from services.runtime.process import Probes
from services.testbed.ports import free_port
from spark_consumers.epochs.metrics import Metrics
from tests.marks import long_but
from tests.providers.waiting import eventually, patient

TOKEN = b"a-token-of-the-tests"
CLIENTS = 200
assert CLIENTS > CONNECTIONS_MAX


def bridge(stack: contextlib.ExitStack, _folder: Path) -> int:
    """The server of `slotbridge run`, without a bridge."""
    runner = cast(Runner, SimpleNamespace(delivered=lambda: None, server=None))
    source = SourceSettings.model_validate({"conninfo": "host=127.0.0.1 port=1"})
    return probes(stack, Control(runner, source, TOKEN).routes())


def watch(stack: contextlib.ExitStack, _folder: Path) -> int:
    """The server of `slotfailover watch`, without servers."""

    def order(*, paused: bool, by: str, reason: str) -> Ordered:
        return Ordered(Pause(paused, "", by, reason, 1), in_effect=True, shared=True)

    loop = cast(Watch, SimpleNamespace(order=order))
    return probes(stack, Api(loop, PlanRequest(), TOKEN, WatchSettings()).routes())


def tables(_stack: contextlib.ExitStack, folder: Path) -> int:
    """The server of `slottables run`, without Spark."""
    port = free_port()
    settings = TablesSettings(warehouse=str(folder), http_host="127.0.0.1", http_port=port)
    Metrics().serve(settings)
    return port


def probes(stack: contextlib.ExitStack, routes: Any) -> int:
    yes = lambda: True  # noqa: E731
    served = stack.enter_context(Probes("127.0.0.1", 0, healthy=yes, ready=yes, routes=routes))
    return served.port


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def healthy(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=patient(20)) as answer:
        return bool(answer.status == 200)


def left_open(client: socket.socket) -> bool:
    """Whether the server has the connection, as far as its client can see."""
    try:
        return client.recv(65536, socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


HALVES = (
    b"",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/pause HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    b"POST /v1/source HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /",
    b"\x16\x03\x01\x02\x00",
)


@pytest.mark.parametrize("service", long_but(bridge, [bridge, watch, tables]))
def test_half_sent_requests_are_dropped_and_others_answered(
    service: Any, stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there are too many, at once; else when their time is over. The log stays short."""
    port = service(stack, tmp_path)
    assert healthy(port)
    clients: list[socket.socket] = []

    def open_connections(number: int) -> None:
        for nth in range(number):
            client = socket.create_connection(("127.0.0.1", port), timeout=patient(20))
            stack.callback(client.close)
            client.sendall(HALVES[nth % len(HALVES)])
            clients.append(client)

    with structlog.testing.capture_logs() as lines:
        open_connections(CLIENTS)
        assert healthy(port)
        held = lambda: sum(left_open(c) for c in clients) <= CONNECTIONS_MAX  # noqa: E731
        eventually(held, what="the oldest are dropped")
        monkeypatch.setattr(http_server, "PATIENCE_S", 0.2)
        before = len(clients)
        open_connections(len(HALVES))
        late = clients[before:]
        eventually(lambda: not any(map(left_open, late)), what="late ones are dropped")
        with socket.create_connection(("127.0.0.1", port), timeout=patient(20)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 2 * HEAD_BYTES_MAX)
            assert client.recv(100).startswith(b"HTTP/1.1 4")
        assert healthy(port)
    assert len(lines) <= 2, lines


def post(port: int, path: str, body: bytes) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {TOKEN.decode()}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=patient(20)) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


MALFORMED = (
    *(rb'"\ud800"', rb'"\u0000"', rb'"host=a\u0000"', b'"\xff"', b'"' + b"a" * 10_000 + b'"'),
    *(b"[" * 4000, b'{"a":' * 1000, b"9" * 4000, b"NaN", b"null"),
)


@pytest.mark.parametrize(
    ("service", "path", "key"), [(bridge, "/v1/source", "conninfo"), (watch, "/v1/pause", "reason")]
)
def test_a_malformed_body_is_refused(
    service: Any, path: str, key: str, stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    port = service(stack, tmp_path)
    for value in MALFORMED:
        for body in (b'{"%s": %s}' % (key.encode(), value), value):
            status, document = post(port, path, body)
            assert status == 400 and document["error"], (body[:40], status, document)
    assert healthy(port)
