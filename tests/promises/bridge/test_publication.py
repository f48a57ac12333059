"""`slotbridge publication`: the publication becomes what `source.tables` says."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ExitCode, SettingsError, SetupError
from schemas.source import SourceSettings
from services.bridge.failpoints import VARIABLE
from services.bridge.publication.plan import changes
from services.bridge.publication.row_requests import parse_comment, signals_of
from services.postgres.publication_options import WHOLE, TableOptions
from services.postgres.publications import Members, TableFacts
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import done
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

NAMES = st.frozensets(st.tuples(st.just("public"), st.sampled_from("abcdef")), min_size=1)
KEYED = TableFacts(())


def run(bridge: Bridge, *options: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / "slotbridge")
    command = [program, "publication", "--config", str(bridge.config), *options]
    environment = {**os.environ, VARIABLE: failpoint}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, input="n\n", env=environment
    )


def want(bridge: Bridge, *tables: str) -> None:
    """Name other tables in source.tables."""
    settings = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
    settings["source"]["tables"] = [*tables]
    bridge.config.write_text(yaml.safe_dump(settings), encoding="utf-8")


SCHEMAS = st.frozensets(st.sampled_from(["r", "s", "t"]))


@given(wanted=NAMES, published=NAMES, into=SCHEMAS, out=SCHEMAS)
def test_schemas_are_added_and_left_out_beside_tables(
    wanted: frozenset[tuple[str, str]],
    published: frozenset[tuple[str, str]],
    into: frozenset[str],
    out: frozenset[str],
) -> None:
    found = Members(False, dict.fromkeys(published, WHOLE), tuple(out), True)
    schemas = {name: ((name, "x"),) for name in into}
    facts = dict.fromkeys([*wanted, *((name, "x") for name in into)], KEYED)
    planned = changes("p", wanted, found, facts, identity_full=False, schemas=schemas)
    assert (out | {*planned.add_schemas}) - {*planned.leave_out_schemas} == into
    texts = [one.as_string(None) for one in planned.statements()]
    assert [text for text in texts if "IN SCHEMA" in text] == [
        f'ALTER PUBLICATION "p" {action} TABLES IN SCHEMA {names}'
        for action, names in (
            ("DROP", ", ".join(f'"{name}"' for name in sorted(out - into))),
            ("ADD", ", ".join(f'"{name}"' for name in sorted(into - out))),
        )
        if names
    ]
    (new,) = changes("p", wanted, None, facts, identity_full=False, schemas=schemas).statements()
    for name in into:
        assert f'"{name}"' in new.as_string(None).split("TABLE ")[0]


@given(wanted=NAMES, published=NAMES)
def test_planned_statements_lead_to_the_wanted_publication(
    wanted: frozenset[tuple[str, str]], published: frozenset[tuple[str, str]]
) -> None:
    found = Members(False, dict.fromkeys(published, WHOLE), (), True)
    planned = changes("p", wanted, found, dict.fromkeys(wanted, KEYED), identity_full=False)
    assert (published | {*planned.add}) - {*planned.leave_out} == wanted
    assert not {*planned.add} & published
    assert len([*planned.statements()]) == bool(planned.add) + bool(planned.leave_out)


@pytest.mark.parametrize(
    ("found", "facts", "words"),
    [
        (Members(True, {}, (), True), {("public", "a"): KEYED}, "for all tables"),
        (None, {}, "no table public.a"),
        (None, {("public", "a"): TableFacts((("public", "a"),))}, "UPDATE and DELETE would fail"),
    ],
)
def test_what_can_not_be_done_is_refused(
    found: Members | None, facts: dict[tuple[str, str], TableFacts], words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        changes("p", {("public", "a")}, found, facts, identity_full=False)


def test_a_schema_with_a_table_without_identity_or_beside_column_lists_is_refused() -> None:
    bare = ("s", "bare")
    facts = {bare: TableFacts((bare,))}
    schemas = {"s": (bare,)}
    with pytest.raises(SetupError, match="would fail on"):
        changes("p", (), None, facts, identity_full=False, schemas=schemas)
    assert changes(
        "p", (), None, facts, identity_full=True, schemas=schemas, present={}, identities_wanted={}
    ).identity_full == (bare,)
    listed = Members(False, {("public", "a"): TableOptions(columns=("id",))}, (), True)
    with pytest.raises(SetupError, match="a column list"):
        changes(
            "p",
            {("public", "a")},
            listed,
            {("public", "a"): KEYED, bare: KEYED},
            identity_full=False,
            schemas=schemas,
        )


@pytest.mark.parametrize(
    "values",
    [
        {"tables": ["sales.*", "sales.t"]},
        {"tables": ["sales.*", "public.a"], "column_lists": {"public.a": ["id"]}},
        {"tables": ["sales.*"], "row_filters": {"sales.t": "true"}},
    ],
)
def test_settings_that_no_publication_can_have(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"listed, too|can't go with|fits none"):
        SourceSettings.model_validate({"conninfo": "host=a", **values})


def test_an_empty_list_of_tables_does_not_empty_the_publication() -> None:
    with pytest.raises(SettingsError, match="all tables"):
        changes(
            "p",
            (),
            Members(False, dict.fromkeys([("public", "a")], WHOLE), (), True),
            {},
            identity_full=False,
        )


@pytest.mark.long
def test_tables_come_and_go_while_the_bridge_runs(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Rows of a table that is added come by themselves; a left out one keeps what it has."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in ("a", "b", "c", 'odd "name'):
            quoted = psycopg.sql.Identifier(table)
            connection.execute(psycopg.sql.SQL("CREATE TABLE {} (id int)").format(quoted))
        connection.execute("ALTER TABLE a ADD PRIMARY KEY (id)")
        connection.execute("ALTER TABLE b ADD PRIMARY KEY (id)")
        connection.execute("INSERT INTO a VALUES (1)")
        connection.execute("INSERT INTO b VALUES (1), (2)")
        bridge = new_bridge(conninfo, tables=["public.a"], snapshot={"mode": "initial"})
        bridge.start().streaming()
        done(bridge)
        same = run(bridge, "--yes")
        assert (same.returncode, same.stdout, same.stderr) == (0, "", "nothing to change\n")
        want(bridge, "public.b")
        assert run(bridge).returncode == ExitCode.CHECK_FAILED  # the answer was no
        only_told = run(bridge, "--dry-run", "--json")
        told = answer(run(bridge, "--yes", "--json"))
        assert {**answer(only_told), "dry_run": False} == told
        assert (told["added"], told["left_out"]) == (["public.b"], ["public.a"])
        connection.execute("INSERT INTO a VALUES (2)")
        connection.execute("INSERT INTO b VALUES (3)")
        done(bridge, times=2)
        bridge.caught_up()
        assert [event["after"]["id"] for event in bridge.events("a")] == [1]
        assert {event["after"]["id"] for event in bridge.events("b")} == {1, 2, 3}
        want(bridge, "public.b", "public.c", 'public.odd "name')
        keyless = run(bridge, "--yes")
        assert keyless.returncode == ExitCode.SERVER_SETTING, keyless.stderr
        assert "public.c" in keyless.stderr and "--identity-full" in keyless.stderr
        connection.execute("ALTER TABLE c ADD PRIMARY KEY (id) DEFERRABLE")
        assert run(bridge, "--yes").returncode == ExitCode.SERVER_SETTING, "UPDATE would fail"
        connection.execute("ALTER TABLE c DROP CONSTRAINT c_pkey")
        statements = run(bridge, "--dry-run", "--identity-full")
        assert statements.returncode == 0, statements.stderr
        assert 'those of public.c, public.odd "name are not sent' in statements.stderr
        connection.execute(statements.stdout.encode())  # as psql would, for the owner
        assert answer(run(bridge, "--yes", "--json"))["statements"] == []
        connection.execute("INSERT INTO c VALUES (7)")
        connection.execute("UPDATE c SET id = 8")
        bridge.caught_up()
        assert bridge.stop() == 0, bridge.output
    assert {event["op"] for event in bridge.events("c")} == {"c", "u"}


@pytest.mark.long
def test_whole_schemas_come_and_go_while_the_bridge_runs(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """With rows, and with a table that is made later."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA sales; CREATE TABLE a (id int PRIMARY KEY)")
        connection.execute(
            "CREATE TABLE sales.b (id int PRIMARY KEY); INSERT INTO sales.b SELECT 1"
        )
        bridge = new_bridge(conninfo, tables=["public.a"], snapshot={"mode": "initial"})
        bridge.start().streaming()
        want(bridge, "public.a", "sales.*", "nowhere.*")
        assert "no schema nowhere" in run(bridge, "--yes").stderr
        want(bridge, "public.a", "sales.*")
        shown = run(bridge, "--dry-run")
        assert (
            f'ALTER PUBLICATION "{bridge.publication}" ADD TABLES IN SCHEMA "sales";'
            in shown.stdout
        )
        told = answer(run(bridge, "--yes", "--json"))
        assert (told["added_schemas"], told["added"]) == (["sales"], [])
        assert answer(run(bridge, "--yes", "--json"))["statements"] == []
        connection.execute("CREATE TABLE sales.later (id int PRIMARY KEY)")
        connection.execute("INSERT INTO sales.later VALUES (7); INSERT INTO sales.b VALUES (2)")
        eventually(lambda: ids(bridge, "sales.b") == {1, 2}, what="the schema's rows are there")
        bridge.caught_up()
        assert ids(bridge, "sales.later") == {7}
        want(bridge, "public.a", "sales.later")
        told = answer(run(bridge, "--yes", "--json"))
        assert (told["left_out_schemas"], told["added"]) == (["sales"], ["sales.later"])
        connection.execute("INSERT INTO sales.b VALUES (3); INSERT INTO sales.later VALUES (8)")
        bridge.caught_up()
        assert (ids(bridge, "sales.b"), ids(bridge, "sales.later")) == ({1, 2}, {7, 8})
        assert bridge.stop() == 0, bridge.output
        fresh = new_bridge(
            conninfo,
            tables=["public.a", "sales.*"],
            slot=f"{bridge.slot}x",
            prefix=f"{bridge.prefix}x",
            publication=f"{bridge.publication}x",
        )
        fresh.start().streaming()
        assert "the publication differs" not in fresh.output
        assert fresh.stop() == 0, fresh.output


