"""Connect schemas as Avro schemas, and JSON of the first as bytes of the second. Pure.

Names and properties are those of Confluent's AvroConverter, so that it reads the schemas back:

    optional         ["null", T], default null
    name, version    connect.name, connect.version, connect.parameters beside the type
    int8, int16      int with connect.type
    Decimal          bytes with the logical type decimal
    Date, Time, …    of Connect itself: date, time-millis, timestamp-millis
    map              map; with keys that are not strings, an array of records (key, value)

A field whose name is adjusted has its column's as `slotbridge.column`, which the converter ignores.
"""

import io
import json
from base64 import b64decode
from collections.abc import Callable
from typing import Any, Final

import fastavro

from schemas import wire
from schemas.shaping import FlatSettings
from services.bridge import compiled
from services.bridge.events import fields
from services.bridge.events.errors import UnfitValue
from services.bridge.events.formats import connect
from services.bridge.events.formats.connect import Schema
from services.bridge.events.formats.names import adjusted, adjusted_column, adjusted_fields
from services.bridge.events.formats.row_json import document_of

REGISTRY_TYPE: Final = "AVRO"
Convert = Callable[[Any], Any]
_KINDS: Final = {"int8": "int", "int16": "int", "int32": "int", "int64": "long"}
_NARROW: Final = ("int8", "int16")
_TIMES: Final = {
    f"{connect.LOGICAL}.{name}": kind
    for name, kind in (("Date", "date"), ("Time", "time-millis"), ("Timestamp", "timestamp-millis"))
}
_ENTRIES: Final = "io.confluent.connect.avro"
_PRESENT: Final = b"\2"
"""The branch of a union that is not null. A flat row's `op` begins with it, in an envelope with its
length, so that the letter follows; in both, the byte before is 2."""
_PRECISION: Final = 64


def record_name(schema: Schema) -> str:
    """Return the name by which subjects name the schema of a struct."""
    return adjusted(schema["name"])


def schema_text(schema: Schema) -> str:
    """Return the Avro schema of a struct as text."""
    return json.dumps(avro_schema(schema), ensure_ascii=False, separators=(",", ":"))


def avro_schema(schema: Schema) -> dict[str, Any]:
    """Return the Avro schema of a struct. Raise BadInput for fields that Avro can't tell apart."""
    found = _type(schema, set())
    assert isinstance(found, dict)
    return found


def serializer(schema: Schema, schema_id: int) -> Callable[[str], bytes]:
    """Return the function from JSON text that fits `schema` to what a Confluent consumer reads.

    The function raises UnfitValue for JSON that does not fit. It is a compiled transcoder if that
    was built, which leaves to the library what is not as usual.
    """
    head = wire.head(schema_id)
    by_library = _library_serializer(schema, head)
    if (engine := compiled.engine) is None:
        return by_library
    made: Callable[[str], bytes] = engine.avro.transcoder(schema, head, by_library)
    return made


def _library_serializer(schema: Schema, head: bytes) -> Callable[[str], bytes]:
    """Return what writes JSON text as Avro after `head`, by fastavro; it raises UnfitValue."""
    parsed = fastavro.parse_schema(avro_schema(schema))
    convert = _converter(schema) or _same
    write = fastavro.schemaless_writer

    def serialize(text: str) -> bytes:
        out = io.BytesIO()
        out.write(head)
        try:
            write(out, parsed, convert(document_of(text)), strict=True)
        except (ValueError, TypeError, OverflowError, LookupError) as error:
            raise UnfitValue(f"Avro can't hold it ({type(error).__name__})") from error
        return out.getvalue()

    return serialize


def first_fields(content: bytes) -> dict[str, Any]:
    """Return the fields that give an event's position, from a value in any schema of this module.

    `content`: the value behind the schema's id. The fields are `op` and `source`, or the first ones
    of a flat row: they come first and are alike in all tables. Raise an error of any kind for other
    bytes.
    """
    flat = content[1:2] == _PRESENT
    schema = _FIRST_OF_ROWS if flat else _FIRST_FIELDS
    found = fastavro.schemaless_reader(io.BytesIO(content), schema, None)
    assert isinstance(found, dict)
    return found if flat else {"op": found["op"], "source": found["source"]}


def begins_flat_rows(schema_text: str) -> bool:
    """Tell whether a writer's schema is that of the bridge's flat rows.

    Raise ValueError, TypeError or LookupError for a text that is not the schema of a record.
    """
    names = [field["name"] for field in json.loads(schema_text)["fields"]]
    first = [field["name"] for field in _OF_ROWS["fields"]]
    return names[: len(first)] == first


def _type(schema: Schema, defined: set[str]) -> Any:
    """Return the Avro type of `schema` without regard to null; a record known by name, by name."""
    kind = schema["type"]
    if kind == "struct":
        return _record(schema, defined)
    found: dict[str, Any]
    if kind == "array":
        found = {"type": "array", "items": _optional(schema["items"], defined)}
    elif kind == "map" and schema["keys"]["type"] == "string":
        found = {"type": "map", "values": _optional(schema["values"], defined)}
    elif kind == "map":
        found = {"type": "array", "items": _entry(schema, defined)}
    else:
        found = {"type": _KINDS.get(kind, kind)}
        if kind in _NARROW:
            found["connect.type"] = kind
    found |= _meaning(schema)
    return found["type"] if len(found) == 1 else found


