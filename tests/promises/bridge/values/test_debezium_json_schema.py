"""JSON Schema of the bridge beside a real Debezium whose converter keeps its schemas in a registry.

Confluent's JsonSchemaConverter is not on Maven Central. Apicurio's ExtJsonConverter stands in for
it: its payload is Connect's JSON, its schema in the registry the Connect schema itself, which
`json_schema` turns into draft 7 here.
"""

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from jsonschema import Draft7Validator

from services.bridge.events.formats import json_schema
from tests.promises.bridge.values.fitting import FINITE, NOT_FINITE, UNFIT
from tests.promises.bridge.values.test_debezium_avro import differing, require_same_payloads
from tests.promises.bridge.values.test_debezium_schemas import (
    IN_NO_ARRAY_OF_CHARACTERS,
    OTHER_DECIMAL,
    OTHER_SCHEMAS,
)
from tests.promises.bridge.values.two_publishers import (
    MODES,
    Source,
    json_or_text,
    published_by_registry,
)
from tests.providers.interface import Broker, Provider
from tests.providers.serial_registry import SerialRegistry
from tests.providers.waiting import patient

CONVERTER = {
    "": "io.apicurio.registry.utils.converter.ExtJsonConverter",
    ".apicurio.registry.headers.enabled": "false",
    ".apicurio.registry.auto-register": "true",
}
OF_DEBEZIUM, OF_THE_BRIDGE = {"origin", "origin_lsn"}, {"commit_lsn", "seq", "timeline"}
"""Fields of `source` that only one has."""


class Reader:
    """Decode a key or value; its schema is draft 7 of either side."""

    def __init__(self, client: SchemaRegistryClient, registry: SerialRegistry) -> None:
        self._client, self._registry = client, registry
        self._known: dict[tuple[str, int], Any] = {}

    def __call__(self, data: bytes, topic: str, _part: str) -> Any:
        if not data:
            return None
        prefix = topic.partition(".")[0]
        if not data[0]:
            return {
                "payload": json.loads(data[5:]),
                "schema": self._schema(self._draft_7, int.from_bytes(data[1:5], "big"), prefix),
            }
        found = json_or_text(data)
        if isinstance(found, dict) and "schemaId" in found:  # as ExtJsonConverter writes it
            schema = self._schema(self._connect, found["schemaId"], prefix)
            return {"payload": found["payload"], "schema": schema}
        return found

    def _schema(self, get: Callable[[int], str], schema_id: int, prefix: str) -> Any:
        key = get.__name__, schema_id
        if key not in self._known:
            self._known[key] = json.loads(get(schema_id).replace(f"{prefix}.", ""))
        return self._known[key]

    def _draft_7(self, schema_id: int) -> str:
        return self._client.get_schema(schema_id).schema_str or ""

    def _connect(self, schema_id: int) -> str:
        url = f"{self._registry.native_url}/ids/globalIds/{schema_id}"
        with urllib.request.urlopen(url, timeout=patient(30)) as answer:
            return json_schema.schema_text(json.load(answer))


@pytest.fixture(scope="module")
def copies(
    pair: Provider, database: str, kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Source]:
    folders = tmp_path_factory.mktemp("registry"), tmp_path_factory.mktemp("debezium")
    return published_by_registry(
        *(pair.primary.conninfo(database), database, kafka, *folders),
        tables=FINITE,
        form="json_schema",
        converter=CONVERTER,
        decode=Reader,
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
            their_fields, our_fields = fields(their.value["schema"]), fields(our.value["schema"])
            sources |= differing(
                fields(their_fields.pop("source")), fields(our_fields.pop("source"))
            )
            for image in ("before", "after"):
                known = fields(their_fields.pop(image))
                columns |= differing(known, fields(our_fields.pop(image))) & known.keys()
            assert our_fields == their_fields
    assert columns == set(OTHER_SCHEMAS) | OTHER_DECIMAL[mode]
    assert sources == OF_DEBEZIUM | OF_THE_BRIDGE


@pytest.mark.long
@MODES
def test_payloads_are_the_same(copies: dict[str, Source], mode: str) -> None:
    """Values, keys and headers; as without schemas, where `differences` has no more than that."""
    require_same_payloads(copies, mode, UNFIT | NOT_FINITE | IN_NO_ARRAY_OF_CHARACTERS)


@pytest.mark.long
@MODES
def test_debeziums_events_are_documents_of_the_bridges_schemas(
    copies: dict[str, Source], mode: str
) -> None:
    """A validating reader with the bridge's schema takes them, but for columns of other schemas."""
    theirs, ours = copies[mode].theirs, copies[mode].ours
    other, checked = set(OTHER_SCHEMAS) | OTHER_DECIMAL[mode], 0
    for topic in theirs.keys() & ours.keys() - {"message"}:
        for their, our in zip(theirs[topic], ours[topic], strict=True):
            if our.value is None:
                continue
            event = dict(their.value["payload"])
            of_ours = {name: our.value["payload"]["source"][name] for name in OF_THE_BRIDGE}
            event["source"] = without(event["source"], OF_DEBEZIUM) | of_ours
            for image in ("before", "after"):
                event[image] = event[image] and without(event[image], other)
            Draft7Validator(our.value["schema"]).validate(event)
            Draft7Validator(our.value["schema"]).validate(our.value["payload"])
            checked += 1
    assert checked > 30


def fields(schema: dict[str, Any]) -> dict[str, Any]:
    """The properties of an object, perhaps one that may be null, without their order."""
    found = schema["oneOf"][1] if "oneOf" in schema else schema
    return {name: without(field, {"connect.index"}) for name, field in found["properties"].items()}


def without(document: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: part for name, part in document.items() if name not in names}
