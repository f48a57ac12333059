"""Avro and Protobuf of the bridge, read back as the text that the bridge writes in plain JSON."""

import json
from collections.abc import Mapping
from json.encoder import encode_basestring as quoted
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.settings import ValueSettings
from services.bridge.events.errors import UnfitValue
from services.bridge.events.formats import avro, connect, protobuf
from services.bridge.events.formats.names import adjusted_column
from services.bridge.events.formats.strict_encoders import StrictEncoders
from services.bridge.events.formats.type_schemas import column_schema
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.type_names import PgType
from spark_consumers.formats.avro_text import avro_reader
from spark_consumers.formats.floats import double_text, real_text
from spark_consumers.formats.json_forms import UnreadableRecord
from spark_consumers.formats.proto_files import proto_descriptor
from spark_consumers.formats.protobuf_text import protobuf_reader
from tests.promises.bridge.strategies import names
from tests.promises.bridge.values.documents import KINDS, SOURCE, STORED_APART, texts
from tests.promises.bridge.values.forms import DEBEZIUM, OIDS
from tests.promises.bridge.values.two_publishers import OTHER_MODES

HSTORE, VECTOR, HALFVEC, SPARSEVEC, ARRAYS = 90_001, 90_002, 90_003, 90_004, 90_100
LEARNED = [
    PgType(HSTORE, "public", "hstore", "b", extension="hstore"),
    *(PgType(oid, "public", name, "b", extension="vector") for oid, name in
      ((VECTOR, "vector"), (HALFVEC, "halfvec"), (SPARSEVEC, "sparsevec"))),
]  # fmt: skip
reals = st.floats(width=32).map(lambda x: real_text(x).strip('"'))
finite_reals = st.floats(width=32, allow_nan=False, allow_infinity=False).map(real_text)
doubles = st.floats().map(lambda x: double_text(x).strip('"'))
vectors = st.lists(finite_reals, min_size=1).map(lambda items: f"[{','.join(items)}]")
lists = st.lists(texts).map(
    lambda items: "{" + ",".join(f'"{t}"' for t in (_escaped(t) for t in items)) + "}"
)
TYPES: dict[tuple[int, int], st.SearchStrategy[str]] = {
    **{(OIDS[kind], typmod): values for (kind, typmod), values in KINDS.items()},
    (OIDS["float8"], -1): doubles,
    (OIDS["float4"], -1): reals,
    (OIDS["_float4"], -1): st.lists(reals).map(lambda items: f"{{{','.join(items)}}}"),
    (OIDS["_float8"], -1): st.lists(doubles).map(lambda items: f"{{{','.join(items)}}}"),
    (OIDS["_text"], -1): lists,
    (OIDS["_bytea"], -1): st.just(r'{"\\x00ff",NULL}'),
    (OIDS["_numeric"], -1): st.just("{1.50,NULL,-3}"),
    (OIDS["_int4"], -1): st.just("{1,NULL,-3}"),
    (OIDS["interval"], -1): st.just("1 day 02:03:04"),
    (OIDS["time"], -1): st.times().map(str),
    (HSTORE, -1): st.just(r'"a"=>"b", "é \""=>NULL'),
    (VECTOR, -1): vectors,
    (HALFVEC, -1): vectors,
    (SPARSEVEC, -1): st.just("{1:1.5,3:1e+06}/5"),
}
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "debezium": DEBEZIUM,
    "other": OTHER_MODES,
}


class Made(NamedTuple):
    """A value, its schema, and the text of its row in plain JSON."""

    schema: connect.Schema
    strict: str
    after: str


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def without_brackets(name: str) -> bool:
    """Protobuf keeps such names for extensions: the column is refused (docs/guides/tables.md)."""
    return not (name.startswith("[") and name.endswith("]"))


