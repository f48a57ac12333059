"""Converters of a connector as formats and a registry, and keys as Kafka Connect writes them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from schemas import wire
from schemas.errors import OperatorNeeded
from schemas.naming import Naming
from schemas.settings import Settings
from schemas.shaping import FlatSettings, RouteSettings, ShapingSettings
from services.adoption.connector import connector_of
from services.adoption.converters import APICURIO, CONFLUENT, Converted, converted
from services.adoption.decoding import decoder, form_of
from services.adoption.translation import differences, translate
from services.bridge.events import fields
from services.bridge.events.formats import avro, connect, connect_keys
from services.bridge.events.topic_owners import TopicOwners
from services.bridge.recovery.event_positions import KafkaRecord, position_of, position_of_record
from tests.adoption.test_connector import CONFIG, WORKER

JSON = "org.apache.kafka.connect.json.JsonConverter"
CONFLUENTS = {"": CONFLUENT, ".schema.registry.url": "https://one:8081/, https://two:8081"}
APICURIOS = {
    "": APICURIO,
    ".apicurio.registry.url": "http://a:8080/apis/registry/v2",
    ".apicurio.registry.as-confluent": "true",
    ".apicurio.registry.use-id": "contentId",
    ".apicurio.registry.headers.enabled": "false",
}
OUR_KEY = connect.key(
    "p.public.t",
    {"id": connect.plain("int32", optional=False), "code": connect.plain("string", optional=False)},
)
THEIR_JSON = (
    b'{"schema":{"type":"struct","fields":[{"type":"int32","optional":false,"default":0,"field":'
    b'"id"},{"type":"string","optional":false,"default":"n","field":"code"}],"optional":false,'
    b'"name":"p.public.t.Key"},"payload":{"id":1,"code":",\\"payload\\":"}}'
)
THEIR_AVRO = json.dumps(
    {
        "type": "record",
        "name": "Key",
        "namespace": "p.public.t",
        "fields": [
            {"name": "id", "type": {"type": "int", "connect.default": 0}, "default": 0},
            {"name": "code", "type": {"type": "string", "connect.default": "n"}, "default": "n"},
        ],
        "connect.name": "p.public.t.Key",
    }
)


def of(key: dict[str, str], value: dict[str, str]) -> Converted:
    named = {"key": key, "value": value}
    config = {
        f"{part}.converter{name}": text
        for part, options in named.items()
        for name, text in options.items()
    }
    return converted(connector_of({"name": "c", "config": config}), [])


def test_the_default_of_jsonconverter_is_json_with_schemas() -> None:
    found = of({"": JSON}, {"": JSON})
    assert found.refusals == [] and found.registry == {}
    whole = "json_schema_envelope"
    assert found.kafka == {"key_format": whole, "value_format": whole, "key_bytes": "connect"}


def test_confluents_converter_tells_its_registry_and_subjects() -> None:
    more = {
        ".basic.auth.credentials.source": "USER_INFO",
        ".basic.auth.user.info": "debezium:secret",
        ".auto.register.schemas": "true",
    }
    naming = "io.confluent.kafka.serializers.subject.TopicRecordNameStrategy"
    found = of(
        {**CONFLUENTS, **more, ".key.subject.name.strategy": naming},
        {**CONFLUENTS, **more, ".value.subject.name.strategy": naming},
    )
    assert found.refusals == []
    assert found.kafka["key_format"] == found.kafka["value_format"] == "avro"
    assert found.registry == {
        "url": "https://one:8081",
        "username": "debezium",
        "subject_naming": "topic_record",
    }
    assert not any("secret" in note for note in found.notes)


def test_apicurios_converter_tells_its_confluent_api() -> None:
    found = of({"": JSON, ".schemas.enable": "false"}, APICURIOS)
    assert found.refusals == []
    assert found.kafka == {"key_format": "json", "value_format": "avro"}
    assert found.registry == {"url": "http://a:8080/apis/ccompat/v7", "subject_naming": "topic"}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (CONFLUENTS, APICURIOS, "differ in their registry"),
        ({"": CONFLUENT}, CONFLUENTS, "schema.registry.url is missing"),
        ({**CONFLUENTS, ".use.latest.version": "true"}, CONFLUENTS, "the bridge has only false"),
        ({**CONFLUENTS, ".key.subject.name.strategy": "org.X"}, CONFLUENTS, "no counterpart"),
        (
            {**CONFLUENTS, ".schema.registry.ssl.keystore.location": "x"},
            CONFLUENTS,
            "no counterpart",
        ),
        ({**APICURIOS, ".apicurio.registry.use-id": "globalId"}, APICURIOS, "only contentid"),
        ({**APICURIOS, ".apicurio.registry.headers.enabled": "true"}, APICURIOS, "only false"),
        (
            {k: v for k, v in APICURIOS.items() if "headers" not in k},
            APICURIOS,
            "headers.enabled is not said",
        ),
        ({"": ""}, APICURIOS, "key.converter is not said"),
        (
            {"": "io.confluent.connect.protobuf.ProtobufConverter"},
            {"": JSON},
            "Protobuf are not read; let Debezium write to another prefix",
        ),
    ],
)
def test_converters_without_a_counterpart_are_refused(
    key: dict[str, str], value: dict[str, str], reason: str
) -> None:
    assert any(reason in refusal for refusal in of(key, value).refusals)


def test_translated_settings_with_a_registry_are_settings() -> None:
    config = {**CONFIG, **{f"value.converter{name}": text for name, text in CONFLUENTS.items()}}
    adjusted = {"schema.name.adjustment.mode": "avro", "field.name.adjustment.mode": "none"}
    found = translate(connector_of({"name": "x", **config, **adjusted}, WORKER))
    assert found.refusals == ()
    settings = Settings.model_validate(found.settings).model_dump()
    settings["registry"]["url"] = "https://elsewhere"
    assert [*differences(found.settings, settings)] == []
    settings["registry"]["subject_naming"] = "record"
    (told,) = differences(found.settings, settings)
    assert told.startswith("registry.subject_naming")
    columns = {**adjusted, "field.name.adjustment.mode": "avro"}  # keys are JSON
    (refusal,) = translate(connector_of({"name": "x", **config, **columns}, WORKER)).refusals
    assert refusal.startswith("field.name.adjustment.mode=avro")


def no_schema(_id: int) -> str:
    raise AssertionError("the registry is not asked")


def test_json_keys_have_the_schema_of_the_last_key() -> None:
    opening = connect_keys.opening(OUR_KEY, THEIR_JSON)
    assert THEIR_JSON.decode().startswith(opening) and '"default":0' in opening
    assert connect_keys.is_like(OUR_KEY, THEIR_JSON, no_schema)
    own = connect_keys.opening(OUR_KEY, None)
    assert own.startswith('{"schema":{"type":"struct"') and "default" not in own
    for other in (
        *(b"x", b"{}", b"\xff", b"5", b'{"schema":5,"payload":{}}', b'{"slotbridge":"settled"}'),
        THEIR_JSON.replace(b"int32", b"int64"),
        THEIR_JSON.replace(b'"field":"code"', b'"field":"kind"'),
    ):
        assert connect_keys.opening(OUR_KEY, other) == own
        assert not connect_keys.is_like(OUR_KEY, other, no_schema)


def test_tables_that_share_a_topic_would_take_the_schema_of_each_others_keys() -> None:
    """So that a row's key would depend on which table was last in the topic at the start."""
    one, other = (
        connect.key(f"p.public.{table}", {"id": connect.needed(connect.plain("int32"))})
        for table in ("one", "other")
    )
    last = f"{connect_keys.opening(other, None)}{{}}{connect_keys.CLOSING}".encode()
    assert connect_keys.opening(one, last) != connect_keys.opening(one, None)
    routes = [RouteSettings(tables="public.(?P<name>one|other)", topic="{prefix}.{name}")]
    own = Naming("p", ShapingSettings(routes=routes))
    shared = Naming("p", ShapingSettings(routes=[RouteSettings(tables=".*", topic="{prefix}.all")]))
    tables = [("public", "one"), ("public", "other")]
    TopicOwners(own, [], apart=True).require_apart(tables)
    TopicOwners(shared, [], apart=False).require_apart(tables)
    for known in ([], tables[:1]):
        with pytest.raises(OperatorNeeded, match="other would share its topic with"):
            TopicOwners(shared, known, apart=True).require_apart(tables)
    owners = TopicOwners(shared, tables[:1], apart=True)
    with pytest.raises(OperatorNeeded, match="other would share its topic with"):
        owners.claim(tables[1], shared.table(*tables[1]))


