"""Schemas that fit their JSON: what is refused, and what stands for a value that the WAL lacks."""

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import ExitCode
from schemas.events import UNAVAILABLE
from schemas.kafka import KafkaSettings
from schemas.settings import ValueSettings
from schemas.shaping import ShapingSettings
from services.bridge.events.errors import UnfitValue, not_encoded
from services.bridge.events.formats.strict_encoders import StrictEncoders
from services.bridge.events.formats.table_format import PLAIN, Formats, encoders_for
from services.bridge.events.formats.type_schemas import column_schema
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.messages import Relation, RelationColumn
from services.bridge.pgoutput.type_names import PgType
from tests.promises.bridge.values.forms import DEBEZIUM, OIDS, numeric

RELATION = Relation(
    7,
    "public",
    "t",
    "d",
    (RelationColumn("id", 20, -1, True), RelationColumn("secret", 1700, -1, False)),
)


def settings(**formats: str) -> KafkaSettings:
    return KafkaSettings.model_validate(
        {"bootstrap_servers": "k:9092", "topic_prefix": "b", **formats}
    )


def envelope(kafka: KafkaSettings, **shaping: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The key and the value of an event of RELATION, both with the payload {}."""
    chosen = Shaping(ShapingSettings.model_validate(shaping), "b")
    formats = Formats(kafka, chosen.naming, encoders_for(kafka)())
    form = formats.of(chosen.plan(RELATION))
    return json.loads(form.key("{}")), json.loads(form.value("{}"))


@pytest.mark.parametrize(
    ("kind", "typmod", "value"),
    [
        ("numeric", -1, b"NaN"),
        ("numeric", numeric(10, 2), b"-Infinity"),
        ("timestamp", -1, b"294276-12-31 23:59:59.999999"),
        ("_int4", -1, b"{{1,2},{3,4}}"),
        ("_text", -1, b"[1:1][1:2]={{a,b}}"),
        ("_numeric", -1, b"{1,NaN}"),
    ],
)
def test_type_without_a_schema_is_refused_with_the_reason(
    kind: str, typmod: int, value: bytes
) -> None:
    encoders = StrictEncoders(ValueSettings(**DEBEZIUM))
    with pytest.raises(UnfitValue) as raised:
        encoders.of(OIDS[kind], typmod).encode(value)
    error = not_encoded(raised.value, "public.t", 5)
    assert error.exit_code == ExitCode.UNDECODABLE
    assert "public.t" in str(error) and "shaping.masks" in error.hint


@pytest.mark.parametrize("form", ["json_schema_envelope", "json_schema", "avro", "protobuf"])
def test_numbers_that_json_lacks_are_refused_where_connect_would_read_zero(form: str) -> None:
    """JsonConverter takes a text in place of a number for 0.0; the other formats hold NaN."""
    modes = {**DEBEZIUM, "decimal_handling": "double"}
    encoders = encoders_for(settings(value_format=form))(ValueSettings(**modes))
    for kind, value in (
        *(("float4", b"NaN"), ("float8", b"-Infinity"), ("_float8", b"{1,NaN}")),
        *(("numeric", b"NaN"), ("numeric", b"1" + b"0" * 400), ("point", b"(1,Infinity)")),
    ):
        encode = encoders.of(OIDS[kind], -1).encode
        if form.startswith("json"):
            with pytest.raises(UnfitValue) as raised:
                encode(value)
            assert "avro" in not_encoded(raised.value, "public.t", 5).hint
        else:
            assert '"' in encode(value)
    assert encoders.of(OIDS["float8"], -1).encode(b"-1.5e-7") == "-1.5e-7"


def test_a_sparse_vector_beyond_the_16_bits_of_its_schema_is_refused() -> None:
    encoders = StrictEncoders(ValueSettings(**DEBEZIUM))
    encoders.learn([PgType(90_001, "public", "sparsevec", "b", extension="vector")])
    encode = encoders.of(90_001, -1).encode
    assert encode(b"{1:1.5}/32767") == '{"dimensions":32767,"vector":[[1,1.5]]}'
    with pytest.raises(UnfitValue, match="16 bits"):
        encode(b"{1:1.5}/32768")


def test_nanoseconds_beyond_64_bits_are_refused_and_others_are_not() -> None:
    encode = StrictEncoders(ValueSettings(time_precision="nanoseconds")).of(OIDS["timestamp"], -1)
    assert encode.encode(b"2024-01-01 00:00:00") == "1704067200000000000"
    assert encode.encode(b"infinity") == str(2**63 - 1)
    with pytest.raises(UnfitValue):
        encode.encode(b"2500-01-01 00:00:00")


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("text", UNAVAILABLE),
        ("bytea", base64.b64encode(UNAVAILABLE.encode()).decode()),
        ("_text", [UNAVAILABLE]),
        ("_int8", list(UNAVAILABLE.encode())),
        ("_float8", list(UNAVAILABLE.encode())),
        ("varbit", base64.b64encode(UNAVAILABLE.encode()).decode()),
    ],
)
def test_the_placeholder_fits_the_schema(kind: str, found: Any) -> None:
    encoders = StrictEncoders(ValueSettings(**DEBEZIUM))
    assert json.loads(encoders.of(OIDS[kind], -1).unavailable) == found


def test_every_placeholder_can_be_told_from_values() -> None:
    """Of booleans, the bits of the text; of a numeric, the number of its bytes."""
    encoders = StrictEncoders(ValueSettings(**DEBEZIUM))
    bits = json.loads(encoders.of(OIDS["_bool"], -1).unavailable)
    number = int("".join("1" if bit else "0" for bit in bits), 2)
    assert number.to_bytes(len(bits) // 8, "big") == UNAVAILABLE.encode()
    whole = json.loads(encoders.of(OIDS["numeric"], -1).unavailable)
    assert base64.b64decode(whole["value"]) == UNAVAILABLE.encode()


def test_a_masked_column_is_text_and_a_key_of_ones_own_may_be_null() -> None:
    kafka = settings(key_format="json_schema_envelope", value_format="json_schema_envelope")
    key, value = envelope(kafka, masks={"public.t": {"secret": {"text": "x"}}})
    assert [(f["field"], f["optional"]) for f in key["schema"]["fields"]] == [("id", False)]
    row = next(f for f in value["schema"]["fields"] if f["field"] == "after")
    assert {f["field"]: f["type"] for f in row["fields"]} == {"id": "int64", "secret": "string"}
    key, _ = envelope(kafka, keys={"public.t": ["id"]})
    assert key["schema"]["fields"][0]["optional"]


def test_schemas_are_named_by_the_topic_or_where_it_is_shared_by_the_table() -> None:
    kafka = settings(key_format="json_schema_envelope", value_format="json_schema_envelope")
    assert envelope(kafka)[1]["schema"]["name"] == "b.public.t.Envelope"
    assert envelope(kafka, topic="x.{table}")[0]["schema"]["name"] == "x.t.Key"
    routes = [{"tables": ".*", "topic": "all"}]
    assert envelope(kafka, routes=routes)[0]["schema"]["name"] == "b.public.t.Key"


def test_plain_json_has_the_plain_encoders() -> None:
    assert encoders_for(settings()) is Encoders
    shaping = Shaping(ShapingSettings(), "b")
    assert Formats(settings(), shaping.naming, Encoders()).of(shaping.plan(RELATION)) is PLAIN


def test_a_key_may_have_a_schema_where_the_value_has_none() -> None:
    key, value = envelope(settings(key_format="json_schema_envelope"))
    assert key["payload"] == {} and value == {}


@pytest.mark.parametrize("oid", [100_000, 100_002])
def test_the_schema_of_a_key_does_not_change_with_an_enums_labels(oid: int) -> None:
    kafka = settings(key_format="json_schema_envelope", value_format="json_schema_envelope")
    columns = (RelationColumn("m", oid, -1, True),)
    plan = Shaping(ShapingSettings(), "b").plan(replace(RELATION, columns=columns))
    keys, values = set(), set()
    for labels in (("sad",), ("sad", "ok")):
        encoders = encoders_for(kafka)()
        moods = PgType(100_002, "public", "_mood", "b", element_oid=100_000)
        encoders.learn([PgType(100_000, "public", "mood", "e", labels=labels), moods])
        form = Formats(kafka, Shaping(ShapingSettings(), "b").naming, encoders).of(plan)
        keys.add(form.key("{}"))
        values.add(form.value("{}"))
    assert (len(keys), len(values)) == (1, 2)


def test_an_enum_tells_its_labels_and_an_unknown_type_is_a_string() -> None:
    encoders = StrictEncoders()
    encoders.learn([PgType(100_000, "public", "mood", "e", labels=("sad", "ok"))])
    found = column_schema(encoders, 100_000, -1)
    assert (found["name"], found["parameters"]) == ("io.debezium.data.Enum", {"allowed": "sad,ok"})
    assert column_schema(encoders, 100_001, -1)["type"] == "string"
