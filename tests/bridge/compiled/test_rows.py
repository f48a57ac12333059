"""Rows of every type and every kind of change: all are transcoded, none is left to the library."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.kafka import KafkaSettings
from schemas.settings import ValueSettings
from schemas.shaping import FIELDS, FlatSettings, ShapingSettings
from services.bridge import compiled
from services.bridge.compiled import new_messages
from services.bridge.events.description import Described
from services.bridge.events.envelope import Envelope
from services.bridge.events.event import Event, Stamp
from services.bridge.events.formats.names import adjusted_column
from services.bridge.events.formats.strict_encoders import StrictEncoders
from services.bridge.events.formats.table_format import Formats, TableFormat
from services.bridge.events.rows import WORTH_ROWS
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.decoder import Decoder
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    Delete,
    Insert,
    Relation,
    RelationColumn,
    Row,
    Truncate,
    Update,
    Value,
)
from services.bridge.pgoutput.type_names import PgType
from tests.bridge.compiled.test_codecs import without_compiled
from tests.bridge.conftest import COMPILED
from tests.promises.bridge.known_registry import KnownRegistry
from tests.promises.bridge.strategies import names
from tests.promises.bridge.values.documents import KINDS, texts
from tests.promises.bridge.values.forms import DEBEZIUM, OIDS
from tests.promises.bridge.wire import encode

pytestmark = COMPILED
NOW_US = 1_700_000_000_000_000
POINT_WKB = "0101000020E6100000000000000000F03F00000000000000C0"
TYPES = [
    *(
        PgType(90_000 + n, "public", name, "b", extension="vector")
        for n, name in enumerate(("vector", "halfvec", "sparsevec"))
    ),
    PgType(90_010, "public", "hstore", "b", extension="hstore"),
    PgType(90_011, "public", "geometry", "b", extension="postgis"),
    PgType(90_012, "public", "ltree", "b", extension="ltree"),
    PgType(90_013, "public", "mood", "e", labels=("sad", 'a"b')),
]


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def hstore(pairs: dict[str, str | None]) -> str:
    """As hstore_out writes it: ordered by the keys' length, then by their bytes."""
    ordered = sorted(pairs.items(), key=lambda pair: (len(pair[0].encode()), pair[0].encode()))
    return ", ".join(
        f'"{escaped(key)}"=>' + ("NULL" if value is None else f'"{escaped(value)}"')
        for key, value in ordered
    )


VALUES: dict[tuple[int, int], st.SearchStrategy[str]] = {
    **{(OIDS[kind], typmod): texts for (kind, typmod), texts in KINDS.items()},
    (OIDS["money"], -1): st.sampled_from(["$1,234.50", "-$0.01"]),
    (OIDS["time"], -1): st.times().map(str),
    (OIDS["timetz"], -1): st.times().map(lambda at: f"{at}+02"),
    (OIDS["interval"], -1): st.sampled_from(["1 year 2 mons -3 days 04:05:06.789", "-infinity"]),
    (OIDS["uuid"], -1): st.uuids().map(str),
    (OIDS["jsonb"], -1): st.sampled_from(['{"a": [1, "x\\n\\"y"]}', '"\\ud83d\\ude00"', "null"]),
    (OIDS["xml"], -1): texts,
    (OIDS["oid"], -1): st.integers(0, 2**32 - 1).map(str),
    (OIDS["bit"], 1): st.sampled_from("01"),
    (OIDS["inet"], -1): st.just("10.0.0.1"),
    (OIDS["line"], -1): st.just("{1,-2.5,3e+100}"),
    (OIDS["lseg"], -1): st.just("[(1,2),(3,4)]"),
    (OIDS["path"], -1): st.sampled_from(["[(1,2),(3,4)]", "((1,2),(3,4))"]),
    (OIDS["_text"], -1): st.just('{"x y",NULL,"","a\\"b\\\\c","NULL",é}'),
    (OIDS["_bytea"], -1): st.just('{"\\\\x00ff",NULL}'),
    (OIDS["_numeric"], -1): st.sampled_from(["{1.50,NULL,100}", "{}"]),
    (OIDS["_timestamp"], 3): st.just('{"2024-02-29 10:20:30.123",NULL}'),
    (OIDS["_point"], -1): st.just('{"(1,2)",NULL}'),
    (90_000, -1): st.sampled_from(["[1,2.5,-3]", "[1e-10]"]),
    (90_001, -1): st.just("[1,2.5,-3]"),
    (90_002, -1): st.sampled_from(["{1:1.5,3:2}/5", "{}/7"]),
    (90_010, -1): st.dictionaries(texts, st.none() | texts, max_size=4).map(hstore),
    (90_011, -1): st.just(POINT_WKB),
    (90_012, -1): st.just("a.b.c"),
    (90_013, -1): st.sampled_from(["sad", 'a"b']),
}
NEVER_APART = (
    "bool",
    "int2",
    "int8",
    "oid",
    "float4",
    "float8",
    "date",
    "time",
    "timetz",
    "bit",
    "timestamp",
    "timestamptz",
    "interval",
    "uuid",
    "money",
    "point",
    "line",
    "lseg",
    "circle",
)
"""Types whose values are never stored apart, so that the WAL never lacks them."""


