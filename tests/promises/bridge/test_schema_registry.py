"""Formats with a real schema registry: what readers decode, changed shapes, a failing registry."""

import base64
import copy
import io
import json
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fastavro
import psycopg
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from schemas.errors import ExitCode, SlotbridgeError
from schemas.registry import RegistrySettings
from services.bridge.events.formats.protobuf import message_class
from services.kafka.schema_registry import SchemaRegistry
from tests.promises.bridge.reading import committed, read_committed
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.values import samples
from tests.promises.bridge.values.connect_documents import meaning
from tests.promises.bridge.values.fitting import FINITE
from tests.promises.bridge.values.forms import DEBEZIUM
from tests.promises.bridge.values.protobuf_reader import compiled, document
from tests.promises.bridge.values.two_publishers import fill, make_tables
from tests.providers.interface import Broker, Provider
from tests.providers.registry import API, Registry, registry
from tests.providers.secured import Certificates
from tests.providers.waiting import eventually, patient, patient_ms

PARTS = ("key_format", "value_format")
TABLES = (*FINITE, "changing", "whole", "keyless", "toasted", "finished")
Pairs = list[tuple[Any, Any]]
Read = Callable[[bytes, str, MessageField], Any]


class Source:
    """A database, and bridges on it."""

    def __init__(self, conninfo: str, database: str, kafka: Broker, folder: Path) -> None:
        self.conninfo, self.database, self.kafka, self.folder = conninfo, database, kafka, folder
        self.bridges: list[Bridge] = []

    def bridge(self, prefix: str, **settings: Any) -> Bridge:
        """A bridge that is not started."""
        made = Bridge(self.folder, self.conninfo, self.kafka, prefix, **settings)
        self.bridges.append(made)
        return made

    def registered(self, found: Registry, form: str = "avro", **settings: Any) -> Bridge:
        """A bridge with schemas in the registry, under the name of the database."""
        formats = dict.fromkeys(PARTS, form)
        options: dict[str, Any] = {"formats": formats, "registry": {"url": found.url}, **settings}
        return self.bridge(options.pop("prefix", self.database), **options)

    def run(self, *statements: str) -> None:
        """Each in a transaction of its own."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def decoded(self, found: Registry, table: str, form: str = "avro", prefix: str = "") -> Pairs:
        """The committed keys and values of a topic, by the schemas that the registry has."""
        topic = f"{prefix or self.database}.public.{table}"
        with SchemaRegistryClient({"url": found.url}) as client:
            read = READERS[form](client)

            def part(data: bytes | None, field: MessageField) -> Any:
                return None if data is None else read(data, topic, field)

            return [
                (part(key, MessageField.KEY), part(value, MessageField.VALUE))
                for _, key, value in committed(self.kafka.bootstrap_servers, topic)
            ]

    def rows(self, found: Registry, table: str, form: str = "avro") -> list[Any]:
        """The `after` of each event of a topic, in their order, tombstones left out."""
        values = [value for _, value in self.decoded(found, table, form) if value is not None]
        values.sort(key=lambda value: (value["source"]["commit_lsn"], value["source"]["seq"]))
        return [value["after"] for value in values]


def _avro(client: SchemaRegistryClient) -> Read:
    def read(data: bytes, _topic: str, _field: MessageField) -> Any:
        assert data[0] == 0
        text = client.get_schema(int.from_bytes(data[1:5], "big")).schema_str
        assert text is not None
        schema = fastavro.parse_schema(json.loads(text))
        return fastavro.schemaless_reader(io.BytesIO(data[5:]), schema, None)

    return read


def _protobuf(client: SchemaRegistryClient) -> Read:
    """A reader of what protoc makes of the registry's text."""
    known: dict[int, Any] = {}

    def read(data: bytes, _topic: str, _field: MessageField) -> Any:
        assert (data[0], data[5]) == (0, 0)
        schema_id = int.from_bytes(data[1:5], "big")
        if schema_id not in known:
            text = client.get_schema(schema_id).schema_str or ""
            with tempfile.TemporaryDirectory() as folder:
                known[schema_id] = message_class(compiled(text, Path(folder)))
        return document(known[schema_id].FromString(data[6:]))

    return read


