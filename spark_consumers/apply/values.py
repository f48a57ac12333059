"""Columns of values: JSON forms as texts -> Arrow, by the rules of `events.columns`. Pure.

A form that Spark may read and this does not is Unsuited, as is one that does not fit: Spark's way
reads it, or refuses it with its place.
"""

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as T

from schemas.infinities import INFINITY_MICROSECONDS, NEGATIVE_INFINITY_MICROSECONDS
from spark_consumers.apply.events import Real
from spark_consumers.events.unsuited import Unsuited

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,18}")
_FLOAT: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,4})?|NaN|-?Infinity")
_INSTANT: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?Z"
)
_ENDLESS: Final = {
    "infinity": INFINITY_MICROSECONDS,
    "-infinity": NEGATIVE_INFINITY_MICROSECONDS,
}
_BOOLEANS: Final = {"true": True, "false": False}
Texts = Sequence[str | None]


def arrow_type(kind: T.DataType) -> pa.DataType:
    """Return the Arrow type of a column's values."""
    if isinstance(kind, T.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    return _TYPES[type(kind)]


def column(texts: Texts, kind: T.DataType) -> pa.Array:
    """Return the values of a column; raise Unsuited where one is not certainly right."""
    try:
        return _READ[type(kind)](texts, kind)
    except (ValueError, KeyError, OverflowError, InvalidOperation, pa.ArrowException) as error:
        raise Unsuited("a value that Spark is to judge") from error


def _matching(texts: Texts, form: re.Pattern[str]) -> list[str | None]:
    if any(text is not None and form.fullmatch(text) is None for text in texts):
        raise ValueError("another form")
    return list(texts)


def _integers(texts: Texts, kind: T.DataType) -> pa.Array:
    return pa.array(_numbers(texts), arrow_type(kind))


def _numbers(texts: Texts) -> list[int | None]:
    return [None if text is None else int(text) for text in _matching(texts, _INTEGER)]


def _dates(texts: Texts, _kind: T.DataType) -> pa.Array:
    return pa.array(_numbers(texts), pa.int32()).cast(pa.date32())


def _local_times(texts: Texts, kind: T.DataType) -> pa.Array:
    return pa.array(_numbers(texts), pa.int64()).cast(arrow_type(kind))


def _instants(texts: Texts, kind: T.DataType) -> pa.Array:
    finite = [None if text in _ENDLESS else text for text in texts]
    found = pa.array(_matching(finite, _INSTANT), pa.string()).cast(arrow_type(kind))
    if finite == list(texts):
        return found
    numbers = found.cast(pa.int64()).to_pylist()
    whole = [_ENDLESS.get(text or "", at) for text, at in zip(texts, numbers, strict=True)]
    return pa.array(whole, pa.int64()).cast(arrow_type(kind))


def _floats(texts: Texts, kind: T.DataType) -> pa.Array:
    numbers = [None if text is None else float(text) for text in _matching(texts, _FLOAT)]
    found = pa.array(numbers, pa.float64())
    return found.cast(arrow_type(kind), safe=False)


def _decimals(texts: Texts, kind: T.DataType) -> pa.Array:
    assert isinstance(kind, T.DecimalType)
    form = re.compile(rf"-?[0-9]+(?:\.[0-9]{{1,{kind.scale}}})?" if kind.scale else "-?[0-9]+")
    numbers = [None if text is None else Decimal(text) for text in _matching(texts, form)]
    return pa.array(numbers, arrow_type(kind))


def _booleans(texts: Texts, _kind: T.DataType) -> pa.Array:
    return pa.array([None if text is None else _BOOLEANS[text] for text in texts], pa.bool_())


def _bytes(texts: Texts, _kind: T.DataType) -> pa.Array:
    found = []
    for text in texts:
        try:
            found.append(None if text is None else base64.b64decode(text, validate=True))
        except binascii.Error as error:
            raise ValueError("not base64") from error
    return pa.array(found, pa.binary())


def _strings(texts: Texts, _kind: T.DataType) -> pa.Array:
    if any(isinstance(text, Real) for text in texts):
        raise ValueError("Spark's text of a number may be another one")
    return pa.array(texts, pa.string())


_TYPES: Final[dict[type[T.DataType], pa.DataType]] = {
    T.BooleanType: pa.bool_(),
    T.IntegerType: pa.int32(),
    T.LongType: pa.int64(),
    T.FloatType: pa.float32(),
    T.DoubleType: pa.float64(),
    T.DateType: pa.date32(),
    T.TimestampNTZType: pa.timestamp("us"),
    T.TimestampType: pa.timestamp("us", "UTC"),
    T.BinaryType: pa.binary(),
    T.StringType: pa.string(),
}
_READ: Final[dict[type[T.DataType], Callable[[Texts, Any], pa.Array]]] = {
    T.BooleanType: _booleans,
    T.IntegerType: _integers,
    T.LongType: _integers,
    T.FloatType: _floats,
    T.DoubleType: _floats,
    T.DecimalType: _decimals,
    T.DateType: _dates,
    T.TimestampNTZType: _local_times,
    T.TimestampType: _instants,
    T.BinaryType: _bytes,
    T.StringType: _strings,
}
