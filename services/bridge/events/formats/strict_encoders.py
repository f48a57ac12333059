"""Encoders whose JSON fits a schema: values that no schema of their column has are refused. Pure.

    refused                                 why
    NaN, ±Infinity in a precise numeric     a Decimal is a number
    a timestamp beyond 64 bits              the schema's number has 64
    an array of arrays                      PostgreSQL has one type for all dimensions
    a sparsevec beyond 32,767 dimensions    Debezium's schema has 16 bits for them
    NaN, ±Infinity of a float, in JSON      a number in JSON is finite; Kafka Connect reads a text
    with a schema                           in its place as 0

What stands for a value that the WAL lacks fits the schema too.
"""

import json
from math import isfinite

from services.bridge.events.errors import UnfitValue
from services.bridge.events.formats import connect
from services.bridge.events.formats.connect import Schema
from services.bridge.events.formats.type_schemas import column_schema
from services.bridge.events.values import datetimes
from services.bridge.events.values.encoders import Encoder, Encoders
from services.bridge.events.values.plain import SPECIAL_NUMBERS, Encode, floating

_FLOATS = ("float", "double")
_NO_NUMBER = "a number in JSON can't be NaN or infinite"
_NOT_FINITE = tuple(SPECIAL_NUMBERS.values())
_INT16_MAX = 2**15 - 1
_DECIMALS = (connect.DECIMAL, connect.VARIABLE_SCALE["name"])
_NESTED = ("array", "bytes", "struct")
_TIMESTAMPS = (f"{connect.TIME}.MicroTimestamp", f"{connect.TIME}.NanoTimestamp")


class StrictEncoders(Encoders):
    """Encoders that raise UnfitValue for values that their column's schema can't hold."""

    def _make(self, oid: int, typmod: int) -> Encoder:
        schema = column_schema(self, oid, typmod)
        encode, unavailable = super()._make(oid, typmod)
        if not _fits(schema):
            unavailable = json.dumps(connect.placeholder(schema), separators=(",", ":"))
        return Encoder(_strict(encode, schema), unavailable)


class FiniteEncoders(StrictEncoders):
    """Encoders that also refuse floating-point numbers that a number in JSON can't be."""

    def _make(self, oid: int, typmod: int) -> Encoder:
        encode, unavailable = super()._make(oid, typmod)
        if _has_floats(column_schema(self, oid, typmod)):
            encode = _finite(encode)
        return Encoder(encode, unavailable)


def _has_floats(schema: Schema) -> bool:
    if schema["type"] == "array":
        return _has_floats(schema["items"])
    if schema["type"] == "struct":
        return any(_has_floats(field) for _, field in connect.fields(schema))
    return schema.get("values", schema)["type"] in _FLOATS


def _finite(encode: Encode) -> Encode:
    """Return an encoder that raises UnfitValue for NaN and infinity."""
    if encode is floating:
        return _finite_floating

    def encoded(value: bytes) -> str:
        text = encode(value)
        if any(number in text for number in _NOT_FINITE):
            raise UnfitValue(_NO_NUMBER)
        return text

    return encoded


def _finite_floating(value: bytes) -> str:
    if isfinite(float(value)):
        return value.decode("ascii")
    raise UnfitValue(_NO_NUMBER)


def _fits(schema: Schema) -> bool:
    """Tell whether the placeholder of plain JSON fits too: a text, or made of what fits."""
    items = schema.get("items", schema)["type"]
    return items in ("string", "map") or (schema["type"] == "array" and items in _NESTED)


def _strict(encode: Encode, schema: Schema) -> Encode:
    """Return an encoder that raises UnfitValue for values which the schema can't have."""
    name = schema.get("name", "")
    if name in _DECIMALS:
        return _number(encode)
    if name in _TIMESTAMPS:
        if encode is datetimes.timestamp_us:
            return datetimes.timestamp_us_of_64_bits
        return lambda value: datetimes.of_64_bits(encode(value))
    if name == connect.SPARSE_VECTOR["name"]:
        return _short(encode)
    if schema["type"] == "array" and not name:
        return _flat(encode)
    return encode


def _number(encode: Encode) -> Encode:
    """Return an encoder of decimals that raises UnfitValue for NaN and infinity."""

    def encoded(value: bytes) -> str:
        if value in SPECIAL_NUMBERS:
            raise UnfitValue("a decimal can't be NaN or infinite")
        return encode(value)

    return encoded


def _short(encode: Encode) -> Encode:
    """Return an encoder of sparse vectors that raises UnfitValue for dimensions above 16 bits."""

    def encoded(value: bytes) -> str:
        if int(value.rpartition(b"/")[2]) > _INT16_MAX:
            raise UnfitValue("a sparse vector's schema has 16 bits for its dimensions")
        return encode(value)

    return encoded


def _flat(encode: Encode) -> Encode:
    """Return an encoder of arrays that raises UnfitValue for an array of arrays."""

    def encoded(value: bytes) -> str:
        begin = value.find(b"{") + 1
        if value[begin : begin + 1] == b"{":
            raise UnfitValue("an array of arrays has no schema")
        return encode(value)

    return encoded
