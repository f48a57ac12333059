"""`slotbridge publication`: the publication becomes what `source.tables` says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ExitCode, SettingsError, SetupError
from services.bridge.publication.plan import changes
from services.postgres.publication_options import WHOLE
from services.postgres.publications import Members, TableFacts
from tests.bridge.conftest import NewBridge
from tests.bridge.running import Bridge
from tests.bridge.snapshots import done
from tests.providers.interface import Provider

NAMES = st.frozensets(st.tuples(st.just("public"), st.sampled_from("abcdef")), min_size=1)
KEYED = TableFacts(())


def run(bridge: Bridge, *options: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / "slotbridge")
    command = [program, "publication", "--config", str(bridge.config), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, input="n\n")


def want(bridge: Bridge, *tables: str) -> None:
    """Name other tables in source.tables."""
    settings = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
    settings["source"]["tables"] = [*tables]
    bridge.config.write_text(yaml.safe_dump(settings), encoding="utf-8")


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
        (Members(False, {}, ("s",), True), {("public", "a"): KEYED}, "whole schemas"),
        (None, {}, "no table public.a"),
        (None, {("public", "a"): TableFacts((("public", "a"),))}, "UPDATE and DELETE would fail"),
    ],
)
def test_what_can_not_be_done_is_refused(
    found: Members | None, facts: dict[tuple[str, str], TableFacts], words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        changes("p", {("public", "a")}, found, facts, identity_full=False)


def test_an_empty_list_of_tables_does_not_empty_the_publication() -> None:
    with pytest.raises(SettingsError, match="all tables"):
        changes(
            "p",
            (),
            Members(False, dict.fromkeys([("public", "a")], WHOLE), (), True),
            {},
            identity_full=False,
        )


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


def answer(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


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
