"""Text forms to JSON, type by type and mode by mode, against Python's own calendar and numbers."""

import base64
import contextlib
import datetime as dt
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SettingsError
from schemas.events import UNAVAILABLE
from schemas.settings import ValueSettings
from services.bridge.events.keys import require_distinct_keys
from services.bridge.events.values.encoders import _EXTENSIONS, _TEXT_EXTENSIONS, Encoders
from services.bridge.pgoutput.messages import Relation, RelationColumn
from services.bridge.pgoutput.pg_types import TYPE_NAMES
from services.bridge.pgoutput.type_names import PgType
from tests.promises.bridge.values.forms import DEBEZIUM, OIDS, encoder, form, numeric

EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - timestamp has no zone
FIRST = 100_000
"""Oids of types that a database adds."""
PRECISE: dict[str, Any] = {"decimal_handling": "precise"}
DOUBLE: dict[str, Any] = {"decimal_handling": "double"}
ADAPTIVE: dict[str, Any] = {"time_precision": "adaptive"}
NANOSECONDS: dict[str, Any] = {"time_precision": "nanoseconds"}
CONNECT: dict[str, Any] = {"time_precision": "connect"}
ISO: dict[str, Any] = {"time_precision": "isostring"}
STRUCTURES: dict[str, Any] = {"structures": "json"}


@given(st.text())
def test_text_survives_json(text: str) -> None:
    plain = text.encode("utf-8", "replace")
    assert form("text", plain) == plain.decode("utf-8")


@given(st.datetimes())
def test_timestamp_is_microseconds(moment: dt.datetime) -> None:
    text = moment.isoformat(" ")
    expected = (moment - EPOCH) // dt.timedelta(microseconds=1)
    assert form("timestamp", text) == expected
    assert form("timestamp", text, **NANOSECONDS) == expected * 1000
    assert form("timestamp", text, 3, **ADAPTIVE) == expected // 1000
    assert dt.datetime.fromisoformat(form("timestamp", text, **ISO)[:-1]) == moment
    assert form("timestamptz", text + "+00") == moment.isoformat("T", "microseconds") + "Z"


@given(st.dates())
def test_date_is_days(day: dt.date) -> None:
    assert form("date", day.isoformat()) == (day - EPOCH.date()).days
    assert form("date", day.isoformat(), **ISO) == f"{day.isoformat()}Z"


@given(st.binary())
def test_bytea(data: bytes) -> None:
    text = f"\\x{data.hex()}"
    assert base64.b64decode(form("bytea", text)) == data
    url_safe = form("bytea", text, binary_handling="base64-url-safe")
    assert base64.urlsafe_b64decode(url_safe) == data
    assert form("bytea", text, binary_handling="hex") == data.hex()


@given(st.decimals(allow_nan=False, allow_infinity=False, places=5))
def test_precise_decimals_are_unscaled_bytes(number: Decimal) -> None:
    text = f"{number:f}"
    assert form("numeric", text) == text
    unscaled = base64.b64decode(form("numeric", text, numeric(60, 5), **PRECISE))
    assert Fraction(int.from_bytes(unscaled, "big", signed=True), 10**5) == Fraction(number)
    variable = form("numeric", text, **PRECISE)
    value = int.from_bytes(base64.b64decode(variable["value"]), "big", signed=True)
    assert Fraction(value, 10 ** variable["scale"]) == Fraction(number)
    assert form("numeric", text, **DOUBLE) == float(number)


