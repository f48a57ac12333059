"""Whatever servers, databases, roles, service files and the environment set, and whatever others
have put into `public`: the services do the same, publish the same, and run nobody's code."""

import json
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg
import pytest
from psycopg import sql

from schemas.settings import SourceSettings
from tests.conftest import NewPair
from tests.promises.bridge.conftest import NewBridge, new_bridge
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import DONE
from tests.promises.failover.servers import configuration, slotfailover_process
from tests.providers import databases
from tests.providers.interface import Provider, Server, Trio
from tests.providers.roles import make_roles
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually

__all__ = ["new_bridge"]

HOSTILE: Final = {
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "quote_all_identifiers": "on",
    "datestyle": "German, DMY",
    "intervalstyle": "iso_8601",
    "timezone": "Asia/Kathmandu",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "xmlbinary": "hex",
    "standard_conforming_strings": "off",
    "array_nulls": "off",
    "row_security": "off",
    "statement_timeout": "300ms",
    "lock_timeout": "50ms",
    "idle_in_transaction_session_timeout": "300ms",
    "idle_session_timeout": "1s",
    "transaction_timeout": "1s",
    "search_path": "public, pg_catalog",
}
ENVIRONMENT: Final = {
    "PGOPTIONS": "-c quote_all_identifiers=on -c bytea_output=escape -c search_path=public",
    "PGTZ": "America/New_York",
    "PGDATESTYLE": "SQL, DMY",
    "PGCLIENTENCODING": "LATIN1",
}
TABLE_NAMES: Final = ("kinds", "people", "known")
TABLES: LiteralString = """
    CREATE EXTENSION citext;
    CREATE TYPE mood AS ENUM ('sad', 'ok');
    CREATE DOMAIN amount AS numeric(12, 2);
    CREATE TABLE kinds (
      id bigint PRIMARY KEY, note varchar(20), at timestamptz, day date, span interval, raw bytea,
      ratio float8, state mood, states mood[], names citext[], amounts amount[], class regclass,
      n int);
    CREATE TABLE people (name citext, state mood, code varchar(9), n int,
                         PRIMARY KEY (name, state, code));
    CREATE TABLE known (id uuid PRIMARY KEY, n int);
    CREATE TABLE signals (id varchar(42) PRIMARY KEY, type varchar(32) NOT NULL,
                          data varchar(2048));
    CREATE PUBLICATION bank FOR TABLE kinds WHERE (id > 0 AND id < 100000), people, known, signals;
"""
ROWS: LiteralString = """
    INSERT INTO public.kinds SELECT {first} + n, 'übrig' || n,
      '2024-03-04 05:06:07.089+00'::timestamptz, '2024-03-04', '1 mon 2 days 03:04:05.6',
      '\\x00ff', 0.1::float8 + 0.2::float8, 'ok', ARRAY['sad', 'ok']::public.mood[],
      ARRAY['A', 'b']::public.citext[], ARRAY[n + 0.5]::public.amount[], 'public.people',
      {first} + n
      FROM generate_series(1, 9) n;
    INSERT INTO public.people
      SELECT (ARRAY['a', 'B', 'c'])[1 + n % 3]::public.citext, 'ok', 'k' || n + {first}, {first} + n
        FROM generate_series(1, 9) n;
    INSERT INTO public.known
      SELECT ('00000000-0000-0000-0000-' || lpad(({first} + n)::text, 12, '0'))::uuid, {first} + n
        FROM generate_series(1, 9) n;
"""
PLANTED: LiteralString = """
    SET search_path = '';
    CREATE TABLE public.ran (who text, what text);
    GRANT INSERT ON public.ran TO PUBLIC;
    CREATE FUNCTION public.note(what text) RETURNS void LANGUAGE plpgsql AS $$
      BEGIN INSERT INTO public.ran VALUES (current_user, what);
      EXCEPTION WHEN others THEN NULL; END $$;
    DO $plant$
    DECLARE one record;
    BEGIN
      -- What pg_catalog has, and what fits a call better than that.
      FOR one IN
        SELECT proname AS name, pg_get_function_identity_arguments(oid) AS of,
               prorettype::regtype AS gives
          FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f'
           AND NOT proretset AND provariadic = 0 AND prorettype::regtype::text NOT LIKE 'any%'
           AND prorettype NOT IN ('internal'::regtype, 'record'::regtype, 'void'::regtype)
           AND pg_get_function_identity_arguments(oid) !~ 'any|internal|OUT|VARIADIC'
           AND proname IN (
             'pg_is_in_recovery', 'current_setting', 'set_config', 'pg_backend_pid', 'substr',
             'has_function_privilege', 'has_table_privilege', 'pg_get_expr', 'format_type', 'lpad',
             'pg_logical_emit_message', 'pg_current_xact_id', 'pg_current_snapshot', 'upper',
             'pg_current_wal_flush_lsn', 'pg_replication_origin_session_setup', 'to_hex',
             'pg_try_advisory_lock', 'pg_blocking_pids', 'pg_basetype', 'length', 'quote_ident',
             'array_to_string', 'string_to_array', 'current_database', 'pg_last_wal_replay_lsn')
        UNION ALL VALUES
          ('format', 'text, text', 'text'::regtype), ('format', 'text, text, text', 'text'),
          ('format', 'text, name, name', 'text'), ('format', 'text, name', 'text'),
          ('format', 'text, regprocedure, text', 'text'),
          ('jsonb_build_array', 'name, bigint, integer, text, boolean', 'jsonb'),
          ('jsonb_build_array', 'name, text, text', 'jsonb'),
          ('greatest', 'timestamptz, timestamptz', 'timestamptz'),
          ('array_append', 'oid[], oid', 'oid[]'), ('string_agg', 'text, text', 'text')
      LOOP
        EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L',
          one.name, one.of, one.gives,
          format('BEGIN PERFORM public.note(%L); RETURN NULL; END', one.name));
      END LOOP;
      FOR one IN
        SELECT oprname AS name, oprleft::regtype AS a, oprright::regtype AS b,
               oprresult::regtype AS gives, oid
          FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace
           AND oprname IN ('=', '<>', '<', '>', '>=', '<=', '||', '-')
           AND oprleft::regtype::text = ANY ('{text,integer,bigint,oid,name,pg_lsn,uuid}')
           AND oprright::regtype::text = ANY ('{text,integer,bigint,oid,name,pg_lsn,uuid}')
        UNION ALL
        SELECT o.name, t.kind::regtype, t.kind::regtype, 'boolean'::regtype, 1
          FROM unnest(ARRAY['=', '>', '>=', '<', '<=', '<>']) o (name),
               unnest(ARRAY['public.mood', 'character varying', 'boolean', '"char"']) t (kind)
        UNION ALL VALUES ('=', 'oid'::regtype, 'bigint'::regtype, 'boolean'::regtype, 2::oid),
          ('=', 'oid', 'integer', 'boolean', 3),
          ('||', 'text', 'name', 'text', 2), ('||', 'name', 'text', 'text', 2)
      LOOP
        EXECUTE format('CREATE FUNCTION public.op_%s_%s(%s, %s) RETURNS %s LANGUAGE plpgsql AS %L',
          one.oid, md5(one.name || one.a::text), one.a, one.b, one.gives,
          format('BEGIN PERFORM public.note(%L); RETURN NULL; END', one.a::text || one.name));
        EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s,'
          ' FUNCTION = public.op_%s_%s)', one.name, one.a, one.b, one.oid,
          md5(one.name || one.a::text));
      END LOOP;
    END $plant$;
    CREATE FUNCTION public.as_text(public.mood) RETURNS text LANGUAGE plpgsql
      AS $$ BEGIN PERFORM public.note('cast'); RETURN 'x'; END $$;
    CREATE CAST (public.mood AS text) WITH FUNCTION public.as_text(public.mood) AS ASSIGNMENT;
    CREATE FUNCTION public.as_json(public.mood) RETURNS json LANGUAGE plpgsql
      AS $$ BEGIN PERFORM public.note('cast'); RETURN '1'; END $$;
    CREATE CAST (public.mood AS json) WITH FUNCTION public.as_json(public.mood) AS ASSIGNMENT;
    CREATE FUNCTION public.is_fine(anyelement) RETURNS boolean LANGUAGE plpgsql
      AS $$ BEGIN PERFORM public.note('type'); RETURN true; END $$;
    CREATE DOMAIN public.text AS pg_catalog.text CHECK (public.is_fine(value));
    CREATE DOMAIN public.uuid AS pg_catalog.uuid CHECK (public.is_fine(value));
    CREATE DOMAIN public.pg_lsn AS pg_catalog.pg_lsn CHECK (public.is_fine(value));
    CREATE DOMAIN public.oid AS pg_catalog.oid CHECK (public.is_fine(value));
"""
CALLS: LiteralString = (
    "SELECT funcname, calls FROM pg_catalog.pg_stat_user_functions"
    " WHERE schemaname OPERATOR(pg_catalog.=) 'public' AND funcname !~ '^(citext|regexp)'"
)