def test_avro_keys_have_the_id_of_the_last_key() -> None:
    last = wire.head(7) + b"\2\2n"
    texts = {7: THEIR_AVRO, 8: THEIR_AVRO.replace('"int"', '"long"'), 9: '"string"'}
    assert connect_keys.schema_id(OUR_KEY, last, texts.__getitem__) == 7
    assert avro.serializer(OUR_KEY, 7)('{"id":1,"code":"n"}') == last
    for other in (None, b"", b"\0\0", b"{}", wire.head(8), wire.head(9), wire.head(10)):
        assert connect_keys.schema_id(OUR_KEY, other, texts.__getitem__) is None


def test_avro_is_read_by_its_writers_schema() -> None:
    decode = decoder({7: THEIR_AVRO, 8: "{"}.__getitem__)
    assert decode(wire.head(7) + b"\2\2n") == {"id": 1, "code": "n"}
    assert decode(THEIR_JSON)["id"] == 1 and decode(b'{"a":1}') == {"a": 1}
    for other in (b"\2\2nn", b"\2", b""):
        with pytest.raises(ValueError, match="does not fit"):
            decode(wire.head(7) + other)
    with pytest.raises(ValueError, match="not one of Avro"):
        decode(wire.head(8))
    forms: list[Any] = [form_of(data) for data in (wire.head(1), THEIR_JSON, b"{}", b"x", b"[]")]
    assert forms == ["avro", "json_schema_envelope", "json", None, None]


