"""interval to JSON text. Pure; relies on IntervalStyle postgres.

text       "1 year 2 mons -3 days 04:05:06.789"
string     "P1Y2M-3DT4H5M6.789S", ISO 8601 with a sign for each part; ±infinity as a string
numeric    microseconds, a month being 365.25 / 12 days; held within 64 bits, ±infinity too
"""

import re
from typing import Final

from services.bridge.events.values.plain import Encode, string

_SHAPE: Final = re.compile(
    rb"(?:(-?\d+) years?)? ?(?:([+-]?\d+) mons?)? ?(?:([+-]?\d+) days?)?"
    rb" ?(?:([+-])?(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?"
)
_DAY_US: Final = 86_400_000_000
_MONTH_US: Final = 2_629_800_000_000
_BOUND: Final = 2**63


def interval(mode: str) -> Encode:
    """Return the encoder of interval in `mode` text, string or numeric."""
    return {"text": string, "string": iso_8601, "numeric": microseconds}[mode]


def iso_8601(value: bytes) -> str:
    """Encode years, months, days, hours, minutes and seconds, zeros included."""
    if value in (b"infinity", b"-infinity"):
        return f'"{value.decode("ascii")}"'
    years, months, days, sign, hours, minutes, seconds, fraction = _parts(value)
    fraction_text = f".{fraction:06d}".rstrip("0") if fraction else ""
    seconds_sign = "-" if sign < 0 and (seconds or fraction) else ""
    return (
        f'"P{years}Y{months}M{days}DT{sign * hours}H{sign * minutes}M'
        f'{seconds_sign}{seconds}{fraction_text}S"'
    )


def microseconds(value: bytes) -> str:
    """Encode an interval as one number of microseconds, with a month of _MONTH_US."""
    if value in (b"infinity", b"-infinity"):
        return str(_BOUND - 1 if value == b"infinity" else -_BOUND)
    years, months, days, sign, hours, minutes, seconds, fraction = _parts(value)
    time = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + fraction
    total = (years * 12 + months) * _MONTH_US + days * _DAY_US + sign * time
    return str(max(-_BOUND, min(total, _BOUND - 1)))


def _parts(value: bytes) -> tuple[int, int, int, int, int, int, int, int]:
    """Return years, months, days, sign of the time, hours, minutes, seconds, microseconds."""
    match = _SHAPE.fullmatch(value)
    if match is None or not value:
        raise ValueError("no interval")
    years, months, days, sign, hours, minutes, seconds, fraction = match.groups(b"")
    return (
        int(years or b"0"),
        int(months or b"0"),
        int(days or b"0"),
        -1 if sign == b"-" else 1,
        int(hours or b"0"),
        int(minutes or b"0"),
        int(seconds or b"0"),
        int(fraction.ljust(6, b"0")) if fraction else 0,
    )
