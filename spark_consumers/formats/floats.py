"""Floating-point numbers as the text that PostgreSQL writes, for JSON. Pure.

    float8   0.1  1  -0  123456789012345  1e+15  1e-05          exponent from 15 digits on
    float4   0.1  1  -0  123456           1e+06  1e-05          exponent from 6 digits on
    both     "NaN"  "Infinity"  "-Infinity"

The text is the shortest that is nearer to the number than to its neighbours; a text half-way
between two, which Python's repr also gives, is not taken (d2s.c, f2s.c: acceptBounds is false).
"""

import math
import struct
from decimal import ROUND_UP, Context
from fractions import Fraction
from typing import Final

_SPECIAL: Final = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
_DOUBLE_DIGITS: Final = 15
_REAL_DIGITS: Final = 6
_FIXED_MIN: Final = 1e-4
_FIXED_MAX: Final = 1e15
_EXACT_MAX: Final = 2.0**53
"""Smaller numbers of float8 have no decimal text as short as theirs half-way to a neighbour."""
_DOUBLE_PRECISIONS: Final = range(1, 18)
_REAL_NORMAL_MIN: Final = 2.0**-126
_REAL_PRECISIONS: Final = range(1, 10)
_REAL: Final = struct.Struct("<f")
_BITS: Final = struct.Struct("<I")


def double_text(number: float) -> str:
    """Return the JSON text of a float8."""
    size = abs(number)
    if _FIXED_MIN <= size < _FIXED_MAX:
        text = repr(number)
        return text[:-2] if text.endswith(".0") else text
    if not math.isfinite(number):
        return _SPECIAL[repr(number)]
    text = repr(number)
    if size >= _EXACT_MAX:
        text = _nearer(number, text)
    return _written(text, _DOUBLE_DIGITS)


def real_text(number: float) -> str:
    """Return the JSON text of a float4, given as the float8 that equals it."""
    if not math.isfinite(number):
        return _SPECIAL[repr(number)]
    if number == 0:
        return "-0" if math.copysign(1, number) < 0 else "0"
    # Six digits tell all texts that have so many apart, but for the smallest numbers.
    for precision in _REAL_PRECISIONS[0 if abs(number) < _REAL_NORMAL_MIN else 5 :]:
        text = f"{number:.{precision - 1}e}"
        if _gives(text, number):
            break
        if math.frexp(number)[0] in (0.5, -0.5):  # its neighbour below is nearer than that above
            text = f"{Context(precision, ROUND_UP).create_decimal(number):e}"
            if _gives(text, number):
                break
    return _written(text, _REAL_DIGITS)


def short_text(number: float) -> str:
    """Return the JSON text of a float4 whose shortest text was read as a float8."""
    if not math.isfinite(number):
        return _SPECIAL[repr(number)]
    return _written(repr(number), _REAL_DIGITS)


def _nearer(number: float, text: str) -> str:
    """Return `text`, or a longer text of a float8 where it is half-way to a neighbour."""
    up = math.nextafter(number, math.inf)
    down = math.nextafter(number, -math.inf)
    middles = {
        (Fraction(number) + Fraction(near)) / 2 for near in (up, down) if math.isfinite(near)
    }
    for precision in _DOUBLE_PRECISIONS:
        if Fraction(text) not in middles:
            break
        text = f"{number:.{precision}e}"
        if float(text) != number:
            text = repr(number)
    return text


def _gives(text: str, number: float) -> bool:
    """Tell whether a text is read as the float4 `number`, and is not half-way to a neighbour."""
    read = float(text)
    try:
        data = _REAL.pack(read)
    except OverflowError:
        return False
    if _REAL.unpack(data)[0] != number:
        return False
    (bits,) = _BITS.unpack(data)
    for near in (bits - 1, bits + 1):
        (other,) = _REAL.unpack(_BITS.pack(near))
        if number + other == read * 2:
            return abs(Fraction(text) - Fraction(number)) < abs(Fraction(read) - Fraction(number))
    return True


def _written(text: str, fixed_digits: int) -> str:
    """Write a number's digits as PostgreSQL does: with an exponent where it is far from 0."""
    sign = "-" if text.startswith("-") else ""
    mantissa, _, exponent_text = text.removeprefix("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    exponent = int(exponent_text or 0) + len(whole) - 1
    digits = whole + fraction
    stripped = digits.lstrip("0")
    exponent -= len(digits) - len(stripped)
    digits = stripped.rstrip("0")
    if not digits:
        return f"{sign}0"
    if -4 <= exponent < fixed_digits:
        if exponent < 0:
            return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
        digits = digits.ljust(exponent + 1, "0")
        rest = digits[exponent + 1 :]
        return sign + digits[: exponent + 1] + (f".{rest}" if rest else "")
    rest = digits[1:]
    tail = f"e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    return sign + digits[0] + (f".{rest}" if rest else "") + tail