def _json_schema(client: SchemaRegistryClient) -> Read:
    """Confluent's own reader, which validates; the strategy is what others than Confluent have."""
    strategy = {"subject.name.strategy.type": "TOPIC"}
    reader = JSONDeserializer(None, schema_registry_client=client, conf=strategy)
    return lambda data, topic, field: reader(data, SerializationContext(topic, field))


READERS: dict[str, Callable[[SchemaRegistryClient], Read]] = {
    "avro": _avro,
    "json_schema": _json_schema,
    "protobuf": _protobuf,
}


@pytest.fixture
def client(schemas: Registry) -> Iterator[SchemaRegistryClient]:
    """A client of the registry."""
    with SchemaRegistryClient({"url": schemas.url}) as made:
        yield made


@pytest.fixture
def source(pair: Provider, fresh_database: str, kafka: Broker, tmp_path: Path) -> Iterator[Source]:
    made = Source(pair.primary.conninfo(fresh_database), fresh_database, kafka, tmp_path)
    yield made
    for bridge in made.bridges:
        bridge.end()


@pytest.mark.long
def test_every_type_and_every_change_is_what_the_json_says(
    source: Source, schemas: Registry
) -> None:
    prefixes = {form: f"{source.database}_{form[0]}" for form in READERS}
    with psycopg.connect(source.conninfo, autocommit=True) as connection:
        connection.execute(samples.SETUP.encode())
        make_tables(connection, FINITE)
        envelope = dict.fromkeys(PARTS, "json_schema_envelope")
        other = source.bridge(source.database, formats=envelope, **DEBEZIUM)
        bridges = [other]
        for form, prefix in prefixes.items():
            bridges.append(source.registered(schemas, form, prefix=prefix, **DEBEZIUM))
        for bridge in bridges:
            bridge.start()
        for bridge in bridges:
            bridge.streaming()
        fill(connection, FINITE)
    for bridge in bridges:
        bridge.caught_up()
    shown = [shown_by_tail(bridge, "public.changing") for bridge in bridges[1:]]
    assert shown[0] and shown.count(shown[0]) == len(shown)
    for table in TABLES:
        raw = other.records(f"public.{table}")
        assert len(raw) >= 1
        for form, prefix in prefixes.items():
            records = [(_json(key, form), _json(value, form)) for key, value in raw]
            expected = [(_meant(key, form), _meant(value, form)) for key, value in records]
            found = source.decoded(schemas, table, form, prefix)
            assert _in_order(found) == _in_order(expected), (table, form)


def shown_by_tail(bridge: Bridge, table: str) -> list[Any]:
    """The keys and rows that `slotbridge tail` prints of a table: the same in each format."""
    count = len(bridge.records(table))
    program = str(Path(sys.executable).parent / "slotbridge")
    command = [program, "tail", "--config", str(bridge.config)]
    options = ("--topic", f"{bridge.prefix}.{table}", "--from-beginning", "--count", str(count))
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert done.returncode == 0, done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    rows = [(one["key"], one["value"] and one["value"]["after"]) for one in shown]
    return sorted(rows, key=repr)


def _json(data: bytes | None, form: str) -> Any:
    """With the sign of -0, which only a reader of numbers as JSON has them does not see."""
    signed = form != "json_schema"
    number = (lambda text: -0.0 if text == "-0" else int(text)) if signed else int
    return None if data is None else json.loads(data, parse_int=number)


def _meant(document: Any, form: str) -> Any:
    if document is None:
        return None
    payload = copy.deepcopy(document["payload"])
    return payload if form == "json_schema" else meaning(document["schema"], payload)


def _in_order(pairs: Pairs) -> list[str]:
    """Without what two bridges tell of themselves; repr tells -0 from 0."""
    for _, value in pairs:
        for name in () if value is None else ("ts_ms", "ts_us", "ts_ns"):
            del value[name]
        if value is not None:
            del value["source"]["name"], value["source"]["sequence"]
    return sorted(repr(pair) for pair in pairs)


