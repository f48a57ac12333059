"""Filters and computed columns: what expressions see, and what becomes of changes."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import BadInput, ExitCode, SettingsError
from schemas.kafka import KafkaSettings
from schemas.settings import BridgeSettings
from schemas.shaping import ShapingSettings
from services.bridge.events.description import Described
from services.bridge.events.envelope import Envelope
from services.bridge.events.errors import ExpressionFailed
from services.bridge.events.event import Event, Stamp
from services.bridge.events.shaping.expressions import Expression
from services.bridge.events.shaping.tables import Shaping
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    Begin,
    Commit,
    Delete,
    Insert,
    Relation,
    RelationColumn,
    Row,
    Truncate,
    Update,
    Value,
)
from services.bridge.pgoutput.pg_types import TYPE_NAMES
from services.bridge.progress.ledger import Position
from services.bridge.recovery.fit import require_fitting, unfit
from services.bridge.recovery.placement import changed, placement_of
from services.bridge.transactions.assembler import Assembler

NOW_US = 1_700_000_000_000_000
OIDS = {name: oid for oid, name in TYPE_NAMES.items()}


def relation(identity: str = "f", **columns: str) -> Relation:
    """A table whose first column is its key, by column -> type."""
    named = tuple(
        RelationColumn(name, OIDS[kind], -1, number == 0)
        for number, (name, kind) in enumerate(columns.items())
    )
    return Relation(7, "public", "t", identity, named)


def whole(found: Relation) -> Relation:
    """As the server describes a table with REPLICA IDENTITY FULL."""
    return replace(found, columns=tuple(replace(one, key=True) for one in found.columns))


T = relation(id="int4", n="int4", s="text")


def row(*values: Value) -> Row:
    """A row, typed."""
    return [*values]


def assembler(settings: dict[str, Any], *, dead_rows: bool = False) -> Assembler:
    shaping = Shaping(ShapingSettings(**settings), "bank")

    def describe(found: Relation, stamp: Stamp, seq: int) -> Described:
        full = found.replica_identity == "f"
        identity = [column.name for column in found.columns if column.key or full]
        return Described(shaping.plan(found, identity))

    envelope = Envelope(
        *("bank", "db", 3, describe),
        tombstones=True,
        transaction_metadata=True,
        dead_rows=dead_rows,
    )
    return Assembler(envelope, Position(0, 100, 0), 10**9)


def events(settings: dict[str, Any], *changes: AnyMessage, dead_rows: bool = False) -> list[Event]:
    machine = assembler(settings, dead_rows=dead_rows)
    messages = [Begin(200, NOW_US, 77), *changes, Commit(200, 248, NOW_US)]
    batches = [machine.feed(message, 9, NOW_US) for message in messages]
    return [event for batch in batches if batch is not None for event in batch.events]


def published(settings: dict[str, Any], *changes: AnyMessage) -> list[tuple[str, Any, Any]]:
    """(op, before, after) of the table's events, tombstones left out."""
    found = []
    for event in events(settings, *changes):
        if event.value is not None and event.table:
            value = json.loads(event.value)
            found.append((value["op"], value["before"], value["after"]))
    return found


def value(text: str, **columns: tuple[str, bytes | None]) -> Any:
    kinds = {name: kind for name, (kind, _) in columns.items()}
    expression = Expression(text, "shaping.filters", relation(**kinds))
    return expression.value([given for _, given in columns.values()])


@pytest.mark.parametrize(
    ("kind", "text", "expression"),
    [
        ("int2", b"-7", "v == -7"),
        ("int8", b"9223372036854775807", "v == 9223372036854775807"),
        ("bool", b"t", "v"),
        ("bool", b"f", "!v"),
        ("float8", b"1.5", "v > 1.25"),
        ("float4", b"NaN", "v != v"),
        ("float8", b"-Infinity", "v < -1e300"),
        ("numeric", b"123456789012345678901234567890.5", "v.endsWith('90.5')"),
        ("numeric", b"12.5", "double(v) > 12.25"),
        ("text", "Łódź".encode(), "v.startsWith('Łó') && v.size() == 4"),
        ("varchar", b"Ada", "v in ['Ada', 'Bea'] && v.lowerAscii() == 'ada'"),
        ("uuid", b"00000000-0000-0000-0000-000000000001", "v.endsWith('01')"),
        ("date", b"2026-01-31", "v < '2026-02-01'"),
        ("timestamp", b"2026-01-31 10:00:00", "v.startsWith('2026-01')"),
        ("timestamptz", b"2026-01-31 10:00:00.25+00", "v > timestamp('2026-01-31T10:00:00Z')"),
        ("timestamptz", b"2026-01-31 12:00:00+02", "v == timestamp('2026-01-31T10:00:00Z')"),
        ("timestamptz", b"2026-01-31 10:00:00+00", "v.getDayOfMonth() == 30"),
        ("bytea", b"\\x6162", "v == b'ab'"),
        ("jsonb", b'{"a": [1, {"b": 2.5}], "n": null}', "v.a[1].b > 2 && v.n == null"),
        ("json", b"[]", "v.size() == 0"),
        ("_int4", b"{1,2}", "v == '{1,2}'"),
    ],
)
def test_values_reach_an_expression_by_their_type(kind: str, text: bytes, expression: str) -> None:
    assert value(expression, v=(kind, text)) is True


