"""Avro's binary form of the bridge's records as JSON text, by the writer's schema alone. Pure.

The inverse of services.bridge.events.formats.avro, which names Connect's types in its schemas:

    connect.name           decides the form of bytes (Decimal, Bits) and of vectors
    slotbridge.column      the column's name, where Avro does not allow it
    array of MapEntry      a map whose keys are not texts

The order of an object's members is the schema's.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring as quoted
from typing import Any, Final

import fastavro

from schemas.events import UNAVAILABLE
from schemas.wire import COLUMN
from spark_consumers.formats import json_forms
from spark_consumers.formats.floats import double_text, real_text, short_text
from spark_consumers.formats.json_forms import UNAVAILABLE_TEXT, UnreadableRecord, Write

Read = Callable[[bytes], str]
"""A record's content, behind the schema's id, to its JSON text. Raises UnreadableRecord."""
_ENTRY: Final = "io.confluent.connect.avro.MapEntry"
_DATA: Final = "io.debezium.data."
_ENCODED_NUMBERS: Final = ("org.apache.kafka.connect.data.Decimal", f"{_DATA}Bits")
_SHORT: Final = f"{_DATA}DoubleVector"
_PLAIN: Final[dict[str, Write]] = {
    "string": quoted,
    "boolean": json_forms.boolean,
    "int": str,
    "long": str,
    "float": real_text,
    "double": double_text,
    "bytes": json_forms.encoded,
}
_NUMBERS: Final = ("boolean", "int", "long", "float", "double")
_UNFIT: Final = (ValueError, TypeError, LookupError, EOFError, OverflowError, AttributeError)


def avro_reader(schema_text: str) -> Read:
    """Return the reader of a schema's records. Raise UnreadableRecord for other schemas."""
    try:
        schema = _bare(json.loads(schema_text))
        parsed = fastavro.parse_schema(schema)
        write = _Writers().of(schema)
    except (*_UNFIT, fastavro.schema.SchemaParseException, RecursionError) as error:
        raise UnreadableRecord("the bridge does not write such an Avro schema") from error
    read = fastavro.schemaless_reader

    def text(content: bytes) -> str:
        stream = io.BytesIO(content)
        try:
            found = write(read(stream, parsed, None))
        except _UNFIT as error:
            raise UnreadableRecord("the bytes do not fit the Avro schema") from error
        if stream.tell() != len(content):
            raise UnreadableRecord("there are bytes behind the Avro record")
        return found

    return text


def _bare(schema: Any) -> Any:
    """Return a schema without logical types, for which fastavro would convert bytes to numbers."""
    if isinstance(schema, list):
        return [_bare(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: value for name, value in schema.items() if name != "logicalType"}
    for name in ("type", "items", "values"):
        if name in found:
            found[name] = _bare(found[name])
    if isinstance(found.get("fields"), list):
        found["fields"] = [_bare(field) for field in found["fields"]]
    return found


class _Writers:
    """The writers of one schema's types; a record is known by its name once it is described."""

    def __init__(self) -> None:
        self._records: dict[str, Write] = {}
        self._unavailable: dict[str, Any] = {}

    def of(self, schema: Any, *, short: bool = False) -> Write:
        """Return the writer of a type. `short`: its doubles are those of a vector of float4."""
        if isinstance(schema, list):
            (branch,) = [kind for kind in schema if kind != "null"]
            return json_forms.or_null(self.of(branch, short=short))
        if isinstance(schema, str):
            if schema == "double" and short:
                return short_text
            return _PLAIN[schema] if schema in _PLAIN else self._records[schema]
        kind, meaning = schema["type"], schema.get("connect.name", "")
        if kind == "record":
            return self._record(schema, meaning)
        if kind == "array":
            items = schema["items"]
            write = self.of(items, short=meaning == _SHORT or short)
            listed = json_forms.list_of_plain if _kind(items) in _NUMBERS else json_forms.list_of
            return listed(write)
        if kind == "map":
            write_members = json_forms.object_of(self.of(schema["values"]))
            return lambda found: write_members(found.items())
        if kind == "bytes" and meaning in _ENCODED_NUMBERS:
            return json_forms.encoded_number
        return self.of(kind, short=short)

    def _record(self, schema: dict[str, Any], meaning: str) -> Write:
        """Return what writes a record as JSON, and keep it for records that name this one."""
        name = f"{schema.get('namespace', '')}.{schema['name']}".removeprefix(".")
        short = name == _ENTRY
        fields = [
            (field["name"], self.of(field["type"], short=short)) for field in schema["fields"]
        ]
        if short:
            (_, write_key), (_, write_value) = fields
            write = _pair(write_key, write_value)
        else:
            columns = [field.get(COLUMN, field["name"]) for field in schema["fields"]]
            write = _object(columns, fields)
        if meaning.startswith(_DATA):
            unavailable = self._placeholder(schema)
            write = _or_unavailable(write, unavailable)
        self._records[name] = write
        self._unavailable[name] = self._placeholder(schema)
        return write

    def _placeholder(self, schema: Any) -> Any:
        """Return the decoded value that stands for an unchanged value of a type."""
        kind = schema
        while isinstance(kind, dict) and kind["type"] not in ("record", "array", "map"):
            kind = kind["type"]
        if isinstance(kind, list):
            (branch,) = [one for one in kind if one != "null"]
            return None if _kind(branch) in _NUMBERS else self._placeholder(branch)
        if isinstance(kind, dict):
            if kind["type"] == "record":
                fields = kind["fields"]
                return {field["name"]: self._placeholder(field["type"]) for field in fields}
            if kind["type"] == "map":
                return {UNAVAILABLE: UNAVAILABLE}
            return [{"key": at, "value": code} for at, code in enumerate(UNAVAILABLE.encode())]
        placeholders = {"string": UNAVAILABLE, "bytes": UNAVAILABLE.encode()}
        return (
            0
            if kind in _NUMBERS
            else placeholders[kind]
            if kind in placeholders
            else self._unavailable[kind]
        )


def _kind(schema: Any) -> str:
    """Return the name of a type, that of its branch which is not null for a union."""
    while not isinstance(schema, str):
        if isinstance(schema, dict):
            schema = schema["type"]
        else:
            (schema,) = [kind for kind in schema if kind != "null"]
    return schema


def _object(columns: Sequence[str], fields: Sequence[tuple[str, Write]]) -> Write:
    """Return the writer of a record as an object; `fields`: Avro's name of each column."""
    parts = [
        (json_forms.label(column), name, write)
        for column, (name, write) in zip(columns, fields, strict=True)
    ]

    def written(record: Mapping[str, Any]) -> str:
        return f"{{{','.join([label + write(record[name]) for label, name, write in parts])}}}"

    return written


def _pair(write_key: Write, write_value: Write) -> Write:
    return lambda entry: f"[{write_key(entry['key'])},{write_value(entry['value'])}]"


def _or_unavailable(write: Write, placeholder: Any) -> Write:
    return lambda value: UNAVAILABLE_TEXT if value == placeholder else write(value)
