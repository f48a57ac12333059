"""`slotbridge recover` on another cluster, upgraded or restored: the same topics go on."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from schemas.errors import ExitCode
from services.testbed.bed import Bed
from services.testbed.other_postgres import major_of
from services.testbed.pair import create_database
from services.testbed.postgres import PostgresServer
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.recover_process import (
    assert_equal,
    assert_goes_on,
    change_unseen,
    fill,
    recover,
    recovered,
    touch,
)
from tests.promises.bridge.running import Bridge
from tests.promises.bridge.snapshots import read_all
from tests.providers.embedded import Embedded
from tests.providers.interface import Provider
from tests.providers.tokens import token_of

DATABASE = "app"
FORMER = os.environ.get("SLOTBRIDGE_FORMER_POSTGRES", "")
"""The `bin` folder of a whole PostgreSQL 17, with pg_controldata and pg_resetwal."""
pytestmark = pytest.mark.since_18


@pytest.fixture
def bed(provider: Provider) -> Bed:
    if not isinstance(provider, Embedded):
        pytest.skip("the servers of containers can't be upgraded")
    return provider.bed


@pytest.fixture
def clusters(
    bed: Bed, request: pytest.FixtureRequest
) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """The former cluster, which runs, and the new one, which is empty and has the same port.

    The parameter: the programs of the former one, if they are another version's.
    """
    programs = getattr(request, "param", "")
    former, new = bed.server("former"), bed.server("new")
    if programs:
        former = PostgresServer(
            *("former", former.data),
            programs=Path(programs),
            processes=bed.processes,
            user=bed.run_as,
            major=major_of(programs),
        )
    new.port = former.port
    try:
        former.create()
        former.start()
        new.create()
        create_database(former, DATABASE)
        yield former, new
    finally:
        for server in (former, new):
            server.discard()


@pytest.fixture
def stopped(clusters: tuple[PostgresServer, PostgresServer], new_bridge: NewBridge) -> Bridge:
    """It has published all changes of the former cluster, which was stopped before it.

    The other way round pg_upgrade refuses the slot: the bridge's last writes are not confirmed.
    """
    conninfo = clusters[0].conninfo(DATABASE)
    bridge = new_bridge(conninfo, snapshot={"mode": "initial"})
    with psycopg.connect(conninfo, autocommit=True) as connection:
        fill(connection)
        read_all(bridge)
        touch(connection)
    bridge.caught_up()
    clusters[0].stop()
    assert bridge.stop() == 0, bridge.output
    return bridge


def number(connection: psycopg.Connection[Any], query: LiteralString) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def upgrade(former: PostgresServer, new: PostgresServer) -> None:
    done = new.run_tool(
        "pg_upgrade",
        [
            *("--old-datadir", former.data, "--new-datadir", new.data),
            *("--old-bindir", former.programs, "--new-bindir", new.programs),
            *("--username", "postgres", "--socketdir", new.data, "--no-sync", "--copy"),
        ],
        check=False,
        cwd=new.data,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    new.start()


def restore(former: PostgresServer, new: PostgresServer) -> None:
    former.start()
    dump = former.data / "dump.sql"
    former.run_tool("pg_dump", ["--dbname", DATABASE, "--file", dump])
    former.stop()
    new.start()
    create_database(new, DATABASE)
    new.run_tool("psql", ["--quiet", "--dbname", DATABASE, "--file", dump])


@pytest.mark.long
@pytest.mark.parametrize(
    ("clusters", "take_over", "slots"),
    [
        pytest.param("", upgrade, 1, id="pg_upgrade"),
        pytest.param("", restore, 0, id="pg_dump"),
        pytest.param(
            *(FORMER, upgrade, 1),
            id="pg_upgrade from another version",
            marks=pytest.mark.skipif(not FORMER, reason="not judged: SLOTBRIDGE_FORMER_POSTGRES"),
        ),
    ],
    indirect=["clusters"],
)
def test_topics_go_on_after_an_upgrade(
    stopped: Bridge,
    clusters: tuple[PostgresServer, PostgresServer],
    take_over: Callable[[PostgresServer, PostgresServer], None],
    slots: int,
) -> None:
    """What was written to the new cluster before the repair is there once, too."""
    bridge, new = stopped, clusters[1]
    take_over(*clusters)
    conninfo = new.conninfo(DATABASE)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        assert number(connection, "SELECT count(*) FROM pg_replication_slots") == slots
        identifier = number(connection, "SELECT system_identifier FROM pg_control_system()")
        change_unseen(connection)
    assert bridge.start().exit_code() == ExitCode.WRONG_DATABASE, bridge.output
    wrong = recover(bridge, "--accept", bridge.token.replace(str(identifier), "1"))
    assert wrong.returncode == ExitCode.WRONG_DATABASE, wrong.stderr
    assert token_of(wrong.stderr) == bridge.token and "not used" in wrong.stderr
    (table,) = recovered(bridge, "--accept", bridge.token).tables.values()
    assert (table.created, table.updated, table.deleted) == (5, 11, 5)
    assert_equal(bridge, conninfo)
    assert_goes_on(bridge, conninfo)
    assert bridge.start().streaming().stop() == 0, bridge.output
