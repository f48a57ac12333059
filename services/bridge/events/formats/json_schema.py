"""Connect schemas as JSON Schema (draft 7), of which the JSON of an event is a document. Pure.

Names and properties are those of Confluent's JsonSchemaConverter, which reads the schemas back:

    optional         oneOf null, T
    name, version    title, connect.version, connect.parameters beside the type
    order of fields  connect.index
    int8 … int64     integer with connect.type
    float, double    number with connect.type float32, float64
    bytes, Decimal   string in base64 with connect.type; the converter's schema of a Decimal says
                     number, though it writes base64 by default
    map              object with additionalProperties; with keys that are not strings, an array of
                     pairs, which the converter reads as an array

Objects have no other properties than those named: a new column is compatible under BACKWARD.
"""

import json
from typing import Any, Final

from schemas import wire
from services.bridge.events.formats import connect
from services.bridge.events.formats.connect import Schema

REGISTRY_TYPE: Final = "JSON"
_DRAFT: Final = "http://json-schema.org/draft-07/schema#"
_FLOATS: Final = {"float": "float32", "double": "float64"}


def record_name(schema: Schema) -> str:
    """Return the name by which subjects name the schema of a struct."""
    return str(schema["name"])


def schema_text(schema: Schema) -> str:
    """Return the JSON Schema of a struct as text."""
    document = {"$schema": _DRAFT, **_type(schema)}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def opening(schema_id: int) -> str:
    """Return the prefix of the JSON text of a key or value, for `wire.text_as_bytes`."""
    return wire.bytes_as_text(wire.head(schema_id))


def _type(schema: Schema) -> dict[str, Any]:
    """Return the JSON Schema of `schema` without regard to null."""
    kind = schema["type"]
    if kind == "struct":
        found = _object(schema)
    elif kind == "array":
        found = {"type": "array", "items": _optional(schema["items"])}
    elif kind == "map" and schema["keys"]["type"] == "string":
        values = _optional(schema["values"])
        found = {"type": "object", "additionalProperties": values, "connect.type": "map"}
    elif kind == "map":
        found = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    elif kind == "bytes":
        found = {"type": "string", "contentEncoding": "base64", "connect.type": "bytes"}
    elif kind in _FLOATS:
        found = {"type": "number", "connect.type": _FLOATS[kind]}
    elif kind in ("string", "boolean"):
        found = {"type": kind}
    else:
        found = {"type": "integer", "connect.type": kind}
    return found | _meaning(schema)


def _object(schema: Schema) -> dict[str, Any]:
    """Return the JSON schema of a struct, with Connect's index of each field."""
    fields = dict(connect.fields(schema))
    properties = {
        name: {**_optional(field), "connect.index": index}
        for index, (name, field) in enumerate(fields.items())
    }
    found = {"type": "object", "properties": properties, "additionalProperties": False}
    required = [name for name, field in fields.items() if not field["optional"]]
    return found | ({"required": required} if required else {})


def _optional(schema: Schema) -> dict[str, Any]:
    found = _type(schema)
    return {"oneOf": [{"type": "null"}, found]} if schema["optional"] else found


def _meaning(schema: Schema) -> dict[str, Any]:
    names = {"name": "title", "doc": "description", "default": "default"}
    names |= {part: f"connect.{part}" for part in ("version", "parameters")}
    return {ours: schema[part] for part, ours in names.items() if part in schema}