@st.composite
def tables(draw: st.DrawFn) -> tuple[Relation, list[Row], Row]:
    """A table with all kinds of columns, whole rows, and an update's with what the WAL lacks."""
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=8))
    some = draw(
        st.lists(names, min_size=len(kinds), max_size=len(kinds), unique_by=adjusted_column)
    )
    columns = [RelationColumn("id", OIDS["int8"], -1, True)]
    for name, (oid, typmod) in zip(some, kinds, strict=True):
        columns.append(RelationColumn(f"c{name}", oid, typmod, False))
    row = [draw(st.integers(-9, 2**63 - 1).map(lambda n: str(n).encode()))]
    rows: list[Row] = []
    for _ in range(3):
        values = [draw(VALUES[kind] | st.none()) for kind in kinds]
        rows.append([*row, *(None if v is None else v.encode() for v in values)])
    apart = {oid for name, oid in OIDS.items() if name not in NEVER_APART} | {
        *range(90_000, 90_013)
    }
    holes: list[Value] = [
        UNCHANGED if oid in apart and draw(st.booleans()) else value
        for (oid, _), value in zip(kinds, rows[-1][1:], strict=True)
    ]
    relation = Relation(7, draw(names), draw(names), "f", tuple(columns))
    return relation, rows, [rows[-1][0], *holes]


@dataclass
class Run:
    """What becomes of rows in a format, and with which functions."""

    events: list[Event] = field(default_factory=list)
    forms: list[TableFormat] = field(default_factory=list)


def run(table: tuple[Relation, list[Row], Row], form: Any, flat: FlatSettings | None) -> Run:
    """Each kind of change: by its message, and where there is one by a specialised encoder."""
    relation, rows, holes = table
    found = Run()
    kafka = KafkaSettings(
        bootstrap_servers="k:9092", topic_prefix="b", key_format=form, value_format=form
    )
    encoders = StrictEncoders(ValueSettings(**{**DEBEZIUM, "hstore_handling": "map"}))
    encoders.learn(TYPES)
    shaping = Shaping(ShapingSettings(flat=flat), "b")
    formats = Formats(kafka, shaping.naming, encoders, KnownRegistry(258))

    def describe(relation: Relation, _stamp: Stamp, _seq: int) -> Described:
        plan = shaping.plan(relation)
        found.forms.append(formats.of(plan))
        return Described(plan, form=found.forms[-1])

    envelope = Envelope(
        *("b", "db", 3, describe),
        tombstones=True,
        transaction_metadata=True,
        encoders=encoders,
        flat=flat,
    )
    envelope.begin(Stamp(9, 200, NOW_US, 100, NOW_US))
    first, second, third = rows
    moved: Row = [b"5", *second[1:]]
    changes: list[Insert | Update | Delete | Truncate] = [
        *(Insert(relation, row) for row in rows),
        Update(relation, None, None, holes),
        Update(relation, "O", first, second),
        Update(relation, "O", first, moved),
        Delete(relation, "O", third),
        Truncate((relation,), cascade=False, restart_identity=False),
    ]
    for change in changes:
        found.events += envelope.events_of(change, 300, len(found.events))
    for row in (Insert(relation, first), Update(relation, "O", first, second)):
        for _ in range(WORTH_ROWS):
            writer = envelope.writer(row)
        if writer is None:
            assert compiled.engine is None
            found.events += envelope.events_of(row, 300, len(found.events))
            continue
        data, decoder, messages = encode(row), Decoder(), new_messages()
        messages.append((300, data))
        writers, seq = {decoder.row_kind(data): writer}, len(found.events)
        assert envelope.rows(messages, 0, decoder.row_at, writers, found.events, seq)[0] == 1
    return found


@pytest.mark.parametrize("form", ["avro", "protobuf"])
@pytest.mark.parametrize("flat", [None, FlatSettings(tables=("*.*",), fields=FIELDS)])
@given(table=tables())
def test_no_ordinary_row_is_left_to_the_library(
    form: str, flat: FlatSettings | None, table: tuple[Relation, list[Row], Row]
) -> None:
    found = run(table, form, flat)
    with without_compiled():
        assert found.events == run(table, form, flat).events
    assert [(made.key.declined, made.value.declined) for made in found.forms] == [(0, 0)]  # type: ignore[attr-defined]
