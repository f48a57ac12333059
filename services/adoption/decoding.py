"""Keys and values of records as documents: JSON, or Avro by the schema that its writer registered.

{…                            JSON
{"schema":…,"payload":…}      JSON with its schema
zero byte, id, …              Avro, as Confluent's converter writes it
"""

import io
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from schemas import wire
from schemas.kafka import Format

Decode = Callable[[bytes], Any]
_ENVELOPE: Final = {"payload", "schema"}
_NOT_AVRO: Final = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
    *(EOFError, MemoryError, AssertionError),
)
"""Errors of the decoder for bytes that do not fit the schema."""


def decoder(schema_of: Callable[[int], str]) -> Decode:
    """Return the function from a key or value to its document.

    `schema_of`: returns the text of the schema that the registry has by an id. The function raises
    ValueError for anything else, and whatever `schema_of` raises.
    """
    parsed: dict[int, Any] = {}

    def decode(data: bytes) -> Any:
        schema_id = wire.schema_id(data)
        if schema_id is None:
            return payload(json.loads(data))
        if schema_id not in parsed:
            parsed[schema_id] = _parsed(schema_of(schema_id))
        return _read(data, parsed[schema_id])

    return decode


def decode_json(data: bytes) -> Any:
    """Return the document of JSON, with or without a schema. Raise ValueError for anything else."""
    return payload(json.loads(data))


def payload(document: Any) -> Any:
    """Return a document without the schema beside it."""
    if isinstance(document, Mapping) and document.keys() == _ENVELOPE:
        return document["payload"]
    return document


def form_of(data: bytes) -> Format | None:
    """Return the format in which a key or value is written, None for an unknown one."""
    if wire.schema_id(data) is not None:
        return "avro"
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, Mapping):
        return None
    return "json_schema_envelope" if document.keys() == _ENVELOPE else "json"


def _parsed(text: str) -> Any:
    """Return a registry's schema as fastavro reads it. Raise ValueError for another kind."""
    import fastavro

    try:
        return fastavro.parse_schema(json.loads(text))
    except Exception as error:
        raise ValueError("its schema in the registry is not one of Avro") from error


def _read(data: bytes, schema: Any) -> Any:
    """Return an Avro record as JSON values. Raise ValueError where the schema does not fit."""
    import fastavro

    content = io.BytesIO(data[wire.HEAD_BYTES :])
    try:
        found = fastavro.schemaless_reader(content, schema, None)
    except _NOT_AVRO as error:
        raise ValueError("it does not fit its schema in the registry") from error
    if content.read(1):
        raise ValueError("it does not fit its schema in the registry")
    return found
