"""Partitions that other columns than the key choose, and those of tables without a key."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.errors import BadInput, SettingsError
from schemas.schema_events import Column
from schemas.shaping import ShapingSettings
from services.bridge.events.event import Event, size_of
from services.bridge.events.rows import WORTH_ROWS, Table
from services.bridge.events.shaping.tables import Shaping
from services.bridge.events.transaction_texts import Counter as EventCounter
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.messages import (
    UNCHANGED,
    AnyMessage,
    Delete,
    Insert,
    Relation,
    RelationColumn,
    Row,
    Update,
)
from services.bridge.recovery.placement import changed
from services.bridge.sink.batch_produce import partition_of
from tests.bridge.events.shaping.test_tables import events
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.reading import committed
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import done
from tests.promises.bridge.test_placement import placement
from tests.providers.interface import Broker, Provider

PARTITIONS = 3
OF_BRIDGE = 2
"""Partitions of the topics of `new_bridge`."""
BY_TENANT: dict[str, Any] = {"partition_by": {"public.t": ["tenant"]}}
BY_ROW: dict[str, Any] = {"partition_by": {"public.t": "row"}}


def table(*keys: str, identity: str = "f") -> Relation:
    columns = [RelationColumn(name, 25, -1, name in keys) for name in ("id", "tenant", "note")]
    return Relation(7, "public", "t", identity, tuple(columns))


T, KEYLESS = table("id"), table()


def of_table(found: list[Event]) -> list[Event]:
    return [event for event in found if event.topic == "bank.public.t"]


def place(event: Event) -> int:
    """The partition of an event; a key chooses as its JSON does."""
    assert event.placed_by is not None or event.key is not None
    return partition_of(event.key if event.placed_by is None else event.placed_by, PARTITIONS)


def by_tenant(tenant: str | None, partitions: int = PARTITIONS) -> int:
    """The partition that a key of the tenant alone would have."""
    text = json.dumps({"tenant": tenant}, ensure_ascii=False, separators=(",", ":"))
    return partition_of(text.encode(), partitions)


def typed(row: tuple[str | None, ...]) -> Row:
    return [None if value is None else value.encode() for value in row]


words = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=2)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[AnyMessage], dict[str, tuple[str | None, ...]]]:
    """Changes of a table with a key, as REPLICA IDENTITY FULL tells them; and its rows then."""
    rows: dict[str, tuple[str | None, ...]] = {}
    changes: list[AnyMessage] = []
    for _ in range(draw(st.integers(1, 30))):
        key, row = draw(st.sampled_from("abc")), (draw(words), draw(words))
        old = rows.get(key)
        if old is None:
            rows[key] = (key, *row)
            changes.append(Insert(T, typed(rows[key])))
        elif draw(st.booleans()):
            rows[key] = (key, *row)
            new = typed(rows[key])
            if rows[key][1] == old[1] and draw(st.booleans()):
                new[1] = UNCHANGED  # a TOAST value that the update did not touch
            changes.append(Update(T, "O", typed(old), new))
        else:
            del rows[key]
            changes.append(Delete(T, "O", typed(old)))
    return changes, rows


@given(histories())
def test_a_row_is_in_the_partition_of_its_columns_and_in_no_other(
    history: tuple[list[AnyMessage], dict[str, tuple[str | None, ...]]],
) -> None:
    """Each partition alone, read in its order, has exactly its rows."""
    changes, rows = history
    told: dict[int, dict[bytes | None, Any]] = defaultdict(dict)
    for event in of_table(events(BY_TENANT, *changes)):
        if event.value is None or json.loads(event.value)["op"] == "d":
            told[place(event)].pop(event.key, None)
        else:
            told[place(event)][event.key] = json.loads(event.value)["after"]
    for partition in range(PARTITIONS):
        expected = [row for row in rows.values() if by_tenant(row[1]) == partition]
        found = [tuple(row.values()) for row in told[partition].values()]
        assert sorted(map(str, found)) == sorted(map(str, expected))


@given(st.lists(st.tuples(words, words, words), min_size=1, max_size=5), st.data())
def test_equal_rows_of_a_table_without_a_key_keep_their_order_by_row(
    rows: list[tuple[str | None, ...]], data: st.DataObject
) -> None:
    """In each partition no row is deleted more often than it was inserted, at any time."""
    changes: list[AnyMessage] = [Insert(KEYLESS, typed(row)) for row in rows]
    present = list(rows)
    for _ in range(data.draw(st.integers(0, 12))):
        at = data.draw(st.integers(0, len(present) - 1))
        new = data.draw(st.tuples(words, words, words))
        changes.append(Update(KEYLESS, "O", typed(present[at]), typed(new)))
        present[at] = new
    counts: Counter[str] = Counter()
    where: dict[str, set[int]] = defaultdict(set)
    for event in of_table(events(BY_ROW, *changes)):
        assert event.key is None and event.value is not None
        told = json.loads(event.value)
        row = json.dumps(told["before"] if told["op"] == "d" else told["after"])
        where[row].add(place(event))
        counts[row] += {"c": 1, "d": -1, "u": 0}[told["op"]]
        assert counts[row] >= 0
    assert all(len(partitions) == 1 for partitions in where.values())
    assert +counts == Counter(json.dumps(dict(zip(_names(), row, strict=True))) for row in present)


def _names() -> list[str]:
    return [column.name for column in T.columns]


@pytest.mark.usefixtures("twin")
def test_a_table_without_a_key_is_in_the_first_partition() -> None:
    row = typed(("1", "x", "y"))
    changes: list[AnyMessage] = [Insert(KEYLESS, row) for _ in range(2 * WORTH_ROWS)]
    changes += [Update(KEYLESS, "O", row, row), Delete(KEYLESS, "O", row)]
    for settings in ({}, BY_ROW):
        found = of_table(events(settings, *changes))
        assert len(found) == len(changes)
        expected = {0} if not settings else {place(found[0])}
        assert {place(event) for event in found} == expected
    for settings in ({}, BY_ROW):  # a key goes before the row
        (keyed,) = of_table(events(settings, Insert(T, row)))
        assert (keyed.key, keyed.placed_by) == (b'{"id":"1"}', None)


def test_a_move_tells_the_key_in_both_headers() -> None:
    change = Update(T, "O", typed(("1", "x", "n")), typed(("1", "y", "n")))
    removed, tombstone, added = of_table(events(BY_TENANT, change))
    key = b'{"id":"1"}'
    assert [removed.headers, tombstone.headers] == 2 * [[("__debezium.newkey", key)]]
    assert added.headers == [("__debezium.oldkey", key)]
    assert (place(removed), place(added)) == (by_tenant("x"), by_tenant("y"))
    assert place(tombstone) == place(removed)


NULLED = typed(("1", None, None))


@pytest.mark.parametrize(
    "change",
    [
        Update(T, None, None, typed(("1", "x", "n"))),
        Update(T, "K", NULLED, typed(("1", "x", "n"))),
        Update(T, "O", NULLED, [b"1", UNCHANGED, b"n"])._replace(old_kind="K"),
        Delete(T, "K", NULLED),
        Update(table("id", "tenant", identity="i"), None, None, [b"1", UNCHANGED, b"n"]),
        Insert(T, [b"1", UNCHANGED, b"n"]),
    ],
)
def test_a_change_that_does_not_tell_its_partition_stops_the_bridge(change: AnyMessage) -> None:
    with pytest.raises(BadInput, match="columns that choose the partition"):
        events(BY_TENANT, change)


def test_what_the_replica_identity_does_not_tell_is_refused() -> None:
    for identity, relation, settings, fits in (
        (["id"], table("id", identity="d"), BY_TENANT, False),
        (["id"], table("id", identity="d"), BY_TENANT | {"skip": {"*.*": ["u", "d"]}}, True),
        (["id"], table("id", identity="d"), BY_TENANT | {"skip": {"*.*": ["u"]}}, False),
        (["id", "tenant"], table("id", "tenant", identity="i"), BY_TENANT, True),
        (["id", "tenant", "note"], T, BY_TENANT, True),
        (["id", "tenant", "note"], T, {"partition_by": {"*.*": ["tenants"]}}, False),
        (
            *(["id", "tenant", "note"], T),
            *(BY_TENANT | {"columns": {"*.*": {"exclude": ["tenant"]}}}, False),
        ),
    ):
        shaping = Shaping(ShapingSettings.model_validate(settings), "bank")
        if fits:
            assert shaping.plan(relation, identity).places == ("tenant",)
        else:
            with pytest.raises(SettingsError, match="tenant") as caught:
                shaping.plan(relation, identity)
            assert "REPLICA IDENTITY FULL" in caught.value.hint or "partition_by" in (
                caught.value.hint
            )
    with pytest.raises(ValidationError):
        ShapingSettings.model_validate({"partition_by": {"*.*": []}})


@pytest.mark.parametrize(
    ("settings", "keys", "identity", "unplaced"),
    [
        (BY_TENANT, (), "d", True),
        (BY_ROW, (), "d", True),
        (BY_TENANT, ("id", "tenant"), "i", False),
        (BY_TENANT, (), "f", True),
    ],
)
def test_without_an_old_row_only_the_identity_tells_that_a_row_stays(
    settings: dict[str, Any], keys: tuple[str, ...], identity: str, unplaced: bool
) -> None:
    """A root without a key, whose partitions have one: pgoutput sends no old row."""
    relation = table(*keys, identity=identity)
    shaping = Shaping(ShapingSettings.model_validate(settings), "bank")
    made = Table(shaping.plan(relation, keys), EventCounter("public.t", '"public.t"'), Encoders())
    change = Update(relation, None, None, typed(("1", "y", "n")))
    assert made.unplaced(change) == unplaced


def test_a_column_that_is_added_leaves_equal_rows_in_their_partition() -> None:
    wider = [*KEYLESS.columns, RelationColumn("extra", 25, -1, False)]
    keys = []
    for relation in (KEYLESS, replace(KEYLESS, columns=tuple(wider))):
        plan = Shaping(ShapingSettings.model_validate(BY_ROW), "bank").plan(relation)
        made = Table(plan, EventCounter("public.t", '"public.t"'), Encoders())
        values = ("1", None, "n", None)[: len(relation.columns)]
        keys.append(made.key(typed(values)))
    assert keys[0] == keys[1]
    assert keys[0].placed_by == b'{"id":"1","note":"n"}'


@pytest.mark.parametrize(
    ("settings", "before", "after", "moved"),
    [
        (BY_ROW, "ab", "abc", True),
        (BY_ROW, "ab", "a", True),
        (BY_ROW, "ab", "ab", False),
        ({}, "ab", "abc", False),
        ({}, "ab", "Ab", True),
        (BY_ROW, "ab", "Ab", True),
        ({"partition_by": {"public.t": ["b"]}}, "ab", "Ab", False),
        ({"partition_by": {"public.t": ["b"]}}, "ab", "abc", False),
    ],
)
def test_a_change_of_shape_that_places_rows_otherwise_is_told(
    settings: dict[str, Any], before: str, after: str, moved: bool
) -> None:
    """An upper-case letter is a column of the key."""
    shapes = [
        [Column(name=x.lower(), type="text", type_oid=25, typmod=-1, key=x.isupper()) for x in all_]
        for all_ in (before, after)
    ]
    columns = tuple(RelationColumn(x.lower(), 25, -1, x.isupper()) for x in after)
    shaping = Shaping(ShapingSettings.model_validate(settings), "bank")
    plan = shaping.plan(Relation(7, "public", "t", "f", columns))
    assert plan.placed_otherwise(*shapes) == moved


def test_the_columns_that_choose_the_partition_count_as_memory() -> None:
    """The value of a record may be a reference to what they have in full."""
    plan = Shaping(ShapingSettings.model_validate(BY_ROW), "bank").plan(KEYLESS)
    made = Table(plan, EventCounter("public.t", '"public.t"'), Encoders())
    key = made.key(typed(("1", "x" * 1_000_000, "n")))
    assert size_of([made.event("c", key, b"{}", None, 0, 0)]) > 1_000_000


def test_other_columns_are_another_placement() -> None:
    assert changed(placement({}), placement(BY_TENANT)) == ["shaping.partition_by"]


def partitions_of(bridge: Bridge, table: str) -> list[tuple[int, bytes | None, Any]]:
    """(partition, key, event or None) of each record of a table, in the order of its partition."""
    topic = f"{bridge.prefix}.public.{table}"
    return [
        (partition, key, None if value is None else json.loads(value))
        for partition, key, value in committed(bridge.kafka.bootstrap_servers, topic)
    ]


SETTINGS = {"partition_by": {"public.t": ["tenant"], "public.log": "row"}}


@pytest.mark.long
def test_partitions_through_a_running_bridge(
    pair: Provider, fresh_database: str, kafka: Broker, new_bridge: NewBridge
) -> None:
    """A snapshot, changes and a kill: each partition alone has exactly the rows that are its."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, tenant text, note text)")
        connection.execute("ALTER TABLE t ALTER tenant SET STORAGE EXTERNAL")
        for table in ("log", "plain"):
            connection.execute(f"CREATE TABLE {table} (n int, note text)".encode())
        for table in ("t", "log", "plain"):
            connection.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL".encode())
        connection.execute(
            "INSERT INTO t SELECT g, CASE g % 7 WHEN 0 THEN NULL WHEN 1 THEN repeat('x', 9000)"
            " ELSE 't' || g % 7 END, '' FROM generate_series(1, 200) g"
        )
        bridge = new_bridge(conninfo, shaping=SETTINGS, snapshot={"mode": "initial"})
        bridge.start().streaming()
        for table in ("log", "plain"):
            connection.execute(
                f"INSERT INTO {table} SELECT g % 9, '' FROM generate_series(1, 60) g"
            )
        connection.execute("UPDATE t SET note = 'kept' WHERE id % 2 = 0")
        bridge.kill()
        connection.execute("UPDATE t SET tenant = 'moved' || id % 3 WHERE id % 5 = 0")
        connection.execute("UPDATE t SET tenant = NULL WHERE id % 11 = 0")
        connection.execute("UPDATE t SET id = id + 1000 WHERE id % 13 = 0")
        connection.execute("DELETE FROM t WHERE id % 17 = 0")
        for table in ("log", "plain"):
            connection.execute(f"UPDATE {table} SET n = n + 1 WHERE n % 2 = 0".encode())
            connection.execute(f"DELETE FROM {table} WHERE n = 3".encode())
        bridge.start().streaming()
        done(bridge)
        bridge.caught_up()
        truth = connection.execute("SELECT id, tenant, note FROM t").fetchall()
        log = connection.execute("SELECT n, note FROM log").fetchall()
    folded: dict[int, dict[bytes | None, tuple[Any, ...]]] = defaultdict(dict)
    for partition, key, event in partitions_of(bridge, "t"):
        if event is None or event["op"] == "d":
            folded[partition].pop(key, None)
        else:
            folded[partition][key] = tuple(event["after"].values())
    for partition in range(OF_BRIDGE):
        expected = [row for row in truth if by_tenant(row[1], OF_BRIDGE) == partition]
        assert sorted(map(str, folded[partition].values())) == sorted(map(str, expected))
    counts: Counter[tuple[Any, ...]] = Counter()
    used = set()
    for partition, key, event in partitions_of(bridge, "log"):
        assert key is None
        used.add(partition)
        row = tuple((event["after"] or event["before"]).values())
        counts[row] += 0 if event["op"] == "u" else -1 if event["op"] == "d" else 1
        assert counts[row] >= 0
    assert counts == Counter(log) and len(used) > 1
    assert {partition for partition, *_ in partitions_of(bridge, "plain")} == {0}
    assert {one[2]["op"] for one in partitions_of(bridge, "plain")} == {"c", "u", "d"}
