"""The bridge and its status as the role that sql/roles.sql makes, and with odd names everywhere."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import PATIENCE_S, Bridge
from tests.promises.bridge.snapshots import INITIAL, fill, read_all, told
from tests.promises.bridge.test_preflight import Examined
from tests.providers import databases
from tests.providers.interface import Provider
from tests.providers.roles import ODD, make_roles
from tests.providers.waiting import eventually, patient_ms

TABLES = ('"; drop table x; --', "MixedCase", "x" * 63, "😀é", "a.b c")


def test_bridge_and_status_run_as_the_scripts_role(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    admin = pair.primary.conninfo(fresh_database)
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE plain (id int)")
        suffix = ODD + topic_prefix
        made = make_roles(
            pair.primary, fresh_database, publication=f"p_{topic_prefix}", suffix=suffix
        )
        assert "UPDATE and DELETE fail in these published tables" in made.told
        assert "replica identity: public.plain\n" in made.told
        rights = "SELECT rolsuper, rolreplication FROM pg_roles WHERE rolname = %s"
        assert connection.execute(rights, [made.bridge]).fetchone() == (False, True)
        bridge = new_bridge(pair.primary.conninfo(fresh_database, user=made.bridge))
        bridge.start().streaming(admin)
        connection.execute("INSERT INTO t SELECT generate_series(1, 10)")
        bridge.caught_up(admin)
        code, status = _status(bridge)
        assert code == 0, status
        (host,) = status["hosts"]
        assert (host["problem"], host["role"], status["kafka_problem"]) == (None, "primary", None)
        assert status["progress"] is not None
        assert bridge.stop() == 0, bridge.output
        bridge.assert_kafka_equals(admin, "t")


@pytest.mark.long
def test_rows_are_read_from_a_standby_as_the_scripts_role(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    """preflight names what is missing; the script grants it on the primary."""
    admin, publication = pair.primary.conninfo(fresh_database), f"p_{topic_prefix}"
    suffix = ODD + topic_prefix
    fill(admin, 30)
    made = make_roles(pair.primary, fresh_database, publication=publication, suffix=suffix)
    with psycopg.connect(admin, autocommit=True) as connection:
        role = sql.Identifier(made.snapshot)
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
    other = pair.standby.conninfo(fresh_database, user=made.snapshot)
    conninfo = pair.primary.conninfo(fresh_database, user=made.bridge)
    bridge = new_bridge(conninfo, snapshot={**INITIAL, "conninfo": other})
    missing = {"snapshot-standby-hidden", "snapshot-standby-denied"}

    def named() -> set[str]:
        return {name for name, _ in Examined(bridge).names()} & missing

    eventually(lambda: named() == missing, what="preflight names both grants")
    make_roles(pair.primary, fresh_database, publication=publication, suffix=suffix, snapshot=True)
    eventually(lambda: not named(), what="the standby has the grants")
    read_all(bridge, admin)
    assert bridge.stop() == 0, bridge.output
    assert {one.read_from for one in told(bridge)} == {"standby"}


def test_a_missing_grant_of_the_role_is_named(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    weak = sql.Identifier(f"weak_{topic_prefix}")
    with psycopg.connect(pair.primary.conninfo(fresh_database), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(weak))
        bridge = new_bridge(
            pair.primary.conninfo(fresh_database, user=f"weak_{topic_prefix}"),
            connect_deadline_ms=patient_ms(1_000),
        )
        assert bridge.start().exit_code() == 20, bridge.output
        assert "slotbridge docs set-up" in bridge.output.splitlines()[-1]
        connection.execute(sql.SQL("DROP ROLE {}").format(weak))


@pytest.mark.long
def test_names_are_quoted_from_the_table_to_kafka(
    pair: Provider, fresh_database: str, new_bridge: NewBridge, topic_prefix: str
) -> None:
    conninfo = pair.primary.conninfo(fresh_database)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for name in TABLES:
            schema, table = sql.Identifier(name), sql.Identifier(name, name)
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
            connection.execute(
                sql.SQL("CREATE TABLE {} ({} int PRIMARY KEY, note text)").format(table, schema)
            )
        bridge = new_bridge(conninfo, publication=f"P{ODD}").start().streaming()
        for number, name in enumerate(TABLES):
            table = sql.Identifier(name, name)
            connection.execute(sql.SQL("INSERT INTO {} VALUES (%s, 'a')").format(table), [number])
            connection.execute(sql.SQL("UPDATE {} SET note = 'b'").format(table))
            connection.execute(sql.SQL("DELETE FROM {}").format(table))
        bridge.caught_up()
        code, status = _status(bridge)
        assert (code, status["hosts"][0]["problem"]) == (0, None)
    assert bridge.stop() == 0, bridge.output
    shapes = [json.loads(value) for _key, value in bridge.records("schema") if value]
    assert {(shape["schema"], shape["table"]) for shape in shapes} == {(n, n) for n in TABLES}
    found = {}
    for topic in bridge.topics():
        if topic.startswith(f"{topic_prefix}.") and topic.count(".") > 1:
            values = [value for _key, value in bridge.records(topic[len(topic_prefix) + 1 :])]
            events = [json.loads(value) for value in values if value is not None]
            found[events[0]["source"]["table"]] = [event["op"] for event in events]
            assert events[0]["after"] == {
                events[0]["source"]["table"]: TABLES.index(events[0]["source"]["table"]),
                "note": "a",
            }
    assert found == {name: ["c", "u", "d"] for name in TABLES}


def _status(bridge: Bridge) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [
            Path(sys.executable).parent / "slotbridge",
            *("status", "--json", "--config", bridge.config),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
def test_database_publication_and_slot_of_odd_and_longest_names(
    pair: Provider, new_bridge: NewBridge, topic_prefix: str
) -> None:
    """63 bytes each, but the slot: PostgreSQL lets it have lower-case letters, digits and _."""
    database = _longest("d'\"; drop table x; --é🐘MixedCase", topic_prefix)
    known = databases.origins(pair.primary)
    databases.create(pair.primary, database)
    databases.await_copy(pair.standby, database)
    conninfo = pair.primary.conninfo(database)
    bridge = new_bridge(
        conninfo,
        publication=_longest("P'\"; drop table x; --é🐘", topic_prefix),
        slot=f"{topic_prefix}_".ljust(40, "0"),
    )
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        bridge.start().streaming()
        connection.execute("INSERT INTO t SELECT generate_series(1, 10)")
        bridge.caught_up()
        code, status = _status(bridge)
        assert (code, status["hosts"][0]["problem"]) == (0, None)
        assert bridge.stop() == 0, bridge.output
        bridge.start().streaming()
        assert bridge.stop() == 0, bridge.output
    bridge.assert_kafka_equals(conninfo, "t")
    assert {event["source"]["db"] for event in bridge.events("t")} == {database}
    databases.remove(pair.primary, database, keep_origins=known)


def _longest(start: str, end: str) -> str:
    """`start` and `end`, and between them what makes it 63 bytes long."""
    return start + "x" * (63 - len((start + end).encode())) + end
