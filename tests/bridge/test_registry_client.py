"""What the client of a schema registry makes of its answers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from schemas.errors import ExitCode, Retryable
from schemas.registry import RegistrySettings
from services.kafka.schema_registry import SchemaRegistry


class _Answers(BaseHTTPRequestHandler):
    """Answers each question with the next of `bodies`, the last one again and again."""

    bodies: ClassVar[list[bytes]] = []

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def _answer(self) -> None:
        body = self.bodies.pop(0) if len(self.bodies) > 1 else self.bodies[0]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def settings() -> Iterator[RegistrySettings]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield RegistrySettings(url=f"http://127.0.0.1:{server.server_port}", deadline_ms=1_000)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"[]", b"{}", b""])
def test_an_answer_that_is_not_a_registrys_is_waited_for_and_names_the_url(
    settings: RegistrySettings, page: bytes
) -> None:
    _Answers.bodies = [page]
    registry = SchemaRegistry(settings)
    with pytest.raises(Retryable, match="not that of a schema registry") as raised:
        registry.register("t-key", '"string"', "AVRO", lambda: None)
    assert raised.value.exit_code == ExitCode.REGISTRY_UNREACHABLE
    assert "registry.url" in raised.value.hint and raised.value.subject == settings.url
    if page != b"{}":
        with pytest.raises(Retryable, match="not that of a schema registry"):
            registry.require()
    registry.close()


def test_ids_are_remembered_by_one_client_alone(settings: RegistrySettings) -> None:
    _Answers.bodies = [json.dumps({"id": schema_id}).encode() for schema_id in (1, 2, 3)]
    found = []
    for _ in range(2):
        registry = SchemaRegistry(settings)
        found += [registry.register("t-key", '"string"', "AVRO", lambda: None) for _ in range(2)]
        registry.close()
    assert found == [1, 1, 2, 2]
