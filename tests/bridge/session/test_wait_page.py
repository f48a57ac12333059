"""GET /v1/wait of the bridge, over HTTP: what it answers, and for whom it stops waiting."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SettingsError
from schemas.wait import WAITERS_MAX
from services.bridge.session.runner import Delivered
from services.bridge.session.wait_page import wait_page
from services.runtime.process import Probes
from slotbridge.consumer import wait_for
from tests.providers.waiting import eventually, patient


class Page:
    """The page of a bridge that has delivered what the test says."""

    def __init__(self) -> None:
        self.state: Delivered | None = Delivered(100, 3, {1: 50})
        self.page = wait_page(lambda: self.state)
        route = Route("/v1/wait", self.page.answer, methods=["GET"])
        yes = lambda: True  # noqa: E731
        self.probes = Probes("127.0.0.1", 0, healthy=yes, ready=yes, routes=[route])
        self.url = f"http://127.0.0.1:{self.probes.port}"

    def listens(self) -> bool:
        """Whether its port takes connections."""
        try:
            socket.create_connection(("127.0.0.1", self.probes.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    def get(self, query: str) -> tuple[int, dict[str, Any]]:
        """The status and the document."""
        try:
            with urllib.request.urlopen(
                f"{self.url}/v1/wait?{query}", timeout=patient(20)
            ) as found:
                return found.status, json.loads(found.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page()
    with made.probes:
        eventually(made.listens, what="the page answers", timeout_s=20)
        yield made


def test_an_answer_tells_position_and_timeline(page: Page) -> None:
    told = {"lsn": "0/64", "in": "kafka", "delivered": "0/64", "timeline": 3}
    assert page.get("lsn=0/64") == (200, told)
    assert page.get("lsn=0/64&in=kafka&timeline=3")[0] == 200
    status, document = page.get("lsn=0/65&timeout_s=0")
    assert (status, document["error"]) == (
        504,
        "Kafka does not have 0/65 yet: at 0/64 of timeline 3",
    )
    page.state = None
    assert page.get("lsn=0/1&timeout_s=0.1")[1]["error"].endswith("nothing streams")


def test_a_lost_commit_is_not_waited_for(page: Page) -> None:
    """The new timeline has passed its LSN."""
    assert page.get("lsn=0/32&timeline=1")[0] == 200, "from before the failover"
    status, document = page.get("lsn=0/33&timeline=1")
    assert status == 409 and "timeline 1 was left at 0/32" in document["error"]
    assert page.get("lsn=0/1&timeline=2")[0] == 409, "not an ancestor"
    status, document = page.get("lsn=0/1&timeline=4&timeout_s=0.2")
    assert status == 504 and "of timeline 4 yet" in document["error"]


def test_a_newer_timeline_is_waited_for(page: Page) -> None:
    later = threading.Timer(0.3, setattr, [page, "state", Delivered(200, 4, {3: 120})])
    later.start()
    assert page.get("lsn=0/65&timeline=4")[1]["timeline"] == 4


@pytest.mark.parametrize("timeout_s", ["nan", "inf", "-1", "x"])
def test_a_time_out_that_is_not_finite_is_refused_by_name(page: Page, timeout_s: str) -> None:
    status, document = page.get(f"lsn=0/FFFF&timeout_s={timeout_s}")
    assert status == 400 and document["error"].startswith("timeout_s is not")


def test_another_place_is_refused(page: Page) -> None:
    assert "tables.http_port" in page.get("lsn=0/1&in=tables")[1]["error"]
    assert page.get("lsn=0/1&in=tables")[0] == page.get("lsn=0/1&in=x")[0] == 400


def test_a_client_that_is_gone_ends_its_wait_and_waiters_are_capped(page: Page) -> None:
    clients = []
    for _ in range(WAITERS_MAX):
        client = socket.create_connection(("127.0.0.1", page.probes.port))
        client.sendall(b"GET /v1/wait?lsn=FFFF/0&timeout_s=300 HTTP/1.1\r\nHost: x\r\n\r\n")
        clients.append(client)
    eventually(lambda: page.page.waiters == WAITERS_MAX, what="all wait", timeout_s=20)
    status, document = page.get("lsn=0/1")
    assert status == 503 and "ask again later" in document["error"]
    for client in clients:
        client.close()
    eventually(lambda: page.page.waiters == 0, what="none waits", timeout_s=10)
    assert page.get("lsn=0/1")[0] == 200


def test_the_small_client_says_what_to_do(page: Page) -> None:
    assert wait_for(page.url, "0/64", timeline=3) == (3, [])
    with pytest.raises(OperatorNeeded, match="is lost") as raised:
        wait_for(page.url, "0/33", timeline=1)
    assert raised.value.exit_code == ExitCode.TIMELINE
    with pytest.raises(SettingsError, match=r"tables\.http_port"):
        wait_for(page.url, "0/1", within="tables")
    with pytest.raises(SettingsError, match="timeout_s"):
        wait_for(page.url, "0/1", timeout_s=float("nan"))
    with pytest.raises(Retryable, match="Kafka does not have the changes yet"):
        wait_for(page.url, "0/65", timeout_s=0)