@pytest.mark.parametrize(
    ("kind", "typmod", "settings", "text", "expected"),
    [
        ("bool", -1, {}, "t", True),
        ("bool", -1, {}, "f", False),
        ("bit", 1, {}, "1", "1"),
        ("bit", 1, STRUCTURES, "1", True),
        ("bit", 8, STRUCTURES, "00000001", "AQ=="),
        ("bit", 12, STRUCTURES, "100000000000", "AAg="),
        ("varbit", -1, STRUCTURES, "", ""),
        ("varbit", 1, STRUCTURES, "", None),
        ("int8", -1, {}, "-9223372036854775808", -9223372036854775808),
        ("float8", -1, {}, "NaN", "NaN"),
        ("float4", -1, {}, "-Infinity", "-Infinity"),
        ("float8", -1, {}, "1e-07", 1e-07),
        ("numeric", -1, {}, "12.30", "12.30"),
        ("numeric", -1, PRECISE, "12.30", {"scale": 1, "value": "ew=="}),
        ("numeric", -1, PRECISE, "100", {"scale": 0, "value": "ZA=="}),
        ("numeric", numeric(5, -2), PRECISE, "1200", {"scale": 0, "value": "BLA="}),
        ("numeric", numeric(10, 2), PRECISE, "-0.01", "/w=="),
        ("numeric", numeric(10, 2), PRECISE, "NaN", "NaN"),
        ("numeric", -1, PRECISE, "Infinity", "Infinity"),
        ("numeric", -1, DOUBLE, "-Infinity", "-Infinity"),
        ("numeric", -1, DOUBLE, "1" + "0" * 400, "Infinity"),
        ("money", -1, {}, "-$1,234,567.80", "-1234567.80"),
        ("money", -1, {}, "($0.05)", "-0.05"),
        ("money", -1, PRECISE, "$12.34", "BNI="),
        ("money", -1, DOUBLE, "1.234,50 €", 1234.5),
        ("bpchar", 8, {}, "ab  ", "ab  "),
        ("date", -1, {}, "0001-01-01 BC", -719528),
        ("date", -1, {}, "infinity", 2146033979),
        ("date", -1, {}, "-infinity", -2147472691),
        ("date", -1, ISO, "0044-03-15 BC", "-0043-03-15Z"),
        ("date", -1, ISO, "10000-01-01", "+10000-01-01Z"),
        ("date", -1, ISO, "infinity", "infinity"),
        ("time", -1, {}, "24:00:00", 86_400_000_000),
        ("time", -1, {}, "01:02:03.5", 3_723_500_000),
        ("time", 3, {}, "01:02:03.5", 3_723_500_000),
        ("time", 3, ADAPTIVE, "01:02:03.5", 3_723_500),
        ("time", 3, {"time_precision": "adaptive_time_microseconds"}, "01:02:03", 3_723_000_000),
        ("time", -1, ISO, "24:00:00", "24:00:00Z"),
        ("date", -1, CONNECT, "2024-02-29", 19_782),
        ("time", -1, CONNECT, "01:02:03.500999", 3_723_500),
        ("timestamp", -1, CONNECT, "1969-12-31 23:59:59.999999", -1),
        ("timestamp", -1, CONNECT, "infinity", 9223372036825200000),
        ("timestamp", -1, {}, "infinity", 2**63 - 1),
        ("timestamp", -1, {}, "-infinity", -(2**63)),
        ("timestamp", 3, ADAPTIVE, "infinity", 9223372036825200000),
        ("timestamp", 0, ADAPTIVE, "-infinity", -9223372036832400000),
        ("timestamp", -1, {}, "1969-12-31 23:59:59.999999", -1),
        ("timestamp", -1, {}, "4713-01-01 00:00:00 BC", -(2_440_588 - 38) * 86_400_000_000),
        ("timestamp", 3, {"time_precision": "adaptive_time_microseconds"},
         "1969-12-31 23:59:59.999", -1),
        ("timestamp", -1, ISO, "0044-03-15 12:00:00 BC", "-0043-03-15T12:00:00Z"),
        ("timestamptz", -1, {}, "2020-02-03 04:05:06.7+00", "2020-02-03T04:05:06.700000Z"),
        ("timestamptz", 0, {}, "2020-02-03 04:05:06+00", "2020-02-03T04:05:06Z"),
        ("timestamptz", 3, {}, "2020-02-03 04:05:06.7+00", "2020-02-03T04:05:06.700Z"),
        ("timestamptz", -1, {}, "0044-03-15 12:00:00+00 BC", "-0043-03-15T12:00:00.000000Z"),
        ("timestamptz", -1, {}, "0001-12-31 00:00:00+00 BC", "0000-12-31T00:00:00.000000Z"),
        ("timestamptz", -1, {}, "1886-03-22 14:19:51.168+00 BC", "-1885-03-22T14:19:51.168000Z"),
        ("timestamptz", -1, {}, "12345-06-07 08:09:10.123456+00",
         "+12345-06-07T08:09:10.123456Z"),
        ("timestamptz", -1, {}, "infinity", "infinity"),
        ("timetz", -1, {}, "10:20:30.5+02", "08:20:30.5Z"),
        ("timetz", -1, {}, "23:00:00-05:30", "04:30:00Z"),
        ("timetz", -1, {}, "10:20:30+02:03:04", "08:17:26Z"),
        ("timetz", -1, {}, "24:00:00+00", "24:00:00Z"),
        ("interval", -1, {}, "1 year 00:00:01", "1 year 00:00:01"),
        ("interval", -1, {"interval_handling": "string"},
         "1 year 2 mons -3 days +04:05:06.789", "P1Y2M-3DT4H5M6.789S"),
        ("interval", -1, {"interval_handling": "string"}, "-01:02:03.5", "P0Y0M0DT-1H-2M-3.5S"),
        ("interval", -1, {"interval_handling": "string"}, "infinity", "infinity"),
        ("interval", -1, {"interval_handling": "numeric"},
         "1 year 2 mons -3 days +04:05:06.789", 36_572_706_789_000),
        ("interval", -1, {"interval_handling": "numeric"}, "-infinity", -(2**63)),
        ("interval", -1, {"interval_handling": "numeric"}, "178000000 years", 2**63 - 1),
        ("point", -1, {}, "(1,2)", "(1,2)"),
        ("line", -1, STRUCTURES, "{1,-2.5,3e+20}", {"a": 1, "b": -2.5, "c": 3e20}),
        ("_int4", -1, {}, "{}", []),
        ("_int4", -1, {}, "{1,NULL,-3}", [1, None, -3]),
        ("_int4", -1, {}, "[0:1][5:6]={{1,2},{3,4}}", [[1, 2], [3, 4]]),
        ("_text", -1, {}, r'{"x y",NULL,"","a\"b\\c","NULL",é,"{,}"}',
         ["x y", None, "", 'a"b\\c', "NULL", "é", "{,}"]),
        ("_numeric", numeric(9, 2), PRECISE, "{1.50,NULL}", ["AJY=", None]),
        ("_timestamp", 3, ADAPTIVE, '{"1970-01-01 00:00:01",infinity}',
         [1000, 9223372036825200000]),
        ("_box", -1, {}, "{(3,4),(1,2);(5,6),(3,4)}", ["(3,4),(1,2)", "(5,6),(3,4)"]),
        ("int2vector", -1, {}, "1 2", "1 2"),
    ],
)  # fmt: skip
def test_values_at_the_edges_of_their_types(
    kind: str, typmod: int, settings: dict[str, Any], text: str, expected: object
) -> None:
    assert form(kind, text, typmod, **settings) == expected