def _record(schema: Schema, defined: set[str]) -> Any:
    """Return the Avro record of a struct, or its name where the schema has defined it before."""
    name = adjusted(schema["name"])
    if name in defined:
        return name
    defined.add(name)
    fields = [
        _field(name, field, defined) | ({} if column == name else {wire.COLUMN: column})
        for name, (column, field) in adjusted_fields(schema, "Avro").items()
    ]
    namespace, _, last = name.rpartition(".")
    found = {"type": "record", "name": last, "namespace": namespace, "fields": fields}
    return found | _meaning(schema)


def _field(name: str, schema: Schema, defined: set[str]) -> dict[str, Any]:
    """Return the Avro field of a struct's field; an optional one has the default null."""
    if "default" in schema:
        kind = _type(schema, defined)
        kinds = [kind, "null"] if schema["optional"] else kind
        return {"name": name, "type": kinds, "default": schema["default"]}
    found = {"name": name, "type": _optional(schema, defined)}
    return found | ({"default": None} if schema["optional"] else {})


def _optional(schema: Schema, defined: set[str]) -> Any:
    kind = _type(schema, defined)
    return ["null", kind] if schema["optional"] else kind


def _entry(schema: Schema, defined: set[str]) -> Any:
    """Return the record of a map's key and value."""
    name = f"{_ENTRIES}.MapEntry"
    if name in defined:
        return name
    defined.add(name)
    fields = [_field(part[:-1], schema[part], defined) for part in ("keys", "values")]
    return {"type": "record", "name": "MapEntry", "namespace": _ENTRIES, "fields": fields}


def _meaning(schema: Schema) -> dict[str, Any]:
    """Return the attributes that Connect's converter keeps, and Avro's logical type."""
    found: dict[str, Any] = {}
    for part in ("name", "version", "parameters", "doc"):
        if part in schema:
            found[f"connect.{part}"] = schema[part]
    if schema.get("name") in _TIMES:
        found["logicalType"] = _TIMES[schema["name"]]
    if schema.get("name") == connect.DECIMAL:
        parameters = schema["parameters"]
        scale = int(parameters["scale"])
        precision = int(parameters.get("connect.decimal.precision", _PRECISION))
        found |= {"logicalType": "decimal", "scale": scale, "precision": max(precision, scale)}
    return found


def _converter(schema: Schema) -> Convert | None:
    """Return the function from a JSON document to what fastavro writes; None: it stays as it is.

    A value that may be null names the branch of its union, so that fastavro does not look for it.
    """
    change = _not_null(schema)
    if not schema["optional"]:
        return change
    branch = _branch(schema)
    if change is None:
        return lambda document: None if document is None else (branch, document)
    return lambda document: None if document is None else (branch, change(document))


def _branch(schema: Schema) -> str:
    """Return the name by which fastavro chooses a union's branch."""
    kind = schema["type"]
    if kind == "struct":
        return adjusted(schema["name"])
    if kind == "map" and schema["keys"]["type"] != "string":
        return "array"
    return str(_KINDS.get(kind, kind))


def _not_null(schema: Schema) -> Convert | None:
    """Return what makes fastavro's value of a JSON value; None where they are the same."""
    kind = schema["type"]
    if kind == "bytes":
        return b64decode
    if kind in ("float", "double"):
        return float
    if kind == "array":
        return _of_items(_converter(schema["items"]))
    if kind == "map" and schema["keys"]["type"] == "string":
        change = _converter(schema["values"]) or _same
        return lambda document: {key: change(value) for key, value in document.items()}
    if kind == "map":
        return lambda document: [{"key": key, "value": float(value)} for key, value in document]
    return _of_fields(schema) if kind == "struct" else None


def _same(document: Any) -> Any:
    return document


def _of_items(change: Convert | None) -> Convert | None:
    return None if change is None else lambda document: [change(item) for item in document]


def _of_fields(schema: Schema) -> Convert | None:
    """Return what renames and converts a struct's fields in place; None if nothing changes."""
    names: dict[str, str] = {}
    changes: list[tuple[str, Convert]] = []
    for column, field in connect.fields(schema):
        if (name := adjusted_column(column)) != column:
            names[column] = name
        if (change := _converter(field)) is not None:
            changes.append((name, change))
    if not names and not changes:
        return None

    def changed(document: dict[str, Any]) -> dict[str, Any]:
        for column, name in names.items():
            document[name] = document.pop(column, None)
        for name, change in changes:  # a truncate's flat row has no columns
            document[name] = change(document.get(name))
        return document

    return changed


_OF_ROWS: Final = avro_schema(
    connect.flat("First", fields.schemas(FlatSettings(deletes="tombstone")), {})
)
_FIRST_OF_ROWS: Final = fastavro.parse_schema(_OF_ROWS)
_FIRST_FIELDS: Final = fastavro.parse_schema(avro_schema(connect.FIRST_FIELDS))
