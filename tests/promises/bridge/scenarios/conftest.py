"""One database, its bridge, and the verdict of the oracle."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from tests.conftest import OLDEST_POSTGRES, database
from tests.marks import long_but
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.oracle import Copy, assert_rebuilt
from tests.promises.bridge.running import Bridge
from tests.providers.databases import Connection
from tests.providers.interface import Provider

SMALL = "-c logical_decoding_work_mem=64kB"


@dataclass
class Scene:
    """A database whose changes the bridge follows; large transactions are streamed."""

    connection: Connection
    bridge: Bridge
    new_bridge: NewBridge

    def configure(self, **settings: Any) -> None:
        """A bridge with these settings, before the start."""
        self.bridge = self.new_bridge(self.bridge.conninfo, **settings)

    def run(self, *statements: str) -> None:
        """Each statement in a transaction of its own."""
        for statement in statements:
            self.connection.execute(statement.encode())

    def together(self, *statements: str) -> None:
        """All statements in one transaction."""
        self.run("BEGIN", *statements, "COMMIT")

    def other(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Another connection, whose transactions end when they are told to."""
        return psycopg.connect(self.bridge.conninfo)

    def publish(self, text: str) -> None:
        """`CREATE PUBLICATION <the bridge's> <text>`, instead of one for all tables."""
        self.run(f"CREATE PUBLICATION {self.bridge.publication} {text}")

    def alter(self, text: str) -> None:
        """`ALTER PUBLICATION <the bridge's> <text>`."""
        self.run(f"ALTER PUBLICATION {self.bridge.publication} {text}")

    def start(self, **environment: str) -> None:
        """The bridge streams."""
        self.bridge.start(**environment).streaming()

    def finish(self, *, unknown: int = 0, where: Mapping[str, str] | None = None) -> Copy:
        """Kafka has everything, and it makes the tables that the publication has."""
        self.bridge.caught_up()
        assert self.bridge.stop() == 0, self.bridge.output
        return assert_rebuilt(self.bridge, unknown=unknown, where=where)

    def streamed(self) -> int:
        """How many transactions the server has streamed while they were in progress."""
        row = self.connection.execute(
            "SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = %s",
            [self.bridge.slot],
        ).fetchone()
        assert row is not None
        return int(row[0])


SERVERS = [
    pytest.param("pair", id="postgres"),
    pytest.param("oldest_pair", id=f"postgres-{OLDEST_POSTGRES}"),
]


@pytest.fixture(params=long_but(SERVERS[0], SERVERS))
def scene(request: pytest.FixtureRequest, new_bridge: NewBridge) -> Iterator[Scene]:
    """A Scene whose bridge is not started yet: on the session's PostgreSQL and on the oldest one.

    The marker `since_18` leaves the oldest one out. On the oldest one, `make test` runs only what
    asks for it by `@pytest.mark.parametrize("scene", SERVERS, indirect=True)`.
    """
    oldest = request.param == "oldest_pair"
    if oldest and request.node.get_closest_marker("since_18"):
        pytest.skip("this needs PostgreSQL 18")
    pair: Provider = request.getfixturevalue(request.param)
    with database(pair.primary, pair.standby) as name:
        conninfo = pair.primary.conninfo(name, options=SMALL)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            yield Scene(connection, new_bridge(conninfo), new_bridge)