@pytest.mark.parametrize("settings", [{}, DEBEZIUM, {**DEBEZIUM, **DOUBLE, **NANOSECONDS}])
@given(st.sampled_from(sorted(TYPE_NAMES)), st.integers(-1, 6), st.binary(max_size=30))
def test_invalid_text_form_raises_value_error_at_most(
    settings: dict[str, Any], oid: int, typmod: int, text: bytes
) -> None:
    with contextlib.suppress(ValueError):
        Encoders(ValueSettings(**settings)).of(oid, typmod).encode(text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("bool", "true"), ("int4", "x"), ("float8", "1,5"), ("bytea", "abc"), ("date", "today"),
        ("time", "noon"), ("timestamp", "now"), ("timestamptz", "yesterday+00"), ("timetz", "9"),
        ("interval", "1 day or so"), ("point", "(1)"), ("_int4", "{1,2"), ("_int4", "1"),
        ("_text", '{"a}'), ("_int4", "{{1}"), ("_int4", "{1}}"), ("numeric", "1.2.3"),
    ],
)  # fmt: skip
def test_invalid_texts_raise_value_error(kind: str, text: str) -> None:
    with pytest.raises(ValueError):
        form(kind, text, **DEBEZIUM)


def test_a_long_numeric() -> None:
    digits = "7" * 131_072
    assert form("numeric", digits) == digits
    assert form("numeric", digits, **DOUBLE) == "Infinity"
    value = base64.b64decode(form("numeric", digits, **PRECISE)["value"])
    assert int.from_bytes(value, "big") == 7 * (10**131_072 - 1) // 9


SPECIAL_NAMES = sorted({*TYPE_NAMES.values(), *_EXTENSIONS, *_TEXT_EXTENSIONS})


@given(
    st.sampled_from(SPECIAL_NAMES),
    st.sampled_from("bcemr"),
    st.sampled_from(["", "hstore_2", "plpgsql"]),
    st.sampled_from([{}, DEBEZIUM]),
    st.text(),
)
def test_a_type_of_ones_own_is_text_whatever_its_name(
    name: str, kind: str, extension: str, settings: dict[str, Any], text: str
) -> None:
    encoders = Encoders(ValueSettings(**settings))
    encoders.learn(
        [
            PgType(FIRST, "app", name, kind, extension=extension),
            PgType(FIRST + 1, "app", f"{name}_domain", "d", FIRST),
            PgType(FIRST + 2, "app", "int4", "d", OIDS["text"]),
        ]
    )
    for oid in (FIRST, FIRST + 1, FIRST + 2):
        encoder = encoders.of(oid, -1)
        assert json.loads(encoder.encode(text.encode())) == text
        assert json.loads(encoder.unavailable) == UNAVAILABLE
    assert encoders.understood(FIRST) is (kind != "b")


