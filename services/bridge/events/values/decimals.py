"""numeric and money to JSON text. Pure.

    mode       numeric(p,s), money                    numeric                       NaN, ±Infinity
    string     "123.45"                               "123.45"                      "NaN" …
    double     123.45                                 123.45                        "NaN" …
    precise    unscaled number in two's complement,   {"scale": s, "value": …},     "NaN" …
               big-endian, base64                     without trailing zeros

`precise` has the form {"scale": 0, "value": …} also for a numeric with a negative scale.
"""

from decimal import Decimal
from typing import Final

from services.bridge.events.values.plain import SPECIAL_NUMBERS, Encode, quoted_base64, string

_INT_DIGITS_MAX: Final = 4_000
_MODIFIER_BASE: Final = 4


def numeric(mode: str, typmod: int) -> Encode:
    """Return the encoder of a numeric with `typmod` in `mode` string, double or precise."""
    if mode == "string":
        return string
    if mode == "double":
        return double
    precision, scale = precision_and_scale(typmod)
    return variable_scale if not precision or scale < 0 else fixed_scale


def money(mode: str, digits: int) -> Encode:
    """Return the encoder of money, whose text form has `digits` after the decimal point.

    The text is lc_monetary's. Only its digits and its sign count, so any currency can be read.
    """

    def plain(value: bytes) -> bytes:
        number = bytes(byte for byte in value if 48 <= byte <= 57)
        if not number:
            raise ValueError("no money")
        sign = b"-" if b"-" in value or b"(" in value else b""
        if not digits:
            return sign + number
        number = number.rjust(digits + 1, b"0")
        return sign + number[:-digits] + b"." + number[-digits:]

    if mode == "precise":
        return lambda value: fixed_scale(plain(value))
    if mode == "double":
        return lambda value: double(plain(value))
    return lambda value: string(plain(value))


def double(value: bytes) -> str:
    """Encode the nearest double; beyond the largest double, infinity."""
    if value in SPECIAL_NUMBERS:
        return SPECIAL_NUMBERS[value]
    text = repr(float(value))
    return f'"{text.replace("inf", "Infinity")}"' if "inf" in text else text


def fixed_scale(value: bytes) -> str:
    """Encode the unscaled number; the column's type tells its scale."""
    return SPECIAL_NUMBERS.get(value) or _unscaled(value.replace(b".", b"", 1))


def variable_scale(value: bytes) -> str:
    """Encode the unscaled number together with its scale."""
    if value in SPECIAL_NUMBERS:
        return SPECIAL_NUMBERS[value]
    whole, _, fraction = value.partition(b".")
    fraction = fraction.rstrip(b"0")
    return f'{{"scale":{len(fraction)},"value":{_unscaled(whole + fraction)}}}'


def precision_and_scale(typmod: int) -> tuple[int, int]:
    """Return what a numeric's type modifier says; (0, 0) for a numeric without one.

    typmod - 4 is precision << 16 | 11 bits of scale (numeric.c).
    """
    if typmod < _MODIFIER_BASE:
        return 0, 0
    typmod -= _MODIFIER_BASE
    return typmod >> 16 & 0xFFFF, (typmod & 0x7FF ^ 0x400) - 0x400


def _unscaled(digits: bytes) -> str:
    """Encode a number as Java's BigInteger.toByteArray: the fewest bytes for number and sign."""
    if not digits.removeprefix(b"-").isdigit():
        raise ValueError("no number")
    short = len(digits) <= _INT_DIGITS_MAX  # int() refuses long texts
    number = int(digits) if short else int(Decimal(digits.decode("ascii")))
    bits = (number if number >= 0 else -number - 1).bit_length()
    return quoted_base64(number.to_bytes(bits // 8 + 1, "big", signed=True))
