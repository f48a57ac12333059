"""Text, numbers, booleans, bit strings and bytea to JSON text. Pure.

    bool                        true, false
    int2 int4 int8 oid          number
    float4 float8               number, or "NaN" "Infinity" "-Infinity"
    bit(1), varbit(1)           boolean              bit(n), varbit   little-endian bytes, base64
    bytea                       base64, base64 with - and _ for + and /, or hexadecimal

The bytes of a bit string end with its last 1, as Debezium's: the length of a varbit is lost.
"""

import base64
from collections.abc import Callable
from json.encoder import encode_basestring
from math import isfinite
from typing import Final

Encode = Callable[[bytes], str]
"""A value's text form to its JSON text. Raises ValueError for other text."""

SPECIAL_NUMBERS: Final = {b"NaN": '"NaN"', b"Infinity": '"Infinity"', b"-Infinity": '"-Infinity"'}
_BOOLEANS: Final = {b"t": "true", b"f": "false"}
_BITS: Final = {b"1": "true", b"0": "false", b"": "null"}


def string(value: bytes) -> str:
    """Encode any text as a JSON string."""
    return encode_basestring(value.decode("utf-8"))


def integer(value: bytes) -> str:
    """Encode an int2, int4, int8 or oid."""
    if not value.isdigit() and not (value[:1] == b"-" and value[1:].isdigit()):
        raise ValueError("no integer")
    return value.decode()


def boolean(value: bytes) -> str:
    """Encode a bool as true or false."""
    found = _BOOLEANS.get(value)
    if found is None:
        raise ValueError("no boolean")
    return found


def floating(value: bytes) -> str:
    """Encode a float4 or float8 by the shortest text that gives the same number."""
    if isfinite(float(value)):
        return value.decode("ascii")
    found = SPECIAL_NUMBERS.get(value)
    if found is None:
        raise ValueError("no number")
    return found


def bit(value: bytes) -> str:
    """Encode a single bit as true or false; an empty varbit(1) is null."""
    found = _BITS.get(value)
    if found is None:
        raise ValueError("no bit")
    return found


def bits(value: bytes) -> str:
    """Encode bit(n) and varbit as base64."""
    number = int(value or b"0", 2)
    return quoted_base64(number.to_bytes((number.bit_length() + 7) // 8, "little"))


def bytea_base64(value: bytes) -> str:
    """Encode bytea in base64."""
    return quoted_base64(bytea_bytes(value))


def bytea_base64_url_safe(value: bytes) -> str:
    """Encode bytea in base64 with - and _."""
    return f'"{base64.urlsafe_b64encode(bytea_bytes(value)).decode("ascii")}"'


def bytea_hex(value: bytes) -> str:
    """Encode bytea in hexadecimal."""
    return f'"{bytea_bytes(value).hex()}"'


def quoted_base64(data: bytes) -> str:
    """Encode bytes as a JSON string of base64."""
    return f'"{base64.b64encode(data).decode("ascii")}"'


def bytea_bytes(value: bytes) -> bytes:
    """Return the bytes of bytea's text form. Raise ValueError unless hexadecimal."""
    if value[:2] != b"\\x":
        raise ValueError("no bytea in hexadecimal")
    return bytes.fromhex(value[2:].decode("ascii"))
