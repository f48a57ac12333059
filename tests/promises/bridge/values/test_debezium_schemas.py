"""Schemas and payloads of the bridge's JSON envelopes against those of a real Debezium."""

import json
from typing import Any

import pytest

from tests.promises.bridge.values import samples
from tests.promises.bridge.values.differences import expected
from tests.promises.bridge.values.fitting import FINITE, NOT_FINITE, UNFIT
from tests.promises.bridge.values.test_debezium import differing_cells
from tests.promises.bridge.values.two_publishers import MODES, Record, Source, published
from tests.providers.interface import Broker, Provider

OTHER_SCHEMAS = {
    "int2vector": "Debezium fails to convert it",
    "bit(8)[]": "Debezium takes it for bit(8)",
    "mood[]": "elements may be null",
    "tsvector[]": "elements may be null",
    "vector(3)[]": "elements may be null",
}
"""Columns whose schemas differ on purpose, and why."""
OTHER_DECIMAL = {"default": {"numeric(5,-2)"}, "other": set[str]()}
"""Debezium reads a negative scale as 2046."""
IN_NO_ARRAY_OF_CHARACTERS = {("toasted.ints", "unchanged")}
"""With a schema, an array of numbers has the same placeholder as Debezium's."""


@pytest.fixture(scope="module")
def copies(
    pair: Provider, database: str, kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Source]:
    """Mode -> what both have published, with schemas."""
    return published(
        *(pair.primary.conninfo(database), database, kafka, tmp_path_factory.mktemp("debezium")),
        tables=FINITE,
        formats=dict.fromkeys(("key_format", "value_format"), "json_schema_envelope"),
        converters={
            f"{part}.converter.schemas.enable": "true" for part in ("key", "value", "header")
        },
    )


@pytest.mark.long
@MODES
def test_schemas_are_the_same(copies: dict[str, Source], mode: str) -> None:
    """Of keys and values, but for what differs on purpose and the order of an envelope's fields."""
    theirs, ours = copies[mode].theirs, copies[mode].ours
    found = set()
    for topic in theirs.keys() & ours.keys() - {"message"}:
        for their, our in zip(theirs[topic], ours[topic], strict=True):
            assert _named(their.key, mode) == _named(our.key, mode)
            assert _named(_key_headers(their), mode) == _named(_key_headers(our), mode)
            if our.value is None:
                continue
            their_fields, our_fields = _fields(their.value, mode), _fields(our.value, mode)
            assert our.value["schema"]["version"] == their.value["schema"]["version"]
            for image in ("before", "after"):
                found |= _differing(their_fields.pop(image), our_fields.pop(image))
            source, other = our_fields.pop("source"), their_fields.pop("source")
            assert our_fields == their_fields
            assert _differing(other, source) == set()
            added = {field["field"] for field in source["fields"]} - {"commit_lsn", "seq"}
            assert added - {"timeline"} < {field["field"] for field in other["fields"]}
    assert found == set(OTHER_SCHEMAS) | OTHER_DECIMAL[mode]


@pytest.mark.long
@MODES
def test_payloads_are_the_same(copies: dict[str, Source], mode: str) -> None:
    """As without schemas, where `differences` has no more than that."""
    plain = Source(_payloads(copies[mode].theirs), _payloads(copies[mode].ours))
    found = differing_cells(plain)
    special = {(kind, text) for kind, texts in samples.SPECIAL.items() for text in texts}
    assert found == expected(mode) - UNFIT - NOT_FINITE - IN_NO_ARRAY_OF_CHARACTERS - special


def _payloads(topics: dict[str, list[Record]]) -> dict[str, list[Record]]:
    return {
        topic: [
            Record(record.key, record.value and record.value["payload"], record.headers)
            for record in records
        ]
        for topic, records in topics.items()
        if topic != "message"
    }


def _key_headers(record: Record) -> dict[str, Any]:
    return {name: key for name, key in record.headers.items() if name.endswith("key")}


def _fields(value: dict[str, Any], mode: str) -> dict[str, Any]:
    return {field["field"]: field for field in _named(value["schema"], mode)["fields"]}


def _named(document: Any, mode: str) -> Any:
    """Without the prefix of the topic, which Debezium's topics begin with a `d`."""
    text = json.dumps(document)
    name = text.find(f"{mode}.public.")
    if name < 0:
        return document
    start = text.rfind('"', 0, name)
    return json.loads(text.replace(text[start + 1 : name], ""))


def _differing(theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    """The fields of two structs whose schemas differ; Debezium leaves some out."""
    assert {**theirs, "fields": []} == {**ours, "fields": []}
    known = {field["field"]: field for field in ours["fields"]}
    return {
        field["field"]
        for field in theirs["fields"]
        if field["field"] in known and known[field["field"]] != field
    }