three = st.sampled_from(row(b"t", b"f", None))


@given(three, three, st.sampled_from(["&&", "||"]))
def test_null_in_conditions_is_as_in_sql(a: bytes | None, b: bytes | None, operator: str) -> None:
    values = {b"t": True, b"f": False, None: None}
    left, right = values[a], values[b]
    strong = operator == "||"
    expected = strong if strong in (left, right) else None if None in (left, right) else not strong
    assert value(f"a {operator} b", a=("bool", a), b=("bool", b)) is expected


def test_null_in_arithmetic_and_comparisons_is_null() -> None:
    null: dict[str, tuple[str, bytes | None]] = {"n": ("int4", None), "j": ("jsonb", None)}
    for text in ("n > 3", "n + 1", "string(n)", "j.a", "j.a.b > 1", "!(n > 3)", "n > 3 && n < 9"):
        assert value(text, **null) is None, text
    assert value("n == null || n > 3", **null) is True
    assert value("n != 3", **null) is True  # equality is CEL's
    with pytest.raises(ExpressionFailed, match="divide by zero"):
        value("z / 0 > 1 || n > 3", z=("int4", b"1"), n=("int4", b"1"))
    with pytest.raises(ExpressionFailed, match="No matching overload"):
        value("j.a > 1", j=("jsonb", b'{"a": "x"}'))


def test_a_name_that_cel_has_itself_is_told_by_row() -> None:
    assert value("row.type == 'x' && row.n > n - 1", type=("text", b"x"), n=("int4", b"4")) is True
    with pytest.raises(SettingsError, match=r"no matching overload.*double\(amount\) > 10\.0"):
        value("type == 'x'", type=("text", b"x"))


@pytest.mark.parametrize(
    ("kind", "text", "expression"),
    [
        ("timestamptz", b"infinity", "v == null"),
        ("timestamptz", b"10000-01-01 00:00:00+00", "v == null"),
        ("jsonb", b'{"a": 1' + b"0" * 30 + b"}", "v.a > 1"),
        ("text", b"secret", "int(v) > 1"),
        ("jsonb", b'{"secret": 1}', "v[v.secret] == 1"),
        ("jsonb", b'"secret"', "v.secret == 1"),
    ],
)
def test_a_row_without_a_value_is_an_error_that_does_not_quote_the_row(
    kind: str, text: bytes, expression: str
) -> None:
    with pytest.raises(ExpressionFailed) as caught:
        value(expression, v=(kind, text))
    said = str(caught.value).replace(repr(expression), "")
    assert "secret" not in said
    assert "1000000" not in said


def test_an_expression_that_never_ends_soon_is_stopped() -> None:
    big = "j.all(a, j.all(b, j.all(c, j.all(d, j.all(e, a + b + c + d + e >= 0)))))"
    with pytest.raises(ExpressionFailed, match="budget"):
        value(big, j=("jsonb", json.dumps([*range(60)]).encode()))


operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "update", "move", "delete", "truncate"]),
        st.integers(0, 3),
        st.one_of(st.none(), st.integers(0, 6)),
    ),
    max_size=25,
)
Rows = dict[int, int | None]


def row_of(key: int, n: int | None) -> list[Any]:
    return [b"%d" % key, None if n is None else b"%d" % n, b"x"]


