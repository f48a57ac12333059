"""Values of Iceberg tables in forms that PostgreSQL reads: what needs no server to be told."""

import datetime as dt
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from spark_consumers.restore.values import input_text
from spark_consumers.verify.forms import Layer

EPOCH = dt.date(1970, 1, 1)


def julian(day: dt.date) -> str:
    """Fliegel and Van Flandern's day number of a date of the Gregorian calendar."""
    a = (14 - day.month) // 12
    y, m = day.year + 4800 - a, day.month + 12 * a - 3
    number = day.day + (153 * m + 2) // 5 + 365 * y + y // 4 - y // 100 + y // 400 - 32045
    return f"J{number}"


@hypothesis.given(st.datetimes())
def test_days_and_moments_are_julian_days(moment: dt.datetime) -> None:
    days = (moment.date() - EPOCH).days
    assert input_text(str(days), [Layer("date")]) == julian(moment.date())
    micros = (moment - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)  # noqa: DTZ001
    expected = f"{julian(moment.date())} {moment:%H:%M:%S.%f}"
    assert input_text(str(micros), [Layer("timestamp")]) == expected


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("2026-01-31T12:00:00.5Z", "2026-01-31T12:00:00.5Z"),
        ("-0043-03-15T12:00:00Z", "0044-03-15T12:00:00Z BC"),
        ("0000-12-31T00:00:00Z", "0001-12-31T00:00:00Z BC"),
        ("+12345-06-07T08:09:10Z", "12345-06-07T08:09:10Z"),
        ("infinity", "infinity"),
        ("-infinity", "-infinity"),
        ("-1", "J2440587 23:59:59.999999"),
    ],
)
def test_an_instant_of_any_year(form: str, expected: str) -> None:
    assert input_text(form, [Layer("timestamptz")]) == expected


def read(literal: str) -> list[str | None]:
    """The elements of a one-dimensional array literal, as PostgreSQL parts them."""
    found: list[str | None] = []
    rest = literal[1:-1]
    while rest:
        if rest.startswith("NULL"):
            found.append(None)
            rest = rest[5:]
            continue
        text, rest = "", rest[1:]
        while not rest.startswith('"'):
            skip = rest.startswith("\\")
            text, rest = text + rest[skip], rest[1 + skip :]
        found.append(text)
        rest = rest[2:]
    return found


@hypothesis.given(st.lists(st.none() | st.text()))
def test_elements_of_an_array_come_back(values: list[str | None]) -> None:
    layers = [Layer("_text", array=True), Layer("text")]
    assert read(input_text(json.dumps(values), layers)) == values


def test_arrays_of_arrays_and_of_what_is_not_text() -> None:
    days = [Layer("days", domain=True), Layer("_date", array=True), Layer("date")]
    assert input_text("[[0,null],[1,-1]]", days) == '{{"J2440588",NULL},{"J2440589","J2440587"}}'
    truths = [Layer("_bool", array=True), Layer("bool")]
    assert input_text("[true,false]", truths) == '{"true","false"}'
    numbers = [Layer("_float8", array=True), Layer("float8")]
    assert input_text('[0.1,1e-300,"NaN",9007199254740993]', numbers) == (
        '{"0.1","1e-300","NaN","9007199254740993"}'
    )
    boxes = [Layer("_box", array=True), Layer("box")]
    assert input_text('["(3,4),(1,2)",null]', boxes) == '{"(3,4),(1,2)";NULL}'
    assert input_text('["/w=="]', [Layer("_bytea", array=True), Layer("bytea")]) == '{"\\\\xff"}'
