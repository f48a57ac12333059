"""date, time and timestamp to JSON text. Pure; relies on DateStyle ISO and TimeZone UTC.

    precision                    date    time(p), timestamp(p)
    microseconds                 days    microseconds
    adaptive                     days    milliseconds for p <= 3, else microseconds
    adaptive_time_microseconds   days    the same, but time is always in microseconds
    nanoseconds                  days    nanoseconds
    connect                      days    milliseconds, without the digits behind them
    isostring                    "2024-02-29Z"  "10:20:30.5Z"  "2024-02-29T10:20:30.5Z"
    any                          timestamptz(p) "2024-02-29T10:20:30.500000Z" with p digits
                                 timetz         "10:20:30.5Z"

Days since 1970-01-01 in the proleptic Gregorian calendar, units of time since midnight or 1970.
Years are ISO 8601's: 1 BC is 0000, and above 9999 they begin with +. ±infinity: INFINITIES, or as a
string. A timestamp far from today needs more than 64 bits of nanoseconds.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from schemas.infinities import (
    DATE_INFINITY_DAYS,
    DATE_NEGATIVE_INFINITY_DAYS,
    INFINITY_MICROSECONDS,
    INFINITY_MILLISECONDS,
    NEGATIVE_INFINITY_MICROSECONDS,
    NEGATIVE_INFINITY_MILLISECONDS,
)
from services.bridge.events.errors import UnfitValue
from services.bridge.events.values.plain import Encode

DAY_US: Final = 86_400_000_000
_MILLISECONDS_DIGITS: Final = 3
_FRACTION_DIGITS: Final = 6
_SAFE_DIGITS: Final = 18
_INFINITIES: Final = (b"infinity", b"-infinity")
_INSTANT_BYTES: Final = len("2024-02-29 10:20:30.123456+00")


class Unit(NamedTuple):
    """Units are microseconds * `multiple` // `divisor`; then what stands for ±infinity."""

    multiple: int
    divisor: int
    infinities: tuple[int, int]


_LARGEST: Final = (INFINITY_MICROSECONDS, NEGATIVE_INFINITY_MICROSECONDS)
_MILLISECONDS: Final = Unit(1, 1000, (INFINITY_MILLISECONDS, NEGATIVE_INFINITY_MILLISECONDS))
_MICROSECONDS: Final = Unit(1, 1, _LARGEST)
_NANOSECONDS: Final = Unit(1000, 1, _LARGEST)


def date(precision: str) -> Encode:
    """Return the encoder of the type date."""
    return _iso_date if precision == "isostring" else date_days


