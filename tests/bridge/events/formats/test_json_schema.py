"""What Confluent's reader makes of JSON with a JSON Schema is what the JSON says, for any row."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext, SerializationError
from hypothesis import given

from schemas import wire
from schemas.settings import ValueSettings
from services.bridge.events.errors import UnfitValue
from services.bridge.events.formats import connect, json_schema
from services.bridge.events.formats.strict_encoders import FiniteEncoders
from services.bridge.recovery.event_positions import EventPosition, position_of
from tests.promises.bridge.values.documents import rows
from tests.promises.bridge.values.forms import DEBEZIUM, OIDS

CONTEXT = SerializationContext("b.s.t", MessageField.VALUE)
Reading = tuple[SchemaRegistryClient, JSONDeserializer]


@pytest.fixture(scope="module")
def reading() -> Iterator[Reading]:
    """A registry in this process, and a reader that takes schemas from it and validates."""
    with SchemaRegistryClient.new_client({"url": "mock://schemas"}) as client:
        yield client, JSONDeserializer(None, schema_registry_client=client)


def record(client: SchemaRegistryClient, schema: connect.Schema, text: str) -> bytes:
    """The bytes of a value whose schema is registered."""
    found = client.register_schema("s", Schema(json_schema.schema_text(schema), "JSON"))
    return wire.text_as_bytes(json_schema.opening(found) + text)


@given(rows(FiniteEncoders))
def test_a_row_is_valid_and_read_as_its_json(
    reading: Reading, made: tuple[connect.Schema, str]
) -> None:
    schema, text = made
    client, read = reading
    data = record(client, schema, text)
    found: Any = read(data, CONTEXT)
    assert repr(found) == repr(json.loads(text))
    assert position_of(data, "b") == EventPosition(8, 2, 3)
    assert position_of(data, "another") is None


def test_a_reader_refuses_what_does_not_fit(reading: Reading) -> None:
    client, read = reading
    schema = connect.key("b.s.t", {"id": connect.needed(connect.plain("int64"))})
    found: Any = read(record(client, schema, '{"id":1}'), CONTEXT)
    assert found == {"id": 1}
    for text in ("{}", '{"id":"1"}', '{"id":null}', '{"id":1,"more":2}'):
        with pytest.raises(SerializationError):
            read(record(client, schema, text), CONTEXT)


def test_the_schema_is_that_of_confluents_converter() -> None:
    """Names and properties as JsonSchemaData (converter 7.x) has them, but for `required`."""
    columns = {"id": connect.needed(connect.plain("int16")), "at": connect.plain("int32", "x.Date")}
    assert json.loads(json_schema.schema_text(connect.key("b.s.t", columns))) == {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "title": "b.s.t.Key",
        "properties": {
            "id": {"type": "integer", "connect.type": "int16", "connect.index": 0},
            "at": {
                "oneOf": [
                    {"type": "null"},
                    {
                        "type": "integer",
                        "title": "x.Date",
                        "connect.type": "int32",
                        "connect.version": 1,
                    },
                ],
                "connect.index": 1,
            },
        },
        "required": ["id"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("kind", "value"),
    [("float8", b"NaN"), ("_float4", b"{1,-Infinity}"), ("point", b"(1,Infinity)")],
)
def test_a_number_that_is_not_finite_is_refused(kind: str, value: bytes) -> None:
    with pytest.raises(UnfitValue, match="NaN"):
        FiniteEncoders(ValueSettings(**DEBEZIUM)).of(OIDS[kind], -1).encode(value)
