"""Avro of the bridge beside that of a real Debezium with Apicurio's converter: schemas and values.

Both have their schemas in one registry and are decoded by fastavro, each by its writer's schema.
"""

import io
import json
import re
from collections.abc import Collection
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from tests.promises.bridge.values import samples
from tests.promises.bridge.values.differences import expected
from tests.promises.bridge.values.fitting import FITTING, UNFIT
from tests.promises.bridge.values.test_debezium import differing_cells
from tests.promises.bridge.values.test_debezium_schemas import (
    IN_NO_ARRAY_OF_CHARACTERS,
    OTHER_DECIMAL,
    OTHER_SCHEMAS,
)
from tests.promises.bridge.values.two_publishers import (
    MODES,
    TABLES,
    Record,
    Source,
    json_or_text,
    published_by_registry,
)
from tests.providers.interface import Broker, Provider

CONVERTER = {
    "": "io.apicurio.registry.utils.converter.AvroConverter",
    ".apicurio.registry.as-confluent": "true",
    ".apicurio.registry.use-id": "contentId",
    ".apicurio.registry.headers.enabled": "false",
    ".apicurio.registry.auto-register": "true",
}
COLUMNS = {re.sub(r"[^A-Za-z0-9_]", "_", kind): kind for types in TABLES.values() for kind in types}
"""Columns by the names that `field.name.adjustment.mode=avro` gives them."""
OTHER_PRECISION = {"default": {"numeric(3,5)"}, "other": set[str]()}
"""Avro wants a precision of at least the scale: 5. Debezium's is 3, which readers refuse or ignore.
"""
OTHER_SOURCE = {"snapshot", "origin", "origin_lsn", "commit_lsn", "seq", "timeline"}
"""The default of `snapshot` is that of its field; Debezium's has it as `connect.default`, too."""
SAME_NUMBER = {("float4", "1e-45")}
"""Texts of one float4, which is the same in binary."""


class Reader:
    """Decode a key or value with the schema in the registry; `{schema, payload}`."""

    def __init__(self, client: SchemaRegistryClient) -> None:
        self._client = client
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, data: bytes, topic: str, _part: str) -> Any:
        if not data:
            return None
        if data[0]:
            return json_or_text(data)
        schema_id = int.from_bytes(data[1:5], "big")
        if schema_id not in self._known:
            text = self._client.get_schema(schema_id).schema_str or ""
            self._known[schema_id] = fastavro.parse_schema(readable(json.loads(text))), text
        parsed, text = self._known[schema_id]
        stream = io.BytesIO(data[5:])
        document = plain(fastavro.schemaless_reader(stream, parsed, None))
        assert not stream.read()
        schema = json.loads(text.replace(topic.partition(".")[0] + ".", ""))
        return {"payload": document, "schema": unfolded(schema, {})}


@pytest.fixture(scope="module")
def copies(
    pair: Provider, database: str, kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Source]:
    folders = tmp_path_factory.mktemp("registry"), tmp_path_factory.mktemp("debezium")
    return published_by_registry(
        *(pair.primary.conninfo(database), database, kafka, *folders),
        tables=FITTING,
        form="avro",
        converter=CONVERTER,
        transforms={"field.name.adjustment.mode": "avro", "schema.name.adjustment.mode": "avro"},
        decode=lambda client, _registry: Reader(client),
    )


@pytest.mark.long
@MODES
def test_schemas_are_the_same(copies: dict[str, Source], mode: str) -> None:
    """Of keys and values, but for what differs on purpose and the order of an envelope's fields."""
    theirs, ours = copies[mode].theirs, copies[mode].ours
    columns, sources = set(), set()
    for topic in theirs.keys() & ours.keys() - {"message"}:
        for their, our in zip(theirs[topic], ours[topic], strict=True):
            assert (their.key and their.key["schema"]) == (our.key and our.key["schema"])
            if our.value is None:
                continue
            their_outline, their_structs = outlined(their.value["schema"])
            our_outline, our_structs = outlined(our.value["schema"])
            assert our_outline == their_outline
            assert our_structs.keys() == their_structs.keys()
            sources |= differing(their_structs.pop("source"), our_structs.pop("source"))
            for image, columns_of_theirs in their_structs.items():
                known = columns_of_theirs.keys()
                found = differing(columns_of_theirs, our_structs[image])
                columns |= {COLUMNS.get(name, name) for name in found & known}
    assert columns == set(OTHER_SCHEMAS) | OTHER_DECIMAL[mode] | OTHER_PRECISION[mode]
    assert sources == OTHER_SOURCE


