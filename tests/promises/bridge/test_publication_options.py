"""Row filters, column lists and replica identities by settings, on a real server and bridge."""

import itertools
import json
from typing import Any

import psycopg
import pytest
import yaml
from psycopg import sql
from pydantic import ValidationError

from schemas.errors import ExitCode, SetupError
from schemas.source import SourceSettings
from services.bridge.source.table_options import require_covered
from services.postgres.publication_options import (
    ReplicaIdentity,
    TableOptions,
    published_options,
    replica_identities,
    server_filter,
    table_clause,
)
from services.postgres.publications import publication_statement
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.consumer_folds import fold
from tests.promises.bridge.recover_process import recovered
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import done
from tests.promises.bridge.test_publication import answer, run
from tests.providers.interface import Provider

CONDITIONS = (
    "id > 5",
    "t.id>5 and note is not null",
    "((note = 'a'))",
    "note IN ('a', 'b') OR lower(note) LIKE 'c%'",
    "amount::numeric(10,2) >= 1e2 AND NOT flag",
    "flag",
    "CASE WHEN id < 3 THEN flag ELSE note = 'x' END",
    "coalesce(day, '2020-01-01') BETWEEN '2020-01-01' AND DATE '2030-01-01'",
    "note COLLATE \"C\" < 'm' AND kinds @> ARRAY['a']",
    "note = $$a's; %s {x}$$",
    "true",
)


def settings(bridge: Bridge, **source: Any) -> None:
    """Change settings of `source`."""
    document = yaml.safe_load(bridge.config.read_text(encoding="utf-8"))
    document["source"].update(source)
    bridge.config.write_text(yaml.safe_dump(document), encoding="utf-8")


def kinds_and_ids(bridge: Bridge) -> set[tuple[str, int]]:
    """Return (op, id) of the events of t; none of them comes twice."""
    told = [(e["op"], (e["after"] or e["before"])["id"]) for e in bridge.events("t")]
    assert len(told) == len({*told})
    return {*told}


def test_a_pattern_that_fits_no_table_is_refused() -> None:
    for name, value in (
        ("row_filters", {"public.b": "true"}),
        ("column_lists", {"public.b": ["id"]}),
        ("replica_identity", {"other.*": "full"}),
    ):
        with pytest.raises(ValidationError, match="fits none of"):
            SourceSettings.model_validate(
                {"conninfo": "host=a", "tables": ["public.a"], name: value}
            )
    with pytest.raises(ValidationError, match="twice"):
        SourceSettings.model_validate(
            {"conninfo": "host=a", "tables": ["public.a"], "column_lists": {"public.*": ["x", "x"]}}
        )


def test_the_first_pattern_that_fits_applies() -> None:
    source = SourceSettings.model_validate(
        {
            "conninfo": "host=a",
            "tables": ["public.a", "public.b"],
            "row_filters": {"public.a": "one", "public.*": "other"},
        }
    )
    assert source.row_filters is not None
    found = [source.of_table(source.row_filters, ("public", name)) for name in "ab"]
    assert found == ["one", "other"]


