"""A column's text form to JSON text, by type. Pure; the default modes of the envelope.

    bool                     true, false
    int2 int4 int8 oid       number
    float4 float8            number, or "NaN" "Infinity" "-Infinity"
    numeric, money           string
    date                     days since 1970-01-01
    time                     microseconds since midnight
    timestamp                microseconds since 1970-01-01; ±infinity: Debezium's two constants
    timestamptz, timetz      ISO 8601 in UTC, ending in Z; ±infinity as a string
    bytea                    base64
    everything else          string: PostgreSQL's text form

These rely on the replication session's DateStyle ISO, TimeZone UTC and bytea_output hex.
"""

import base64
from collections.abc import Callable
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Final

from schemas.events import INFINITY_MICROSECONDS, NEGATIVE_INFINITY_MICROSECONDS

Encode = Callable[[bytes], str]

_DAY_US: Final = 86_400_000_000
_INFINITIES: Final = {
    b"infinity": INFINITY_MICROSECONDS,
    b"-infinity": NEGATIVE_INFINITY_MICROSECONDS,
}


def encoder_for(type_oid: int) -> Encode:
    """The encoder of a pg_type oid; unknown types go out as strings."""
    return _ENCODERS.get(type_oid, _string)


def _string(value: bytes) -> str:
    return encode_basestring(value.decode("utf-8"))


def _number(value: bytes) -> str:
    return value.decode("ascii")


def _boolean(value: bytes) -> str:
    return "true" if value == b"t" else "false"


def _float(value: bytes) -> str:
    text = value.decode("ascii")
    return f'"{text}"' if text in ("NaN", "Infinity", "-Infinity") else text


def _bytea(value: bytes) -> str:
    return f'"{base64.b64encode(bytes.fromhex(value[2:].decode("ascii"))).decode("ascii")}"'


def _date(value: bytes) -> str:
    if value in _INFINITIES:
        return str(_INFINITIES[value] // _DAY_US)
    return str(_days(value))


def _time(value: bytes) -> str:
    return str(_microseconds(value))


def _timestamp(value: bytes) -> str:
    if value in _INFINITIES:
        return str(_INFINITIES[value])
    day, _, time = value.partition(b" ")
    if time.endswith(b" BC"):
        day, time = day + b" BC", time[:-3]
    return str(_days(day) * _DAY_US + _microseconds(time))


def _timestamptz(value: bytes) -> str:
    if value in _INFINITIES:
        return f'"{value.decode("ascii")}"'
    text = value.decode("ascii")
    if text.endswith(" BC"):
        year, rest = text[:-3].split("-", 1)
        text = f"-{int(year) - 1:04d}-{rest}"
    return f'"{text.replace(" ", "T").removesuffix("+00")}Z"'


def _timetz(value: bytes) -> str:
    """`10:20:30.5+02` in UTC; the day's shift is dropped, as a time of day has none."""
    text = value.decode("ascii")
    sign_at = max(text.rfind("+"), text.rfind("-"))
    hours, *rest = (int(part) for part in text[sign_at + 1 :].split(":"))
    offset = (hours * 3600 + (rest[0] * 60 if rest else 0)) + (rest[1] if len(rest) > 1 else 0)
    offset *= -1 if text[sign_at] == "-" else 1
    time = (_microseconds(text[:sign_at].encode()) - offset * 1_000_000) % _DAY_US
    seconds, fraction = divmod(time, 1_000_000)
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f'"{clock}{f".{fraction:06d}".rstrip("0") if fraction else ""}Z"'


def _microseconds(time: bytes) -> int:
    """`HH:MM:SS[.ffffff]` in microseconds."""
    whole = int(time[:2]) * 3600 + int(time[3:5]) * 60 + int(time[6:8])
    return whole * 1_000_000 + (int(time[9:].ljust(6, b"0")) if len(time) > 9 else 0)


@lru_cache(maxsize=4096)
def _days(day: bytes) -> int:
    """Days since 1970-01-01 of `YYYY-MM-DD[ BC]`, in the proleptic Gregorian calendar.

    Any year, by H. Hinnant's days_from_civil.
    """
    before_christ = day.endswith(b" BC")
    year_text, month_text, day_text = day.removesuffix(b" BC").split(b"-")
    year, month, day_of_month = int(year_text), int(month_text), int(day_text)
    if before_christ:
        year = 1 - year
    year -= month <= 2
    era, year_of_era = divmod(year, 400)
    day_of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day_of_month - 1
    return (
        era * 146_097
        + year_of_era * 365
        + year_of_era // 4
        - year_of_era // 100
        + day_of_year
        - 719_468
    )


_ENCODERS: Final[dict[int, Encode]] = {
    16: _boolean,
    17: _bytea,
    20: _number,
    21: _number,
    23: _number,
    26: _number,
    700: _float,
    701: _float,
    1082: _date,
    1083: _time,
    1114: _timestamp,
    1184: _timestamptz,
    1266: _timetz,
}
