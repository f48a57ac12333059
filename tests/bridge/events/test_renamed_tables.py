"""What settings hide under one name of a table, and whether they do under its others. No server."""

from collections.abc import Iterable
from typing import Any

import pytest

from schemas.errors import ExitCode, OperatorNeeded
from schemas.naming import Naming
from schemas.schema_events import SchemaEvent
from schemas.shaping import ShapingSettings
from services.bridge.events.renamed_tables import Name, RenamedTables
from services.bridge.pgoutput.messages import Relation, RelationColumn

OID, OTHER_OID, LSN = 20_000, 20_001, 0x16B3750
OLD, NEW = ("public", "customers"), ("public", "clients")
OLD_NAME, NEW_NAME = "public.customers", "public.clients"
MASKED = {"email": {"text": "-"}}


def relation(name: Name, oid: int = OID) -> Relation:
    columns = tuple(RelationColumn(c, 25, -1, c == "id") for c in ("id", "ssn", "email"))
    return Relation(oid, *name, "d", columns)


def event(name: Name, oid: int) -> SchemaEvent:
    return SchemaEvent(
        schema=name[0],
        table=name[1],
        oid=oid,
        commit_lsn=1,
        seq=0,
        ts_ms=0,
        replica_identity="default",
        before=None,
        after=[],
    )


def tables(
    settings: dict[str, Any],
    *known: SchemaEvent,
    catalog: dict[int, Name] | None = None,
    noted: Iterable[tuple[int, Name]] = (),
) -> RenamedTables:
    names = {(one.schema_, one.table): one for one in known}
    naming = Naming("bank", ShapingSettings.model_validate(settings))
    return RenamedTables(naming, names, catalog or {}, noted)


def lost(settings: dict[str, Any], *known: SchemaEvent) -> str:
    """Return the error of the table under its new name, "" where it is published."""
    found = tables(settings, *(known or [event(OLD, OID)]))
    try:
        found.require_hidden(relation(NEW), LSN)
    except OperatorNeeded as error:
        assert error.exit_code is ExitCode.SETTINGS
        assert error.lsn == LSN
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"columns": {OLD_NAME: {"exclude": ["ssn"]}}}, "shaping.columns (ssn)"),
        ({"columns": {OLD_NAME: {"include": ["id"]}}}, "shaping.columns (ssn, email)"),
        ({"masks": {OLD_NAME: MASKED}}, "shaping.masks (email)"),
        (
            {"masks": {OLD_NAME: MASKED, NEW_NAME: {"ssn": {"truncate": 1}}}},
            "shaping.masks (email)",
        ),
        (
            {
                "columns": {OLD_NAME: {"exclude": ["ssn"]}},
                "masks": {NEW_NAME: {"ssn": {"truncate": 3}}},
            },
            "(ssn)",
        ),
        ({"filters": {OLD_NAME: "id != '1'"}}, "shaping.filters"),
        ({"filters": {OLD_NAME: "id != '1'", "*.*": "true"}}, "shaping.filters"),
        ({"skip": {OLD_NAME: ["d", "u"], NEW_NAME: ["u"]}}, "shaping.skip (d)"),
        (
            {"computed": {"*.*": {"low": "email"}}, "masks": {OLD_NAME: {"low": {"text": "-"}}}},
            "shaping.masks (low)",
        ),
        (
            {"masks": {OLD_NAME: MASKED, "public.*": {"email": {"truncate": 1000}}}},
            "shaping.masks (email)",
        ),
        ({"outbox": {"table": OLD_NAME, "topic": "{prefix}.out.{type}"}}, "shaping.outbox"),
        ({"masks": {OLD_NAME: MASKED, NEW_NAME: {}}}, "in shaping.renames_allowed"),
        ({"exclude": [OLD_NAME]}, "under the name public.customers: shaping.exclude"),
        ({"include": ["public.cl*"]}, "name public.clients in shaping.exclude, too"),
        (
            {"columns": {OLD_NAME: {"exclude": ["ssn"]}}, "masks": {OLD_NAME: MASKED}},
            "name public.clients in shaping.columns and shaping.masks (before the patterns",
        ),
    ],
)
def test_a_rule_of_the_former_name_alone_is_named(settings: dict[str, Any], said: str) -> None:
    found = lost(settings)
    assert said in found
    assert f"{NEW_NAME} and {OLD_NAME} are names of one table" in found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"masks": {"public.other": MASKED}},
        {
            "masks": {OLD_NAME: {"phone": {"text": "-"}}},
            "columns": {OLD_NAME: {"exclude": ["note"]}},
        },
        {"masks": {"public.c*": MASKED}, "filters": {"public.c*": "id != '1'"}},
        {"masks": {OLD_NAME: MASKED}, "columns": {NEW_NAME: {"exclude": ["email"]}}},
        {
            "masks": {OLD_NAME: MASKED, NEW_NAME: {"email": {"hash": "sha256"}}},
            "salt": "of 16 characters",
        },
        {"filters": {OLD_NAME: "id != '1'", NEW_NAME: "id != '2'"}},
        {"columns": {OLD_NAME: {"exclude": ["ssn"]}}, "exclude": [NEW_NAME]},
        {"columns": {OLD_NAME: {"exclude": ["ssn"]}}, "skip": {NEW_NAME: ["c", "u", "d", "t"]}},
        {
            "columns": {OLD_NAME: {"exclude": ["ssn"]}},
            "masks": {OLD_NAME: MASKED},
            "renames_allowed": ["public.cl*"],
        },
        {"exclude": [OLD_NAME], "renames_allowed": ["public.cl*"]},
        {"masks": {NEW_NAME: MASKED}},
    ],
)
def test_a_table_goes_on_where_nothing_is_lost_or_nothing_is_to_be_hidden(
    settings: dict[str, Any],
) -> None:
    assert not lost(settings)