def changes_of(found: list[tuple[str, int, int | None]], rows: Rows) -> list[AnyMessage]:
    """What pgoutput says of operations on a table with REPLICA IDENTITY FULL; fills `rows`."""
    changes: list[AnyMessage] = []
    for operation, key, n in found:
        new = row_of(key, n)
        if operation == "insert" and key not in rows:
            changes.append(Insert(T, new))
            rows[key] = n
        elif operation == "truncate" and key == 0:
            changes.append(Truncate((T,), False, False))
            rows.clear()
        elif key in rows and operation in ("update", "move"):
            old, to = row_of(key, rows.pop(key)), key
            if operation == "move" and key + 10 not in rows:
                to = key + 10
            changes.append(Update(T, "O", old, row_of(to, n)))
            rows[to] = n
        elif key in rows and operation == "delete":
            changes.append(Delete(T, "O", row_of(key, rows.pop(key))))
    return changes


@given(operations, st.sampled_from([{}, {"skip_unchanged": ["public.*"]}]))
def test_events_make_the_rows_that_fit_and_are_counted(
    found: list[tuple[str, int, int | None]], others: dict[str, Any]
) -> None:
    rows: Rows = {}
    changes = changes_of(found, rows)
    computed = {"public.*": {"double": "n * 2"}}
    sent = events({"filters": {"*.t": "n > 2"}, "computed": computed, **others}, *changes)
    folded: dict[bytes, Any] = {}
    counted = 0
    for event in sent:
        if not event.table:
            continue
        counted += event.value is not None
        told = json.loads(event.value) if event.value is not None else None
        if told is None or told["op"] == "d":
            folded.pop(event.key or b"", None)
        elif told["op"] == "t":
            folded.clear()
        else:
            assert (told["op"] == "u") == ((event.key or b"") in folded)
            folded[event.key or b""] = told["after"]
    expected = {key: n for key, n in rows.items() if n is not None and n > 2}
    assert folded == {
        b'{"id":%d}' % key: {"id": key, "n": n, "s": "x", "double": 2 * n}
        for key, n in expected.items()
    }
    ends = [json.loads(e.value) for e in sent if e.value and b'"END"' in e.value]
    assert sum(end["event_count"] for end in ends) == counted


def test_an_update_into_or_out_of_the_filter() -> None:
    settings = {"filters": {"public.t": "n > 2"}}
    low, high = row(b"1", b"1", b"x"), row(b"1", b"5", UNCHANGED)
    whole = {"id": 1, "n": 5, "s": "x"}
    assert published(settings, Update(T, "O", low, high)) == [("c", None, whole)]
    assert published(settings, Update(T, "O", row(b"1", b"5", b"x"), row(*low[:2], UNCHANGED))) == [
        ("d", whole, None)
    ]
    assert published(settings, Update(T, "O", low, row(b"1", b"2", UNCHANGED))) == []
    assert published({**settings, "skip": {"*.*": ["u"]}}, Update(T, "O", low, high)) == []
    assert published({**settings, "skip": {"*.*": ["c"]}}, Update(T, "O", low, high)) == []


def test_with_a_key_as_identity_a_filter_may_use_the_key_alone() -> None:
    table = relation("d", id="int4", n="int4", s="text")
    settings = {"filters": {"public.t": "id > 2"}}
    two, three = row(b"2", None, None), row(b"3", b"1", b"x")
    assert published(settings, Update(table, "K", two, three)) == [
        ("c", None, {"id": 3, "n": 1, "s": "x"})
    ]
    assert [op for op, *_ in published(settings, Update(table, None, None, three))] == ["u"]
    assert [op for op, *_ in published(settings, Delete(table, "K", two))] == []
    untold = {"filters": {"public.t": "id > 2 && n > 1"}}
    with pytest.raises(SettingsError, match="it uses n, whose old value"):
        events(untold, Insert(table, three))
    inserts = {**untold, "skip": {"public.t": ["u", "d"]}}
    assert published(inserts, Insert(table, three), Delete(table, "K", two)) == []
    with pytest.raises(BadInput, match="not told whole"):
        events(settings, Update(T, "K", two, three))
    with pytest.raises(BadInput, match="not told whole"):
        events(settings, Update(T, None, None, three))


def test_an_unchanged_toast_value_is_never_guessed() -> None:
    table = relation("d", id="int4", n="int4", s="text")
    gone = row(b"1", b"1", UNCHANGED)
    placeholder = "__debezium_unavailable_value"
    copied = {"computed": {"*.*": {"copy": "s.upperAscii()"}}}
    [(_, _, after)] = published(copied, Update(table, None, None, gone))
    assert (after["s"], after["copy"]) == (placeholder, placeholder)
    for text in ("s + string(n)", "s.size()"):
        with pytest.raises(BadInput, match="unchanged TOAST value"):
            events({"computed": {"*.*": {"c": text}}}, Update(table, None, None, gone))
    skip = {"*.*": ["d"]}
    [(op, _, _)] = published(
        {"filters": {"*.*": "s == 'x'"}, "skip": skip},
        Update(T, "O", row(b"1", b"1", b"x"), row(b"1", b"2", UNCHANGED)),
    )
    assert op == "u"


