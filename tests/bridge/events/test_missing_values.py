"""What a schema event tells of rows that were there: a value only where it is certain."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.schema_events import Column, SchemaEvent
from services.bridge.events.event import Stamp
from services.bridge.events.missing_values import (
    NOTHING,
    MissingValues,
    hidden_name,
    missing_values,
)
from services.bridge.events.schema_events import Shapes
from services.bridge.pgoutput.messages import Relation, RelationColumn
from services.postgres.stored_columns import StoredColumn, StoredColumns, StoredPublication

XID = 100
INT, TEXT, BIGINT = 23, 25, 20


def columns(*names: str, oid: int = INT) -> list[Column]:
    return [
        Column(name=name, type="int4", type_oid=oid, typmod=-1, key=name == "id") for name in names
    ]


def event(
    *names: str,
    attnum_max: int = 2,
    relfilenode: int = 7,
    publication: str = "1:40",
    left_out: Sequence[str] = (),
) -> SchemaEvent:
    return SchemaEvent(
        schema="public",
        table="t",
        oid=7,
        commit_lsn=1,
        seq=0,
        ts_ms=0,
        replica_identity="default",
        before=None,
        after=columns(*names),
        attnum_max=attnum_max,
        relfilenode=relfilenode,
        publication=publication,
        left_out=[hidden_name(7, name) for name in left_out],
    )


BEFORE = event("id", "a")
C = StoredColumn("c", 3, (90,), "7", mixed=False)
PLAIN = replace(C, missing=None)
LISTED = StoredPublication(1, (40,), listed=True)


PUBLICATION = StoredPublication(1, (40,), listed=False)


def stored(
    c: StoredColumn | None,
    *,
    relfilenode: int = 7,
    changed_by: int = 90,
    publication: StoredPublication = PUBLICATION,
) -> StoredColumns:
    old = (StoredColumn("id", 1, (50,), None, False), StoredColumn("a", 2, (50,), None, False))
    found = old if c is None else (*old, c)
    return StoredColumns(found, relfilenode, relfilenode != 7, changed_by, 900, publication)


def ask(
    found: StoredColumns | None,
    before: SchemaEvent | None = BEFORE,
    after: Sequence[Column] | None = None,
    xid: int = XID,
) -> MissingValues:
    now = columns("id", "a", "c") if after is None else after
    names = {column.name for column in now}
    return missing_values(before, now, names, found, xid, lambda _name, value: value.decode())


@pytest.mark.parametrize(
    ("found", "before", "missing", "unsent"),
    [
        (stored(C), BEFORE, {"c": 7}, []),
        (stored(replace(C, changed_by=(XID,))), BEFORE, {"c": 7}, []),  # added by it itself
        (stored(PLAIN), BEFORE, {}, []),  # no default: NULL
        (stored(replace(C, changed_by=(90, 101))), BEFORE, {}, ["c"]),  # changed since
        (stored(replace(PLAIN, changed_by=(101,))), BEFORE, {}, ["c"]),  # rewritten since
        (stored(PLAIN, relfilenode=9), BEFORE, {}, ["c"]),  # a volatile default
        (stored(PLAIN, relfilenode=9), event("id", "a", relfilenode=9), {}, []),  # long before
        (stored(C, relfilenode=9), BEFORE, {"c": 7}, []),  # rewritten, and then added
        (stored(C), event("id", "a", attnum_max=3), {}, ["c"]),  # was there, and not published
        (stored(C), event("id", "a", attnum_max=0), {}, ["c"]),  # of an older release
        (stored(C), event("id", "a", publication=""), {}, ["c"]),  # a column list then
        (stored(C), event("id", "a", publication="1:30"), {}, ["c"]),  # perhaps in between
        (stored(PLAIN), event("id", "a", publication="1:30"), {}, ["c"]),
        (stored(C, publication=LISTED), event("id", "a", publication=""), {}, ["c"]),
        (stored(C), event("id", "a", left_out=["c"]), {}, ["c"]),  # by the bridge's settings
        (stored(replace(C, mixed=True)), BEFORE, {}, ["c"]),  # partitions have several
        (stored(None), BEFORE, {}, ["c"]),  # dropped since
        (None, BEFORE, {}, ["c"]),  # the table is gone
        (stored(C), None, {}, []),  # the first event: nothing was there
    ],
)
def test_a_value_is_told_where_it_is_certain(
    found: StoredColumns | None,
    before: SchemaEvent | None,
    missing: dict[str, object],
    unsent: list[str],
) -> None:
    assert ask(found, before)[:2] == (missing, unsent)


def test_a_column_that_is_renamed_was_there() -> None:
    found = replace(stored(None), columns=(StoredColumn("b", 2, (90,), None, False),))
    assert ask(found, after=columns("id", "b"))[:2] == ({}, [])


NICK = StoredColumn("nick", 4, (90,), "7", mixed=False)


@pytest.mark.parametrize(
    ("names", "now", "column", "missing", "unsent"),
    [
        ("id first last", "id last nick", NICK, {"nick": 7}, []),
        ("id first last", "id last nick", replace(NICK, missing=None), {}, []),
        ("id first last", "id last nick", replace(NICK, attnum=3), {}, ["nick"]),
        ("id first last", "id first nick", NICK, {"nick": 7}, []),  # last dropped, nick added
        ("id first last", "id first nick", replace(NICK, missing=None), {}, ["nick"]),
        ("id first last", "id first nick", replace(NICK, attnum=3), {}, []),  # renamed
    ],
)
def test_a_column_that_takes_the_place_of_another_is_renamed_or_new(
    names: str,
    now: str,
    column: StoredColumn,
    missing: dict[str, object],
    unsent: list[str],
) -> None:
    """What `slottables` would take for renamed is told, be it NULL."""
    found = replace(stored(None), columns=(*stored(None).columns[:1], column))
    before = event(*names.split(), attnum_max=3)
    assert ask(found, before, columns(*now.split()))[:2] == (missing, unsent)


def test_a_column_whose_place_in_a_list_another_takes_is_not_renamed() -> None:
    found = stored(StoredColumn("b", 3, (50,), None, mixed=False), publication=LISTED)
    before = event("id", "a", attnum_max=3, publication="")
    assert ask(found, before, columns("id", "b"))[:2] == ({}, ["b"])
    left_out = event("id", "a", attnum_max=3, left_out=["b"])
    assert ask(stored(found.columns[2]), left_out, columns("id", "b"))[:2] == ({}, ["b"])


@pytest.mark.parametrize(("relfilenode", "unsent"), [(7, []), (9, ["a"])])
def test_another_type_is_unsent_if_the_table_was_rewritten(
    relfilenode: int, unsent: list[str]
) -> None:
    after = [*columns("id"), *columns("a", oid=BIGINT)]
    assert ask(stored(None, relfilenode=relfilenode), after=after)[:2] == ({}, unsent)


def test_a_value_that_is_not_to_be_told_is_unsent() -> None:
    names = ("id", "a", "c")
    found = missing_values(BEFORE, columns(*names), {*names}, stored(C), XID, lambda *_: None)
    assert found[:2] == ({}, ["c"])


def test_what_later_events_are_compared_with() -> None:
    assert ask(stored(C))[2:] == ([1, 2, 3], 3, 7, "1:40")
    published = replace(PUBLICATION, changed_by=(40, 101))
    later = stored(replace(C, changed_by=(101,)), changed_by=101, publication=published)
    assert ask(later, after=columns("id", "a"))[2:] == ([1, 2], 2, 0, "")
    assert ask(later).attnums == [1, 2, 0], "not certain to be the c of then"
    assert ask(stored(C, publication=LISTED)).publication == ""


@given(
    xid=st.integers(3, 2**32 - 1),
    age=st.integers(0, 2**31),
    lead=st.integers(1, 2**31 - 1),
    data=st.data(),
)
def test_only_what_was_changed_later_is_uncertain(
    xid: int, age: int, lead: int, data: st.DataObject
) -> None:
    """Transaction ids are circular, and may be long past."""

    def by(changed_by: int) -> MissingValues:
        published = replace(PUBLICATION, changed_by=(xid,))
        found = stored(replace(C, changed_by=(changed_by % 2**32,)), publication=published)
        before = event("id", "a", publication=f"1:{xid}")
        return ask(replace(found, next_xid=(xid + lead) % 2**32), before, xid=xid)

    assert by(xid - age).missing == {"c": 7}
    if lead > 1:
        later = data.draw(st.integers(1, lead - 1))
        assert by(xid + later)[:2] == ({}, ["c"])


def test_fields_that_tell_nothing_are_left_out() -> None:
    relation = Relation(7, "public", "t", "d", (RelationColumn("id", INT, -1, True),))
    plain = Shapes("bank", {}).change(relation, Stamp(0, 1, 0, 0, 0), 0, lambda *_: NOTHING)
    assert plain is not None
    assert plain.value is not None
    assert {"missing", "unsent", "attnum_max", "relfilenode"}.isdisjoint(json.loads(plain.value))
    assert {"publication", "left_out", "attnums"}.isdisjoint(json.loads(plain.value))
    full = MissingValues({"c": 7}, ["d"], [1], 3, 7, "1:40")
    event = Shapes("bank", {}).change(relation, Stamp(0, 1, 0, 0, 0), 0, lambda *_: full)
    assert event is not None
    assert event.value is not None
    assert SchemaEvent.model_validate_json(event.value).missing == {"c": 7}


def test_a_schema_event_tells_of_columns_that_are_left_out_and_are_not() -> None:
    """Else rows may come with other values in a column before an event knows of it."""
    relation = Relation(7, "public", "t", "d", (RelationColumn("id", INT, -1, True),))
    shapes, stamp = Shapes("bank", {}), Stamp(0, 1, 0, 0, 0)
    assert shapes.change(relation, stamp, 0)
    event = shapes.change(relation, stamp, 1, left_out={"c"})
    assert event is not None
    assert event.value is not None
    assert SchemaEvent.model_validate_json(event.value).left_out == [hidden_name(7, "c")]
    assert b'"c"' not in event.value
    assert shapes.change(relation, stamp, 2, left_out={"c"}) is None
    assert shapes.change(relation, stamp, 3)


def test_fields_of_a_later_release_are_ignored() -> None:
    """Else it could not be rolled back."""
    document = {**event("id").model_dump(by_alias=True), "later": 1}
    assert SchemaEvent.model_validate(document) == event("id")
