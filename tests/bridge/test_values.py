"""Text forms to JSON, type by type, against Python's own calendar and JSON."""

import base64
import datetime as dt
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bridge.values import encoder_for

EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - timestamp has no zone


@given(st.text())
def test_text_survives_json(text: str) -> None:
    assert json.loads(encoder_for(25)(text.encode("utf-8", "replace"))) == text.encode(
        "utf-8", "replace"
    ).decode("utf-8")


@given(st.datetimes())
def test_timestamp_is_microseconds(moment: dt.datetime) -> None:
    text = moment.isoformat(" ")
    expected = (moment - EPOCH) // dt.timedelta(microseconds=1)
    assert int(encoder_for(1114)(text.encode())) == expected


@given(st.dates())
def test_date_is_days(day: dt.date) -> None:
    assert int(encoder_for(1082)(day.isoformat().encode())) == (day - EPOCH.date()).days


@given(st.binary())
def test_bytea_is_base64(data: bytes) -> None:
    encoded = json.loads(encoder_for(17)(b"\\x" + data.hex().encode()))
    assert base64.b64decode(encoded) == data


@pytest.mark.parametrize(
    ("oid", "text", "expected"),
    [
        (16, "t", True),
        (16, "f", False),
        (20, "-9223372036854775808", -9223372036854775808),
        (701, "NaN", "NaN"),
        (701, "-Infinity", "-Infinity"),
        (701, "1e-07", 1e-07),
        (1700, "12.30", "12.30"),
        (1042, "ab  ", "ab  "),
        (1082, "0001-01-01 BC", -719528),
        (1083, "24:00:00", 86_400_000_000),
        (1083, "01:02:03.5", 3_723_500_000),
        (1114, "infinity", 9223372036825200000),
        (1114, "-infinity", -9223372036832400000),
        (1114, "1969-12-31 23:59:59.999999", -1),
        (1114, "4713-01-01 00:00:00 BC", -(2_440_588 - 38) * 86_400_000_000),
        (1184, "2020-02-03 04:05:06.7+00", "2020-02-03T04:05:06.7Z"),
        (1184, "0044-03-15 12:00:00+00 BC", "-0043-03-15T12:00:00Z"),
        (1184, "infinity", "infinity"),
        (1266, "10:20:30.5+02", "08:20:30.5Z"),
        (1266, "23:00:00-05:30", "04:30:00Z"),
    ],
)
def test_edges(oid: int, text: str, expected: object) -> None:
    assert json.loads(encoder_for(oid)(text.encode())) == expected