@pytest.mark.long
@MODES
def test_payloads_are_the_same(copies: dict[str, Source], mode: str) -> None:
    """Values, keys and headers; as in JSON, where `differences` has no more than that."""
    require_same_payloads(copies, mode, UNFIT | IN_NO_ARRAY_OF_CHARACTERS | SAME_NUMBER)


def require_same_payloads(
    copies: dict[str, Source], mode: str, left_out: Collection[tuple[str, str]]
) -> None:
    """Require the same keys and headers, and values that differ as `expected`.

    `left_out`: types and texts that the source does not have, beside those of SPECIAL.
    """
    theirs, ours = payloads(copies[mode].theirs), payloads(copies[mode].ours)
    assert theirs.keys() == ours.keys()
    for topic in theirs:
        for their, our in zip(theirs[topic], ours[topic], strict=True):
            assert (our.key, our.value is None) == (their.key, their.value is None)
            assert headers(our) == headers(their)
    special = {(kind, text) for kind, texts in samples.SPECIAL.items() for text in texts}
    assert differing_cells(Source(theirs, ours)) == expected(mode) - {*left_out, *special}


def outlined(envelope: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The schema of an envelope with its fields by name, without those of the rows and `source`;
    and these, by name."""
    outline, structs = dict(envelope), {}
    outline["fields"] = {field["name"]: dict(field) for field in envelope["fields"]}
    for part in ("before", "after", "source"):
        field = outline["fields"][part]
        branches = field["type"] if isinstance(field["type"], list) else [field["type"]]
        record = branches[-1]
        structs[part] = {one["name"]: one for one in record["fields"]}
        field["type"] = [*branches[:-1], {**record, "fields": []}]
    return outline, structs


def differing(theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    """The fields that differ or that one lacks."""
    return {name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)}


def headers(record: Record) -> dict[str, Any]:
    """A record's headers but for those of Debezium's tracing; keys without their schema."""
    return {
        name: key["payload"] if isinstance(key, dict) and "payload" in key else key
        for name, key in record.headers.items()
        if not name.startswith("__debezium.context")
    }


def payloads(topics: dict[str, list[Record]]) -> dict[str, list[Record]]:
    """The records of tables without schemas, with the columns' own names."""

    def named(row: Any) -> Any:
        return row and {COLUMNS.get(name, name): part for name, part in row.items()}

    def payload(document: Any) -> Any:
        if document is None:
            return None
        return {
            name: named(part) if name in ("before", "after") else part
            for name, part in document["payload"].items()
        }

    return {
        topic: [
            Record(payload(record.key), payload(record.value), record.headers) for record in records
        ]
        for topic, records in topics.items()
        if topic != "message"
    }


def plain(document: Any) -> Any:
    """A decoded document, whose numbers are equal only if all their bits are."""
    if isinstance(document, dict):
        return {name: plain(part) for name, part in document.items()}
    if isinstance(document, list):
        return [plain(item) for item in document]
    return repr(document) if isinstance(document, float) else document


def readable(schema: Any) -> Any:
    """A schema whose decimals have a precision of at least their scale: fastavro insists on it.

    Without the logical types of times: Python's have neither infinity nor years before 1.
    """
    if isinstance(schema, list):
        return [readable(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: readable(part) for name, part in schema.items()}
    if schema.get("logicalType") == "decimal":
        found["precision"] = max(schema["precision"], schema.get("scale", 0))
    elif isinstance(schema.get("logicalType"), str):
        del found["logicalType"]
    return found


def unfolded(schema: Any, known: dict[str, Any], namespace: str = "") -> Any:
    """A schema in which each name of a record stands for its definition.

    Without the columns' own names, which only the bridge notes.
    """
    if isinstance(schema, str):
        full = schema if "." in schema else f"{namespace}.{schema}"
        return known.get(full, schema)
    if isinstance(schema, list):
        return [unfolded(branch, known, namespace) for branch in schema]
    found = {name: part for name, part in schema.items() if name not in ("fields", "namespace")}
    if schema["type"] == "record":
        if "." not in schema["name"]:
            found["name"] = f"{schema.get('namespace', namespace)}.{schema['name']}"
        namespace = found["name"].rpartition(".")[0]
        found["fields"] = [
            {
                name: unfolded(part, known, namespace) if name == "type" else part
                for name, part in field.items()
                if name != "slotbridge.column"
            }
            for field in schema["fields"]
        ]
        known[found["name"]] = found
        return found
    for part in ("type", "items", "values"):
        if part in found:
            found[part] = unfolded(found[part], known, namespace)
    return found
