"""A publication that differs from the settings: found by preflight, and told by a start."""

from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from schemas.errors import ExitCode
from schemas.shaping import ShapingSettings
from schemas.source import SourceSettings
from services.bridge.cli.app import app
from services.bridge.source.publication_drift import (
    NAMES,
    PublicationDifference,
    PublicationSeen,
    publication_differences,
)
from services.bridge.source.publication_reader import without_waiting
from services.postgres.publication_options import WHOLE, ReplicaIdentity, TableOptions
from services.postgres.publications import Members
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.test_preflight import Examined
from tests.promises.bridge.test_publication import run
from tests.promises.bridge.test_publication_options import settings
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

ROOT = Path(__file__).parents[3]
A, B = ("public", "a"), ("public", "b")
TABLES = st.frozensets(st.tuples(st.just("public"), st.sampled_from("abcd")), max_size=4)
TOLD = "the publication differs from the settings"


def source(**values: Any) -> SourceSettings:
    return SourceSettings.model_validate({"conninfo": "host=a", **values})


def seen(*tables: tuple[str, str], **values: Any) -> PublicationSeen:
    of = Members(False, dict.fromkeys(tables, WHOLE), (), True)
    given = {"members": of, "tables": frozenset(tables), "there": frozenset(tables), **values}
    return PublicationSeen("p", **given)


def found(
    settings_of_source: SourceSettings, publication: PublicationSeen, **shaping: Any
) -> list[PublicationDifference]:
    return publication_differences(
        settings_of_source, ShapingSettings(**shaping), "bank", publication
    )


def names(found: list[PublicationDifference]) -> list[str]:
    return [one.name for one in found]


@given(wanted=TABLES, published=TABLES)
def test_tables_differ_exactly_where_the_sets_do(
    wanted: frozenset[tuple[str, str]], published: frozenset[tuple[str, str]]
) -> None:
    told = found(source(tables=[".".join(t) for t in wanted]), seen(*published))
    expected = {"publication-lacks-tables"} if wanted - published else set()
    if wanted and published - wanted:
        expected |= {"publication-has-more-tables"}
    assert {*names(told)} == expected
    for one in told:
        beyond = wanted - published if "lacks" in one.name else published - wanted
        assert all(".".join(table) in one.evidence for table in beyond)
        assert "slotbridge publication" in one.change


def test_what_no_setting_speaks_of_is_no_difference() -> None:
    filtered = Members(False, {A: TableOptions("id > 1", ("id",), "(id > 1)")}, (), True)
    assert not found(source(), seen(A, members=filtered))
    assert not found(source(), seen(A, members=Members(True, {}, (), True)))
    assert not found(source(tables=["public.a"]), seen(A, members=filtered))


def test_whole_schemas_and_all_tables_are_more_than_a_list() -> None:
    listed = source(tables=["public.a", "other.c"])
    (one,) = found(listed, seen(A, members=Members(True, {}, (), True)))
    assert (one.name, "shaping.include" in one.change) == ("publication-has-more-tables", True)
    excepted = Members(True, {}, (), True, frozenset([("other", "c")]))
    lacks, more = found(listed, seen(A, ("other", "c"), members=excepted))
    assert (lacks.name, "lists other.c, which" in lacks.evidence) == (
        "publication-lacks-tables",
        True,
    )
    assert "SET ALL TABLES" in lacks.change
    lacks, more = found(listed, seen(A, members=Members(False, {}, ("public",), True)))
    assert "lists other.c, which" in lacks.evidence
    assert "it has public.*, which source.tables does not list" in more.evidence
    whole = source(tables=["public.*", "other.c"])
    assert names(found(whole, seen(A, members=Members(False, {}, ("public",), True)))) == [
        "publication-lacks-tables"
    ]
    (one,) = found(whole, seen(members=Members(False, {("other", "c"): WHOLE}, (), True)))
    assert "lists public.*, which it does not have" in one.evidence


def test_tables_without_a_topic_of_their_own_are_told() -> None:
    spaced, plain, own = ("public", "order items"), ("public", "order_items"), ("x", "y")
    (one,) = found(source(), seen(A, spaced, plain))
    assert (one.name, one.subject) == ("table-parked", "public.order items, public.order_items")
    route = {"tables": r"public\.order.items", "topic": "{prefix}.items"}
    assert not found(source(), seen(A, spaced, plain), routes=[route])
    assert not found(source(), seen(A, spaced, plain), exclude=["public.order items"])
    taken = [{"tables": r"x\.y", "topic": "{prefix}.dead"}]
    assert names(found(source(), seen(own), routes=taken)) == ["table-parked"]


