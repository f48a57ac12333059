"""Values that the driver reads: those of `events.columns`, and nothing that is not certain."""

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from schemas.infinities import INFINITY_MICROSECONDS
from spark_consumers.apply.data_file import bounds
from spark_consumers.apply.values import column
from spark_consumers.epochs.few_events import Bounds, own_events
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.kafka.few_records import Record

UTC = datetime.UTC


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (T.BooleanType(), "true", True),
        (T.IntegerType(), "-7", -7),
        (T.LongType(), "9223372036854775807", 2**63 - 1),
        (T.FloatType(), "1.5", 1.5),
        (T.DoubleType(), "1e-7", 1e-7),
        (T.DoubleType(), "-Infinity", float("-inf")),
        (T.DecimalType(6, 2), "-12.30", Decimal("-12.30")),
        (T.DateType(), "-1", datetime.date(1969, 12, 31)),
        (T.TimestampNTZType(), "1", datetime.datetime(1970, 1, 1, microsecond=1)),  # noqa: DTZ001
        (
            T.TimestampType(),
            "2026-01-31T12:00:00.5Z",
            datetime.datetime(2026, 1, 31, 12, microsecond=500_000, tzinfo=UTC),
        ),
        (T.BinaryType(), "AAE=", b"\0\1"),
        (T.StringType(), "é", "é"),
    ],
)
def test_forms_are_read_as_their_types(kind: T.DataType, text: str, value: Any) -> None:
    assert column([text, None], kind).to_pylist() == [value, None]


def test_infinity_is_the_last_instant() -> None:
    found = column(["infinity", "2026-01-31T12:00:00Z", None], T.TimestampType())
    assert found.cast(pa.int64())[0].as_py() == INFINITY_MICROSECONDS


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((T.BooleanType(), "t"), (T.IntegerType(), "2147483648"), (T.IntegerType(), "0x1")),
        *((T.LongType(), "-0"), (T.LongType(), " 1"), (T.FloatType(), "x"), (T.DateType(), "a")),
        *((T.DecimalType(6, 2), "1.234"), (T.DecimalType(6, 2), "12345.00")),
        *(
            (T.TimestampType(), "2026-13-01T00:00:00Z"),
            (T.TimestampType(), "12026-01-01T00:00:00Z"),
        ),
        (T.BinaryType(), "A"),
    ],
)
def test_what_is_not_certain_is_left_to_spark(kind: T.DataType, text: str) -> None:
    with pytest.raises(Unsuited):
        column([text], kind)


def image(text: str) -> dict[str, str | None]:
    """The row of an event with a nested value."""
    source = '{"schema": "public", "table": "t", "commit_lsn": 1, "seq": 0}'
    whole = f'{{ "op" : "c" , "source":{source}, "after": {{"a]}}": ["]"] , "v":{text}}}}}'
    one = Record("t", 0, 0, b"1", whole.encode())
    (event,), _ = own_events([one], "t", Bounds(-1, 9, -1))
    return dict(event.image)


@given(st.recursive(st.none() | st.integers() | st.booleans() | st.text(), st.lists, max_leaves=8))
def test_nested_values_keep_their_text(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if isinstance(value, list) and "\\u" in text:
        with pytest.raises(Unsuited):
            image(text)
        return
    found = image(text)
    assert found["a]}"] == '["]"]'
    scalar = {None: None, True: "true", False: "false"}
    if isinstance(value, list):
        assert found["v"] == text
    elif value is None or isinstance(value, bool):
        assert found["v"] == scalar[value]
    else:
        assert found["v"] == str(value)


@pytest.mark.parametrize("text", ["[1e+20]", "[1.0]", "[1, 2]", '["\\u00e9"]', "[-0]", '{"a": 1}'])
def test_nested_values_of_several_forms_are_left_to_spark(text: str) -> None:
    with pytest.raises(Unsuited):
        image(text)


def test_a_number_of_several_forms_is_no_text() -> None:
    found = image("1e+20")["v"]
    assert column([found], T.DoubleType()).to_pylist() == [1e20]
    with pytest.raises(Unsuited):
        column([found], T.StringType())


@given(st.lists(st.text(max_size=24), min_size=1))
def test_bounds_of_texts_hold_all_of_them(texts: list[str]) -> None:
    low, high = bounds(pa.array(texts))
    assert low is not None
    assert all(low <= text.encode() for text in texts)
    assert high is None or all(text.encode() <= high for text in texts)
    assert len(low.decode()) <= 16


@given(st.lists(st.decimals("-9999", "9999", places=2), min_size=1))
def test_bounds_of_decimals_are_their_unscaled_values(values: list[Decimal]) -> None:
    low, high = bounds(pa.array(values, pa.decimal128(6, 2)))
    assert low is not None and high is not None
    assert int.from_bytes(low, "big", signed=True) == int(min(values) * 100)
    assert int.from_bytes(high, "big", signed=True) == int(max(values) * 100)
