"""What Confluent's reader makes of Protobuf is what the JSON says, for any row; and the .proto."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import given

from schemas.errors import BadInput
from schemas.settings import ValueSettings
from services.bridge.events.errors import UnfitValue
from services.bridge.events.formats import avro, connect, protobuf
from services.bridge.events.formats.strict_encoders import StrictEncoders
from services.bridge.events.formats.type_schemas import column_schema
from services.bridge.pgoutput.type_names import PgType
from services.bridge.recovery.event_positions import EventPosition, position_of
from tests.promises.bridge.values.connect_documents import meaning
from tests.promises.bridge.values.documents import KINDS, rows
from tests.promises.bridge.values.forms import DEBEZIUM, OIDS
from tests.promises.bridge.values.protobuf_reader import compiled, document

CONTEXT = SerializationContext("b.s.t", MessageField.VALUE)


@pytest.fixture(scope="module")
def client() -> Iterator[SchemaRegistryClient]:
    """A registry in this process."""
    with SchemaRegistryClient.new_client({"url": "mock://schemas"}) as made:
        yield made


@given(made=rows())
def test_a_row_is_read_as_its_json(
    client: SchemaRegistryClient, made: tuple[connect.Schema, str]
) -> None:
    schema, text = made
    file = protobuf.proto_file(schema)
    serialized = base64.b64encode(file.SerializeToString()).decode()
    schema_id = client.register_schema("s", Schema(serialized, "PROTOBUF"))
    data = protobuf.serializer(schema, schema_id)(text)
    strategy = {"subject.name.strategy.type": "TOPIC", "use.deprecated.format": False}
    read = ProtobufDeserializer(protobuf.message_class(file), strategy, client)
    found = document(read(data, CONTEXT))
    assert repr(found) == repr(meaning(dict(schema), json.loads(text)))
    assert position_of(data, "b") == EventPosition(8, 2, 3)
    assert position_of(data, "another") is None


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"\x0a\1c\x10", b"\x0a\1c\x12\xff", b"\x0a\1c\x10\1"]
)
def test_a_message_that_is_not_an_event_has_no_position(content: bytes) -> None:
    assert position_of(b"\0\0\0\0\1\0" + content, "b") is None


def test_the_text_of_the_file_is_its_descriptor(tmp_path: Path) -> None:
    """As protoc compiles it, also with columns named as messages, and names it does not allow."""
    encoders = StrictEncoders(ValueSettings(**DEBEZIUM))
    columns = {
        f"{kind}{typmod}": column_schema(encoders, OIDS[kind], typmod) for kind, typmod in KINDS
    }
    columns |= {"Decimal": connect.decimal(2), 'ß "1".\t': connect.STRING, "Source": connect.POINT}
    columns |= {"hstore": connect.HSTORE_MAP, "[x]": connect.VARIABLE_SCALE, "a_b": connect.STRING}
    columns |= {"vectors": connect.array(connect.array(connect.plain("double", optional=False)))}
    for schema in (connect.envelope("1b.public.t", columns), connect.key("b.s.t", columns)):
        file = protobuf.proto_file(schema)
        found = compiled(protobuf.schema_text(schema), tmp_path)
        found.name = file.name
        for one in (*found.message_type, *file.message_type):
            _without_json_names(one)
        assert found == file


def _without_json_names(message: Any) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _without_json_names(nested)


def test_the_json_of_a_message_has_the_columns_names(tmp_path: Path) -> None:
    schema = connect.key("b.s.t", {"größe_x": connect.STRING, "aB": connect.STRING})
    (message,) = compiled(protobuf.schema_text(schema), tmp_path).message_type
    assert [field.json_name for field in message.field] == ["größe_x", "aB"]


def test_a_columns_number_hangs_on_its_name_alone() -> None:
    def numbers(*columns: str) -> dict[str, int]:
        schema = connect.key("b.s.t", dict.fromkeys(columns, connect.STRING))
        return {f.json_name: f.number for f in protobuf.proto_file(schema).message_type[0].field}

    assert numbers("a", "b", "c") == numbers("c", "a") | numbers("b")
    assert numbers("id", "größe") == {"id": 22459311, "größe": 31568758}


def test_a_columns_number_changes_with_its_unit_of_time() -> None:
    def number(kind: str, typmod: int, mode: str) -> int:
        settings = ValueSettings.model_validate({"time_precision": mode})
        column = column_schema(StrictEncoders(settings), OIDS[kind], typmod)
        file = protobuf.proto_file(connect.key("b.s.t", {"at": column}))
        return file.message_type[0].field[0].number

    for kind in ("time", "timestamp", "_timestamp"):
        milli, micro = number(kind, 3, "adaptive"), number(kind, 6, "adaptive")
        nano = number(kind, 6, "nanoseconds")
        assert len({milli, micro, nano}) == 3
        assert number(kind, -1, "microseconds") == micro


@pytest.mark.parametrize("first", ["drawn", "located"])
def test_a_table_may_have_native_and_postgis_geometries(first: str) -> None:
    encoders = StrictEncoders(ValueSettings(**DEBEZIUM))
    encoders.learn([PgType(90_001, "public", "geometry", "b", extension="postgis")])
    point = b"0101000020E6100000000000000000F03F00000000000000C0"
    texts = {"drawn": b"((1,2),(3,4))", "located": point}
    oids = {"drawn": OIDS["path"], "located": 90_001}
    names = sorted(texts, key=lambda name: name != first)
    columns = {name: column_schema(encoders, oids[name], -1) for name in names}
    row = {name: json.loads(encoders.of(oids[name], -1).encode(texts[name])) for name in names}
    schema = connect.key("b.s.t", columns)
    located = {**row["located"], "extensions": None}
    expected = meaning(dict(schema), {**row, "located": located})
    data = protobuf.serializer(schema, 1)(json.dumps(row))
    message = protobuf.message_class(protobuf.proto_file(schema)).FromString(data[6:])
    assert document(message) == expected
    data = avro.serializer(schema, 1)(json.dumps(row))
    parsed = fastavro.parse_schema(avro.avro_schema(schema))
    assert fastavro.schemaless_reader(io.BytesIO(data[5:]), parsed, None) == expected


def test_names_that_protobuf_does_not_tell_apart() -> None:
    with pytest.raises(BadInput, match="a b and a_b have the same name in Protobuf"):
        protobuf.proto_file(connect.key("b.s.t", {"a b": connect.STRING, "a_b": connect.STRING}))


def test_value_that_does_not_fit_its_schema_is_refused() -> None:
    schema = connect.key("b.s.t", {"n": connect.needed(connect.plain("int64"))})
    serialize = protobuf.serializer(schema, 1)
    for row in ({"n": 2**63}, {"n": "text"}, {"n": None}, {}):
        with pytest.raises(UnfitValue, match="Protobuf"):
            serialize(json.dumps(row))
