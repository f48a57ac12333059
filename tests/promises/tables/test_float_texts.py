"""Floating-point numbers as PostgreSQL writes them."""

import math
import random
import struct
from collections.abc import Callable

import psycopg
import pytest

from spark_consumers.formats.floats import double_text, real_text, short_text
from tests.providers.interface import Trio


def doubles() -> list[float]:
    drawn = random.Random(7)
    return [
        *(math.ldexp(1.0, n) for n in range(-1074, 1024)),
        *(float(f"{m}e{n}") for n in range(-320, 308) for m in (1, 9.5)),
        *(float(2**53 + n) for n in range(-40, 41)),
        *(struct.unpack("<d", drawn.randbytes(8))[0] for _ in range(30_000)),
        *(drawn.randint(2**52, 2**63) * 10.0 ** drawn.randint(0, 8) for _ in range(10_000)),
        *(round(drawn.uniform(-1e6, 1e6), drawn.randint(0, 6)) for _ in range(5_000)),
        *(1e23, 9007199254740993e1, 0.1, 0.0001, 0.00001234, 1e15 - 0.5, 123456789012345.0),
        *(0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308),
    ]


def reals() -> list[float]:
    drawn = random.Random(7)
    scaled = (float(f"{m}e{n}") for n in range(-44, 38) for m in (1, 2.5, 3.3333333))
    return [
        *(math.ldexp(1.0, n) for n in range(-149, 128)),
        *(struct.unpack("<f", drawn.randbytes(4))[0] for _ in range(30_000)),
        *(struct.unpack("<f", struct.pack("<f", number))[0] for number in scaled),
        *(float(drawn.randint(2**24, 2**31) // 128 * 128) for _ in range(5_000)),
        *(0.0, -0.0, 123456.0, 1234567.0, 999999.0, 1e6, 16777216.0, 33554432.0),
        (2 - 2.0**-23) * 2.0**127,
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "draw", "text"), [("float8", doubles, double_text), ("float4", reals, real_text)]
)
def test_a_number_has_the_text_that_the_server_gives(
    pair: Trio, fresh_database: str, kind: str, draw: Callable[[], list[float]], text: object
) -> None:
    assert callable(text)
    numbers = draw()
    forms = [repr(number) for number in numbers]
    with psycopg.connect(pair.primary.conninfo(fresh_database)) as connection:
        told = connection.execute(
            f"SELECT t::{kind}::text FROM unnest(%s::text[]) WITH ORDINALITY AS u (t, n)"
            " ORDER BY n".encode(),
            [forms],
        ).fetchall()
    wrong = [
        (number, text(number), found)
        for number, (found,) in zip(numbers, told, strict=True)
        if text(number).strip('"') != found
    ]
    assert not wrong, (len(wrong), wrong[:20])


@pytest.mark.parametrize("text", ["0.1", "1e+06", "123456", "1.2345678e-05", "-3.5", "0"])
def test_a_vectors_number_has_the_text_of_a_float4(text: str) -> None:
    assert short_text(float(text)) == text