@pytest.mark.long
def test_shapes_change_in_the_middle_and_rows_that_were_there_are_read(
    source: Source, schemas: Registry, client: SchemaRegistryClient
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "INSERT INTO t SELECT i, 'early' FROM generate_series(1, 50) i",
    )
    bridge = source.registered(schemas, snapshot={"mode": "initial"}).start().streaming()
    topic = f"{source.database}.public.t"
    eventually(
        lambda: topic in bridge.topics() and len(source.rows(schemas, "t")) == 50,
        what="the snapshot",
        timeout_s=60,
    )
    source.run(
        "INSERT INTO t SELECT i, 'then' FROM generate_series(51, 100) i",
        "ALTER TABLE t ADD COLUMN n bigint, DROP COLUMN note",
        "INSERT INTO t SELECT i, i FROM generate_series(101, 150) i",
        "TRUNCATE t",
    )
    bridge.caught_up()
    assert bridge.stop() == 0
    found = source.rows(schemas, "t")
    assert [row["note"] for row in found[:100]] == ["early"] * 50 + ["then"] * 50
    assert found[100:150] == [{"id": i, "n": i} for i in range(101, 151)]
    assert found[150:] == [None, None]  # the truncate, in each partition
    assert client.get_versions(f"{source.database}.public.t-value") == [1, 2]
    assert bridge.output.count("schema registered") == 3


@pytest.mark.long
def test_a_row_stays_in_the_partition_of_json_when_its_keys_schema_changes(
    source: Source, schemas: Registry, client: SchemaRegistryClient
) -> None:
    source.run(
        "CREATE TYPE mood AS ENUM ('ok')",
        "CREATE TABLE t (id int, m mood, n int, PRIMARY KEY (id, m))",
    )
    bridges = [
        source.bridge(f"{source.database}_j"),
        source.bridge(f"{source.database}_e", formats={"key_format": "json_schema_envelope"}),
        source.registered(schemas, prefix=f"{source.database}_a", formats={"key_format": "avro"}),
    ]
    for bridge in bridges:
        bridge.start().streaming()
    source.run(
        "INSERT INTO t SELECT i, 'ok', 0 FROM generate_series(1, 20) i",
        "ALTER TYPE mood ADD VALUE 'sad'",
        "ALTER TABLE t ALTER id TYPE bigint",
        "INSERT INTO t SELECT i, 'sad', 0 FROM generate_series(1, 20) i",
        "UPDATE t SET n = 1",
    )
    found = []
    for bridge in bridges:
        bridge.caught_up()
        records = read_committed(source.kafka.bootstrap_servers, [f"{bridge.prefix}.public.t"])
        rows = [(record.partition, json.loads(record.value or b"")["after"]) for record in records]
        found.append(sorted((row["id"], row["m"], row["n"], at) for at, row in rows))
    assert found[1] == found[0]
    assert found[2] == found[0]
    places = {(row, mood, partition) for row, mood, _, partition in found[0]}
    assert (len(found[0]), len(places)) == (80, 40)
    assert client.get_versions(f"{source.database}_a.public.t-key") == [1, 2]


@pytest.mark.long
@pytest.mark.parametrize("form", ["json_schema", "protobuf"])
def test_a_new_column_is_compatible_and_another_type_is_not(
    source: Source, schemas: Registry, client: SchemaRegistryClient, form: str
) -> None:
    subject = f"{source.database}.public.t-value"
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    bridge = source.registered(schemas, form).start().streaming()
    source.run("INSERT INTO t VALUES (1, 1)")
    bridge.caught_up()
    client.set_compatibility(subject, "BACKWARD")
    source.run("ALTER TABLE t ADD note text", "INSERT INTO t VALUES (2, 2, 'new')")
    bridge.caught_up()
    assert client.get_versions(subject) == [1, 2]
    source.run("ALTER TABLE t ALTER n TYPE text", "INSERT INTO t VALUES (3, '3')")
    assert bridge.exit_code() == ExitCode.SCHEMA_REFUSED
    assert f"subject {subject}" in bridge.output
    assert "version 2" in bridge.output
    found = source.rows(schemas, "t", form)
    assert found == [{"id": 1, "n": 1}, {"id": 2, "n": 2, "note": "new"}]


