"""Any row of any table as JSON, with the Connect schema that it fits."""

import json
from typing import Any

from hypothesis import strategies as st

from schemas.settings import ValueSettings
from services.bridge.events.errors import UnfitValue
from services.bridge.events.formats import connect
from services.bridge.events.formats.names import adjusted_column
from services.bridge.events.formats.strict_encoders import StrictEncoders
from services.bridge.events.formats.type_schemas import column_schema
from tests.promises.bridge.strategies import names
from tests.promises.bridge.values.forms import DEBEZIUM, OIDS, numeric

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
longs = st.integers(-(2**63), 2**63 - 1).map(str)
doubles = st.floats().map(
    lambda x: {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(x), repr(x))
)
decimals = st.decimals(allow_nan=False, allow_infinity=False, places=2).map(lambda d: f"{d:f}")
KINDS: dict[tuple[str, int], st.SearchStrategy[str]] = {
    ("bool", -1): st.sampled_from("tf"),
    ("int2", -1): st.integers(-(2**15), 2**15 - 1).map(str),
    ("int8", -1): longs,
    ("text", -1): texts,
    ("bytea", -1): st.binary().map(lambda data: f"\\x{data.hex()}"),
    ("float8", -1): doubles,
    ("float4", -1): st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    ("numeric", -1): decimals,
    ("numeric", numeric(1000, 2)): decimals,
    ("date", -1): st.dates().map(str),
    ("timestamp", -1): st.datetimes().map(str),
    ("timestamptz", -1): st.datetimes().map(lambda at: f"{at}+00"),
    ("_int8", -1): st.lists(longs).map(lambda items: f"{{{','.join(items)}}}"),
    ("_float8", -1): st.lists(doubles).map(lambda items: f"{{{','.join(items)}}}"),
    ("_bool", -1): st.just("{t,NULL,f}"),
    ("varbit", -1): st.text("01"),
    ("point", -1): st.just("(1.5,NaN)"),
    ("circle", -1): st.just("<(1,-Infinity),3>"),
    ("polygon", -1): st.just("((1,2),(3,4),(5,6))"),
}
SOURCE = {
    "version": "1",
    "connector": "postgresql",
    "name": "b",
    "snapshot": "false",
    "db": "d",
    "ts_ms": 1,
    "ts_us": 1,
    "ts_ns": 1,
    "sequence": "[]",
    "schema": "s",
    "table": "t",
    "txId": 1,
    "lsn": 7,
    "xmin": None,
    "commit_lsn": 8,
    "seq": 2,
    "timeline": 3,
}

STORED_APART = ("array", "bytes", "string", "map", "struct")
"""Connect types whose values may be unchanged and not in the WAL."""


@st.composite
def rows(
    draw: st.DrawFn, kind_of_encoders: type[StrictEncoders] = StrictEncoders
) -> tuple[connect.Schema, str]:
    """The schema of a table's values, and one value as JSON; null for what has no schema."""
    encoders = kind_of_encoders(ValueSettings(**DEBEZIUM))
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=8))
    some = draw(
        st.lists(names, min_size=len(kinds), max_size=len(kinds), unique_by=adjusted_column)
    )
    columns: dict[str, connect.Schema] = {}
    row: dict[str, Any] = {}
    for name, (kind, typmod) in zip(some, kinds, strict=True):
        columns[name] = column_schema(encoders, OIDS[kind], typmod)
        encoder = encoders.of(OIDS[kind], typmod)
        text = draw(KINDS[kind, typmod] | st.none() | st.just("unavailable"))
        if text is None:
            row[name] = None
        elif text == "unavailable" and columns[name]["type"] in STORED_APART:
            row[name] = json.loads(encoder.unavailable)
        else:
            text = draw(KINDS[kind, typmod]) if text == "unavailable" else text
            try:
                row[name] = json.loads(encoder.encode(text.encode()))
            except UnfitValue:
                row[name] = None
    value = {"op": "c", "before": draw(st.sampled_from([None, row])), "after": row}
    order = {"id": "1:8", "total_order": 1, "data_collection_order": 1}
    value |= {"source": SOURCE, "transaction": draw(st.sampled_from([None, order]))}
    value |= {"ts_ms": 1, "ts_us": 2, "ts_ns": 3}
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # as the bridge writes it
    return connect.envelope("b.s.t", columns), text
