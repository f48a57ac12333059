"""A column is told from another one of its name: by its number, from the catalog to the table."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.column_identity import NumberedColumn, survivors
from schemas.schema_events import Column, SchemaEvent
from schemas.tables import TablesSettings
from services.bridge.events.missing_values import MissingValues, missing_values, renumbered
from services.postgres.stored_columns import StoredColumn, StoredColumns, StoredPublication
from spark_consumers.events.shape import Shape, filled, survivors_of, unsent_columns
from spark_consumers.iceberg.evolution import needed
from spark_consumers.iceberg.layout import layout_of
from tests.spark_consumers.events.test_shape import renamed

SETTINGS = TablesSettings(warehouse="/nowhere")
XID = 100
PUBLICATION = StoredPublication(1, (40,), listed=False)


class Stored(NamedTuple):
    """A column of the catalog: its number, who last changed it, its value in earlier rows."""

    attnum: int
    changed_by: int = 50
    missing: str | None = None


def columns(names: str) -> list[Column]:
    """Columns as `id a b:int8`."""
    found = []
    for name, _, kind in (word.partition(":") for word in names.split()):
        oid = 20 if kind == "int8" else 23
        key = name == "id"
        found.append(Column(name=name, type=kind or "int4", type_oid=oid, typmod=-1, key=key))
    return found


def in_catalog(catalog: dict[str, Stored]) -> StoredColumns:
    stored = [
        StoredColumn(name, column.attnum, (column.changed_by,), column.missing, mixed=False)
        for name, column in catalog.items()
    ]
    return StoredColumns(stored, 7, False, 50, 900, PUBLICATION)


def told(
    before: SchemaEvent | None, after: list[Column], catalog: dict[str, Stored], xid: int = XID
) -> MissingValues:
    found = in_catalog(catalog)
    served = {column.name for column in after}
    return missing_values(before, after, served, found, xid, lambda _name, value: value.decode())


def event(before: SchemaEvent | None, names: str, catalog: dict[str, Stored]) -> SchemaEvent:
    after = columns(names)
    found = told(before, after, catalog)
    return SchemaEvent(
        schema="public",
        table="t",
        oid=7,
        commit_lsn=1 if before is None else before.commit_lsn + 1,
        seq=0,
        ts_ms=0,
        replica_identity="default",
        before=before.after if before else None,
        after=after,
        missing=found.missing,
        unsent=found.unsent,
        attnums_before=before.attnums if before else [],
        attnums=found.attnums,
        attnum_max=found.attnum_max,
        relfilenode=found.relfilenode,
        publication=found.publication,
    )


def first(names: str) -> SchemaEvent:
    numbers = {column.name: Stored(n) for n, column in enumerate(columns(names), 1)}
    return event(None, names, numbers)


def changes(
    before: Shape, after: Shape, existing: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The renames and the added columns in the Iceberg table."""
    old, new = layout_of(SETTINGS, before), layout_of(SETTINGS, after)
    found = needed(SETTINGS, old, new, [*old.names, *existing], replaced=False)
    return dict(found.renames), [name for name, _ in found.adds]


@pytest.mark.parametrize(
    ("names", "now", "catalog", "renames", "adds"),
    [
        # ALTER TABLE … DROP price, RENAME price_new TO price, in one transaction.
        (
            "id price price_new",
            "id price",
            {"id": Stored(1), "price": Stored(3, 90)},
            {"price_new": "price", "price": "price__old1"},
            [],
        ),
        (
            "id price price_new:int8",
            "id price:int8",
            {"id": Stored(1), "price": Stored(3, 90)},
            {"price_new": "price", "price": "price__old1"},
            [],
        ),
        (
            "id price price_new",
            "id price_old price",
            {"id": Stored(1), "price_old": Stored(2, 90), "price": Stored(3, 90)},
            {"price": "price_old", "price_new": "price"},
            [],
        ),
        (
            "id a b",
            "id b a",
            {"id": Stored(1), "b": Stored(2, 90), "a": Stored(3, 90)},
            {"a": "b", "b": "a"},
            [],
        ),
        # Dropped, and added again.
        (
            "id c d",
            "id d c",
            {"id": Stored(1), "d": Stored(3), "c": Stored(4, 90, "6")},
            {"c": "c__old1"},
            ["c"],
        ),
        (
            "id c d",
            "id d c",
            {"id": Stored(1), "d": Stored(3), "c": Stored(4, 90)},
            {"c": "c__old1"},
            ["c"],
        ),
        # Several are renamed while others come and go.
        (
            "id a b c",
            "id y z",
            {"id": Stored(1), "y": Stored(3, 90), "z": Stored(5, 90)},
            {"b": "y"},
            ["z"],
        ),
    ],
)
def test_columns_are_followed_by_their_numbers(
    names: str,
    now: str,
    catalog: dict[str, Stored],
    renames: dict[str, str],
    adds: list[str],
) -> None:
    before = first(names)
    after = event(before, now, catalog)
    shapes = Shape.from_event(before), Shape.from_event(after)
    assert changes(*shapes) == (renames, adds)
    assert filled(*shapes) == {n: c.missing for n, c in catalog.items() if c.missing}
    assert list(unsent_columns(*shapes)) == []