def test_types_of_the_database() -> None:
    """Domains are their base type, arrays of them too; extensions are known by theirs."""
    added = [
        PgType(FIRST, "public", "positive", "d", OIDS["int4"]),
        PgType(FIRST + 1, "public", "smaller", "d", FIRST),
        PgType(FIRST + 2, "public", "_smaller", element_oid=FIRST + 1),
        PgType(FIRST + 3, "public", "price", "d", OIDS["numeric"], numeric(8, 2)),
        PgType(FIRST + 4, "public", "hstore", extension="hstore"),
        PgType(FIRST + 5, "public", "vector", extension="vector"),
        PgType(FIRST + 6, "public", "geometry", extension="postgis"),
        PgType(FIRST + 7, "public", "mood", "e"),
        PgType(FIRST + 8, "public", "strange"),
        PgType(FIRST + 9, "public", "sparsevec", extension="vector"),
    ]
    encoders = Encoders(ValueSettings(**DEBEZIUM))
    asked = {kind.oid for kind in added} | {FIRST + 10}
    assert encoders.unknown({*asked, OIDS["int4"]}) == asked
    assert json.loads(encoders.of(FIRST, -1).encode(b"7")) == "7"
    encoders.learn(added)
    assert encoders.unknown(asked) == {FIRST + 10}

    def read(number: int, text: str) -> Any:
        return json.loads(encoders.of(FIRST + number, -1).encode(text.encode()))

    assert read(1, "7") == 7
    assert read(2, "{{7},{NULL}}") == [[7], [None]]
    assert read(3, "1.50") == "AJY="
    assert json.loads(read(4, r'"a"=>"1", "b\"\\"=>NULL')) == {"a": "1", 'b"\\': None}
    assert read(5, "[1,2.5e-08]") == [1, 2.5e-08]
    assert read(6, "0101000020E6100000000000000000F03F0000000000000040")["srid"] == 4326
    assert read(6, "0101000000000000000000F03F0000000000000040")["srid"] is None
    assert read(9, "{1:1.5,3:2}/5") == {"dimensions": 5, "vector": [[1, 1.5], [3, 2]]}
    assert read(9, "{}/5") == {"dimensions": 5, "vector": []}
    assert (read(7, "sad"), read(8, "?"), read(10, "?")) == ("sad", "?", "?")
    meaningless = {oid for oid in asked if not encoders.understood(oid)}
    assert meaningless == {FIRST + 8, FIRST + 10}


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("text", {}, UNAVAILABLE),
        ("numeric", PRECISE, UNAVAILABLE),
        ("bytea", {}, base64.b64encode(UNAVAILABLE.encode()).decode()),
        ("bytea", {"binary_handling": "hex"}, UNAVAILABLE),
        ("_int4", {}, [UNAVAILABLE]),
        ("_bytea", {}, [base64.b64encode(UNAVAILABLE.encode()).decode()]),
    ],
)
def test_values_that_the_wal_lacks(kind: str, settings: dict[str, Any], expected: object) -> None:
    assert json.loads(encoder(kind, **settings).unavailable) == expected


def test_an_hstore_that_the_wal_lacks() -> None:
    encoders = Encoders(ValueSettings(hstore_handling="map"))
    encoders.learn([PgType(FIRST, "public", "hstore", extension="hstore")])
    assert json.loads(encoders.of(FIRST, -1).unavailable) == {UNAVAILABLE: UNAVAILABLE}


@pytest.mark.parametrize(
    ("kind", "typmod", "refused"),
    [("timestamp", -1, True), ("time", 6, True), ("timestamp", 3, False), ("date", -1, False)],
)
def test_keys_that_would_be_cut_are_refused(kind: str, typmod: int, *, refused: bool) -> None:
    """Two rows within a millisecond would have one key."""
    for key, precision in ((True, "connect"), (False, "connect"), (True, "microseconds")):
        columns = (RelationColumn("at", OIDS[kind], typmod, key),)
        encoders = Encoders(ValueSettings.model_validate({"time_precision": precision}))
        expected: Any = contextlib.nullcontext()
        if refused and key and precision == "connect":
            expected = pytest.raises(SettingsError, match="two keys may become one")
        with expected:
            require_distinct_keys(Relation(1, "public", "t", "d", columns), encoders)