class Boss:
    """A server as a superuser reaches it whom nothing protects from the settings."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def conninfo(self, dbname: str = "postgres", **extra: Any) -> str:
        return self._server.conninfo(dbname, **{"user": "boss", **extra})


def run(server: Server, dbname: str, *statements: str) -> None:
    with databases.connect(server, dbname) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def make_hostile(trio: Trio) -> None:
    """Set all of HOSTILE for servers, the database and all roles but the test's own."""
    with databases.connect(trio.primary, trio.dbname) as connection:
        me = sql.Identifier(connection.info.user)
        own = "SELECT name, boot_val FROM pg_settings WHERE lower(name) = ANY (%s)"
        for name, value in connection.execute(own, [[*HOSTILE]]).fetchall():
            value = "" if name == "search_path" else value
            connection.execute(
                sql.SQL("ALTER ROLE {} SET {} = {}").format(
                    me, sql.Identifier(name), sql.Literal(value)
                )
            )
        connection.execute("CREATE ROLE boss SUPERUSER LOGIN; CREATE ROLE app LOGIN")
        connection.execute(
            sql.SQL(
                "ALTER DATABASE {} OWNER TO app; ALTER DATABASE {} SET search_path ="
                " public, pg_catalog; ALTER TYPE public.mood OWNER TO app"
            ).format(sql.Identifier(trio.dbname), sql.Identifier(trio.dbname))
        )
    replayed(trio)
    with psycopg.connect(trio.primary.conninfo(trio.dbname, user="app"), autocommit=True) as app:
        app.execute(PLANTED)
    for server in (trio.primary, trio.standby):
        with databases.connect(server) as connection:
            for name, value in {**HOSTILE, "track_functions": "all"}.items():
                if name == "search_path":
                    continue
                connection.execute(
                    sql.SQL("ALTER SYSTEM SET {} = {}").format(
                        sql.Identifier(name), sql.Literal(value)
                    )
                )
            connection.execute("SELECT pg_reload_conf()")


