"""Keys and values of records whose schema is in a registry, as Confluent writes them. Pure.

    zero byte, the schema's id in the registry (4 bytes, big-endian), content

The content's first byte tells the format: 2 in Avro, `{` in JSON, 0 in Protobuf (FIRST_MESSAGE).
"""

from typing import Final

MAGIC: Final = b"\0"
HEAD_BYTES: Final = 5
FIRST_MESSAGE: Final = b"\0"
"""The path to a Protobuf message within its file, in the form that Confluent shortens it to."""
COLUMN: Final = "slotbridge.column"
"""The property of a field in Avro that has its column's name, where Avro does not allow that."""
ERRORS: Final = "surrogateescape"
"""The error handler with which any bytes become text and the same bytes again."""


def head(schema_id: int) -> bytes:
    """Return the bytes before the content."""
    return MAGIC + schema_id.to_bytes(HEAD_BYTES - 1, "big")


def schema_id(data: bytes) -> int | None:
    """Return the id of the schema before a key or value, None where there is none."""
    if data[:1] != MAGIC or len(data) < HEAD_BYTES:
        return None
    return int.from_bytes(data[1:HEAD_BYTES], "big")


def bytes_as_text(data: bytes) -> str:
    """Return any bytes as text, for `text_as_bytes`."""
    return data.decode("utf-8", ERRORS)


def text_as_bytes(text: str) -> bytes:
    """Return the bytes of a text that may contain the text of any bytes."""
    return text.encode("utf-8", ERRORS)