@pytest.mark.long
@pytest.mark.parametrize(
    ("naming", "subjects"),
    [
        ("record", ["{}.public.a.Envelope", "{}.public.a.Key"]),
        ("topic_record", ["{0}.all-{0}.public.a.Envelope", "{0}.all-{0}.public.a.Key"]),
    ],
)
def test_subjects_are_named_as_chosen(
    source: Source,
    schemas: Registry,
    client: SchemaRegistryClient,
    naming: str,
    subjects: list[str],
) -> None:
    source.run("CREATE TABLE a (id int PRIMARY KEY)")
    bridge = source.registered(
        schemas,
        registry={"url": schemas.url, "subject_naming": naming},
        shaping={"routes": [{"tables": "public.*", "topic": "{prefix}.all"}]},
    )
    bridge.start().streaming()
    source.run("INSERT INTO a VALUES (1)")
    bridge.caught_up()
    mine = sorted(subject for subject in client.get_subjects() if source.database in subject)
    assert mine == [subject.format(source.database) for subject in subjects]


@pytest.mark.long
def test_a_schema_that_is_not_compatible_stops_the_bridge_by_name(
    source: Source, schemas: Registry, client: SchemaRegistryClient
) -> None:
    subject = f"{source.database}.public.t-value"
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    bridge = source.registered(schemas).start().streaming()
    source.run("INSERT INTO t VALUES (1, 1)")
    bridge.caught_up()
    client.set_compatibility(subject, "BACKWARD")
    source.run("ALTER TABLE t ALTER n TYPE text", "INSERT INTO t VALUES (2, '2')")
    assert bridge.exit_code() == ExitCode.SCHEMA_REFUSED
    assert f"subject {subject}" in bridge.output
    assert "version 1" in bridge.output
    client.set_compatibility(subject, "NONE")
    bridge.start().streaming().caught_up()
    assert source.rows(schemas, "t") == [{"id": 1, "n": 1}, {"id": 2, "n": "2"}]