def test_options_and_identities_are_compared() -> None:
    wanted = source(tables=["public.a"], replica_identity={"public.*": "full"})
    present = ReplicaIdentity(A, False, "default", ("id", "v"), ("id",))
    published = seen(A, options={A: TableOptions("x", ("id",), "(x)")}, identities={A: (present,)})
    told = found(wanted, published)
    assert names(told) == [
        *("publication-row-filter", "publication-column-list", "table-identity-differs")
    ]
    assert "no row filter, source.row_filters the row filter (x)" in told[0].evidence
    assert "all columns, source.column_lists names id" in told[1].evidence
    assert "is default, source.replica_identity says full" in told[2].evidence
    same = Members(False, {A: TableOptions("(x)", ("v", "id"), "(x)")}, (), True)
    assert not found(
        wanted,
        seen(
            A,
            members=same,
            options={A: TableOptions("x", ("id", "v"), "(x)")},
            identities={A: (present.as_kind("full"),)},
        ),
    )


@pytest.mark.parametrize(
    ("unpublished", "skip", "lacking"),
    [
        ((), {}, ""),
        (("delete", "truncate"), {}, "d, t"),
        (("delete", "truncate"), {"*.*": ["t"]}, "d"),
        (("delete", "truncate"), {"*.*": ["t"], "public.a": ["d"]}, "d"),
        (("delete", "truncate"), {"*.*": ["t"], "public.a": ["d"], "public.b": ["d"]}, ""),
    ],
)
def test_operations_that_are_skipped_need_not_be_published(
    unpublished: tuple[str, ...], skip: dict[str, Any], lacking: str
) -> None:
    told = found(source(), seen(A, B, unpublished=unpublished), skip=skip)
    assert bool(told) == bool(lacking)
    if told:
        assert f'shaping.skip: {{"*.*": [{lacking}]}}' in told[0].change
        assert "publish = 'insert, update, delete" in told[0].change


def test_the_page_names_every_difference() -> None:
    page = (ROOT / "docs/guides/operate.md").read_text(encoding="utf-8")
    assert not [name for name in NAMES if f"`{name}`" not in page]


WANTED = {
    "tables": ["public.a", "public.b", "public.c"],
    "row_filters": {"public.a": "id > 5"},
    "column_lists": {"public.b": ["id", "v"]},
    "replica_identity": {"public.c": "full"},
}
"""What the settings say once the publication is `PUBLISHED`."""
PUBLISHED = "a WHERE (id > 4), b (id), d"


def differing(bridge: Bridge) -> dict[str, dict[str, Any]]:
    """The findings of preflight that are differences, by name."""
    told = [one for one in Examined(bridge).findings if one["check"] in NAMES]
    assert len({one["check"] for one in told}) == len(told)
    return {one["check"]: one for one in told}


@pytest.mark.long
def test_each_difference_is_found_and_gone_after_its_own_remedy(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in "abcd":
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int, w int)".encode())
        bridge = new_bridge(conninfo)
        connection.execute(
            f"CREATE PUBLICATION {bridge.publication} FOR TABLE {PUBLISHED}"
            " WITH (publish = 'insert, update')".encode()
        )
        assert {*differing(bridge)} == {"publication-lacks-operations"}
        settings(bridge, **WANTED)
        told = differing(bridge)
        assert {*told} == {*NAMES} - {"table-identity-differs", "table-parked"}, "c is not there"
        assert told["publication-lacks-tables"]["evidence"].startswith(
            "source.tables lists public.c, "
        )
        assert "it has public.d" in told["publication-has-more-tables"]["evidence"]
        assert told["publication-row-filter"]["subject"] == "public.a"
        assert (
            "has the row filter (id > 4), source.row_filters the row filter (id > 5)"
            in told["publication-row-filter"]["evidence"]
        )
        assert (
            "sends id, source.column_lists names id, v"
            in told["publication-column-list"]["evidence"]
        )
        bridge.start().streaming()
        assert bridge.stop() == 0, bridge.output
        assert bridge.output.count(TOLD) == len(told)
        for name in told:
            assert name in bridge.output
        statement = told["publication-lacks-operations"]["remedy"]["text"].partition(";")[0]
        connection.execute(statement.encode())
        assert run(bridge, "--yes").returncode == 0
        assert not differing(bridge)
        connection.execute("ALTER TABLE c REPLICA IDENTITY DEFAULT")
        (identity,) = differing(bridge).values()
        assert (identity["check"], identity["subject"]) == ("table-identity-differs", "public.c")
        assert run(bridge, "--yes").returncode == 0
        assert not differing(bridge)
        before = bridge.output.count(TOLD)
        bridge.start().streaming()
        assert bridge.stop() == 0, bridge.output
        assert bridge.output.count(TOLD) == before


