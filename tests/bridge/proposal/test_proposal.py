"""The proposed file is read back as what was proposed, whatever the tables are called."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas.example import as_yaml
from services.bridge.proposal.pair import FoundTable, Node, Pair
from services.bridge.proposal.proposal import notes, overview, proposed, select, unfit

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


def found_table(
    schema: str, name: str, *, identified: bool = True, unlogged: bool = False
) -> FoundTable:
    key = ("id",) if identified else ()
    return FoundTable(schema, name, False, unlogged, identified, key, 7, "8 kB", (f"{name} (odd)",))


def pair_of(tables: list[FoundTable], database: str) -> Pair:
    nodes = (
        Node("h1", "5432", False, 180006),
        Node("h2", "5433", True, 180006, "", "slotfailover_x"),
    )
    parameters = {"host": "h1", "sslmode": "verify-full", "password": "secret-of-mine"}
    return Pair(database, "o'brien", True, parameters, nodes, (), tuple(tables), {}, {})


TABLES = st.lists(
    st.builds(found_table, NAMES, NAMES, identified=st.booleans(), unlogged=st.booleans()),
    unique_by=lambda table: table.full_name,
    max_size=5,
)


@given(NAMES)
def test_any_text_is_one_line_of_yaml_that_a_comment_may_follow(text: str) -> None:
    line = f"- {as_yaml(text)}  # a comment"
    assert "\n" not in line
    assert yaml.safe_load(line) == [text]


@given(TABLES, NAMES)
def test_any_names_are_read_back(tables: list[FoundTable], database: str) -> None:
    pair = pair_of(tables, database)
    chosen = [table for table in tables if not unfit(table)]
    values = proposed(pair, chosen, kafka="k:9092", prefix="p")
    blocks = {
        key: yaml.safe_load("\n".join(value))
        for key, value in values.items()
        if isinstance(value, list)
    }
    assert (blocks["source.tables"] or []) == [one.full_name for one in tables if one in chosen]
    full = {table.full_name: "full" for table in chosen if not table.identified}
    assert blocks.get("source.replica_identity", {}) == full
    assert blocks["failover.nodes"].keys() == blocks["failover.admins"].keys() == {"a", "x"}
    assert "sslmode=verify-full" in str(values["source.conninfo"])
    assert "secret" not in str(values)
    assert all("\n" not in line for line in (*overview(pair), *notes(pair)))


def test_without_names_only_tables_with_an_identity_are_chosen() -> None:
    tables = [
        found_table("public", "a"),
        found_table("public", "b", identified=False),
        found_table("public", "c", unlogged=True),
    ]
    pair = pair_of(tables, "shop")
    assert [table.name for table in select(pair, [])] == ["a"]
    assert [table.name for table in select(pair, ["public.*"])] == ["a", "b"]
