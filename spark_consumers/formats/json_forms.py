"""Writers of a decoded value's JSON text, in the forms of `kafka.value_format: json`. Pure.

    bytes                base64
    float, double        PostgreSQL's text, or "NaN" "Infinity" "-Infinity"
    what stands for an unchanged value that the WAL lacks, and fits the schema
        array of numbers or booleans     ["__debezium_unavailable_value"]
        Decimal, Bits, a struct          "__debezium_unavailable_value"
        text, bytea, other arrays, maps  itself

The bridge writes the left column (services.bridge.events.formats.connect, `placeholder`).
"""

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from json.encoder import encode_basestring as quoted
from typing import Any, Final

from schemas.errors import BadInput
from schemas.events import UNAVAILABLE

Write = Callable[[Any], str]
"""A decoded value, never None, to its JSON text."""
_BYTES: Final = UNAVAILABLE.encode()
UNAVAILABLE_NUMBERS: Final = list(_BYTES)
UNAVAILABLE_BOOLEANS: Final = [bit == "1" for byte in _BYTES for bit in f"{byte:08b}"]
UNAVAILABLE_TEXT: Final = quoted(UNAVAILABLE)
UNAVAILABLE_LIST: Final = f"[{UNAVAILABLE_TEXT}]"
_LENGTHS: Final = (len(UNAVAILABLE_NUMBERS), len(UNAVAILABLE_BOOLEANS))


class UnreadableRecord(BadInput):
    """A record that its schema does not describe, or whose schema the bridge has not made."""


def boolean(value: Any) -> str:
    """Write true or false."""
    return "true" if value else "false"


def encoded(value: bytes) -> str:
    """Write bytes in base64."""
    return f'"{b64encode(value).decode("ascii")}"'


def encoded_number(value: bytes) -> str:
    """Write a Decimal or a bit string in base64; a placeholder as text."""
    return UNAVAILABLE_TEXT if value == _BYTES else encoded(value)


def or_null(write: Write) -> Write:
    """Return the writer of a value that may be None."""
    return lambda value: "null" if value is None else write(value)


def list_of(write: Write) -> Write:
    """Return the writer of an array whose items `write` writes."""
    return lambda items: f"[{','.join([write(item) for item in items])}]"


def list_of_plain(write: Write) -> Write:
    """Return the writer of an array of numbers or booleans."""

    def written(items: Sequence[Any]) -> str:
        if len(items) in _LENGTHS and items in (UNAVAILABLE_NUMBERS, UNAVAILABLE_BOOLEANS):
            return UNAVAILABLE_LIST
        return f"[{','.join([write(item) for item in items])}]"

    return written


def object_of(write_value: Write) -> Callable[[Iterable[tuple[str, Any]]], str]:
    """Return the writer of a map whose keys are texts: an object."""

    def written(entries: Iterable[tuple[str, Any]]) -> str:
        return f"{{{','.join([f'{quoted(key)}:{write_value(value)}' for key, value in entries])}}}"

    return written


def label(name: str) -> str:
    """Return the JSON text before a member's value."""
    return f"{quoted(name)}:"