def replayed(trio: Trio) -> None:
    """Wait until the standby has what the primary has."""
    with databases.connect(trio.primary) as one, databases.connect(trio.standby) as other:
        row = one.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
        assert row is not None
        behind = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
        eventually(lambda: other.execute(behind, [row[0]]).fetchone() == (True,), what="replay")


def nobody_ran(server: Server, dbname: str) -> None:
    with databases.connect(server, dbname) as connection:
        assert connection.execute("SELECT * FROM public.ran").fetchall() == []
        assert connection.execute(CALLS).fetchall() == []


def values(bridge: Bridge, table: str) -> list[Any]:
    """The rows of inserts and of the snapshot, without the place of a row among the others."""
    found = [(one["after"]["n"], one["op"], one["after"]) for one in bridge.events(table)]
    return sorted((one for one in found if one[1] in "cr"), key=lambda one: one[0])


def environment(folder: Path, trio: Trio, user: str) -> dict[str, str]:
    """The environment of the services, with a service file that names both hosts."""
    path = folder / "services.conf"
    path.write_text(
        f"[bank]\nhost=127.0.0.1,127.0.0.1\nport={trio.primary.port},{trio.standby.port}\n"
        f"dbname={trio.dbname}\nuser={user}\noptions=-c intervalstyle=sql_standard\n"
    )
    return {**ENVIRONMENT, "PGSERVICEFILE": str(path)}