LIKE_A_FLAT_ROW = b"\2\2c\2\n\2\x0c\2\x0e\0\x163.7.0.Final\x14postgresql\4pa"
"""Debezium's event of a row that begins with 'c', and NULL or numbers behind it."""
FLAT_OF_DEBEZIUM = b"\2\2c\2\n\2\x0c\2\x0e\2\2d"
"""The same by ExtractNewRecordState, which does not name the connector."""


def written_by(*names: str) -> Callable[[int], str]:
    own = [{"name": name, "type": ["null", "long"]} for name in names]
    return {1: json.dumps({"type": "record", "name": "Value", "fields": own})}.__getitem__


def test_debeziums_avro_has_no_position_of_the_bridge() -> None:
    """An insert, an update, and rows whose first columns look like fields of a flat row."""
    for content in (
        b"\0\2\2\n\0\x08none\0\0062026-11-27T07:01:37.485512Z\2\2\x163.7.0.Final\x14postgresql\4pa",
        b"\2\4\n\0\x08none\0\0061970-01-01T00:00:00.000000Z\0\0\x163.7.0.Final\x14postgresql\4pa",
    ):
        assert position_of(wire.head(1) + content, "pa", own=False) is None
    for content in (LIKE_A_FLAT_ROW, FLAT_OF_DEBEZIUM):
        value = wire.head(1) + content
        for names in (["before", "after"], ["__op", "a", "b", "c"], ["__op"]):
            found = position_of(value, "pa", own=False, schema_text=written_by(*names))
            assert found is None, names


def test_only_the_writers_schema_tells_flat_rows_from_debeziums_events() -> None:
    """Also where the columns of a flat row look like the source of Debezium's events."""
    value = wire.head(1) + LIKE_A_FLAT_ROW
    ours = written_by("__op", "__commit_lsn", "__seq", "__timeline", "a")
    assert position_of(value, "pa", own=False, schema_text=ours) == (5, 6, 7)
    for content in (LIKE_A_FLAT_ROW, FLAT_OF_DEBEZIUM):
        with pytest.raises(OperatorNeeded, match="only the schema registry tells"):
            position_of(wire.head(1) + content, "pa", own=False)
    with pytest.raises(OperatorNeeded, match=r"topic pa\.public\.t, offset 12"):
        record = KafkaRecord("pa.public.t", 12, None, value)
        position_of_record(record, "pa", outbox=False)
    columns = {name: connect.needed(connect.STRING) for name in ("kind", "system")}
    schema = connect.flat("pa.public.t", fields.schemas(FlatSettings()), columns)
    row = {"__op": "c", "__commit_lsn": 5, "__seq": 6, "__timeline": 7, "__deleted": "false"}
    made = avro.serializer(schema, 1)(json.dumps({**row, "kind": "postgresql", "system": "pa"}))
    text = avro.schema_text(schema)
    assert position_of(made, "pa", own=False, schema_text={1: text}.__getitem__) == (5, 6, 7)