@pytest.mark.long
def test_a_table_that_somebody_has_locked_is_not_judged_and_not_waited_for(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY)")
        expressions = {"filters": {"public.a": "id > 2"}}
        bridge = new_bridge(conninfo, tables=("public.a",), shaping=expressions)
        settings(bridge, row_filters={"public.a": "id > 5"})
        bridge.start().streaming()
        assert bridge.stop() == 0, bridge.output
        with connection.transaction():
            connection.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
            examined = Examined(bridge)
            unjudged = [one["why"] for one in examined.document["not_judged"]]
            assert any("somebody has locked a table of it" in why for why in unjudged)
            bridge.start().streaming()
            assert bridge.stop() == 0, bridge.output
        assert "not judged: whether the publication is as the settings say" in bridge.output
        assert bridge.output.count("not judged: whether shaping fits") == 1
        assert TOLD not in bridge.output
        connection.execute("CREATE TABLE b (id int PRIMARY KEY)")
        connection.execute(f"ALTER PUBLICATION {bridge.publication} ADD TABLE b".encode())
        wanted = {"public.a": "id > 5", "public.b": "id > 5"}
        settings(bridge, tables=["public.a", "public.b"], row_filters=wanted)
        with connection.transaction():  # the publication has no filter of b, which opens it
            connection.execute("LOCK TABLE b IN ACCESS EXCLUSIVE MODE")
            unjudged = [one["why"] for one in Examined(bridge).document["not_judged"]]
        assert any("public.b: the row filter can't be compared" in why for why in unjudged)
        settings(bridge, tables=["public.a"], row_filters={"public.a": "nowhere > 5"})
        assert "nowhere" in differing(bridge)["publication-row-filter"]["evidence"]


@pytest.mark.long
def test_what_the_server_refuses_is_not_judged(pair: Provider, fresh_database: str) -> None:
    with psycopg.connect(pair.primary.conninfo(fresh_database), autocommit=True) as connection:
        assert without_waiting(connection, lambda c: c.execute("SELECT 1 / 0")) is None
        found = without_waiting(connection, lambda c: c.execute("SELECT 7").fetchone())
        assert found == (7,)


@pytest.mark.long
def test_a_table_that_leaves_while_the_bridge_runs_is_told(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """A staging table is swapped in: the publication has the table, and does not any more."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo, tables=("public.t",)).start().streaming()
        connection.execute("INSERT INTO t VALUES (1)")
        bridge.caught_up()
        assert "publication-lacks-tables" not in bridge.output
        assert status(bridge).exit_code == 0
        for statement in (
            "CREATE TABLE staging (id int PRIMARY KEY)",
            "DROP TABLE t",
            "ALTER TABLE staging RENAME TO t",
        ):
            connection.execute(statement.encode())
        eventually(lambda: "publication-lacks-tables" in bridge.output, what="it is told")
        shown = status(bridge)
        assert shown.exit_code == ExitCode.CHECK_FAILED
        assert "source.tables lists public.t, which it does not have" in shown.output
        connection.execute(f"ALTER PUBLICATION {bridge.publication} ADD TABLE t")
        connection.execute("INSERT INTO t VALUES (2)")
        eventually(lambda: "another table has this name now" in bridge.output, what="that, too")
        bridge.caught_up()
        assert status(bridge).exit_code == 0
        assert bridge.stop() == 0, bridge.output
    assert bridge.output.count("publication-lacks-tables") == 1


@pytest.mark.long
def test_a_table_that_is_renamed_keeps_the_topic_and_a_parked_one_is_told(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Both names have the same topic, as a hint of the bridge says to rename one."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute('CREATE TABLE "order items" (id int PRIMARY KEY)')
        bridge = new_bridge(conninfo).start().streaming()
        connection.execute('INSERT INTO "order items" VALUES (1)')
        connection.execute('ALTER TABLE "order items" RENAME TO order_items')
        connection.execute("INSERT INTO order_items VALUES (2)")
        bridge.caught_up()
        assert status(bridge).exit_code == 0
        connection.execute('CREATE TABLE "order items" (id int PRIMARY KEY)')
        connection.execute('INSERT INTO "order items" VALUES (3)')
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
        bridge.start().streaming()
        connection.execute("INSERT INTO order_items VALUES (4)")
        bridge.caught_up()
        shown = status(bridge)
        assert shown.exit_code == ExitCode.CHECK_FAILED
        assert "all would have one topic" in shown.output
        assert bridge.stop() == 0, bridge.output
    assert [event["after"]["id"] for event in bridge.events("order_items")] == [1, 2, 4]


def status(bridge: Bridge) -> Result:
    return CliRunner().invoke(app, ["status", "--config", str(bridge.config)])
