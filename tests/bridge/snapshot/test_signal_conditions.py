"""Which columns a signal's condition may compare, and whose functions it can't reach."""

from dataclasses import replace

import pytest

from services.bridge.pgoutput.messages import RelationColumn
from services.bridge.snapshot.progress import SnapshotPlan, TableProgress
from services.bridge.snapshot.readable import refuse_conditions
from services.bridge.snapshot.signal_conditions import forbidden_part, foreign_name
from services.bridge.snapshot.tables import SettingsCondition, TableShape, chunk_query
from tests.bridge.snapshot.test_progress import WHOLE, shape

COLUMNS = frozenset(("id", "note", "größe", 'a"b', "Note", "a", "b", "u", "ÄB"))


@pytest.mark.parametrize(
    "condition",
    [
        "",
        "ID BETWEEN 1 AND 2 AND note NOT BETWEEN 'a' AND 'b' OR (id) BETWEEN -1 AND id",
        """ "Note" IS NOT NULL AND Größe IN (1, 2) AND "a""b" = ANY (ARRAY[1, 2])""",
        "note::text COLLATE \"C\" LIKE 'a!%' ESCAPE '!' AND made_at::date < CURRENT_DATE",
        "CASE WHEN id IS DISTINCT FROM 1 THEN true ELSE note ISNULL END",
    ],
)
def test_columns_of_built_in_types_may_be_compared(condition: str) -> None:
    assert not forbidden_part(condition)
    assert not foreign_name(condition, COLUMNS | {"made_at"})


@pytest.mark.parametrize(
    "condition",
    [
        "state",
        "state::text = 'x'",
        "id = 1 AND t",
        '"state" = 1',
        '"ID" = 1',
        '"a""c" = 1',
        "ÄB = 1",
        "between",
        "NOT between",
        "id = 1 OR NOT between::text = 'x'",
        "CASE between WHEN true THEN true END",
        "escape LIKE 'x'",
        "id IN (between)",
        "id = between",
        "id BETWEEN between AND 5",
        "ctid = '(0,1)'",
    ],
)
def test_no_other_name_may_stand_in_a_condition(condition: str) -> None:
    assert not forbidden_part(condition)
    assert foreign_name(condition, COLUMNS)


@pytest.mark.parametrize("condition", ['U&"d\\0061t" = 1', "u&'d' = note", 'u&"a"'])
def test_no_name_has_escapes(condition: str) -> None:
    assert forbidden_part(condition)


def typed(oid: int, name: str) -> TableShape:
    found = shape("public.t", "id")
    column = RelationColumn("state", oid, -1, False, name)
    columns = (*found.relation.columns, column)
    return replace(found, relation=replace(found.relation, columns=columns))


def test_a_table_is_refused_for_a_condition_on_a_column_of_its_owners_type() -> None:
    for oid, name, refused in ((1043, "", False), (16400, "pg_catalog.text", False)):
        assert _refused(typed(oid, name), asked=True) is refused
    assert _refused(typed(16400, "app.mood"), asked=True)
    assert not _refused(typed(16400, "app.mood"), asked=False)


def _refused(table: TableShape, *, asked: bool) -> bool:
    found = SnapshotPlan({table.name: TableProgress(table, where="state = 'x'", asked=asked)})
    refuse_conditions(found)
    return "state" in found.refused.get(table.name, "")


def test_only_names_of_the_settings_are_found_by_the_search_path_of_the_role() -> None:
    assert not chunk_query(shape("public.t", "id"), WHOLE, "note = 'x'", 1).meant
    assert chunk_query(shape("public.t", "id"), WHOLE, SettingsCondition("note = 'x'"), 1).meant
