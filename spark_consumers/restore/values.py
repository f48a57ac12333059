"""Gives values of an Iceberg table in a form that PostgreSQL reads. Pure.

The opposite of `verify/forms`: from the JSON form that the bridge writes, which Iceberg's texts and
arrays still have, to the text that the input function of the column's type takes.

    date, timestamp(tz)   a Julian day: the same for each year that PostgreSQL knows
    arrays                PostgreSQL's array literal
    everything else       the form itself
"""

import base64
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from pyspark.sql import types as T

from schemas.infinities import (
    DATE_INFINITY_DAYS,
    DATE_NEGATIVE_INFINITY_DAYS,
    INFINITY_MICROSECONDS,
    NEGATIVE_INFINITY_MICROSECONDS,
)
from spark_consumers.sql import quoted
from spark_consumers.verify.forms import Layer

_JULIAN_EPOCH_DAYS: Final = 2440588
_DAY_US: Final = 24 * 3600 * 1_000_000
_INFINITE_DAYS: Final = {
    DATE_INFINITY_DAYS: "infinity",
    DATE_NEGATIVE_INFINITY_DAYS: "-infinity",
}
_INFINITE_MICROSECONDS: Final = {
    INFINITY_MICROSECONDS: "infinity",
    NEGATIVE_INFINITY_MICROSECONDS: "-infinity",
}
_INSTANT: Final = re.compile(r"([+-]?)(\d+)(.*)", re.DOTALL)
_ESCAPED: Final = re.compile(r'(["\\])')


def form_sql(column: str, kind: T.DataType) -> str:
    """Return SQL of a column's JSON form as text; an instant is microseconds since 1970."""
    name = quoted(column)
    if isinstance(kind, T.DateType):
        name = f"unix_date({name})"
    elif isinstance(kind, (T.TimestampType, T.TimestampNTZType)):
        name = f"unix_micros(CAST({name} AS timestamp))"
    elif isinstance(kind, T.BinaryType):
        name = f"base64({name})"
    return f"CAST({name} AS string)"


def input_text(form: str, layers: Sequence[Layer]) -> str:
    """Return the text by which PostgreSQL reads a value of a type that consists of `layers`."""
    first, *rest = layers
    if first.domain:
        return input_text(form, rest)
    if first.array:
        delimiter = ";" if rest[-1].type == "box" else ","
        return _array(json.loads(form, parse_int=str, parse_float=str), rest, delimiter)
    convert = _INPUTS.get(first.type)
    return form if convert is None else convert(form)


def _array(value: Any, element: Sequence[Layer], delimiter: str) -> str:
    """Return a nested list as PostgreSQL's array text."""
    if isinstance(value, list):
        return f"{{{delimiter.join(_array(part, element, delimiter) for part in value)}}}"
    if value is None:
        return "NULL"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    escaped = _ESCAPED.sub(r"\\\1", input_text(text, element))
    return f'"{escaped}"'


def _date(form: str) -> str:
    days = int(form)
    return _INFINITE_DAYS.get(days) or f"J{days + _JULIAN_EPOCH_DAYS}"


def _time(form: str) -> str:
    seconds, micros = divmod(int(form), 1_000_000)
    minutes, second = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}.{micros:06}"


def _timestamp(form: str) -> str:
    micros = int(form)
    days, rest = divmod(micros, _DAY_US)
    finite = f"J{days + _JULIAN_EPOCH_DAYS} {_time(str(rest))}"
    return _INFINITE_MICROSECONDS.get(micros) or finite


def _instant(form: str) -> str:
    """Return an instant's text: of microseconds, or of ISO 8601 with a year that may be signed."""
    if form.lstrip("-").isdigit():
        return _timestamp(form)
    match = _INSTANT.fullmatch(form)
    if match is None:  # infinity
        return form
    sign, year, rest = match.groups()
    if sign == "-" or int(year) == 0:
        return f"{1 + int(year):04}{rest} BC"
    return f"{year}{rest}"


def _bytes(form: str) -> str:
    return "\\x" + base64.b64decode(form).hex()


_INPUTS: Final[dict[str, Callable[[str], str]]] = {
    "date": _date,
    "time": _time,
    "timestamp": _timestamp,
    "timestamptz": _instant,
    "bytea": _bytes,
}
