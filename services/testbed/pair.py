"""A primary and its streaming standby with slot synchronization, as in docs/start/set-up.md.

    primary   physical slot standby_1; synchronized_standby_slots and, by option,
              synchronous_standby_names name the standby (ALTER SYSTEM, after the base backup)
    standby   primary_slot_name, primary_conninfo with dbname (pg_basebackup -R writes none)

What names the other node is set on the node it belongs to and never copied: a promoted standby
waits for nobody.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import psycopg
from psycopg import sql

from schemas.errors import ExitCode, Retryable
from services.testbed import procfs
from services.testbed.postgres import PostgresServer, quoted

STANDBY_SLOT = "standby_1"
"""The standby's physical slot on the primary, and its application_name."""
_STREAMING_TIMEOUT_S = 600.0


class Pair:
    """`primary` and `standby` by the role they were made with; a failover does not swap the names.

    `dbname` is made on the primary, `synchronous` makes every commit wait for the standby.
    """

    def __init__(
        self,
        primary: PostgresServer,
        standby: PostgresServer,
        *,
        dbname: str,
        synchronous: bool = True,
    ) -> None:
        self.primary = primary
        self.standby = standby
        self.dbname = dbname
        self.synchronous = synchronous

    def start(self, settings: Mapping[str, str | int] | None = None) -> None:
        """Make both servers and wait until the standby streams. `settings` go to both.

        Raise what PostgresServer raises, and Retryable (DEADLINE) when it does not stream.
        """
        self.primary.create(settings)
        self.primary.start()
        await_standby = prepare_primary(self.primary, self.dbname)
        clone(self.primary, self.standby, slot=STANDBY_SLOT, dbname=self.dbname)
        self.standby.start()
        await_standby(self.synchronous)


class Reachable(Protocol):
    """A server, wherever it runs."""

    def conninfo(self, dbname: str = "postgres", **extra: Any) -> str:
        """Return a connection string of the server's superuser."""
        ...


def prepare_primary(primary: Reachable, dbname: str) -> Callable[[bool], None]:
    """Make the database and the standby's slot; return what is to be called once it is started.

    That waits until the standby streams, then lets logical consumers and, if its argument
    `synchronous` is true, commits wait for it. Raise Retryable (DEADLINE) if it never streams.
    """
    create_database(primary, dbname)
    slot = sql.SQL("SELECT pg_create_physical_replication_slot({}, true)").format(STANDBY_SLOT)
    execute(primary, slot)

    def await_standby(synchronous: bool) -> None:
        _await_streaming(primary)
        set_parameter(primary, "synchronized_standby_slots", STANDBY_SLOT)
        if synchronous:
            set_parameter(primary, "synchronous_standby_names", STANDBY_SLOT)

    return await_standby


def standby_settings(source: Reachable, *, slot: str, dbname: str) -> str:
    """Return lines for postgresql.auto.conf of a standby of `source` that streams through `slot`.

    They override what a copied file says of the source's own standbys. `dbname` is what the slot
    synchronization worker connects to.
    """
    values = {
        "primary_conninfo": source.conninfo(dbname, application_name=slot),
        "primary_slot_name": slot,
        "synchronized_standby_slots": "",
        "synchronous_standby_names": "",
    }
    return "".join(f"{name} = {quoted(value)}\n" for name, value in values.items())


def clone(source: PostgresServer, target: PostgresServer, *, slot: str, dbname: str) -> None:
    """Make `target` a standby of `source` (pg_basebackup) that streams through `slot`.

    `dbname` is what the slot synchronization worker connects to. `target` is not started.
    """
    target.make_data_folder()
    target.run_tool(
        "pg_basebackup",
        [
            *("-d", source.conninfo(), "-D", target.data),
            *("--checkpoint=fast", "--wal-method=stream", "--no-sync", "--no-manifest"),
        ],
    )
    make_standby(source, target, slot=slot, dbname=dbname)


def make_standby(source: PostgresServer, target: PostgresServer, *, slot: str, dbname: str) -> None:
    """Set up the stopped server `target` as a standby of `source`, from its next start on."""
    with (target.data / "postgresql.auto.conf").open("a", encoding="utf-8") as file:
        file.write(standby_settings(source, slot=slot, dbname=dbname))
    (target.data / "standby.signal").touch()


def hasten_slot_sync(primary: str, standby: str) -> None:
    """Let the slots of `primary` be synchronized now; both are conninfo of a superuser.

    A new slot becomes persistent on the standby only where a running-transactions record gives its
    copy a consistent start (the primary logs one in 15 s), and an idle worker naps up to 30 s
    (a reload wakes it). Measured for a new slot: 26 s without this, 0.4 s with it.
    """
    with psycopg.connect(primary, autocommit=True) as connection:
        connection.execute("SELECT pg_log_standby_snapshot()")
    with psycopg.connect(standby, autocommit=True) as connection:
        connection.execute("SELECT pg_reload_conf()")


def create_database(server: Reachable, dbname: str) -> None:
    """Make the database `dbname` unless it exists."""
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [dbname])
        if known.fetchone() is None:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(dbname)))


def set_parameter(server: Reachable, name: str, value: str) -> None:
    """Set a parameter by ALTER SYSTEM on a running server, and reload."""
    execute(server, sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), value))
    execute(server, sql.SQL("SELECT pg_reload_conf()"))


def execute(server: Reachable, statement: sql.SQL | sql.Composed) -> None:
    """Run one statement in autocommit mode as the superuser, in the database postgres."""
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute(statement)


def _await_streaming(primary: Reachable) -> None:
    """Wait until the standby streams. Raise Retryable after _STREAMING_TIMEOUT_S."""
    query = sql.SQL(
        "SELECT count(*) FROM pg_stat_replication"
        " WHERE application_name = {} AND state = 'streaming'"
    ).format(STANDBY_SLOT)
    with psycopg.connect(primary.conninfo(), autocommit=True) as connection:

        def streaming() -> bool:
            row = connection.execute(query).fetchone()
            return row is not None and row[0] == 1

        if not procfs.wait_until(streaming, timeout_s=_STREAMING_TIMEOUT_S):
            raise Retryable(
                "the standby does not stream",
                operation="start the pair",
                subject=STANDBY_SLOT,
                hint="read the standby's log",
                exit_code=ExitCode.DEADLINE,
            )
