"""Random values through a live server: what it prints of a value, encoded, is that value again."""

import base64
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.settings import ValueSettings
from services.bridge.events.values.encoders import Encoders
from services.bridge.source.type_catalog import money_digits, read_types
from services.postgres.sessions import ROWS, open_session
from tests.promises.bridge.values.forms import DEBEZIUM
from tests.providers.interface import Provider

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
floats = st.floats(allow_nan=False)
DAY_US = 86_400_000_000
FIRST_DAY, LAST_DAY = -2_440_550, 106_741_034
"""timestamp's range in days since 1970, of which the last has 64 bits of microseconds."""
microseconds = st.integers(FIRST_DAY * DAY_US, LAST_DAY * DAY_US)
SPECIAL_NAMES = (
    "money",
    "vector",
    "halfvec",
    "sparsevec",
    "geometry",
    "hstore",
    "bytea",
    "numeric",
)
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(pair: Provider, database: str) -> Iterator[Ask]:
    """`ask(expression, *parameters, **modes)`: the JSON form of an SQL expression's value."""
    with open_session(ROWS, pair.primary.conninfo(database)) as connection:
        connection.execute("SET search_path = public")
        connection.execute("CREATE EXTENSION hstore; CREATE EXTENSION vector")
        connection.execute("CREATE SCHEMA composite; CREATE SCHEMA enum; CREATE SCHEMA domain")
        for name in SPECIAL_NAMES:
            connection.execute(
                f"CREATE TYPE composite.{name} AS (amount numeric, currency text);"
                f"CREATE TYPE enum.{name} AS ENUM ('(1,x)', '[1,2]');"
                f"CREATE DOMAIN domain.{name} AS text".encode()
            )
        digits = money_digits(connection)

        def ask(expression: str, *parameters: Any, **modes: Any) -> Any:
            cursor = connection.execute(f"SELECT {expression}".encode(), parameters)
            result = cursor.pgresult
            assert result is not None
            value = result.get_value(0, 0)
            assert value is not None
            encoders = Encoders(ValueSettings(**modes), money_digits=digits)
            unknown = encoders.unknown([result.ftype(0)])
            encoders.learn(read_types(connection, unknown))
            return json.loads(encoders.of(result.ftype(0), result.fmod(0)).encode(value))

        yield ask


def same(given: Any, read: Any) -> bool:
    """Equal, and a float equal in its sign too."""
    return repr(given) == repr(read) or given == read


@given(st.lists(st.none() | texts))
def test_arrays_of_text(ask: Ask, words: list[str | None]) -> None:
    assert ask("%s::text[]", words) == words


@given(st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(texts, min_size=width, max_size=width), min_size=1)
))  # fmt: skip
def test_arrays_of_arrays(ask: Ask, words: list[list[str]]) -> None:
    assert ask("%s::text[]", words) == words


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)), st.lists(floats))
def test_arrays_of_numbers(ask: Ask, whole: list[int | None], real: list[float]) -> None:
    assert ask("%s::int8[]", whole) == whole
    assert ask("%s::float8[]", real) == [_finite(number) for number in real]


@given(floats)
def test_floats(ask: Ask, number: float) -> None:
    assert same(_finite(number), ask("%s::float8", number))
    assert ask("point(%s, 0)", number, structures="json")["x"] == _finite(number)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=7))
def test_numerics(ask: Ask, number: Decimal) -> None:
    assert Decimal(ask("%s::numeric", number)) == number
    precise = ask("%s::numeric", number, decimal_handling="precise")
    unscaled = int.from_bytes(base64.b64decode(precise["value"]), "big", signed=True)
    assert Decimal(f"{unscaled}e-{precise['scale']}") == number
    assert ask("%s::numeric", number, decimal_handling="double") == float(number)


@given(st.integers(-(2**63), 2**63 - 1))
def test_money(ask: Ask, cents: int) -> None:
    amount = Decimal(cents).scaleb(-2)
    assert Decimal(ask("%s::numeric::money", amount)) == amount
    unscaled = ask("%s::numeric::money", amount, decimal_handling="precise")
    assert int.from_bytes(base64.b64decode(unscaled), "big", signed=True) == cents


