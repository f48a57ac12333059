"""Keys with schemas as Kafka Connect writes them, by a key that it has written. Pure.

    JsonConverter     {"schema":S,"payload":…}
    AvroConverter     zero byte, id of S in the registry, Avro

The bytes of a key choose its partition, and name it for compaction. S also has the defaults of key
columns, which pgoutput does not send; so S is that of a topic's last key, if it differs from the
bridge's own schema in nothing that a key's value depends on.
"""

import json
from collections.abc import Callable
from typing import Any, Final

from schemas import wire
from services.bridge.events.formats import avro, connect
from services.bridge.events.formats.connect import Schema

CLOSING: Final = "}"
_OPENING: Final = '{"schema":'
_PAYLOAD: Final = ',"payload":'


def opening(schema: Schema, last: bytes | None) -> str:
    """Return the text before a JSON key; `schema`: the bridge's, `last`: the topic's last key."""
    text = _json_schema(schema, last)
    if text is None:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return f"{_OPENING}{text}{_PAYLOAD}"


def schema_id(schema: Schema, last: bytes | None, text_of: Callable[[int], str]) -> int | None:
    """Return the id of the schema in the topic's last key; None where it has another Avro form.

    `text_of`: returns the schema that the registry has by an id.
    """
    found = wire.schema_id(last or b"")
    if found is None:
        return None
    try:
        theirs = json.loads(text_of(found))
        return found if _avro_form(theirs) == _avro_form(avro.avro_schema(schema)) else None
    except (ValueError, LookupError, TypeError):
        return None


def is_like(schema: Schema, last: bytes, text_of: Callable[[int], str]) -> bool:
    """Tell whether the bridge's keys will have the schema of the topic's last key."""
    if last[:1] == wire.MAGIC:
        return schema_id(schema, last, text_of) is not None
    return _json_schema(schema, last) is not None


def _json_schema(schema: Schema, last: bytes | None) -> str | None:
    """Return the text of the schema in a JSON key; None where keys would have another form."""
    try:
        text = (last or b"").decode()
        start = len(_OPENING)
        theirs, end = json.JSONDecoder().raw_decode(text, start)
        if text[:start] == _OPENING and text.startswith(_PAYLOAD, end):
            return text[start:end] if _fields_of(theirs) == _fields_of(schema) else None
    except (ValueError, LookupError, TypeError):
        pass
    return None


def _fields_of(schema: Schema) -> list[Any]:
    return [(name, _form(field)) for name, field in connect.fields(schema)]


def _form(schema: Schema) -> Any:
    """Return what the JSON of a value depends on: neither defaults nor an enum's labels."""
    kind, name = schema["type"], schema.get("name")
    inner: Any = None
    if kind == "struct":
        inner = _fields_of(schema)
    elif kind == "array":
        inner = _form(schema["items"])
    elif kind == "map":
        inner = _form(schema["keys"]), _form(schema["values"])
    elif name == connect.DECIMAL:
        inner = schema["parameters"]["scale"]
    return kind, name, bool(schema["optional"]), inner


def _avro_form(schema: Any) -> Any:
    """Return what the bytes of a value depend on, without names that Kafka Connect gives."""
    if isinstance(schema, list):
        return [_avro_form(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema["type"]
    if kind == "record":
        return [(field["name"], _avro_form(field["type"])) for field in schema["fields"]]
    if kind in ("array", "map"):
        return kind, _avro_form(schema["items" if kind == "array" else "values"])
    if schema.get("logicalType") == "decimal":
        return kind, schema.get("scale", 0)
    return _avro_form(kind)