def test_a_name_that_had_events_before_may_be_taken_by_a_table_that_was_left_out() -> None:
    """Loads build a table beside the published one, and exchange the two."""
    settings = {"exclude": ["public.next_*"]}
    found = tables(settings, event(NEW, OTHER_OID))
    found.require_hidden(relation(("public", "next_clients")), LSN)
    found.require_hidden(relation(NEW), LSN)
    found.require_hidden(relation(("public", "archived"), OTHER_OID), LSN)


def test_another_table_may_take_the_name_and_the_former_one_is_still_known() -> None:
    settings = {"masks": {OLD_NAME: MASKED}}
    found = tables(settings, event(OLD, OID))
    found.require_hidden(relation(OLD, OTHER_OID), LSN)
    with pytest.raises(OperatorNeeded):
        found.require_hidden(relation(NEW), LSN)
    assert not lost(settings, event(OLD, OTHER_OID))


def test_every_name_counts_and_going_back_is_not_a_loss() -> None:
    found = tables({"masks": {OLD_NAME: MASKED, NEW_NAME: MASKED}})
    for name in (OLD, NEW, OLD, NEW):
        found.require_hidden(relation(name), LSN)
    for third in (("public", "people"), ("archive", "customers")):
        with pytest.raises(OperatorNeeded):
            found.require_hidden(relation(third), LSN)
    found.require_hidden(relation(OLD), LSN)


@pytest.mark.parametrize("name", [OLD, NEW])
def test_the_name_in_the_catalog_is_one_of_the_table(name: Name) -> None:
    """The stream may be behind the catalog, or ahead of what it was at the session's start."""
    other = NEW if name == OLD else OLD
    found = tables({"masks": {".".join(other): MASKED}}, catalog={OID: other, OTHER_OID: name})
    with pytest.raises(OperatorNeeded):
        found.require_hidden(relation(name), LSN)
    found.require_hidden(relation(name, OTHER_OID), LSN)


@pytest.mark.parametrize(
    "settings",
    [
        {"masks": {OLD_NAME: MASKED}},
        {"exclude": [OLD_NAME]},
        {"include": [NEW_NAME]},
        {"filters": {OLD_NAME: "id != '1'"}},
        {"columns": {OLD_NAME: {"exclude": ["ssn"]}}},
        {"skip": {OLD_NAME: ["d"]}},
        {"outbox": {"table": OLD_NAME, "topic": "{prefix}.out.{type}"}},
    ],
)
@pytest.mark.parametrize("known", ["catalog", "stream", "events"])
def test_a_name_that_hides_something_is_noted_once_for_the_next_session(
    settings: dict[str, Any], known: str
) -> None:
    named = [event(OLD, OID)] if known == "events" else []
    found = tables(settings, *named, catalog={OTHER_OID: NEW} | {OID: OLD} if not named else None)
    if known == "stream":
        found = tables(settings)
        found.require_hidden(relation(OLD), LSN)
    noted = found.to_note()
    assert noted == {(OID, OLD)}
    found.require_hidden(relation(OLD), LSN)
    assert not found.to_note()
    later = tables(settings, noted=noted)
    assert not later.to_note()
    for _ in range(2):
        with pytest.raises(OperatorNeeded):
            later.require_hidden(relation(NEW), LSN)
    assert not later.to_note()
