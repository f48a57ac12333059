"""What the client of a schema registry makes of its answers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from schemas.errors import ExitCode, Retryable, SetupError
from schemas.registry import RegistrySettings
from services.kafka.schema_registry import SchemaRegistry
from tests.providers.waiting import patient_ms


class _Answers(BaseHTTPRequestHandler):
    """Answers each question with the next of `bodies`, the last one again and again."""

    bodies: ClassVar[list[bytes]] = []
    by_path: ClassVar[dict[str, tuple[int, object]]] = {}
    """Path -> status and document, in place of `bodies`."""
    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def _answer(self) -> None:
        status = self.status
        if self.by_path:
            path = self.path.partition("?")[0]
            status, document = self.by_path.get(path, (404, {"error_code": 40401, "message": ""}))
            body = json.dumps(document).encode()
        else:
            body = self.bodies.pop(0) if len(self.bodies) > 1 else self.bodies[0]
        self.send_response(status)
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
        _Answers.by_path = {}
        yield RegistrySettings(
            url=f"http://127.0.0.1:{server.server_port}", deadline_ms=patient_ms(340)
        )
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"[]", b"{}", b""])
def test_an_answer_that_is_not_a_registrys_is_waited_for_and_names_the_url(
    settings: RegistrySettings, page: bytes
) -> None:
    _Answers.bodies = [page]
    registry = SchemaRegistry(settings)
    with pytest.raises(Retryable, match="not that of a schema registry") as raised:
        registry.register("t-key", '"string"', "AVRO")
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
        found += [registry.register("t-key", '"string"', "AVRO") for _ in range(2)]
        registry.close()
    assert found == [1, 1, 2, 2]


LATEST = {"subject": "t-value", "version": 3, "id": 7, "schema": '"string"'}
REFUSED = (409, {"error_code": 409, "message": "READER_FIELD_MISSING_DEFAULT_VALUE"})
COMPARED = "/compatibility/subjects/t-value/versions"


@pytest.mark.parametrize(
    ("of_subject", "of_all", "said"),
    [
        ("FULL_TRANSITIVE", "NONE", "any of its versions up to 3 may be the one"),
        ("BACKWARD", "NONE", "compatibility BACKWARD: with version 3"),
        ("", "BACKWARD_TRANSITIVE", "BACKWARD_TRANSITIVE: any of its versions up to 3"),
        ("", "", "the latest is version 3"),
    ],
)
def test_a_conflict_names_the_versions_that_the_registry_compares(
    settings: RegistrySettings, of_subject: str, of_all: str, said: str
) -> None:
    _Answers.by_path = {
        "/subjects/t-value/versions": REFUSED,
        COMPARED: (200, {"is_compatible": False}),
        "/subjects/t-value/versions/latest": (200, LATEST),
        **({"/config/t-value": (200, {"compatibilityLevel": of_subject})} if of_subject else {}),
        **({"/config": (200, {"compatibilityLevel": of_all})} if of_all else {}),
    }
    error = refusal(settings)
    assert said in error.message and "READER_FIELD_MISSING" in error.message
    assert f"{settings.url}/config/t-value" in error.hint


def test_a_conflict_is_called_incompatible_only_where_the_registry_says_so(
    settings: RegistrySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry answers 409 to what another request registers at the same time, too."""
    monkeypatch.setattr("services.kafka.schema_registry._PAUSE_S", 0)
    _Answers.by_path = {
        "/subjects/t-value/versions": (409, {"error_code": 409, "message": "already exists"}),
        COMPARED: (200, {"is_compatible": True}),
    }
    error = refusal(settings)
    assert "(status 409): already exists" in error.message
    assert "compatible" not in f"{error.message} {error.hint}"
    _Answers.by_path["/subjects/t-value"] = (200, LATEST)
    registry = SchemaRegistry(settings)
    assert registry.register("t-value", '"string"', "AVRO") == 7
    registry.close()