@given(st.integers(FIRST_DAY, 2_145_042_905))
def test_dates(ask: Ask, day: int) -> None:
    assert ask("DATE '1970-01-01' + %s", day) == day


@given(microseconds)
def test_timestamps(ask: Ask, moment: int) -> None:
    day, time = divmod(moment, DAY_US)
    sql = "DATE '1970-01-01' + %s + TIME '0:00' + %s * INTERVAL '1 us'"
    assert ask(sql, day, time) == moment
    assert ask(sql, day, time, time_precision="nanoseconds") == moment * 1000
    iso = ask(f"({sql}) AT TIME ZONE 'UTC'", day, time)
    assert iso.endswith("Z")
    # Years 1 to 9999, which PostgreSQL has as ISO 8601 does: it reads what we have written.
    if iso[0].isdigit() and iso[:4] != "0000":
        assert ask("%s::timestamptz AT TIME ZONE 'UTC'", iso) == moment


@given(st.integers(0, DAY_US))
def test_times(ask: Ask, time: int) -> None:
    text = f"{time // 1_000_000 // 3600}:{time // 60_000_000 % 60}:{time // 1_000_000 % 60}"
    text += f".{time % 1_000_000:06d}"
    assert ask("%s::time", text) == time
    assert (
        ask("%s::time(0)", text, time_precision="adaptive") == (time + 500_000) // 1_000_000 * 1000
    )


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.integers(-(10**15), 10**15))
def test_intervals(ask: Ask, months: int, days: int, time: int) -> None:
    sql = "make_interval(months => %s, days => %s) + %s * INTERVAL '1 us'"
    total = months * 2_629_800_000_000 + days * DAY_US + time
    assert ask(sql, months, days, time, interval_handling="numeric") == total
    text = ask(sql, months, days, time, interval_handling="string")
    assert ask("%s::interval", text, interval_handling="numeric") == total


@given(st.binary())
def test_bytea(ask: Ask, data: bytes) -> None:
    assert base64.b64decode(ask("%s::bytea", data)) == data
    assert ask("ARRAY[%s::bytea]", data, binary_handling="hex") == [data.hex()]


@given(st.text("01", min_size=1))
def test_bit_strings(ask: Ask, bits: str) -> None:
    read = int.from_bytes(base64.b64decode(ask("%s::varbit", bits, structures="json")), "little")
    assert read == int(bits, 2)


@pytest.mark.long
@given(st.dictionaries(texts, st.none() | texts))
def test_hstore(ask: Ask, pairs: dict[str, str | None]) -> None:
    sql = "hstore(%s::text[], %s::text[])"
    keys, values = list(pairs), list(pairs.values())
    assert ask(sql, keys, values, hstore_handling="map") == pairs
    assert json.loads(ask(sql, keys, values, hstore_handling="json")) == pairs


@pytest.mark.long
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=5))
@settings(max_examples=30)
def test_vectors(ask: Ask, numbers: list[float]) -> None:
    read = ask("%s::float4[]::vector", numbers)
    assert read == ask("%s::float4[]", numbers)


@pytest.mark.long
@pytest.mark.parametrize("name", SPECIAL_NAMES)
@pytest.mark.parametrize("modes", [{}, DEBEZIUM], ids=["ours", "debezium"])
def test_types_of_ones_own_under_special_names(ask: Ask, name: str, modes: dict[str, Any]) -> None:
    assert ask(f"(12.50, 'USD')::composite.{name}", **modes) == "(12.50,USD)"
    two = f"ARRAY[(12.50, 'USD'), (-0.07, 'EUR')]::composite.{name}[]"
    assert ask(two, **modes) == ["(12.50,USD)", "(-0.07,EUR)"]
    assert ask(f"'(1,x)'::enum.{name}", **modes) == "(1,x)"
    assert ask(f"'[1,2]'::domain.{name}", **modes) == "[1,2]"


def _finite(number: float) -> float | str:
    return number if abs(number) != float("inf") else f"{'-' if number < 0 else ''}Infinity"
