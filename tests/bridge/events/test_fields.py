"""Flat rows: an event's row and the chosen fields of its envelope, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.errors import BadInput, SettingsError
from schemas.kafka import Format
from schemas.shaping import FIELDS, POSITION, ShapingSettings, field_name
from services.bridge.compiled import new_messages
from services.bridge.events.description import Described
from services.bridge.events.event import Event, Stamp, size_of
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.messages import (
    Begin,
    Commit,
    Insert,
    Relation,
    RelationColumn,
    Row,
    Update,
)
from services.bridge.recovery.event_positions import EventPosition, KafkaRecord, position_of_record
from services.bridge.snapshot.row_events import RowEvents
from tests.bridge.events.test_row_encoders import (
    FORMATS,
    JSON,
    LSN,
    NOW_US,
    ROW,
    TABLE,
    assembler,
    events,
    tables,
)
from tests.promises.bridge.wire import encode

pytestmark = pytest.mark.usefixtures("twin")
OWN = ("bank.transaction", "b.transaction")
FLAT = json.dumps({"fields": [{"name": field_name(name)} for name in POSITION]})
"""What a registry has for flat rows in Avro, as far as a position asks for it."""
flats = st.fixed_dictionaries(
    {
        "fields": st.lists(st.sampled_from(FIELDS), unique=True),
        "deletes": st.sampled_from(["rewrite", "tombstone"]),
    }
)

flat_tables = tables().filter(
    lambda table: not any(column.name.startswith("__") for column in table[0].columns)
)
"""Tables without a column of a flat row's field's name, which is refused."""


def settings(flat: dict[str, Any] | None, **others: Any) -> ShapingSettings:
    return ShapingSettings.model_validate({"flat": flat, **others})


def rows_of(found: list[Event]) -> list[Event]:
    """The events without transactions' boundaries and the tombstones behind deletes."""
    told = [e for e in found if e.topic not in OWN]
    return [e for e in told if e.value is not None or "__op" in dict(e.headers or [])]


def field(envelope: dict[str, Any], name: str) -> Any:
    first, _, second = name.partition(".")
    if name in ("op", "ts_ms"):
        return envelope[name]
    if first == "transaction":
        return None if envelope[first] is None else envelope[first][second]
    return envelope["source"][second or first]