@pytest.mark.long
def test_a_whole_schema_takes_the_place_of_column_lists_in_one_step(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """PostgreSQL refuses a schema only beside column lists that stay."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA sales; CREATE TABLE sales.b (id int PRIMARY KEY, v int)")
        connection.execute("CREATE TABLE a (id int PRIMARY KEY, v int)")
        bridge = new_bridge(conninfo, tables=["public.a", "sales.b"])
        options(bridge, column_lists={"*.*": ["id"]})
        assert run(bridge, "--yes").returncode == 0
        settings = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
        del settings["source"]["column_lists"]
        bridge.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        want(bridge, "public.a", "sales.*")
        refused = run(bridge, "--yes")
        assert refused.returncode == ExitCode.SERVER_SETTING and "public.a" in refused.stderr
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="column list"):
            connection.execute(
                f"ALTER PUBLICATION {bridge.publication} DROP TABLE sales.b;"
                f"ALTER PUBLICATION {bridge.publication} ADD TABLES IN SCHEMA sales".encode()
            )
        options(bridge, column_lists={})
        told = answer(run(bridge, "--yes", "--json"))
        assert (told["added_schemas"], told["replaced"]) == (["sales"], ["public.a"])
        assert told["unfiltered"] == ["sales.b"]
        assert answer(run(bridge, "--yes", "--json"))["statements"] == []


def ids(bridge: Bridge, topic: str) -> set[int]:
    if f"{bridge.prefix}.{topic}" not in bridge.topics():
        return set()
    values = [json.loads(value) for _, value in bridge.records(topic) if value is not None]
    return {value["after"]["id"] for value in values}


@pytest.mark.long
def test_rows_that_a_changed_filter_lets_through_are_asked_for(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    """The command asks for these tables alone, in the same run; without the flag it tells how."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table in ("a", "b"):
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)".encode())
        snapshot = {"mode": "on_request", "signal_topic": f"{topic_prefix}-signal"}
        bridge = new_bridge(conninfo, tables=["public.a", "public.b"], snapshot=snapshot)
        options(bridge, row_filters={"public.a": "id < 10"})
        bridge.start().streaming()
        connection.execute("INSERT INTO a SELECT generate_series(8, 12)")
        connection.execute("INSERT INTO b VALUES (1)")
        bridge.caught_up()
        options(bridge, row_filters={"public.a": "id < 12"})
        told = run(bridge, "--dry-run")
        assert f"slotbridge snapshot start public.a --config {bridge.config}" in told.stderr
        done = run(bridge, "--yes", "--read-rows")
        assert done.returncode == 0, done.stderr
        assert "the bridge is asked for their rows (signal " in done.stderr
        eventually(lambda: ids(bridge, "public.a") == {8, 9, 10, 11}, what="the rows are read")
        assert len([*bridge.events("b")]) == 1, "the other table is not read"
        assert bridge.stop() == 0, bridge.output
        options(bridge, row_filters={"public.a": "id < 13"}, snapshot={"mode": "never"})
        refused = run(bridge, "--yes", "--read-rows")
        assert refused.returncode == ExitCode.SETTINGS and "signal_topic" in refused.stderr
        assert answer(run(bridge, "--dry-run", "--json"))["replaced"] == ["public.a"]