@pytest.mark.long
def test_a_condition_is_compared_as_the_server_writes_it(
    pair: Provider, fresh_database: str
) -> None:
    """The text of the temporary table's CHECK is that of the publication's row filter."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE t (gone int, id int PRIMARY KEY, note text, amount numeric, flag bool,"
            " day date, kinds text[], twice int GENERATED ALWAYS AS (id * 2) STORED)"
        )
        connection.execute("ALTER TABLE t DROP COLUMN gone")
        name = f"p_{fresh_database}"
        for condition in (*CONDITIONS, "twice > 2"):
            text, columns = server_filter(connection, ("public", "t"), condition)
            clause = table_clause(("public", "t"), TableOptions(condition))
            made = sql.SQL("CREATE PUBLICATION {} FOR TABLE {}")
            connection.execute(made.format(sql.Identifier(name), clause))
            found = published_options(connection, name)["public", "t"]
            assert found.same_as(TableOptions(condition, None, text)), condition
            again, _ = server_filter(connection, ("public", "t"), found.condition)
            assert again == text, "its own text is a fixed point"
            assert columns == {
                column
                for column in ("id", "note", "amount", "flag", "day", "kinds", "twice")
                if column in condition
            }, condition
            connection.execute(sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(name)))
        with pytest.raises(psycopg.errors.SyntaxError):
            server_filter(connection, ("public", "t"), "true); DROP TABLE t; SELECT (1")
        left = connection.execute("SELECT to_regclass('public.t'), to_regclass('pg_temp.t')")
        assert left.fetchone() == ("t", None)


@pytest.mark.long
def test_the_server_refuses_updates_exactly_where_the_check_does(
    pair: Provider, fresh_database: str
) -> None:
    """All combinations of identity, filter and list: nothing refused needlessly, nothing let by."""
    conninfo = pair.primary.conninfo(fresh_database)
    verdicts = set()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for table, more in (("t", ""), ("g", ", twice int GENERATED ALWAYS AS (id * 2) STORED")):
            columns = f"id int PRIMARY KEY, note text NOT NULL, more text{more}"
            connection.execute(f"CREATE TABLE {table} ({columns})".encode())
            connection.execute(f"CREATE UNIQUE INDEX {table}_note ON {table} (note, id)".encode())
        for table, kind, condition, listed in itertools.product(
            ("t", "g"),
            ("default", "full", "nothing", "index {}_note"),
            ("", "id > 0", "note = 'a'", "id > 0 OR note = 'a'", "more IS NULL"),
            (None, ("id",), ("id", "note"), ("note", "more"), ("id", "note", "more")),
        ):
            name = ("public", table)
            used = server_filter(connection, name, condition)[1] if condition else frozenset[str]()
            options = TableOptions(condition, listed, filter_columns=used)
            with connection.transaction(force_rollback=True):
                connection.execute(publication_statement("p", {name: options}))
                (present,) = replica_identities(connection, "p", [name])[name]
                identity = present.as_kind(kind.format(table))
                connection.execute(identity.statement())
                assert replica_identities(connection, "p", [name])[name] == (identity,)
                refused = not identity.identity or check_refuses(options, identity)
                server = server_refuses(connection, table)
            assert refused == server, (table, kind, condition, listed)
            verdicts.add(server)
    assert verdicts == {True, False}


def check_refuses(options: TableOptions, identity: ReplicaIdentity) -> bool:
    try:
        require_covered("p", {identity.table: options}, {identity.table: [identity]})
    except SetupError:
        return True
    return False


def server_refuses(connection: psycopg.Connection[Any], table: str) -> bool:
    try:
        connection.execute(f"UPDATE {table} SET more = ''".encode())
    except (psycopg.errors.InvalidColumnReference, psycopg.errors.ObjectNotInPrerequisiteState):
        return True
    return False


@pytest.mark.long
def test_what_would_break_update_and_delete_is_refused(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text NOT NULL, more text)")
        connection.execute("CREATE UNIQUE INDEX by_note ON t (id, note)")
        bridge = new_bridge(conninfo, tables=["public.t"])
        for source, words in (
            ({"row_filters": {"public.t": "note = 'a'"}}, ("public.t", "uses note", "full")),
            ({"column_lists": {"public.t": ["note"]}}, ("public.t", "lacks id", "add id")),
            ({"column_lists": {"public.t": ["id", "x"]}}, ("no column x",)),
            ({"row_filters": {"public.t": "x = 1"}}, ("source.row_filters", '"x"')),
            ({"row_filters": {"public.t": "note ="}}, ("syntax error",)),
            (
                {"column_lists": {"public.*": ["id"]}, "replica_identity": {"public.t": "full"}},
                ("column list can't go",),
            ),
            ({"replica_identity": {"public.t": "nothing"}}, ("UPDATE and DELETE would fail",)),
            ({"replica_identity": {"public.t": "index gone"}}, ("index gone can't be",)),
        ):
            settings(bridge, row_filters=None, column_lists=None, replica_identity={})
            settings(bridge, **source)
            refused = run(bridge, "--yes")
            expected = {ExitCode.SETTINGS, ExitCode.SERVER_SETTING}
            assert refused.returncode in expected, (source, refused.stderr)
            assert all(word in refused.stderr for word in words), (source, refused.stderr)
        if connection.info.server_version >= 180000:
            connection.execute(
                "CREATE TABLE g (id int, twice int GENERATED ALWAYS AS (id * 2) STORED)"
            )
            settings(bridge, tables=["public.g"], replica_identity={"public.g": "full"})
            refused = run(bridge, "--yes")
            assert "generated columns twice" in refused.stderr, refused.stderr
            settings(bridge, replica_identity={})
            refused = run(bridge, "--yes", "--identity-full")
            assert "generated columns twice" in refused.stderr, refused.stderr
        settings(bridge, tables=["public.t"])
        # The server agrees that what is accepted does not break them, and that nothing was changed.
        settings(
            bridge,
            row_filters={"public.*": "note = 'a'"},
            column_lists={"public.t": ["id", "note"]},
            replica_identity={"public.t": "index by_note"},
        )
        told = answer(run(bridge, "--yes", "--json"))
        assert told["created"] and told["replica_identity"] == {"public.t": "index by_note"}
        connection.execute("INSERT INTO t VALUES (1, 'a')")
        connection.execute("UPDATE t SET note = 'b'")
        connection.execute("DELETE FROM t")
        assert answer(run(bridge, "--yes", "--json"))["statements"] == [], "idempotent"


@pytest.mark.long
def test_rows_move_into_and_out_of_a_row_filter_that_changes(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    """The first start makes the filter; a change reads nothing again until it is asked."""
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, amount int, secret text)")
        connection.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        connection.execute("CREATE TABLE u (id int PRIMARY KEY, secret text)")
        connection.execute("INSERT INTO t SELECT g, g, 's' FROM generate_series(1, 9) g")
        bridge = new_bridge(conninfo, tables=["public.t", "public.u"], snapshot={"mode": "initial"})
        settings(bridge, row_filters={"public.t": "amount > 5"}, column_lists={"*.u": ["id"]})
        bridge.start().streaming()
        done(bridge)
        assert answer(run(bridge, "--yes", "--json"))["statements"] == []
        connection.execute("UPDATE t SET amount = 10 WHERE id = 1")  # moves in
        connection.execute("UPDATE t SET amount = 0 WHERE id = 9")  # moves out
        connection.execute("UPDATE t SET amount = 0 WHERE id = 2")  # stays out
        connection.execute("INSERT INTO u VALUES (1, 'hidden')")
        bridge.caught_up()
        read = {("r", 6), ("r", 7), ("r", 8), ("r", 9)}
        assert kinds_and_ids(bridge) == {*read, ("c", 1), ("d", 9)}
        assert [event["after"] for event in bridge.events("u")] == [{"id": 1}]

        settings(bridge, row_filters={"public.t": "amount > 3"}, column_lists={})
        changed = run(bridge, "--yes")
        assert changed.returncode == 0, changed.stderr
        assert "slotbridge snapshot start" in changed.stderr
        assert changed.stdout.startswith("BEGIN;\nSET LOCAL lock_timeout")
        assert answer(run(bridge, "--yes", "--json"))["statements"] == []
        connection.execute("UPDATE t SET secret = 'new' WHERE id = 4")  # fits only now: an update
        connection.execute("INSERT INTO u VALUES (2, 'shown')")
        bridge.caught_up()
        assert kinds_and_ids(bridge) == {*read, ("c", 1), ("d", 9), ("u", 4)}, (
            "row 5 fits too, and nobody has asked for it"
        )
        assert {"id": 2, "secret": "shown"} in [event["after"] for event in bridge.events("u")]
        assert bridge.stop() == 0, bridge.output

        settings(bridge, row_filters={"public.t": "amount > 6"})
        assert run(bridge, "--yes").returncode == 0
        recovered(bridge, "--force")
        rows = fold(bridge, "t").by_position.values()
        assert sorted(row["id"] for row in rows) == [1, 7, 8], "row 6 is deleted"


@pytest.mark.long
def test_a_first_start_does_not_break_update_and_delete(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, amount int)")
        bridge = new_bridge(conninfo, tables=["public.t"])
        settings(bridge, row_filters={"public.t": "amount > 5"})
        assert bridge.start().exit_code() == ExitCode.SERVER_SETTING, bridge.output
        assert "source.replica_identity" in bridge.output
        made = connection.execute(
            "SELECT FROM pg_publication WHERE pubname = %s", [bridge.publication]
        )
        assert made.fetchone() is None


@pytest.mark.long
def test_replica_identities_need_the_owner_and_wait_for_no_lock(
    pair: Provider, fresh_database: str, new_bridge: NewBridge
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)")
        connection.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (9)")
        bridge = new_bridge(conninfo, tables=["public.t"])
        assert run(bridge, "--yes").returncode == 0
        settings(bridge, replica_identity={"public.t": "full"})
        with psycopg.connect(conninfo) as other:
            other.execute("SELECT FROM t1")
            locked = run(bridge, "--yes")
            assert locked.returncode == ExitCode.DEADLINE, locked.stderr
            assert "pg_locks" in locked.stderr
        role = f"r_{fresh_database}"
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        settings(bridge, conninfo=psycopg.conninfo.make_conninfo(conninfo, user=role))
        refused = run(bridge, "--yes")
        assert refused.returncode == ExitCode.PRIVILEGE_MISSING, refused.stderr
        statements = run(bridge, "--dry-run")
        assert statements.returncode == 0, statements.stderr
        connection.execute(statements.stdout.encode())  # as the owner, by psql
        assert answer(run(bridge, "--yes", "--json"))["statements"] == []
        found = connection.execute(
            "SELECT relname, relreplident::text FROM pg_class"
            " WHERE relname IN ('t', 't1') ORDER BY 1"
        )
        assert found.fetchall() == [("t", "f"), ("t1", "f")]
        settings(bridge, conninfo=conninfo, replica_identity={"*.*": "default"})
        told = json.loads(run(bridge, "--yes", "--json").stdout)
        assert told["replica_identity"] == {"public.t": "default", "public.t1": "default"}
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))
