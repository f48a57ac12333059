"""`slotbridge adopt` of topics whose keys and values have schemas, with a real Debezium."""

import json
import random
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from schemas.errors import ExitCode
from services.testbed.processes import Processes
from services.testbed.users import server_user
from tests.promises.adoption.ground import Taken, connectors, kill_at_random
from tests.promises.adoption.load import KEYED, Decode, plain_json
from tests.promises.bridge.reading import committed
from tests.providers.interface import Broker, Provider
from tests.providers.registry import Registry, registry

NUMBERED = """
    CREATE TABLE numbered (
        id serial, code text DEFAULT 'none', version bigint NOT NULL DEFAULT 7,
        PRIMARY KEY (id, code)
    );
    CREATE TRIGGER told AFTER INSERT OR UPDATE OR DELETE ON numbered
        FOR EACH ROW EXECUTE FUNCTION told('id', 'version');
    ALTER PUBLICATION pub ADD TABLE numbered;
"""
"""A table whose key has defaults, which Debezium writes into the key's schema."""
JSON = {"": "org.apache.kafka.connect.json.JsonConverter"}
"""With its default: schemas.enable=true."""
PLAIN = {**JSON, ".schemas.enable": "false"}
FORMS = {
    "schemas": ("json_schema_envelope", "json_schema_envelope", "connect"),
    "avro": ("avro", "avro", "connect"),
    "mixed": ("json", "avro", None),
}
"""What is adopted -> key_format, value_format, key_bytes."""


@pytest.fixture(scope="module")
def schemas(servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry with the rule that Confluent's has by default."""
    with registry(tmp_path_factory.mktemp("registry")) as made:
        with SchemaRegistryClient({"url": made.url}) as client:
            client.set_compatibility(level="BACKWARD")
        yield made


def converters(form: str, schemas: Registry) -> dict[str, str]:
    avro = {
        "": "io.apicurio.registry.utils.converter.AvroConverter",
        ".apicurio.registry.url": schemas.native_url,
        ".apicurio.registry.as-confluent": "true",
        ".apicurio.registry.use-id": "contentId",
        ".apicurio.registry.headers.enabled": "false",
        ".apicurio.registry.auto-register": "true",
    }
    key, value = {"schemas": (JSON, JSON), "avro": (avro, avro), "mixed": (PLAIN, avro)}[form]
    return {
        f"{part}.converter{name}": text
        for part, options in (("key", key), ("value", value))
        for name, text in options.items()
    }


def consumer(client: SchemaRegistryClient) -> Decode:
    """Read every format; Avro by the newest schema of its subject, whatever its writer had."""
    readers: dict[str, AvroDeserializer] = {}

    def decode(data: bytes, topic: str, part: str) -> Any:
        if data[:1] != b"\0":
            return plain_json(data, topic, part)
        subject = f"{topic}-{part}"
        if subject not in readers:
            text = client.get_latest_version(subject).schema.schema_str
            readers[subject] = AvroDeserializer(client, text)
        field = MessageField.KEY if part == "key" else MessageField.VALUE
        return readers[subject](data, SerializationContext(topic, field))

    return decode


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_topics_with_schemas_are_continued_key_by_key(
    form: str, schemas: Registry, pair: Provider, kafka: Broker, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    made = partial(connectors, pair.primary, kafka, tmp_path / "c")
    with (
        SchemaRegistryClient({"url": schemas.url}) as client,
        Processes(tmp_path, server_user()) as processes,
        made(processes, random.Random(3), 1, converters=converters(form, schemas)) as (
            debezium,
            (one,),
        ),
    ):
        one.decode = consumer(client)
        run(one, NUMBERED, "INSERT INTO numbered SELECT FROM generate_series(1, 20)")
        kill_at_random(debezium, [one], random.Random(11), 3)
        assert one.load is not None
        one.translate()
        require_formats(one, form)
        if form != "schemas":
            _refused_by_the_registry(one, client)
        one.load.go()
        run(one, "UPDATE numbered SET version = 8 WHERE id < 15")
        done = one.adopt()
        assert done.returncode == 0, done.stderr
        assert sum(json.loads(done.stdout)["left_out"].values()) > 0
        bridge = one.new_bridge().streaming()
        one.load.more(30)
        bridge.kill()
        run(one, "DELETE FROM numbered WHERE id > 18", "INSERT INTO numbered DEFAULT VALUES")
        bridge.start().streaming()
        one.load.more(30)
        found = one.compared()
        assert (found.lost, found.twice, found.wrong) == (0, 0, 0), found.faults
        assert found.ours > 0 and found.theirs > 0
        for table in KEYED.keys() & {"counters", "numbered"}:
            require_keys_of_one_form(one, table)
        refused = one.release()
        assert (refused.returncode == ExitCode.SETTINGS) == (form != "mixed"), refused.stderr


def require_formats(one: Taken, form: str) -> None:
    """Require that the connector's configuration says these formats."""
    found: Mapping[str, Any] = yaml.safe_load(one.config.read_text())["kafka"]
    names = ("key_format", "value_format", "key_bytes")
    assert tuple(found.get(name) for name in names) == FORMS[form]


def _refused_by_the_registry(one: Taken, client: SchemaRegistryClient) -> None:
    """Require that a rule which forbids the bridge's schema is told before anything is changed."""
    subject = f"{one.prefix}.public.numbered-value"
    versions = client.get_versions(subject)
    client.set_compatibility(subject, "FULL")
    refused = one.adopt()
    assert refused.returncode == ExitCode.SCHEMA_REFUSED, refused.stderr
    assert subject in refused.stderr and "BACKWARD" in refused.stderr
    assert client.get_versions(subject) == versions
    client.set_compatibility(subject, "BACKWARD")


def require_keys_of_one_form(one: Taken, table: str) -> None:
    """Require that a key has the same bytes, hence one partition, of Debezium and the bridge."""
    topic = f"{one.prefix}.public.{table}"
    keys: dict[str, set[tuple[bytes, int]]] = {}
    for partition, key, _ in committed(one.broker.bootstrap_servers, topic):
        name = json.dumps(one.decode(key or b"", topic, "key"))
        keys.setdefault(name, set()).add((key or b"", partition))
    assert keys and all(len(found) == 1 for found in keys.values())


def run(one: Taken, *statements: str) -> None:
    with psycopg.connect(one.conninfo, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())