@pytest.mark.parametrize(
    ("names", "now", "nick", "is_renamed"),
    [
        ("id first last", "id last nick", Stored(4, 90, "7"), False),
        ("id first last", "id last nick", Stored(4, 90), False),
        ("id first last", "id last nick", Stored(3, 90), False),
        ("id first last", "id first nick", Stored(4, 90, "7"), False),
        ("id first last", "id first nick", Stored(4, 90), False),
        ("id first last", "id first nick", Stored(3, 90), True),
    ],
)
def test_without_numbers_places_and_what_the_event_tells_decide(
    names: str, now: str, nick: Stored, *, is_renamed: bool
) -> None:
    before = first(names).model_copy(update={"attnums": []})
    after = event(before, now, {"id": Stored(1), "nick": nick})
    shapes = Shape.from_event(before), Shape.from_event(after)
    assert ("nick" in renamed(*shapes).values()) == is_renamed
    assert filled(*shapes) == ({"nick": nick.missing} if nick.missing else {})


def test_a_column_is_renamed_to_the_name_of_one_that_was_dropped_and_kept() -> None:
    dropped = Shape.from_event(first("id price_new"))
    catalog = {"id": Stored(1), "price": Stored(2, 90)}
    renamed = Shape.from_event(event(first("id price_new"), "id price", catalog))
    found = changes(dropped, renamed, existing=["price"])
    assert found == ({"price_new": "price", "price": "price__old1"}, [])


def test_an_event_that_kafka_has_compacted_away_may_have_dropped_a_column() -> None:
    one = first("id c")
    two = event(one, "id", {"id": Stored(1)})
    three = event(two, "id c", {"id": Stored(1), "c": Stored(3, 90, "6")})
    shapes = Shape.from_event(one), Shape.from_event(three)
    assert changes(*shapes) == ({"c": "c__old1"}, ["c"])
    assert filled(*shapes) == {"c": "6"}
    # Of an older release, which noted no numbers.
    plain = three.model_copy(update={"attnums": [], "attnums_before": []})
    shapes = Shape.from_event(one), Shape.from_event(plain)
    assert changes(*shapes) == ({"c": "c__old1"}, ["c"])
    assert filled(*shapes) == {"c": "6"}


def test_a_column_list_that_has_another_column_is_not_a_rename() -> None:
    before = event(None, "id a", {"id": Stored(1), "a": Stored(2), "b": Stored(3)})
    after = event(before, "id b", {"id": Stored(1), "b": Stored(3)})
    assert (after.missing, after.unsent) == ({}, ["b"])
    shapes = Shape.from_event(before), Shape.from_event(after)
    assert survivors_of(*shapes) == {"id": "id"}
    assert list(unsent_columns(*shapes)) == ["b"]


def test_a_column_that_is_dropped_and_added_again_in_its_place_is_another_one() -> None:
    before = first("id c")
    catalog = {"id": Stored(1), "c": Stored(3, 90, "6")}
    assert renumbered(before, in_catalog(catalog), XID)
    assert not renumbered(before, in_catalog({**catalog, "c": Stored(3, 101, "6")}), XID), "later"
    assert not renumbered(before, in_catalog({**catalog, "c": Stored(2, 101)}), XID)
    assert not renumbered(before, None, XID)
    shapes = Shape.from_event(before), Shape.from_event(event(before, "id c", catalog))
    assert changes(*shapes) == ({"c": "c__old1"}, ["c"])
    assert filled(*shapes) == {"c": "6"}


def test_columns_that_have_changed_places_and_no_certain_number_are_unsent() -> None:
    """Touched since: nobody knows which one had which name then."""
    catalog = {"id": Stored(1), "b": Stored(2, 101), "a": Stored(3, 101)}
    assert told(first("id a b"), columns("id b a"), catalog)[:2] == ({}, ["a", "b"])


def test_a_column_that_was_touched_since_keeps_its_number_under_its_name() -> None:
    catalog = {"id": Stored(1, 101), "a": Stored(2, 101), "b": Stored(3, 101), "c": Stored(4, 90)}
    assert told(first("id a b"), columns("id a b c"), catalog).attnums == [1, 2, 3, 4]
    catalog["b"] = Stored(5, 101)  # another one, later
    assert told(first("id a b"), columns("id a b c"), catalog).attnums == [1, 2, 0, 4]


def test_the_shape_that_a_table_keeps_has_the_numbers() -> None:
    shape = Shape.from_event(first("id a"))
    assert shape.attnums == (1, 2)
    assert Shape.from_document("public.t", shape.document()).attnums == (1, 2)
    former = {k: v for k, v in shape.document().items() if k != "attnums"}
    assert Shape.from_document("public.t", former).attnums == ()


Step = tuple[str, str, str]
NAMES = st.sampled_from("abcdef")
STEPS = st.lists(st.tuples(st.sampled_from(["add", "drop", "rename"]), NAMES, NAMES), max_size=12)


@given(STEPS, STEPS)
def test_numbers_follow_any_changes(
    first_steps: list[tuple[str, str, str]], more: list[tuple[str, str, str]]
) -> None:
    """A table is a list of (name, number), as PostgreSQL changes it."""
    table: dict[int, str] = {}
    last = 0

    def change(steps: list[Step]) -> list[NumberedColumn]:
        nonlocal last
        for action, name, other in steps:
            there = {n: number for number, n in table.items()}
            if action == "add" and name not in there:
                last += 1
                table[last] = name
            elif action == "drop" and name in there:
                del table[there[name]]
            elif action == "rename" and name in there and other not in there:
                table[there[name]] = other
        return [NumberedColumn(n, ("int4", -1), number) for number, n in sorted(table.items())]

    before = change(first_steps)
    after = change(more)
    numbers = {column.attnum: column.name for column in after}
    expected = {c.name: numbers[c.attnum] for c in before if c.attnum in numbers}
    assert survivors(before, after) == expected