SIGNALS = "CREATE TABLE signals (id varchar(42) PRIMARY KEY, type varchar(32), data varchar(2048))"


@pytest.mark.long
def test_a_change_and_the_signal_for_its_rows_are_one_transaction(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """Where the signal can't be written, nothing is changed: the second call asks as the first."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE a (id int PRIMARY KEY); {SIGNALS}".encode())
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN RAISE EXCEPTION 'not now'; END$$;"
            "CREATE TRIGGER refuse BEFORE INSERT ON signals EXECUTE FUNCTION refuse()"
        )
        snapshot = {"mode": "on_request", "signal_table": "public.signals"}
        tables = ["public.a", "public.signals"]
        bridge = new_bridge(conninfo, tables=tables, snapshot=snapshot)
        options(bridge, row_filters={"public.a": "id < 10"})
        bridge.start().streaming()
        connection.execute("INSERT INTO a SELECT generate_series(8, 12)")
        bridge.caught_up()
        options(bridge, row_filters={"public.a": "id < 12"})
        refused = run(bridge, "--yes", "--read-rows")
        assert refused.returncode != 0 and "SQLSTATE P0001" in refused.stderr, refused.stderr
        connection.execute("DROP TRIGGER refuse ON signals")
        shown = run(bridge, "--dry-run", "--read-rows")
        assert 'INSERT INTO "public"."signals"' in shown.stdout, "for the owner, by psql"
        assert "are asked for by the INSERT" in shown.stderr
        told = answer(run(bridge, "--yes", "--read-rows", "--json"))
        assert told["replaced"] == told["rows_asked_for"] == ["public.a"]
        eventually(lambda: ids(bridge, "public.a") == {8, 9, 10, 11}, what="the rows are read")
        options(bridge, row_filters={"public.a": "id < 13"})
        connection.execute(run(bridge, "--dry-run", "--read-rows").stdout.encode())
        eventually(lambda: 12 in ids(bridge, "public.a"), what="the owner's signal is obeyed")
        again = run(bridge, "--yes", "--read-rows")
        assert "it changes none" in again.stderr and "slotbridge snapshot start" in again.stderr
        assert bridge.stop() == 0, bridge.output


@pytest.mark.long
def test_a_signal_that_kafka_does_not_take_is_not_forgotten(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    """The publication's comment has the wish to read rows until the signal topic has it."""
    conninfo = pair.primary.conninfo(fresh_database)
    snapshot = {"mode": "on_request", "signal_topic": f"{topic_prefix}-signal"}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY)")
        bridge = new_bridge(conninfo, tables=["public.a"], snapshot=snapshot)
        options(bridge, row_filters={"public.a": "id < 10"})
        bridge.start().streaming()
        connection.execute(f"COMMENT ON PUBLICATION {bridge.publication} IS 'of shop'".encode())
        connection.execute("INSERT INTO a SELECT generate_series(8, 12)")
        bridge.caught_up()
        missing = {**snapshot, "signal_topic": f"{topic_prefix}-missing"}
        options(bridge, row_filters={"public.a": "id < 11"}, snapshot=missing)
        refused = run(bridge, "--yes", "--read-rows")
        assert refused.returncode != 0, refused.stderr
        assert "the publication is changed" in refused.stderr, refused.stderr
        options(bridge, row_filters={"public.a": "id < 12"}, snapshot=snapshot)
        told = run(bridge, "--yes")
        assert told.returncode == 0
        assert "an earlier call with --read-rows has changed public.a" in told.stderr
        told = run(bridge, "--yes", "--read-rows")
        assert told.returncode == 0 and "the bridge is asked for their rows" in told.stderr
        eventually(lambda: ids(bridge, "public.a") == {8, 9, 10, 11}, what="the rows are read")
        assert comment_of(connection, bridge) == "of shop"
        for number, point in enumerate(("rows noted", "rows asked for"), 12):
            options(bridge, row_filters={"public.a": f"id <= {number}"})
            connection.execute("INSERT INTO a VALUES (%s) ON CONFLICT DO NOTHING", [number])
            killed = run(bridge, "--yes", "--read-rows", failpoint=f"{point}:1")
            assert killed.returncode == -signal.SIGKILL, killed.stderr
            assert "public.a" in comment_of(connection, bridge)
            told = run(bridge, "--yes", "--read-rows")
            assert told.returncode == 0 and "was interrupted before" in told.stderr
            eventually(partial(_has, bridge, number), what="the row is read")
            assert comment_of(connection, bridge) == "of shop"
        assert bridge.stop() == 0, bridge.output


