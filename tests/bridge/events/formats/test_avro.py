"""What Avro holds is what the JSON says, for any row; names that Avro does not allow."""

import io
import json
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import BadInput
from services.bridge.events.errors import UnfitValue
from services.bridge.events.formats import connect
from services.bridge.events.formats.avro import avro_schema, first_fields, serializer
from services.bridge.events.formats.names import adjusted
from services.bridge.recovery.event_positions import EventPosition, position_of
from tests.promises.bridge.values.connect_documents import meaning
from tests.promises.bridge.values.documents import rows


@given(rows(), st.integers(0, 2**31 - 1))
def test_a_row_is_decoded_as_its_json(made: tuple[connect.Schema, str], schema_id: int) -> None:
    schema, text = made
    data = serializer(schema, schema_id)(text)
    assert data[:5] == b"\0" + schema_id.to_bytes(4, "big")
    parsed = fastavro.parse_schema(json.loads(json.dumps(avro_schema(schema))))
    found = fastavro.schemaless_reader(io.BytesIO(data[5:]), parsed, None)
    expected = meaning(dict(schema), json.loads(text))
    assert repr(_sorted(found)) == repr(_sorted(expected))
    assert first_fields(data[5:])["source"]["seq"] == 2
    assert position_of(data, "b") == EventPosition(8, 2, 3)
    assert position_of(data, "another") is None


def _sorted(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _sorted(document[name]) for name in sorted(document)}
    return [_sorted(item) for item in document] if isinstance(document, list) else document


def test_names_that_avro_does_not_allow() -> None:
    assert adjusted("bank.public.größe 1.1st.Value") == "bank.public.gr__e_1._1st.Value"
    columns = dict.fromkeys(("a.b", "1", "é"), connect.STRING)
    found = avro_schema(connect.key("b.s.t", columns))["fields"]
    assert [field["name"] for field in found] == ["a_b", "_1", "_"]
    with pytest.raises(BadInput, match="a b and a_b") as raised:
        avro_schema(connect.key("b.s.t", {"a b": connect.STRING, "a_b": connect.STRING}))
    assert "shaping.columns" in raised.value.hint


def test_a_decimal_tells_its_scale_and_at_least_as_much_precision() -> None:
    found = avro_schema(connect.key("b.s.t", {"n": connect.decimal(5, 3)}))
    kind = found["fields"][0]["type"][1]
    assert (kind["logicalType"], kind["scale"], kind["precision"]) == ("decimal", 5, 5)
    assert kind["connect.parameters"] == {"scale": "5", "connect.decimal.precision": "3"}


def test_value_that_does_not_fit_its_schema_is_refused() -> None:
    serialize = serializer(connect.key("b.s.t", {"n": connect.plain("int64")}), 1)
    for document in ({"n": 2**63}, {"n": "text"}, {"m": 1}):
        with pytest.raises(UnfitValue, match="Avro"):
            serialize(json.dumps(document))