def expected(envelope: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    """What the documentation says of the flat form of an event."""
    row = envelope["before"] if envelope["after"] is None else envelope["after"]
    told = {field_name(n): field(envelope, n) for n in (*POSITION, *flat["fields"])}
    if flat["deletes"] == "rewrite":
        told["__deleted"] = "true" if envelope["op"] == "d" else "false"
    return told | (row or {})


@given(flat_tables, flats, st.sampled_from([None, 9]), st.booleans())
def test_a_flat_row_is_the_events_row_and_the_chosen_fields(
    table: tuple[Relation, list[Row]], flat: dict[str, Any], xid: int | None, metadata: bool
) -> None:
    relation, rows = table
    assume(flat["deletes"] == "rewrite" or any(column.key for column in relation.columns))
    whole = rows_of(events(relation, rows, short=False, xid=xid, metadata=metadata))
    for short in (False, True):
        found = events(
            *(relation, rows), short=short, xid=xid, metadata=metadata, settings=settings(flat)
        )
        for one, other in zip(rows_of(found), whole, strict=True):
            envelope = json.loads(other.value or b"")
            assert one.key == other.key
            assert one[4:] == other[4:]
            assert one.op == envelope["op"]
            source = envelope["source"]
            position = EventPosition(source["commit_lsn"], source["seq"], source["timeline"])
            record = KafkaRecord(one.topic, 0, one.key, one.value, one.headers)
            assert position_of_record(record, "bank", outbox=False) == position
            if envelope["op"] == "d" and flat["deletes"] == "tombstone":
                assert one.value is None
                place_told = [("__op", "d"), ("__commit_lsn", str(position.commit_lsn))]
                place_told += [("__seq", str(position.seq)), ("__timeline", "3")]
                assert one.headers == [*(other.headers or []), *place_told]
            else:
                assert json.loads(one.value or b"") == expected(envelope, flat)
                assert one.headers == other.headers
        assert [e for e in found if e.topic in OWN] == [
            e
            for e in events(relation, rows, short=short, xid=xid, metadata=metadata)
            if e.topic in OWN
        ]


@given(flat_tables, flats, st.sampled_from(FORMATS), st.sampled_from(FORMATS), st.booleans())
def test_specialised_encoders_make_the_same_flat_rows_in_every_format(
    table: tuple[Relation, list[Row]],
    flat: dict[str, Any],
    key: Format,
    value: Format,
    metadata: bool,
) -> None:
    relation, rows = table
    kafka = JSON.model_copy(update={"key_format": key, "value_format": value})
    ways: list[Any] = []
    for short in (False, True):
        try:
            ways.append(
                events(
                    *(relation, rows),
                    short=short,
                    metadata=metadata,
                    kafka=kafka,
                    settings=settings(flat),
                )
            )
        except BadInput as error:  # a NULL in the key, no key at all, one name twice in Avro
            ways.append(str(error))
    assert ways[0] == ways[1]
    if isinstance(ways[0], str):
        return
    readable = "json" if value == "json" else "json_schema_envelope"  # encoded as strictly
    kafka = JSON.model_copy(update={"key_format": key, "value_format": readable})
    try:
        whole = rows_of(events(relation, rows, short=False, metadata=metadata, kafka=kafka))
    except BadInput:  # NaN, which Avro and Protobuf have and text with a schema has not
        return
    for one, other in zip(rows_of(ways[0]), whole, strict=True):
        document = json.loads(other.value or b"")
        source = document.get("payload", document)["source"]
        record = KafkaRecord(one.topic, 0, one.key, one.value, one.headers)
        position = position_of_record(record, "bank", outbox=False, schema_text=lambda _: FLAT)
        assert position == EventPosition(source["commit_lsn"], source["seq"], 3)
        assert one.op == document.get("payload", document)["op"]


def test_rows_of_a_snapshot_are_flat_too() -> None:
    chosen = settings({"fields": ["snapshot", "source.snapshot", "lsn"]})
    plan = Shaping(chosen, "bank").plan(TABLE)
    made = RowEvents(
        *("b", '"snapshot":"true"', 3, lambda *_: Described(plan)),
        transaction_metadata=True,
        encoders=Encoders(),
        flat=chosen.flat,
    )
    made.begin_chunks(Stamp(0, 200, NOW_US, 100, NOW_US), 9)
    made.describe(TABLE, 0, partitioned=False)
    rows = new_messages()
    for _ in range(3):
        rows.append((0, encode(Insert(TABLE, ROW))))
    found, size = made.read(TABLE, [rows], lambda seq: "true" if seq else "first", 150, 0)
    assert size == size_of(found)
    told = [json.loads(event.value or b"") for event in found]
    assert [row["__snapshot"] for row in told] == ["first", "true", "true"]
    assert [row["__source_snapshot"] for row in told] == ["first", "true", "true"]
    assert [row["__seq"] for row in told] == [0, 1, 2]
    assert {row["__op"] for row in told} == {event.op for event in found} == {"r"} and {
        row["__lsn"] for row in told
    } == {150}


def test_a_column_with_the_name_of_a_field_is_refused() -> None:
    columns = (*TABLE.columns, RelationColumn("__op", 25, -1, False))
    relation = Relation(7, "public", "people", "d", columns)
    with pytest.raises(SettingsError, match="has a column __op") as raised:
        Shaping(settings({}), "bank").plan(relation)
    assert "shaping.columns" in raised.value.hint
    left_out = settings({}, columns={"public.people": {"exclude": ["__op"]}})
    assert Shaping(left_out, "bank").plan(relation).flat is not None
    assert Shaping(settings({"tables": ["x.*"]}), "bank").plan(relation).flat is None


def test_a_delete_without_a_key_can_not_be_a_tombstone() -> None:
    keyless = Relation(7, "public", "log", "f", (RelationColumn("note", 25, -1, False),))
    with pytest.raises(BadInput, match="has no key") as raised:
        events(keyless, [[b"x"]], short=True, settings=settings({"deletes": "tombstone"}))
    assert (raised.value.subject, raised.value.lsn) == ("public.log", LSN)


def test_a_truncate_is_told_in_every_format() -> None:
    """It has no columns, where a schema has some."""
    for form in FORMATS:
        kafka = JSON.model_copy(update={"key_format": form, "value_format": form})
        found = events(TABLE, [ROW], short=True, kafka=kafka, settings=settings({}))
        last = rows_of(found)[-1]
        assert last.broadcast and last.key is None
        record = KafkaRecord(last.topic, 0, None, last.value)
        position = position_of_record(record, "bank", outbox=False, schema_text=lambda _: FLAT)
        assert position == EventPosition(200, last.seq, 3)
        assert (last.table, last.op) == ("public.people", "t")


def test_an_old_value_that_can_not_be_written_is_another_one() -> None:
    """A flat row does not have it, so that it is no reason to stop."""
    arrays = Relation(
        *(7, "public", "t", "f"),
        (RelationColumn("id", 20, -1, True), RelationColumn("a", 1007, -1, False)),
    )
    kafka = JSON.model_copy(update={"value_format": "json_schema_envelope"})
    machine = assembler(settings({}, skip_unchanged=("*.*",)), metadata=True, kafka=kafka)
    machine.feed(Begin(200, NOW_US, 77), LSN, NOW_US)
    machine.feed(Update(arrays, "O", [b"1", b"{{1,2}}"], [b"1", b"{1,2}"]), LSN, NOW_US)
    with pytest.raises(BadInput, match="array of arrays"):
        machine.feed(Update(arrays, "O", [b"1", b"{1,2}"], [b"1", b"{{1,2}}"]), LSN, NOW_US)
    batch = machine.feed(Commit(200, 248, NOW_US), LSN, NOW_US)
    assert batch is not None and len(rows_of(batch.events)) == 1


@pytest.mark.parametrize(
    ("shaping", "text"),
    [
        ({"flat": {"fields": ["lns"]}}, "'lns' is not one of op"),
        ({"flat": {}, "topic": "{table}"}, "needs {prefix}"),
        ({"flat": {}, "routes": [{"tables": ".*", "topic": "all"}]}, "needs {prefix}"),
    ],
)
def test_invalid_flat_settings_are_refused(shaping: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShapingSettings.model_validate(shaping)


def test_the_form_is_as_documented() -> None:
    found = events(TABLE, [ROW], short=True, settings=settings({"fields": ["table", "lsn"]}))
    first, truncate = (rows_of(found)[number].value for number in (0, -1))
    assert first == (
        b'{"__op":"c","__deleted":"false","__table":"people","__commit_lsn":200,"__timeline":3,'
        b'"__seq":0,"__lsn":5000,"id":1,"secret":"hush","left_out":"nobody\'s","note":"x"}'
    )
    assert truncate is not None and b'"__op":"t"' in truncate and b"secret" not in truncate