def test_the_whole_way_under_hostile_settings_and_beside_planted_objects(
    new_pair: NewPair, new_bridge: NewBridge, tmp_path: Path, topic_prefix: str
) -> None:
    trio = new_pair()
    primary, standby = trio.primary.conninfo(trio.dbname), trio.standby.conninfo(trio.dbname)
    run(trio.primary, trio.dbname, TABLES, ROWS.format(first=0))
    small = {"mode": "initial", "chunk_rows_max": 4}
    plain = new_bridge(primary, publication="bank", snapshot=small, prefix=f"{topic_prefix}p")
    _publish(plain.start(), trio)
    assert plain.stop() == 0, plain.output
    run(trio.primary, trio.dbname, f"SELECT pg_drop_replication_slot('{plain.slot}')")
    run(trio.primary, trio.dbname, *(f"DELETE FROM {table} WHERE n > 100" for table in TABLE_NAMES))

    make_hostile(trio)
    roles = make_roles(
        Boss(trio.primary),  # type: ignore[arg-type]
        trio.dbname,
        publication="bank",
        snapshot=True,
    )
    nobody_ran(trio.primary, trio.dbname)
    given = environment(tmp_path, trio, roles.bridge)
    signalled = {**small, "signal_table": "public.signals"}
    signalled["conninfo"] = trio.standby.conninfo(trio.dbname, user=roles.snapshot)
    bridge = new_bridge("service=bank", publication="bank", snapshot=signalled)
    _publish(bridge.start(**given), trio)
    for table in TABLE_NAMES:
        assert values(bridge, table) == values(plain, table), table
    _verify_reads(trio, roles.tables, tmp_path)
    _ask_for_rows(bridge, trio)
    nobody_ran(trio.primary, trio.dbname)
    nobody_ran(trio.standby, trio.dbname)

    await_ready(trio.primary, trio.standby, bridge.slot)
    names = {"a": trio.primary, "b": trio.standby}
    nodes = {one: s.conninfo(trio.dbname, user=roles.failover) for one, s in names.items()}
    config = str(configuration(tmp_path, trio, nodes=nodes, subscribers={}))
    before = f"import os; os.environ.update({given!r});"
    checked = slotfailover_process("check", "--config", config, before=before)
    assert checked.code == 0, checked.out + checked.err
    nobody_ran(trio.primary, trio.dbname)
    trio.primary.kill()
    ran = slotfailover_process("failover", "--config", config, "--yes", before=before)
    assert ran.code == 0, ran.out + ran.err
    run(trio.standby, trio.dbname, "INSERT INTO public.known VALUES (gen_random_uuid(), 99)")
    bridge.streaming(standby)
    bridge.caught_up(standby)
    assert [one["op"] for one in bridge.events("known") if one["after"]["n"] == 99] == ["c"]
    assert bridge.stop() == 0, bridge.output
    nobody_ran(trio.standby, trio.dbname)


