"""CloudEvents whose data or keys have their schemas in a real registry, read by the CNCF's SDK."""

import io
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import fastavro
import psycopg
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.serialization import MessageField

from services.bridge.events.formats.protobuf import message_class
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import read_committed
from tests.promises.bridge.test_cloud_events import read
from tests.promises.bridge.test_schema_registry import READERS
from tests.promises.bridge.values.protobuf_reader import compiled, document
from tests.providers.interface import Broker, Provider
from tests.providers.registry import Registry
from tests.providers.waiting import patient

CHANGES = (
    "INSERT INTO t SELECT i, 'n' || i FROM generate_series(1, 20) i",
    "UPDATE t SET note = NULL WHERE id = 3",
    "DELETE FROM t WHERE id = 4",
)


def schema_text(url: str) -> str:
    """The schema behind a dataschema URL, as any reader of CloudEvents gets it."""
    with urllib.request.urlopen(url, timeout=patient(30)) as answer:
        return str(json.load(answer)["schema"])


def decoded(form: str, schema: str, data: bytes) -> Any:
    """Data behind a schema's id, by the schema alone."""
    if form == "avro":
        return fastavro.schemaless_reader(io.BytesIO(data[5:]), json.loads(schema), None)
    with tempfile.TemporaryDirectory() as folder:
        return document(message_class(compiled(schema, Path(folder))).FromString(data[6:]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "key_format", "value_format"),
    [
        ("binary", "json", "avro"),
        ("binary", "json", "protobuf"),
        ("binary", "avro", "avro"),
        ("structured", "avro", "json"),
        ("structured", "protobuf", "json"),
    ],
)
def test_each_event_is_read_by_the_sdk_and_its_data_by_its_dataschema(
    pair: Provider,
    fresh_database: str,
    kafka: Broker,
    new_bridge: NewBridge,
    schemas: Registry,
    mode: str,
    key_format: str,
    value_format: str,
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    formats = {"cloudevents": mode, "key_format": key_format, "value_format": value_format}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        bridge = new_bridge(conninfo, formats=formats, registry={"url": schemas.url})
        bridge.start().streaming()
        for statement in CHANGES:
            connection.execute(statement.encode())
    bridge.caught_up()
    topic = f"{bridge.prefix}.public.t"
    records = [one for one in read_committed(kafka.bootstrap_servers, [topic]) if one.value]
    found = {}
    with SchemaRegistryClient({"url": schemas.url}) as client:
        for record in records:
            # The SDK takes a key for text (docs/guides/formats.md).
            key = record.key if key_format == "json" else None
            event = read(key, record.value, record.headers)
            data: Any = event.get_data()
            if value_format != "json":
                assert event.get_datacontenttype() == f"application/{value_format}"
                assert isinstance(data, bytes) and (event.get_dataschema() or "").startswith("http")
                data = decoded(value_format, schema_text(event.get_dataschema() or ""), data)
            row = data["after"] or data["before"]
            key_read = json.loads(record.key or b"{}") if key_format == "json" else None
            if key_read is None:
                key_read = READERS[key_format](client)(record.key or b"", topic, MessageField.KEY)
            assert key_read["id"] == row["id"]
            assert event.get_subject() == "public.t"
            found[event.get_id()] = (data["op"], row["id"], row.get("note"))
    assert len(found) == len(records) == 22
    assert sorted(found.values())[-2:] == [("d", 4, None), ("u", 3, None)]
    assert sorted(found.values())[:2] == [("c", 1, "n1"), ("c", 2, "n2")]
    assert bridge.stop() == 0