@pytest.mark.parametrize("with_latest", [False, True, None])
def test_a_conflict_is_called_incompatible_where_the_registry_compares_no_versions_together(
    settings: RegistrySettings, monkeypatch: pytest.MonkeyPatch, *, with_latest: bool | None
) -> None:
    """Karapace and Redpanda compare with one version alone, and a rule may be about all of them."""
    monkeypatch.setattr("services.kafka.schema_registry._PAUSE_S", 0)
    _Answers.by_path = {
        "/subjects/t-value/versions": REFUSED,
        "/subjects/t-value/versions/latest": (200, LATEST),
        COMPARED: (404, {"error_code": 404, "message": "HTTP 404 Not Found"}),
    }
    if with_latest is not None:
        _Answers.by_path[f"{COMPARED}/latest"] = (200, {"is_compatible": with_latest})
    error = refusal(settings)
    assert "READER_FIELD_MISSING" in error.message
    assert f"{settings.url}/config/t-value" in error.hint
    registry = SchemaRegistry(settings)
    if with_latest is False:
        with pytest.raises(SetupError, match="not compatible"):
            registry.look("t-value", '"string"', "AVRO")
    else:
        assert registry.look("t-value", '"string"', "AVRO") is None
    registry.close()


def test_a_schema_that_the_registry_refuses_is_not_a_wrong_url(settings: RegistrySettings) -> None:
    path = "/subjects/t-value/versions"
    _Answers.by_path = {path: (422, {"error_code": 42201, "message": "Invalid schema: field x"})}
    error = refusal(settings)
    assert "Invalid schema: field x" in error.message and "registry.url" not in error.hint
    assert "shaping.columns" in error.hint
    _Answers.by_path = {path: (404, {"error_code": 404, "message": "HTTP 404 Not Found"})}
    assert "registry.url" in refusal(settings).hint


def refusal(settings: RegistrySettings) -> SetupError:
    registry = SchemaRegistry(settings)
    try:
        with pytest.raises(SetupError) as raised:
            registry.register("t-value", '"string"', "AVRO")
    finally:
        registry.close()
    assert raised.value.exit_code == ExitCode.SCHEMA_REFUSED
    return raised.value


def test_a_schema_is_read_by_its_id(settings: RegistrySettings) -> None:
    _Answers.bodies = [b'{"schema": "message A {}", "schemaType": "PROTOBUF"}']
    registry = SchemaRegistry(settings)
    assert registry.schema(7) == ("PROTOBUF", "message A {}")
    _Answers.bodies = [b'{"schema": "\\"string\\""}']
    assert registry.schema(8) == ("AVRO", '"string"')
    registry.close()


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"[]", b"{}", b""])
def test_a_page_in_place_of_a_schema_is_waited_for(settings: RegistrySettings, page: bytes) -> None:
    _Answers.bodies = [page]
    registry = SchemaRegistry(settings)
    with pytest.raises(Retryable, match="not that of a schema registry"):
        registry.schema(7)
    registry.close()


def test_only_the_registrys_own_code_says_that_it_lacks_a_schema(
    settings: RegistrySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Answers, "status", 404)
    monkeypatch.setattr("services.kafka.schema_registry._FOLLOWS_S", 0)
    registry = SchemaRegistry(settings)
    _Answers.bodies = [b'{"error_code": 40403, "message": "Schema not found"}']
    assert registry.schema(7) is None
    _Answers.bodies = [b"<html>not found</html>"]
    assert registry.schema(7) is None  # not asked again for a while
    with pytest.raises(SetupError, match="404"):
        registry.schema(8)
    registry.close()


def test_a_schema_that_a_follower_does_not_have_yet_is_waited_for(
    settings: RegistrySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = SchemaRegistry(settings)
    answers = iter([None, None, ("AVRO", '"string"')])
    monkeypatch.setattr(registry, "_schema", lambda _id: next(answers))
    assert registry.schema(7) == ("AVRO", '"string"')
    registry.close()
