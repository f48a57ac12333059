"""What settings make of changes: nothing that they leave out is in any byte of any event."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import BadInput, SettingsError
from schemas.schema_events import SchemaEvent
from schemas.shaping import ShapingSettings
from services.bridge.events.description import Described
from services.bridge.events.envelope import Envelope
from services.bridge.events.event import Event, Stamp
from services.bridge.events.schema_events import Shapes
from services.bridge.events.shaping.outbox import members
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    RelationColumn,
    Truncate,
    Update,
)
from services.bridge.progress.ledger import Position
from services.bridge.transactions.assembler import Assembler, EventBatch

NOW_US = 1_700_000_000_000_000
SALT = "a salt of the test"


def relation(
    *columns: str, key: str = "id", identity: str = "f", table: str = "person"
) -> Relation:
    named = tuple(RelationColumn(name, 25, -1, name in key.split()) for name in columns)
    return Relation(7, "public", table, identity, named)


PERSON = relation("id", "secret", "name")


def assembler(
    settings: dict[str, Any],
    start: Position = Position(0, 100, 0),  # noqa: B008 - immutable
    counts: dict[str, int] | None = None,
    bytes_max: int = 10**9,
) -> Assembler:
    shaping = Shaping(ShapingSettings(**settings), "bank")
    shapes = Shapes("bank", {})

    def describe(found: Relation, stamp: Stamp, seq: int) -> Described:
        plan = shaping.plan(shaping.with_key(found))
        shape = shapes.change(plan.relation, stamp, seq) if plan.published else None
        return Described(plan, shape)

    envelope = Envelope(
        *("bank", "db", 3, describe),
        tombstones=True,
        transaction_metadata=True,
        outbox_messages=shaping.outbox_messages,
    )
    return Assembler(envelope, start, bytes_max, counts, shaping)


def run(machine: Assembler, *changes: AnyMessage) -> list[EventBatch]:
    messages = [Begin(200, NOW_US, 77), *changes, Commit(200, 248, NOW_US)]
    return [p for p in (machine.feed(m, 9, NOW_US) for m in messages) if p is not None]


def events(settings: dict[str, Any], *changes: AnyMessage) -> list[Event]:
    return [event for batch in run(assembler(settings), *changes) for event in batch.events]


def rows_of(found: Iterable[Event]) -> list[dict[str, Any]]:
    own = ("bank.schema", "bank.transaction")
    return [json.loads(e.value) for e in found if e.value is not None and e.topic not in own]


marked = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8).map(
    lambda text: f"§{text}§".encode()
)
changes_of_person = st.lists(
    st.one_of(
        st.builds(
            lambda old, new: Update(PERSON, "O", [b"1", old, b"n"], [b"1", new, UNCHANGED]),
            marked,
            st.one_of(marked, st.just(UNCHANGED), st.none()),
        ),
        marked.map(lambda value: Insert(PERSON, [b"1", value, b"n"])),
        marked.map(lambda value: Delete(PERSON, "O", [b"1", value, b"n"])),
        st.builds(
            lambda a, b: Update(PERSON, "O", [b"1", a, b"n"], [b"2", b, b"n"]), marked, marked
        ),
        st.just(Truncate((PERSON,), False, False)),
    ),
    min_size=1,
    max_size=8,
)


@given(
    changes_of_person,
    st.sampled_from(
        [
            {"columns": {"public.*": {"exclude": ["sec*"]}}},
            {"columns": {"public.person": {"include": ["id", "name"]}}},
            {"masks": {"*.person": {"secret": {"hash": "sha256"}}}, "salt": SALT},
            {"masks": {"*.person": {"secret": {"text": "***"}}}},
            {"masks": {"*.person": {"s*": {"truncate": 0}}}},
            {"exclude": ["public.p*"]},
            {"include": ["public.other"]},
            {"skip": {"public.person": ["c", "u", "d", "t"]}},
        ]
    ),
)
def test_excluded_and_masked_values_are_in_no_byte(
    changes: list[AnyMessage], settings: dict[str, Any]
) -> None:
    for event in events(settings, *changes):
        headers = b"".join(
            value if isinstance(value, bytes) else (value or "").encode()
            for _, value in event.headers or []
        )
        everything = (event.key or b"") + (event.value or b"") + headers
        assert "§".encode() not in everything
        assert SALT.encode() not in everything
        if "columns" in settings:
            assert b"secret" not in everything


@given(marked, marked)
def test_a_hash_is_the_same_for_the_same_value_and_salt_alone(one: bytes, other: bytes) -> None:
    def hashed(value: bytes, salt: str) -> str:
        settings = {"masks": {"public.person": {"secret": {"hash": "sha256"}}}, "salt": salt}
        return str(
            rows_of(events(settings, Insert(PERSON, [b"1", value, b"n"])))[0]["after"]["secret"]
        )

    assert (hashed(one, SALT) == hashed(other, SALT)) == (one == other)
    assert hashed(one, SALT) != hashed(one, SALT + "!")
    assert len(hashed(one, SALT)) == 64


def test_masks_by_kind_null_and_unchanged() -> None:
    person = relation("id", "a", "b", "c")
    settings = {
        "masks": {
            "*.person": {"a": {"text": "*"}, "b": {"truncate": 2}},
            "*.*": {"c": {"text": ""}},
        }
    }
    rows: list[AnyMessage] = [
        Insert(person, [b"1", b"one", "äöü".encode(), b"x"]),
        Insert(person, [b"2", None, None, None]),
        Update(person, None, None, [b"3", UNCHANGED, UNCHANGED, UNCHANGED]),
    ]
    gone = "__debezium_unavailable_value"
    assert [event["after"] for event in rows_of(events(settings, *rows))] == [
        {"id": "1", "a": "*", "b": "äö", "c": ""},
        {"id": "2", "a": None, "b": None, "c": None},
        {"id": "3", "a": gone, "b": gone, "c": gone},
    ]


def test_the_schema_event_is_of_what_is_published() -> None:
    numbers = Relation(
        7,
        "public",
        "person",
        "d",
        (
            RelationColumn("id", 23, -1, True),
            RelationColumn("salary", 1700, 5, False),
            RelationColumn("secret", 23, -1, False),
        ),
    )
    settings = {
        "columns": {"public.person": {"exclude": ["secret"]}},
        "masks": {"public.person": {"salary": {"text": "?"}}},
    }
    found = events(settings, Insert(numbers, [b"1", b"2", b"3"]))
    (shape,) = [e.value for e in found if e.topic == "bank.schema"]
    assert shape is not None
    columns = SchemaEvent.model_validate_json(shape).after
    assert [(c.name, c.type, c.typmod, c.key) for c in columns] == [
        ("id", "int4", -1, True),
        ("salary", "text", -1, False),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"public.*": {"exclude": ["id"]}}}, "would lose its key column id"),
        ({"columns": {"public.*": {"include": ["name"]}}}, "would lose its key column id"),
        ({"masks": {"public.*": {"id": {"text": "x"}}}}, "rows with equal keys"),
        ({"masks": {"public.*": {"*": {"truncate": 3}}}}, "rows with equal keys"),
        ({"keys": {"public.person": ["nope"]}}, "has no column nope"),
        ({"topic": "bank.{table}", "routes": [{"tables": ".*", "topic": "bank.schema"}]}, "other"),
        ({"outbox": {"table": "public.person"}}, "has no column aggregatetype"),
        (
            {
                "outbox": {"table": "a.b", "topic": "{prefix}.public.{type}"},
            },
            "which the bridge uses for other things",
        ),
    ],
)
def test_a_table_that_can_not_be_shaped_so_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        events(settings, Insert(PERSON, [b"1", b"s", b"n"]))


def test_a_key_that_old_rows_do_not_tell_is_refused() -> None:
    settings = {"keys": {"public.person": ["name"]}}
    with pytest.raises(SettingsError, match="REPLICA IDENTITY FULL"):
        events(settings, Insert(relation("id", "name", identity="d"), [b"1", b"n"]))
    keyless = relation("id", "name", identity="d", key="")
    found = events(settings, Insert(keyless, [b"1", b"n"]))
    assert [e.key for e in found if e.topic == "bank.public.person"] == [b'{"name":"n"}']


def test_a_hashed_key_keeps_rows_apart() -> None:
    settings = {"masks": {"public.person": {"id": {"hash": "sha256"}}}, "salt": SALT}
    found = events(
        settings,
        Insert(PERSON, [b"1", b"s", b"n"]),
        Update(PERSON, "O", [b"1", b"s", b"n"], [b"2", b"s", b"n"]),
    )
    keys = [e.key for e in found if e.topic == "bank.public.person"]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert [e["op"] for e in rows_of(found)] == ["c", "d", "c"]


def test_an_operation_that_is_skipped_takes_its_number() -> None:
    changes: list[AnyMessage] = [
        Insert(PERSON, [b"1", b"s", b"n"]),
        Update(PERSON, "O", [b"1", b"s", b"n"], [b"1", b"t", b"n"]),
        Delete(PERSON, "O", [b"1", b"s", b"n"]),
        Truncate((PERSON,), False, False),
    ]
    numbers = {e["op"]: e["source"]["seq"] for e in rows_of(events({}, *changes))}
    assert numbers == {"c": 0, "u": 1, "d": 3, "t": 4}
    for op in numbers:
        found = events({"skip": {"public.person": [op]}}, *changes)
        left = {e["op"]: e["source"]["seq"] for e in rows_of(found)}
        assert left == {other: seq for other, seq in numbers.items() if other != op}
        assert found[-1].value is not None
        assert json.loads(found[-1].value)["event_count"] == 3
        orders = [e["transaction"]["total_order"] for e in rows_of(found)]
        assert orders == [1, 2, 3]
    assert events({"exclude": ["*.*"]}, *changes) == []


settings_of_person = st.sampled_from(
    [
        {},
        {"exclude": ["public.person"]},
        {"skip": {"public.person": ["u"]}},
        {"skip": {"*.*": ["c", "t"]}},
        {"keys": {"public.person": ["name"]}},
        {"columns": {"public.*": {"exclude": ["secret"]}}},
    ]
)


@given(changes_of_person, settings_of_person, settings_of_person, st.data())
def test_settings_changed_in_the_middle_of_a_transaction_lose_and_repeat_nothing(
    changes: list[AnyMessage], first: dict[str, Any], then: dict[str, Any], data: st.DataObject
) -> None:
    before = run(assembler(first, bytes_max=600), *changes)
    cut = data.draw(st.integers(1, len(before)))
    last = before[cut - 1]
    resumed = assembler(then, last.position, dict(last.counts or {}), 600)
    after = run(resumed, *changes)
    had = rows_of(e for p in before[:cut] for e in p.events)
    got = rows_of(e for p in after for e in p.events)
    at = last.position.seq or 2**63
    whole = rows_of(e for p in run(assembler(then), *changes) for e in p.events)
    assert [e["source"]["seq"] for e in got] == [
        e["source"]["seq"] for e in whole if e["source"]["seq"] >= at
    ]
    assert all(e["source"]["seq"] < at for e in had)
    boundaries = [
        json.loads(e.value)
        for p in (*before[:cut], *after)
        for e in p.events
        if e.topic == "bank.transaction" and e.value is not None
    ]
    assert [b["status"] for b in boundaries] == (["BEGIN", "END"] if had or got else [])
    if boundaries:
        assert boundaries[1]["event_count"] == len(had) + len(got)


OUTBOX = relation("id", "aggregatetype", "aggregateid", "type", "payload", table="outbox")


def test_an_outbox_row_is_a_message_of_its_own() -> None:
    settings = {"outbox": {"table": "public.outbox"}}
    found = events(
        settings,
        Insert(OUTBOX, [b"e1", b"order/1", b"o-7", b"OrderPaid", b'{"total": 5}']),
        Delete(OUTBOX, "O", [b"e1", b"order", b"o-7", b"OrderPaid", b"{}"]),
        Insert(OUTBOX, [b"e2", None, None, None, None]),
        Truncate((OUTBOX,), False, False),
    )
    messages = [e for e in found if e.topic != "bank.transaction"]
    assert [(e.topic, e.key, e.value) for e in messages] == [
        ("bank.outbox.order_1", b"o-7", b'{"total": 5}'),
        ("", None, None),
    ]
    assert messages[0].headers == [
        ("id", b"e1"),
        ("type", b"OrderPaid"),
        ("commit_lsn", "200"),
        ("seq", "0"),
    ]
    updated = Update(OUTBOX, "O", [b"e", b"t", b"k", b"y", b"p"], [b"e", b"t", b"k", b"y", b"q"])
    with pytest.raises(BadInput, match=r"skip: \{public.outbox: \[u\]\}"):
        events(settings, updated)
    assert events({**settings, "skip": {"public.outbox": ["u"]}}, updated) == []


def test_columns_of_an_outbox_become_headers() -> None:
    outbox = {"table": "public.outbox", "payload": "id", "headers": {"payload": "tenant"}}
    row = Insert(OUTBOX, [b"e1", b"order", b"o-7", b"Paid", b"acme"])
    (message,) = [e for e in events({"outbox": outbox}, row) if e.topic == "bank.outbox.order"]
    assert ("tenant", b"acme") in (message.headers or [])
    with pytest.raises(SettingsError, match=r"no column zone.*shaping\.outbox\.headers\.zone"):
        events({"outbox": {**outbox, "headers": {"zone": "zone"}}}, row)
    for header in ("id", "seq"):
        with pytest.raises(ValueError, match="every message has its own header"):
            ShapingSettings(outbox={**outbox, "headers": {"payload": header}})


@pytest.mark.parametrize(
    ("given", "partition"),
    [(b"3", 3), (None, None), (b"-1", -2), (b"1.5", -2), (b"x", -2), (b"9" * 20, -2)],
)
def test_a_column_of_an_outbox_is_the_partition(given: bytes | None, partition: int | None) -> None:
    outbox = {"table": "public.outbox", "payload": "id", "partition": "payload"}
    row = Insert(OUTBOX, [b"e1", b"order", b"o-7", b"Paid", given])
    (message,) = [e for e in events({"outbox": outbox}, row) if e.topic == "bank.outbox.order"]
    assert (message.placed_by, message.value) == (partition, b"e1")
    with pytest.raises(SettingsError, match=r"no column zone.*shaping\.outbox\.partition"):
        events({"outbox": {**outbox, "partition": "zone"}}, row)
    told = b'{"aggregatetype":"order","aggregateid":"7","payload":1,"shard":3}'
    by_message = {"message_prefix": "outbox", "partition": "shard"}
    found = events({"outbox": by_message}, Message(True, 9, "outbox", told))
    (message,) = [e for e in found if e.topic == "bank.outbox.order"]
    assert message.placed_by == 3


UNCLEAR = (
    b"not JSON",
    b'{"aggregatetype":"order","aggregateid":"7","Payload":{}}',
    b'{"aggregatetype":"order","aggregateId":"7","payload":{}}',
    b'{"aggregateType":"order","aggregateid":"7","payload":{}}',
    b'{"aggregatetype":null,"aggregateid":"7","payload":{}}',
)
"""Messages of an outbox from which neither topic nor value follows, or only by guessing."""


def test_a_logical_message_is_an_outbox_message() -> None:
    settings = {"outbox": {"message_prefix": "outbox", "headers": {"tenant": "tenant"}}}
    content = (
        b' {"id" :"e1", "aggregatetype":"order","aggregateid": 7, "type":"Paid",'
        b'"payload": {"total": 1.10, "n":[ 1 ]}, "tenant":null}'
    )
    found = events(
        settings,
        Message(True, 150, "outbox", content),
        Message(True, 151, "other", content),
        Message(
            *(True, 152, "outbox"),
            b'{"aggregatetype":"order","aggregateid":null,"payload":"\\u00e4","x":"\\ud800"}',
        ),
        *(Message(True, 153, "outbox", content) for content in UNCLEAR),
    )
    first, second, *bad = [e for e in found if e.topic != "bank.transaction"]
    assert (first.topic, first.key) == ("bank.outbox.order", b"7")
    assert first.value == b'{"total": 1.10, "n":[ 1 ]}'
    assert first.headers == [
        *(("id", b"e1"), ("type", b"Paid"), ("commit_lsn", "200"), ("seq", "0")),
        ("tenant", None),
    ]
    assert second.seq == 2, "another message takes its number, and is not published"
    assert (second.key, second.value) == (None, "ä".encode())
    assert [(e.topic, e.key, e.value) for e in bad] == [("", None, c) for c in UNCLEAR]
    ends = [json.loads(e.value) for e in found if e.topic == "bank.transaction" and e.value]
    assert [end["event_count"] for end in ends] == [None, 2 + len(UNCLEAR)]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), _json), st.sampled_from([None, 1]))
def test_the_members_of_a_json_object_are_taken_as_written(
    given_members: dict[str, Any], indent: int | None
) -> None:
    found = members(json.dumps(given_members, indent=indent), given_members)
    assert found.keys() == given_members.keys()
    for name, value in given_members.items():
        text = found[name]
        if value is None:
            assert text is None
        elif isinstance(value, str):
            assert text == value.encode()
        else:
            assert text is not None
            assert json.loads(text) == value


@given(st.text())
def test_what_is_not_one_json_object_is_refused(text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        with pytest.raises(ValueError, match=r"line \d+ column|not a JSON object"):
            members(text, ())


def test_patterns_that_match_nothing_are_told() -> None:
    shaping = Shaping(
        ShapingSettings(
            include=("public.*", "old.*"),
            columns={"public.person": {"exclude": ["name", "nmae"]}},
            masks={"public.people": {"name": {"text": "x"}}},
        ),
        "bank",
    )
    assert list(shaping.unmatched({("public", "person"): ("id", "name")})) == [
        "include: old.*",
        "masks: public.people: name",
        "columns: public.person: nmae",
    ]


@given(changes_of_person, st.booleans())
def test_updates_that_change_nothing_published_are_left_out_and_nothing_else(
    changes: list[AnyMessage], masked: bool
) -> None:
    """The others keep their numbers; END counts what is there."""
    shaping: dict[str, Any] = {}
    if masked:
        shaping["masks"] = {"*.person": {"secret": {"text": "***"}}}
    whole = rows_of(events(shaping, *changes))
    machine = events({**shaping, "skip_unchanged": ["public.p*"]}, *changes)
    found = rows_of(machine)
    expected = [e for e in whole if e["op"] != "u" or e["before"] != e["after"]]
    assert [(e["op"], e["source"]["seq"]) for e in found] == [
        (e["op"], e["source"]["seq"]) for e in expected
    ]
    assert [(e["before"], e["after"]) for e in found] == [
        (e["before"], e["after"]) for e in expected
    ]
    ends = [json.loads(e.value or b"") for e in machine if e.topic == "bank.transaction"]
    assert [end["event_count"] for end in ends[1:]] == [len(expected)] * bool(expected)


def test_without_the_whole_old_row_an_update_is_published() -> None:
    by_key = relation("id", "secret", "name", identity="d")
    change = Update(by_key, None, None, [b"1", b"s", b"n"])
    assert len(rows_of(events({"skip_unchanged": ["*.*"]}, change))) == 1
