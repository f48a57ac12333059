"""Rows that the C extension takes become the same events as by Decoder and Envelope."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.errors import BadInput
from schemas.kafka import Format, KafkaSettings
from schemas.shaping import ShapingSettings
from services.bridge import compiled
from services.bridge.compiled import new_messages
from services.bridge.events.description import Described
from services.bridge.events.envelope import Envelope
from services.bridge.events.event import Event, Stamp
from services.bridge.events.formats.table_format import Formats, encoders_for
from services.bridge.events.rows import WORTH_ROWS
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.decoder import DecodeError, Decoder
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    Relation,
    RelationColumn,
    Row,
    Truncate,
    Update,
)
from services.bridge.progress.ledger import Position
from services.bridge.transactions.assembler import Assembler
from tests.bridge.conftest import COMPILED
from tests.promises.bridge.known_registry import KnownRegistry
from tests.promises.bridge.strategies import names
from tests.promises.bridge.wire import encode

pytestmark = COMPILED
NOW_US = 1_700_000_000_000_000
LSN = 5_000
JSON = KafkaSettings(bootstrap_servers="k:9092", topic_prefix="bank")
FORMATS: tuple[Format, ...] = get_args(Format)
digits = st.integers(-(2**63), 2**63 - 1).map(lambda number: str(number).encode())
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=400)
VALUES = {
    16: st.sampled_from([b"t", b"f"]),
    20: digits,
    25: texts.map(str.encode) | st.text('t"\\\n xyz', max_size=300).map(str.encode),
    701: st.sampled_from([b"1.5", b"-2", b"1e+300", b"NaN", b"Infinity", b"-Infinity"]),
    1082: st.dates().map(lambda day: day.isoformat().encode()),
    1184: st.datetimes().map(lambda at: f"{at.isoformat(' ')}+00".encode())
    | st.sampled_from([b"infinity", b"-infinity", b"2024-02-29 10:20:30.123456+00"]),
    1700: st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: f"{d:f}".encode()),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[Relation, list[Row]]:
    """A relation and rows for it: whole ones, and such with NULL or what the WAL lacks."""
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=6))
    column_names = draw(st.lists(names, min_size=len(kinds), max_size=len(kinds), unique=True))
    columns = [
        RelationColumn(name, kind, -1, draw(st.booleans()))
        for name, kind in zip(column_names, kinds, strict=True)
    ]
    relation = Relation(7, draw(names), draw(names), "d", tuple(columns))
    whole = st.tuples(*(VALUES[kind] for kind in kinds)).map(list)
    holes = st.tuples(*(VALUES[k] | st.none() | st.just(UNCHANGED) for k in kinds)).map(list)
    return relation, draw(st.lists(whole | holes, min_size=1, max_size=4))


def assembler(
    settings: ShapingSettings, *, metadata: bool, kafka: KafkaSettings = JSON
) -> Assembler:
    shaping = Shaping(settings, "bank")
    encoders = encoders_for(kafka)()
    formats = Formats(kafka, shaping.naming, encoders, KnownRegistry(0xC3_28_7F_80))

    def describe(relation: Relation, _stamp: Stamp, _seq: int) -> Described:
        plan = shaping.plan(relation)
        return Described(plan, form=formats.of(plan))

    envelope = Envelope(
        *("b", "db", 3, describe),
        tombstones=True,
        transaction_metadata=metadata,
        encoders=encoders,
        flat=settings.flat,
    )
    return Assembler(envelope, Position(0, 100, 0), 10**9)


def take(machine: Assembler, decoder: Decoder, payload: bytes) -> None:
    """Take a message as Pipeline does inside a transaction."""
    messages = new_messages()
    messages.append((LSN, payload))
    if machine.rows(messages, 0, decoder) == 0:
        machine.take(decoder, payload, LSN, NOW_US)


def events(
    relation: Relation,
    rows: Sequence[Row],
    *,
    short: bool,
    xid: int | None = None,
    settings: ShapingSettings | None = None,
    metadata: bool = True,
    kafka: KafkaSettings = JSON,
) -> list[Event]:
    """An insert and two updates of each row, in one transaction, after enough rows for writers.

    Last a delete and a truncate.
    """
    machine = assembler(settings or ShapingSettings(), metadata=metadata, kafka=kafka)
    decoder = Decoder(streamed=xid is not None)
    decoder.decode(encode(relation, xid), LSN)
    machine.feed(Begin(200, NOW_US, 77), LSN, NOW_US)
    before = rows[0]
    for row in [*[rows[0]] * WORTH_ROWS, *rows, rows[0], rows[0]]:
        updates = (Update(relation, None, None, row), Update(relation, "O", before, row))
        before = row
        for change in (Insert(relation, row), *updates):
            payload = encode(change, xid)
            if short:
                take(machine, decoder, payload)
            else:
                machine.feed(decoder.decode(payload, LSN), LSN, NOW_US)
    if short and compiled.engine is not None:
        assert len(decoder.writers) == 3
    for end in (Delete(relation, "O", before), Truncate((relation,), False, False)):
        machine.feed(decoder.decode(encode(end, xid), LSN), LSN, NOW_US)
    batch = machine.feed(Commit(200, 248, NOW_US), LSN, NOW_US)
    assert batch is not None
    return batch.events


@given(tables(), st.sampled_from([None, 9]), st.booleans())
def test_specialised_encoders_make_the_same_events(
    table: tuple[Relation, list[Row]], xid: int | None, metadata: bool
) -> None:
    relation, rows = table
    by_the_long_way = events(relation, rows, short=False, xid=xid, metadata=metadata)
    assert events(relation, rows, short=True, xid=xid, metadata=metadata) == by_the_long_way


@given(tables(), st.sampled_from(FORMATS), st.sampled_from(FORMATS), st.booleans())
def test_specialised_encoders_make_the_same_events_in_every_format(
    table: tuple[Relation, list[Row]], key: Format, value: Format, metadata: bool
) -> None:
    relation, rows = table
    kafka = JSON.model_copy(update={"key_format": key, "value_format": value})
    found: list[object] = []
    for short in (False, True):
        try:
            found.append(events(relation, rows, short=short, metadata=metadata, kafka=kafka))
        except BadInput as error:  # a NULL in the key, columns with one name in Avro
            found.append(str(error))
    assert found[0] == found[1]


@given(tables(), st.sampled_from(FORMATS), st.sampled_from(FORMATS), st.booleans())
def test_a_row_is_placed_by_the_json_of_its_key_in_every_format(
    table: tuple[Relation, list[Row]], key: Format, value: Format, short: bool
) -> None:
    relation, rows = table
    assume(not any(UNCHANGED in row for row in rows))  # what stands for it has the key's type
    kafka = JSON.model_copy(update={"key_format": key, "value_format": value})
    try:
        found = events(relation, rows, short=short, kafka=kafka)
    except BadInput:  # as above
        return
    plain = events(relation, rows, short=short)
    assert [event.placed_by or event.key for event in found] == [event.key for event in plain]
    assert key != "json" or found[-1].placed_by is None


TABLE = Relation(
    7,
    "public",
    "people",
    "d",
    (
        RelationColumn("id", 20, -1, True),
        RelationColumn("secret", 25, -1, False),
        RelationColumn("left_out", 25, -1, False),
        RelationColumn("note", 25, -1, False),
    ),
)
ROW: Row = [b"1", b"hush", b"nobody's", b"x"]


@pytest.mark.parametrize("row", [ROW, [b"1", b"hu\xc3\x9fh", None, b"x" * 300]])
def test_masks_and_left_out_columns(row: Row) -> None:
    settings = ShapingSettings.model_validate(
        {
            "columns": {"public.people": {"exclude": ["left_out"]}},
            "masks": {"public.people": {"secret": {"hash": "sha256"}}},
            "salt": "salt for the hashes",
        }
    )
    found = events(TABLE, [row], short=True, settings=settings)
    assert found == events(TABLE, [row], short=False, settings=settings)
    assert not any(b"hush" in (event.value or b"") for event in found)


def prepared_decoder() -> tuple[Assembler, Decoder]:
    """Inside a transaction, with writers for TABLE."""
    machine, decoder = assembler(ShapingSettings(), metadata=True), Decoder()
    decoder.decode(encode(TABLE), LSN)
    machine.feed(Begin(200, NOW_US, 77), LSN, NOW_US)
    for _ in range(WORTH_ROWS):
        take(machine, decoder, encode(Insert(TABLE, ROW)))
        take(machine, decoder, encode(Update(TABLE, "O", ROW, ROW)))
    assert len(decoder.writers) == 2
    return machine, decoder


@pytest.mark.parametrize("row", [ROW, [b"1", None, b"\xc3\x9f", b"x" * 300]])
@pytest.mark.parametrize("old", [None, ROW])
def test_every_truncation_and_surplus_is_a_decode_error(row: Row, old: Row | None) -> None:
    machine, decoder = prepared_decoder()
    change = Insert(TABLE, row) if old is None else Update(TABLE, "O", old, row)
    whole = encode(change)
    for length in range(len(whole)):
        with pytest.raises(DecodeError):
            take(machine, decoder, whole[:length])
    for surplus in (b"\0", b"t\0\0\0\0", b"n", b"x"):
        with pytest.raises(DecodeError):
            take(machine, decoder, whole + surplus)


@pytest.mark.parametrize("value", [b"1x", b"", b"--1", b"\xff"])
def test_invalid_value_raises_decode_error(value: bytes) -> None:
    machine, decoder = prepared_decoder()
    with pytest.raises(DecodeError, match="text form") as raised:
        take(machine, decoder, encode(Insert(TABLE, [value, *ROW[1:]])))
    assert raised.value.subject == "public.people"


def test_a_relation_described_anew_has_new_columns_at_once() -> None:
    machine, decoder = prepared_decoder()
    columns = [
        replace(TABLE.columns[0]),
        *(replace(c, name=f"{c.name}2") for c in TABLE.columns[1:]),
    ]
    changed = replace(TABLE, columns=tuple(columns))
    take(machine, decoder, encode(changed))
    take(machine, decoder, encode(Insert(changed, ROW)))
    batch = machine.feed(Commit(200, 248, NOW_US), LSN, NOW_US)
    assert batch is not None
    assert b'"note":' in (batch.events[2].value or b"")
    assert b'"note2":' in (batch.events[-2].value or b"")


def test_a_row_outside_a_transaction_is_misplaced() -> None:
    machine, decoder = prepared_decoder()
    machine.feed(Commit(200, 248, NOW_US), LSN, NOW_US)
    with pytest.raises(DecodeError, match="outside"):
        take(machine, decoder, encode(Insert(TABLE, ROW)))


def test_unchanged_updates_are_left_out_beside_specialised_encoders() -> None:
    machine = assembler(ShapingSettings(skip_unchanged=("public.people",)), metadata=True)
    decoder = Decoder()
    decoder.decode(encode(TABLE), LSN)
    machine.feed(Begin(200, NOW_US, 77), LSN, NOW_US)
    other: Row = [b"1", b"hush", b"nobody's", b"y"]
    for _ in range(2 * WORTH_ROWS):
        take(machine, decoder, encode(Insert(TABLE, ROW)))
        take(machine, decoder, encode(Update(TABLE, "O", ROW, ROW)))
        take(machine, decoder, encode(Update(TABLE, "O", ROW, other)))
    assert len(decoder.writers) == 1
    batch = machine.feed(Commit(200, 248, NOW_US), LSN, NOW_US)
    assert batch is not None
    rows = [event for event in batch.events if event.table]
    assert len(rows) == 4 * WORTH_ROWS
    assert [event.seq for event in rows[:4]] == [0, 3, 5, 8]