@st.composite
def rows(draw: st.DrawFn, mode: str, *, in_protobuf: bool = False) -> Made:
    """A row of any columns that the format can tell, in the modes of that name."""
    settings = ValueSettings(**MODES[mode])
    strict, plain = StrictEncoders(settings), Encoders(settings)
    strict.learn(LEARNED)
    plain.learn(LEARNED)
    kinds = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=8))
    count = len(kinds)
    fit = names.filter(without_brackets) if in_protobuf else names
    some = draw(st.lists(fit, min_size=count, max_size=count, unique_by=adjusted_column))
    columns: dict[str, connect.Schema] = {}
    given_texts, expected = {}, {}
    for name, kind in zip(some, kinds, strict=True):
        schema = columns[name] = column_schema(strict, *kind)
        text = draw(TYPES[kind] | st.none() | st.just("unavailable"))
        bits = schema.get("name", "") == f"{connect.SEMANTIC}.Bits"
        apart = schema["type"] in STORED_APART and not (bits and in_protobuf)
        if text == "unavailable" and apart:
            given_texts[name] = strict.of(*kind).unavailable
            expected[name] = plain.of(*kind).unavailable
            continue
        text = draw(TYPES[kind]) if text == "unavailable" else text
        try:
            form = "null" if text is None else strict.of(*kind).encode(text.encode())
        except UnfitValue:
            form = "null"
        given_texts[name] = expected[name] = form
    row, after = ("{" + ",".join(f"{quoted(n)}:{t}" for n, t in found.items()) + "}"
                  for found in (given_texts, expected))  # fmt: skip
    before = draw(st.sampled_from(["null", row]))
    value = (
        f'{{"op":"c","source":{json.dumps(SOURCE)},"before":{before},"after":{row},'
        '"transaction":null,"ts_ms":1,"ts_us":2,"ts_ns":3}'
    )
    return Made(connect.envelope("b.s.t", columns), value, after)


def check(made: Made, text: str) -> None:
    """The members are those of the value; the row's text is that of plain JSON."""
    found, expected = json.loads(text), json.loads(made.strict)
    assert found["op"] == "c" and found["source"] == expected["source"]
    assert found["transaction"] is None and found["ts_ns"] == 3
    assert f'"after":{made.after}' in text
    assert found["before"] == (None if expected["before"] is None else json.loads(made.after))


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_avro_is_read_as_plain_json(mode: str, data: st.DataObject) -> None:
    made = data.draw(rows(mode))
    written = avro.serializer(made.schema, 7)(made.strict)
    check(made, avro_reader(avro.schema_text(made.schema))(written[5:]))


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_protobuf_is_read_as_plain_json(mode: str, data: st.DataObject) -> None:
    made = data.draw(rows(mode, in_protobuf=True))
    written = protobuf.serializer(made.schema, 7)(made.strict)
    check(made, protobuf_reader(protobuf.schema_text(made.schema))(written[5:]))


COLUMNS = {"größe": connect.STRING, 'a"b\\c': connect.decimal(2), "n": connect.plain("int32")}


@pytest.mark.parametrize("module", [avro, protobuf])
def test_a_key_is_read_with_the_names_of_its_columns(module: Any) -> None:
    schema = connect.key("bank.public.größe 1", COLUMNS)
    text = '{"größe":"x","a\\"b\\\\c":"AQI=","n":null}'
    read = (avro_reader if module is avro else protobuf_reader)(module.schema_text(schema))
    assert read(module.serializer(schema, 1)(text)[5:]) == text


@given(st.binary(max_size=40))
def test_bytes_that_do_not_fit_are_refused_with_one_error(content: bytes) -> None:
    schema = connect.envelope("b.s.t", {"n": connect.plain("int32"), "t": connect.STRING})
    for read in (
        avro_reader(avro.schema_text(schema)),
        protobuf_reader(protobuf.schema_text(schema)),
    ):
        try:
            json.loads(read(content))
        except UnreadableRecord as error:
            assert "the" in str(error)


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (avro_reader, "not JSON"),
        (avro_reader, '"unknown"'),
        (avro_reader, '{"type":"enum","name":"e","symbols":["A"]}'),
        (avro_reader, '["null","string","int"]'),
        (protobuf_reader, ""),
        (protobuf_reader, 'syntax = "proto3";'),
        (protobuf_reader, "message A {"),
        (protobuf_reader, "message A { map<string, string> m = 1; }"),
        (protobuf_reader, "message A { .b.C c = 1; }"),
        (protobuf_reader, "message A { string a = x; }"),
        (protobuf_reader, "enum E { A = 0; }"),
        (protobuf_reader, "§"),
    ],
)
def test_a_schema_that_the_bridge_does_not_write_is_refused(reader: Any, text: str) -> None:
    with pytest.raises(UnreadableRecord, match="the bridge does not write"):
        reader(text)


def test_a_registry_may_lay_a_proto_file_out_anew() -> None:
    schema = connect.key("b.s.t", COLUMNS)
    text = protobuf.schema_text(schema)
    other = "// formatted\n" + text.replace(";\n", ';\n\n  option java_package = "x";\n', 1)
    other = other.replace(" = ", "=").replace("{\n", "{ /* a\nb */ reserved 5 ;")
    assert proto_descriptor(other) == proto_descriptor(text)