def test_a_row_does_not_enter_a_filter_without_a_value() -> None:
    """Its event would be the first of the row, with a placeholder for a value that never came."""
    table = relation("d", id="int4", n="int4", s="text")
    settings = {"filters": {"public.t": "id > 2"}}
    entering = Update(table, "K", row(b"2", None, None), row(b"3", b"1", UNCHANGED))
    with pytest.raises(BadInput, match="unchanged TOAST value of column s") as caught:
        events(settings, entering)
    assert caught.value.exit_code == ExitCode.RECORD_REFUSED
    assert (caught.value.subject, caught.value.lsn) == ("public.t", 9)
    for part in ("public.t REPLICA IDENTITY FULL", "shaping.filters", "shaping.columns"):
        assert part in caught.value.hint
    [dead] = [one for one in events(settings, entering, dead_rows=True) if not one.topic]
    assert (dead.key, dead.value) == (b'{"id":3}', None)
    copied = {"computed": {"*.*": {"copy": "s"}}, "columns": {"*.*": {"exclude": ["s"]}}}
    with pytest.raises(BadInput, match="unchanged TOAST value of column copy"):
        events(settings | copied, entering)
    [(op, _, after)] = published(settings | {"columns": {"*.*": {"exclude": ["s"]}}}, entering)
    assert (op, after) == ("c", {"id": 3, "n": 1})
    assert published(settings | {"skip": {"*.*": ["c"]}}, entering) == []
    inside = Update(table, None, None, row(b"3", b"2", UNCHANGED))
    assert [op for op, *_ in published(settings, inside)] == ["u"]


def test_computed_columns_have_the_type_of_their_expression() -> None:
    table = relation("f", id="int4", at="timestamptz", raw="bytea", f="float8")
    computed = {
        "i": "id + 1",
        "b": "id > 1",
        "s": "'<' + string(id) + '>'",
        "t": "at + duration('1h')",
        "r": "raw + b'!'",
        "d": "f / 0.0",
        "nothing": "string(f) + string(at)",
    }
    settings = {"computed": {"public.t": computed}, "masks": {"public.t": {"s": {"text": "-"}}}}
    given = row(b"7", b"2026-01-31 10:00:00+00", b"\\x61", b"1")
    [(_, _, after)] = published(settings, Insert(table, given))
    assert after == {
        "id": 7,
        "at": "2026-01-31T10:00:00.000000Z",
        "raw": "YQ==",
        "f": 1,
        "i": 8,
        "b": True,
        "s": "-",
        "t": "2026-01-31T11:00:00.000000Z",
        "r": "YSE=",
        "d": "Infinity",
        "nothing": "12026-01-31T10:00:00Z",
    }
    [(_, _, after)] = published(settings, Insert(table, row(b"7", None, None, None)))
    assert [after[name] for name in ("t", "r", "d", "nothing")] == [None] * 4
    plan = Shaping(ShapingSettings(**settings), "bank").plan(table)
    types = {column.name: TYPE_NAMES[column.type_oid] for column in plan.relation.columns[4:]}
    assert types == {
        "i": "int8",
        "b": "bool",
        "s": "text",
        "t": "timestamptz",
        "r": "bytea",
        "d": "float8",
        "nothing": "text",
    }