def _has(bridge: Bridge, number: int) -> bool:
    return number in ids(bridge, "public.a")


def comment_of(connection: psycopg.Connection[Any], bridge: Bridge) -> str:
    row = connection.execute(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_publication WHERE pubname = %s",
        [bridge.publication],
    ).fetchone()
    return str(row and row[0])


@pytest.mark.long
@pytest.mark.parametrize("asked", [False, True])
def test_rows_that_a_filter_kept_from_a_table_of_a_whole_schema(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, *, asked: bool
) -> None:
    """They are read where that is asked; without it, it is said how."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA sales; {SIGNALS}".encode())
        connection.execute("CREATE TABLE sales.b (id int PRIMARY KEY)")
        connection.execute("CREATE TABLE sales.whole (id int PRIMARY KEY)")
        snapshot = {"mode": "initial", "signal_table": "public.signals"}
        tables = ["public.signals", "sales.b", "sales.whole"]
        bridge = new_bridge(conninfo, tables=tables, snapshot=snapshot)
        options(bridge, row_filters={"sales.b": "id < 10"})
        bridge.start().streaming()
        connection.execute(
            "INSERT INTO sales.b VALUES (1), (11); INSERT INTO sales.whole VALUES (1)"
        )
        bridge.caught_up()
        done(bridge)
        options(bridge, row_filters={})
        want(bridge, "public.signals", "sales.*")
        told = run(bridge, "--yes", *["--read-rows"] * asked)
        assert told.returncode == 0, told.stderr
        if not asked:
            assert "slotbridge snapshot start sales.b --config" in told.stderr, told.stderr
        connection.execute("INSERT INTO sales.b VALUES (12)")
        eventually(lambda: 12 in ids(bridge, "sales.b"), what="the change has come")
        wanted = {1, 11, 12} if asked else {1, 12}
        eventually(lambda: ids(bridge, "sales.b") == wanted, what="the rows that are wanted")
        assert bridge.stop() == 0, bridge.output


NAME = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=63)


@given(tables=st.lists(NAME.map(lambda name: f"public.{name}"), max_size=60))
def test_signals_name_all_tables_and_fit_into_the_signal_table(tables: list[str]) -> None:
    found = signals_of(tables)
    assert [name for one in found for name in json.loads(one.data)["data-collections"]] == tables
    assert all(len(one.data) <= 2048 for one in found)


@given(comment=st.text(), tables=st.lists(NAME, min_size=1))
def test_a_note_in_a_comment_leaves_the_rest_of_it(comment: str, tables: list[str]) -> None:
    note = f"slotbridge --read-rows: {json.dumps(tables)}"
    kept, noted = parse_comment(f"{comment}\n{note}")
    assert noted[-len(tables) :] == tuple(tables)
    assert kept == comment
    assert parse_comment("slotbridge --read-rows: edited") == (
        "slotbridge --read-rows: edited",
        (),
    )


def options(bridge: Bridge, snapshot: dict[str, Any] | None = None, **source: Any) -> None:
    settings = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
    settings["source"] |= source
    settings["snapshot"] = snapshot or settings["snapshot"]
    bridge.config.write_text(yaml.safe_dump(settings), encoding="utf-8")


def answer(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.long
def test_a_role_that_does_not_own_it_is_told_what_to_do(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY)")
        connection.execute("CREATE TABLE b (id int PRIMARY KEY)")
        role = f"r_{fresh_database}"
        connection.execute(f"CREATE ROLE {role} LOGIN".encode())
        bridge = new_bridge(conninfo, tables=["public.a", "public.b"])
        connection.execute(f"CREATE PUBLICATION {bridge.publication} FOR TABLE a".encode())
        restricted = psycopg.conninfo.make_conninfo(conninfo, user=role)
        settings = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
        settings["source"]["conninfo"] = restricted
        bridge.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        refused = run(bridge, "--yes")
        assert refused.returncode == ExitCode.PRIVILEGE_MISSING, refused.stderr
        assert "--dry-run" in refused.stderr
        connection.execute(f"DROP ROLE {role}".encode())