def _publish(bridge: Bridge, trio: Trio) -> None:
    """Let it publish the rows that are there, and as many that are written then."""
    primary = trio.primary.conninfo(trio.dbname)
    bridge.streaming(primary)
    eventually(lambda: DONE in bridge.output, what="the snapshot is done")
    run(trio.primary, trio.dbname, ROWS.format(first=1000))
    bridge.caught_up(primary)


def _ask_for_rows(bridge: Bridge, trio: Trio) -> None:
    """A signal has its rows where a condition's operators are pg_catalog's, and none elsewhere."""
    before = [op for _, op, _ in values(bridge, "people")].count("r")
    for id_, table, condition in (
        ("own type", "public.people", "state::text = 'ok'"),
        ("planted operator", "public.kinds", "note = 'übrig1'"),
    ):
        data = {
            "data-collections": [table],
            "additional-conditions": [{"data-collection": table, "filter": condition}],
        }
        with databases.connect(trio.primary, trio.dbname) as connection:
            signal = (id_, "execute-snapshot", json.dumps(data))
            connection.execute("INSERT INTO public.signals VALUES (%s, %s, %s)", signal)
    eventually(
        lambda: (
            [one[2]["note"] for one in values(bridge, "kinds") if one[1] == "r"].count("übrig1") > 1
        ),
        what="the rows of a signal come",
    )
    assert "with a condition on 'state'" in bridge.output
    assert [op for _, op, _ in values(bridge, "people")].count("r") == before


def _verify_reads(trio: Trio, role: str, folder: Path) -> None:
    """What `slottables verify` reads of the source is in the forms that it compares."""
    postgres = pytest.importorskip("spark_consumers.verify.postgres")
    source = SourceSettings.model_validate(
        {
            "conninfo": trio.primary.conninfo(trio.dbname, user=role),
            "slot": "s",
            "publication": "bank",
        }
    )
    with postgres.snapshot(source) as connection:
        columns = postgres.source_columns(connection, "public", "kinds")
        row_filter = postgres.published(connection, "bank")["public.kinds"].row_filter
        postgres.export(connection, ("public", "kinds"), columns, row_filter, folder)
    first = json.loads((folder / "000000.json").read_text().splitlines()[0])
    told = dict(zip((column.name for column in columns), first.values(), strict=True))
    assert (told["span"], told["raw"], told["state"]) == ("1 mon 2 days 03:04:05.6", "00ff", "ok")
    assert (told["class"], told["states"]) == ("public.people", ["sad", "ok"])


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "EUC_TW"])
def test_a_database_of_another_encoding_is_published(
    encoding: str, pair: Provider, new_bridge: NewBridge, topic_prefix: str
) -> None:
    """Neither is one that psycopg decodes by itself."""
    dbname, known = f"of_{topic_prefix}", databases.origins(pair.primary)
    run(
        pair.primary,
        "postgres",
        f"CREATE DATABASE {dbname} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0",
    )
    databases.await_copy(pair.standby, dbname)
    conninfo = pair.primary.conninfo(dbname, client_encoding="UTF8")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
        connection.execute("CREATE TABLE bare (note text)")
        connection.execute("INSERT INTO t VALUES (1, '中'); INSERT INTO bare VALUES ('中')")
        bridge = new_bridge(pair.primary.conninfo(dbname), snapshot={}).start().streaming(conninfo)
        eventually(lambda: DONE in bridge.output, what="the snapshot is done")
        connection.execute("INSERT INTO t VALUES (2, '文')")
        bridge.caught_up(conninfo)
    assert bridge.stop() == 0, bridge.output
    assert bridge.start().streaming(conninfo).stop() == 0, bridge.output
    assert sorted(one["after"]["note"] for one in bridge.events("t")) == ["中", "文"]
    assert [one["after"]["note"] for one in bridge.events("bare")] == ["中"]
    databases.remove(pair.primary, dbname, keep_origins=known)