@pytest.mark.long
def test_a_registry_that_lost_its_schemas_is_told_them_again_by_the_next_session(
    source: Source, tmp_path: Path
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    with registry(tmp_path) as own:  # what it has is in its memory
        bridge = source.registered(own).start().streaming()
        source.run("INSERT INTO t VALUES (1, 1)")
        bridge.caught_up()
        assert source.rows(own, "t") == [{"id": 1, "n": 1}]
        own.stop()
        own.start()
        sessions = bridge.sessions
        with SchemaRegistryClient({"url": own.url}) as client:
            client.register_schema("another", Schema('"string"', "AVRO"))
            source.run(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                f" WHERE slot_name = '{bridge.slot}'"
            )
            eventually(lambda: bridge.sessions > sessions, what="another session", timeout_s=60)
            source.run("UPDATE t SET n = 2")
            bridge.caught_up()
            topic = f"{source.database}.public.t"
            (_, (_, key, value)) = committed(source.kafka.bootstrap_servers, topic)
            read = _avro(client)
            assert read(key or b"", topic, MessageField.KEY) == {"id": 1}
            after = read(value or b"", topic, MessageField.VALUE)["after"]
            assert after == {"id": 1, "n": 2}


def test_a_registry_that_is_down_is_waited_for_and_nothing_is_lost(
    source: Source, tmp_path: Path
) -> None:
    own = Registry(tmp_path)
    source.run("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    settings: dict[str, Any] = {"registry": {"url": own.url, "deadline_ms": patient_ms(340)}}
    bridge = source.registered(own, **settings, connect_deadline_ms=patient_ms(20_000)).start()
    try:
        eventually(
            lambda: "the schema registry does not answer" in bridge.output,
            what="the bridge says what it waits for",
            timeout_s=60,
        )
        own.start()
        bridge.streaming()
        source.run("INSERT INTO a VALUES (1)")
        bridge.caught_up()
        lost, sessions = bridge.output.count("session lost"), bridge.sessions
        own.freeze()
        source.run("INSERT INTO a VALUES (2)", "INSERT INTO b VALUES (1)")
        eventually(
            lambda: bridge.output.count("session lost") > lost,
            what="the session ends",
            timeout_s=60,
        )
        own.thaw()
        eventually(lambda: bridge.sessions > sessions, what="another session", timeout_s=60)
        bridge.caught_up()
        assert source.rows(own, "a") == [{"id": 1}, {"id": 2}]
        assert source.rows(own, "b") == [{"id": 1}]
    finally:
        own.stop()


class _Front(BaseHTTPRequestHandler):
    """Passes on what comes with the right user and password."""

    registry = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

    def _pass_on(self, body: bytes | None) -> None:
        known = f"Basic {base64.b64encode(b'bridge:Pw:9f3a').decode()}"
        if self.headers["Authorization"] != known:
            self._answer(401, b'{"error_code": 401, "message": "who are you"}')
            return
        kind = self.headers["Content-Type"] or "application/json"
        url = f"{self.registry}{self.path}"
        request = urllib.request.Request(url, body, {"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=patient(30)) as answer:
            self._answer(answer.status, answer.read())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def secured(schemas: Registry, tmp_path: Path) -> Iterator[tuple[str, Certificates]]:
    """The URL of the registry behind TLS and a password, and the certificates."""
    certificates = Certificates(tmp_path / "certificates")
    certificates.make()
    handler = type("Front", (_Front,), {"registry": schemas.url.removesuffix(API)})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.path("server-both.pem"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://localhost:{server.server_port}{API}", certificates
        server.shutdown()
        thread.join()


@pytest.mark.long
def test_by_tls_and_password(
    source: Source, schemas: Registry, secured: tuple[str, Certificates]
) -> None:
    url, certificates = secured
    source.run("CREATE TABLE t (id int PRIMARY KEY)")
    right = {
        "url": url,
        "username": "bridge",
        "password": "Pw:9f3a",
        "ca_file": str(certificates.path("authority.pem")),
    }
    bridge = source.registered(schemas, registry=right).start().streaming()
    source.run("INSERT INTO t VALUES (1)")
    bridge.caught_up()
    assert bridge.stop() == 0
    assert source.rows(schemas, "t") == [{"id": 1}]
    assert "9f3a" not in bridge.output
    wrong = source.registered(schemas, registry={**right, "password": "other"}).start()
    assert wrong.exit_code() == ExitCode.PRIVILEGE_MISSING
    assert "registry.password" in wrong.output and "other" not in wrong.output
    stranger = {**right, "ca_file": str(certificates.path("stranger.pem"))}
    distrusting = source.registered(
        schemas, registry=stranger, connect_deadline_ms=patient_ms(700)
    ).start()
    assert distrusting.exit_code() == ExitCode.REGISTRY_UNREACHABLE
    assert "registry.ca_file" in distrusting.output


@pytest.mark.long
def test_a_format_without_a_registry_is_refused_by_name(source: Source) -> None:
    bridge = source.bridge(source.database, formats=dict.fromkeys(PARTS, "avro")).start()
    assert bridge.exit_code() == ExitCode.SETTINGS
    assert "registry.url" in bridge.output


@pytest.mark.long
def test_a_registry_that_does_not_come_ends_in_an_exit_code(source: Source, tmp_path: Path) -> None:
    bridge = source.registered(Registry(tmp_path), connect_deadline_ms=patient_ms(700)).start()
    assert bridge.exit_code() == ExitCode.REGISTRY_UNREACHABLE


@pytest.mark.long
def test_one_schema_is_registered_by_two_at_the_same_time(schemas: Registry) -> None:
    """The registry refuses one with 409, which it answers to an incompatible schema, too."""
    together = threading.Barrier(2)
    settings = RegistrySettings(url=schemas.url, deadline_ms=60_000)

    def registered() -> list[int]:
        mine = SchemaRegistry(settings)
        found = []
        try:
            for number in range(20):
                together.wait(patient(120))
                found.append(mine.register(f"two-{number}", '"string"', "AVRO"))
        except SlotbridgeError:
            together.abort()
            raise
        finally:
            mine.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(registered) for _ in range(2))
    assert first.result() == second.result()
