"""A record's key and value as plain JSON, by the schemas whose ids they begin with. Pure.

    zero byte, id of 4 bytes, content      by the registry's schema: AVRO, PROTOBUF, JSON
    anything else                          itself, as the record was written before a change of
                                           format, or has another format in its other part

What can't be read becomes a document that is not an event, so that the record is refused where it
stands: {"slotbridge":"unreadable","why":…,"base64":…}.
"""

import json
from base64 import b64encode
from collections.abc import Callable
from typing import Final, NamedTuple

from schemas import wire
from spark_consumers.formats.avro_text import avro_reader
from spark_consumers.formats.json_forms import UnreadableRecord
from spark_consumers.formats.protobuf_text import protobuf_reader

Read = Callable[[bytes], str]
_READERS: Final[dict[str, Callable[[str], Read]]] = {
    "AVRO": avro_reader,
    "PROTOBUF": protobuf_reader,
    "JSON": lambda _schema: lambda content: content.decode("utf-8"),
}


class WriterSchema(NamedTuple):
    """A schema of the registry; `kind`: AVRO, PROTOBUF or JSON."""

    kind: str
    text: str


class Decoder:
    """Decodes records; it remembers the reader of each schema."""

    def __init__(self, schema_of: Callable[[int], WriterSchema | None]) -> None:
        """Ask `schema_of` for the schema of an id, None for one that the registry lacks."""
        self._schema_of = schema_of
        self._readers: dict[int, Read] = {}

    def decoded(self, key: bytes | None, value: bytes) -> tuple[bytes | None, bytes]:
        """Return a record's key and value as JSON. Raise what `schema_of` raises."""
        try:
            return None if key is None else self._json(key), self._json(value)
        except UnreadableRecord as error:
            why = error.message
            return None if key is None else _unreadable(key, why), _unreadable(value, why)

    def _json(self, data: bytes) -> bytes:
        """Return the JSON of a key or value in any format. Raise UnreadableRecord."""
        if data[:1] != wire.MAGIC:
            return data
        schema_id = wire.schema_id(data)
        if schema_id is None:
            raise UnreadableRecord("there is no schema's id")
        read = self._readers.get(schema_id)
        if read is None:
            read = self._readers[schema_id] = self._reader(schema_id)
        try:
            return read(data[wire.HEAD_BYTES :]).encode()
        except UnicodeError as error:
            raise UnreadableRecord("the text is not UTF-8") from error

    def _reader(self, schema_id: int) -> Read:
        """Return the reader of a schema in the registry. Raise UnreadableRecord without one."""
        found = self._schema_of(schema_id)
        if found is None:
            raise UnreadableRecord(f"the registry has no schema {schema_id}")
        make = _READERS.get(found.kind)
        if make is None:
            raise UnreadableRecord(f"schema {schema_id} is of another kind")
        return make(found.text)


def _unreadable(data: bytes, why: str) -> bytes:
    document = {"slotbridge": "unreadable", "why": why, "base64": b64encode(data).decode("ascii")}
    return json.dumps(document).encode()
