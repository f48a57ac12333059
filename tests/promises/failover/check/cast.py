"""The servers of PostgreSQL's 040_standby_failover_slots_sync.pl, and what its steps ask."""

import contextlib
from pathlib import Path

import psycopg
import pytest

from services.testbed.bed import Bed
from services.testbed.pair import clone
from services.testbed.postgres import PostgresServer
from tests.promises.failover.check.examining import examiner_of, quoted
from tests.promises.failover.servers import ask, tell
from tests.providers.interface import Trio
from tests.providers.waiting import eventually

DB = "postgres"
SETTINGS: dict[str, str | int] = {"autovacuum": "off", "sync_replication_slots": "off"}


class Cast:
    """primary, standby1, standby2, cascading, subscriber1, subscriber2: made when asked for."""

    def __init__(self, bed: Bed, folder: Path, exits: contextlib.ExitStack) -> None:
        self._bed = bed
        self._folder = folder
        self._exits = exits
        self.primary = self._lone("publisher")
        self.subscriber1 = self._lone("subscriber1")
        self.standby1 = self._server("standby1")
        self.standby2 = self._server("standby2")
        self.cascading = self._server("cascading")
        self.up = {"a": self.primary}

    def subscriber(self, name: str) -> PostgresServer:
        """A further subscriber."""
        return self._lone(name)

    def standby(
        self, name: str, source: PostgresServer, slot: str, *, start: bool = True
    ) -> PostgresServer:
        """Clone `source` into the node of that name (b standby1, c standby2, d cascading)."""
        server = {"b": self.standby1, "c": self.standby2, "d": self.cascading}[name]
        clone(source, server, slot=slot, dbname=DB)
        if start:
            server.start()
        self.up[name] = server
        return server

    def verdict(self, *checks: str, nodes: str = "", standby: str = "") -> dict[str, bool]:
        """Wait until `slotfailover check` finds exactly these; slot -> whether it is ready."""
        chosen = {n: s.conninfo() for n, s in self.up.items() if not nodes or n in nodes}
        trio = Trio(self.primary, self.standby1, self.subscriber1, DB)
        examiner = examiner_of(trio, self._folder, nodes=chosen)
        option = ["--standby", standby] if standby else []
        examiner.expect(*checks, options=option)
        report = examiner.run("--json", *option).json
        return {slot["slot"]: slot["ready"] for slot in report["slots"]}

    def caught_up(self, *standbys: PostgresServer) -> None:
        """wait_for_replay_catchup."""
        target = ask(self.primary, "SELECT pg_current_wal_lsn()::text")
        for standby in standbys:
            query = f"SELECT pg_last_wal_replay_lsn() >= '{target}'"
            eventually(lambda s=standby, q=query: ask(s, q), what="replay")  # type: ignore[misc]

    def synchronize(self, standby: PostgresServer) -> None:
        """What the primary has, then pg_sync_replication_slots()."""
        self.caught_up(standby)
        tell(standby, "SELECT pg_sync_replication_slots()")

    def _lone(self, name: str) -> PostgresServer:
        server = self._server(name)
        server.create(SETTINGS)
        server.start()
        return server

    def _server(self, name: str) -> PostgresServer:
        server = self._bed.server(f"mirror-{name}")
        self._exits.callback(server.discard)
        return server


def slot(server: PostgresServer, name: str, columns: str, where: str = "true") -> object:
    """Columns of a slot, None where there is no such slot."""
    return ask(
        server,
        f"SELECT {columns} FROM pg_replication_slots WHERE slot_name = {quoted(name)} AND {where}",
    )


def released(server: PostgresServer, name: str) -> None:
    """Wait until the slot is inactive."""
    eventually(lambda: slot(server, name, "NOT active"), what=f"{name} is inactive")


def create_slot(server: PostgresServer, name: str, plugin: str = "pgoutput") -> None:
    """A failover slot."""
    arguments = f"{quoted(name)}, {quoted(plugin)}, false, false, true"
    tell(server, f"SELECT pg_create_logical_replication_slot({arguments})")


def count(server: PostgresServer) -> object:
    """How many rows of tab_int it has."""
    return ask(server, "SELECT count(*) FROM tab_int")


def refused(server: PostgresServer, statement: str, message: str, **connection: str) -> None:
    """The statement fails with this message."""
    with psycopg.connect(server.conninfo(DB, **connection), autocommit=True) as session:
        with pytest.raises(psycopg.Error) as refusal:
            session.execute(statement.encode())
        assert message in str(refusal.value)