def time(precision: str, typmod: int) -> Encode:
    """Return the encoder of the type time; `typmod` is its precision."""
    if precision == "isostring":
        return _iso_time
    if precision == "microseconds":
        return _time
    multiple, divisor, _ = _unit(precision, typmod, "adaptive")
    return lambda value: str(_microseconds(value) * multiple // divisor)


def timestamp(precision: str, typmod: int) -> Encode:
    """Return the encoder of the type timestamp; `typmod` is its precision."""
    if precision == "isostring":
        return _iso_timestamp
    if precision == "microseconds":
        return timestamp_us
    multiple, divisor, infinities = _unit(
        precision, typmod, "adaptive", "adaptive_time_microseconds"
    )

    def encode(value: bytes) -> str:
        if value in _INFINITIES:
            return str(infinities[_INFINITIES.index(value)])
        return str(_since_1970(value) * multiple // divisor)

    return encode


def timestamptz(typmod: int) -> Encode:
    """Return the encoder of the type timestamptz; `typmod` is its precision."""
    digits = _FRACTION_DIGITS if typmod < 0 else typmod
    return instant if digits == _FRACTION_DIGITS else lambda value: _instant(value, digits)


def instant(value: bytes) -> str:
    """Encode a timestamptz with all its digits."""
    text = value.decode("ascii")
    if len(text) == _INSTANT_BYTES and text[4] == "-" and text[26:] == "+00":
        return f'"{text[:10]}T{text[11:26]}Z"'
    return _instant(value, _FRACTION_DIGITS)


def _instant(value: bytes, digits: int) -> str:
    """Return a timestamptz in UTC as ISO 8601 in quotes, with `digits` of its fraction."""
    text = value.decode("ascii")
    if value in _INFINITIES:
        return f'"{text}"'
    day, _, rest = text.partition(" ")
    clock, _, era = rest.partition(" ")
    whole, _, fraction = clock.removesuffix("+00").partition(".")
    _microseconds(whole.encode())
    fraction = f".{fraction:0<{digits}}" if digits else ""
    return f'"{_iso_day(day, era)}T{whole}{fraction}Z"'


def timetz(value: bytes) -> str:
    """Encode a time like `10:20:30.5+02` in UTC; drop the day's shift: a time has no day."""
    if value == b"24:00:00+00":
        return '"24:00:00Z"'
    text = value.decode("ascii")
    sign_at = max(text.rfind("+"), text.rfind("-"))
    hours, minutes, seconds = (*map(int, text[sign_at + 1 :].split(":")), 0, 0)[:3]
    offset = hours * 3600 + minutes * 60 + seconds
    offset *= -1 if text[sign_at] == "-" else 1
    time = (_microseconds(text[:sign_at].encode()) - offset * 1_000_000) % DAY_US
    seconds, fraction = divmod(time, 1_000_000)
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f'"{clock}{f".{fraction:06d}".rstrip("0") if fraction else ""}Z"'


def in_milliseconds(typmod: int) -> bool:
    """Tell whether a time or timestamp of this type modifier has at most three digits."""
    return 0 <= typmod <= _MILLISECONDS_DIGITS


def _unit(precision: str, typmod: int, *adaptive: str) -> Unit:
    if precision in adaptive and in_milliseconds(typmod):
        return _MILLISECONDS
    if precision == "connect":
        return _MILLISECONDS
    return _NANOSECONDS if precision == "nanoseconds" else _MICROSECONDS


def date_days(value: bytes) -> str:
    """Encode a date as days since 1970."""
    if value in _INFINITIES:
        return str(DATE_INFINITY_DAYS if value == b"infinity" else DATE_NEGATIVE_INFINITY_DAYS)
    return str(_days(value))


def _time(value: bytes) -> str:
    return str(_microseconds(value))


def timestamp_us(value: bytes) -> str:
    """Encode a timestamp as microseconds since 1970."""
    if value in _INFINITIES:
        return str(_LARGEST[_INFINITIES.index(value)])
    return str(_since_1970(value))


def timestamp_us_of_64_bits(value: bytes) -> str:
    """Encode as `timestamp_us`. Raise UnfitValue for a number that needs more than 64 bits."""
    return of_64_bits(timestamp_us(value))


def of_64_bits(number: str) -> str:
    """Return `number`. Raise UnfitValue where it needs more than 64 bits."""
    if len(number) > _SAFE_DIGITS and not -(2**63) <= int(number) < 2**63:
        raise UnfitValue("a timestamp needs more than 64 bits")
    return number


def _iso_date(value: bytes) -> str:
    if value in _INFINITIES:
        return f'"{value.decode("ascii")}"'
    day, _, era = value.decode("ascii").partition(" ")
    return f'"{_iso_day(day, era)}Z"'


def _iso_time(value: bytes) -> str:
    _microseconds(value)
    return f'"{value.decode("ascii")}Z"'


def _iso_timestamp(value: bytes) -> str:
    if value in _INFINITIES:
        return f'"{value.decode("ascii")}"'
    day, clock, era = (*value.decode("ascii").split(" "), "")[:3]
    _microseconds(clock.encode())
    return f'"{_iso_day(day, era)}T{clock}Z"'


def _iso_day(day: str, era: str) -> str:
    """Convert `YYYY-MM-DD` to ISO 8601's year; `era` is "" or "BC"."""
    _days(f"{day} {era}".strip().encode())
    year, rest = day.split("-", 1)
    if era:
        number = 1 - int(year)
        return f"{'-' if number < 0 else ''}{-number:04d}-{rest}"
    return f"+{day}" if len(year) > 4 else day


def _since_1970(value: bytes) -> int:
    """Convert a timestamp to microseconds since 1970; most values share a recently seen second."""
    if value[19:20] == b".":
        fraction = value[20:]
        if fraction.isdigit():
            return _second(value[:19]) + int(fraction.ljust(_FRACTION_DIGITS, b"0"))
    return _second(value)


@lru_cache(maxsize=4096)
def _second(value: bytes) -> int:
    """Convert `YYYY-MM-DD HH:MM:SS[.ffffff][ BC]` to microseconds since 1970."""
    day, _, time = value.partition(b" ")
    if time.endswith(b" BC"):
        day, time = day + b" BC", time[:-3]
    return _days(day) * DAY_US + _microseconds(time)


def _microseconds(time: bytes) -> int:
    """Return `HH:MM:SS[.ffffff]` in microseconds."""
    whole = int(time[:2]) * 3600 + int(time[3:5]) * 60 + int(time[6:8])
    return whole * 1_000_000 + (int(time[9:].ljust(6, b"0")) if len(time) > 9 else 0)


@lru_cache(maxsize=4096)
def _days(day: bytes) -> int:
    """Count the days from 1970-01-01 to `YYYY-MM-DD[ BC]`, in the proleptic Gregorian calendar.

    Works for any year, by H. Hinnant's days_from_civil.
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