def test_expressions_see_what_is_neither_masked_nor_left_out() -> None:
    settings = {
        "columns": {"public.t": {"exclude": ["s"]}},
        "masks": {"public.t": {"n": {"text": "-"}}},
        "computed": {"public.t": {"s": "s + string(n)"}},
        "filters": {"public.*": "n == 5", "*.t": "s == 'x'"},
    }
    assert published(
        settings, Insert(T, row(b"1", b"5", b"x")), Insert(T, row(b"2", b"5", b"y"))
    ) == [("c", None, {"id": 1, "n": "-", "s": "x5"})]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filters": {"*.*": "n >"}}, "Syntax error"),
        ({"filters": {"*.*": "missing > 1"}}, "the table does not have a column missing"),
        ({"filters": {"*.*": "n > 'a'"}}, "no matching overload"),
        ({"filters": {"*.*": "n + 1"}}, "its type is int, not bool"),
        ({"computed": {"*.*": {"x": "[n]"}}}, "which no column has"),
        ({"computed": {"*.*": {"s": "n"}}}, "has a column s itself"),
        (
            {"filters": {"public.t": "n > 1"}, "outbox": {"table": "public.t"}},
            "neither filter nor computed",
        ),
    ],
)
def test_an_expression_that_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    if "outbox" in settings:
        names = ("id", "type", "aggregatetype", "aggregateid", "payload", "n")
        table = relation(**dict.fromkeys(names, "text"))
        given = row(*[b"1"] * len(names))
    else:
        table, given = T, row(b"1", b"1", b"x")
    with pytest.raises(SettingsError, match=message) as caught:
        events(settings, Insert(table, given))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("staus == 'x'", "does not have a column staus", "did you mean status?"),
        ("row.staus == 'x'", "does not have a column staus", "did you mean status?"),
        ("STATUS == 'x'", "does not have a column STATUS", "did you mean status?"),
        ("stat.us == 'x'", "does not have a column stat", "did you mean status?"),
        ("zzz == 'x'", "does not have a column zzz", "correct shaping.filters.*.*"),
        ("status > 2", "in expressions status is string", "correct shaping.filters.*.*"),
        ("sizee(status) > 1", "undeclared reference to 'sizee'", "correct shaping.filters.*.*"),
        ("status.foo()", "undeclared reference to 'foo'", "correct shaping.filters.*.*"),
    ],
)
def test_an_error_names_expression_table_column_and_near_names(
    text: str, message: str, hint: str
) -> None:
    shaping = Shaping(ShapingSettings(filters={"*.*": text}), "bank")
    with pytest.raises(SettingsError) as caught:
        shaping.check(whole(relation(status="text")))
    error = caught.value
    assert text in error.message and "public.t" in error.message and message in error.message
    assert error.subject == "shaping.filters.*.*"
    assert error.hint.startswith(hint)


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"filters": {"public.t": "n > 2"}}, True),
        ({"filters": {"other.*": "zzz > 2"}}, True),
        ({"filters": {"public.t": "zzz > 2"}, "exclude": ["public.t"]}, True),
        ({"filters": {"public.t": "zzz > 2"}}, False),
        ({"computed": {"public.t": {"x": "zzz"}}}, False),
        ({"computed": {"public.t": {"n": "s"}}}, False),
        ({"computed": {"public.t": {"n": "s"}}, "columns": {"*.*": {"exclude": ["n"]}}}, True),
    ],
)
def test_new_expressions_that_do_not_fit_are_refused_and_known_ones_told(
    settings: dict[str, Any], fits: bool
) -> None:
    given = ShapingSettings.model_validate(settings)
    shaping = Shaping(given, "bank")
    kafka = KafkaSettings(bootstrap_servers="b", topic_prefix="bank")
    now = placement_of(given, BridgeSettings(), kafka)
    other = placement_of(ShapingSettings(filters={"*.*": "true"}), BridgeSettings(), kafka)
    assert bool([*unfit(shaping, [whole(T)], {})]) is not fits
    for known in (now, {}):  # {}: of an older release
        require_fitting(unfit(shaping, [whole(T)], {}), known, now)
    for then in (None, other):
        with contextlib.nullcontext() if fits else pytest.raises(SettingsError):
            require_fitting(unfit(shaping, [whole(T)], {}), then, now)
    assert changed(other, now) == []


def test_a_row_that_an_expression_fails_on_stops_or_is_a_dead_letter() -> None:
    settings = {"filters": {"public.t": "10 / n > 1"}}
    bad, good = Insert(T, row(b"1", b"0", b"x")), Insert(T, row(b"2", b"2", b"x"))
    with pytest.raises(BadInput, match="divide by zero") as caught:
        events(settings, bad)
    assert caught.value.exit_code == ExitCode.RECORD_REFUSED
    assert (caught.value.subject, caught.value.lsn) == ("public.t", 9)
    assert "10 / n > 1" in caught.value.message
    sent = events(settings, bad, good, dead_rows=True)
    [dead] = [event for event in sent if not event.topic]
    assert (dead.key, dead.value, dead.table, dead.seq) == (b'{"id":1}', None, "public.t", 0)
    assert b'"event_count":2' in (sent[-1].value or b"")
