"""Clients that append to lists at one node each, whenever that takes writes, and note all of it.

    lists   id int, items text: '1,5,9'; a key gets some tens of values, then there are new keys

A transaction is SERIALIZABLE: it appends to two lists and reads one. The notes are what
`tests.promises.failover.rounds.history` checks.
"""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen

from tests.promises.failover.rounds.history import Append, Operation, Outcome, Read
from tests.providers.interface import Server
from tests.providers.waiting import patient

TABLE = "CREATE TABLE lists (id int PRIMARY KEY, items text NOT NULL)"
KEYS = 4
VALUES_A_KEY = 40
ANSWER_S = patient(1.7)
"""A client gives up a server that says nothing for so long."""
PACE_S, BACKOFF_S = 0.005, 0.03
_APPEND = """
    INSERT INTO lists VALUES (%s, %s)
        ON CONFLICT (id) DO UPDATE SET items = lists.items || ',' || excluded.items
"""
_READ = "SELECT items FROM lists WHERE id = %s"
_COMMIT = """
    COMMIT;
    SELECT ('x' || substr(pg_walfile_name(l), 1, 8))::bit(32)::int, (l - '0/0')::bigint
      FROM pg_current_wal_insert_lsn() l
"""
"""The node's timeline and position, after the commit and before anything else is sent."""
_NOT_COMMITTED = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.FeatureNotSupported,  # SERIALIZABLE on a standby
)

_Answer = TypeVar("_Answer")


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection on which every wait ends, as through a proxy that is stalled none would."""

    def wait(
        self, gen: PQGen[_Answer], interval: float = 0.1, timeout: float | None = None
    ) -> _Answer:
        return super().wait(gen, interval, timeout or ANSWER_S)


class Values:
    """Hands out values that nobody has had, and which lists they go to. Thread-safe."""

    def __init__(self, seed: int) -> None:
        self._numbers = itertools.count(1)
        self._dice = random.Random(seed)
        self._lock = threading.Lock()

    def next(self) -> list[tuple[int, int | None]]:
        """Key and value of each part of a transaction, sorted by key; None: read that list."""
        with self._lock:
            first, second = next(self._numbers), next(self._numbers)
            generation = KEYS * (first // (KEYS * VALUES_A_KEY))
            keys = sorted(self._dice.sample(range(KEYS), 2))
            parts: list[tuple[int, int | None]] = [
                (generation + key, value) for key, value in zip(keys, (first, second), strict=True)
            ]
            read = (generation + self._dice.randrange(KEYS), None)
            parts.insert(self._dice.randrange(3), read)
            return parts


@dataclass
class Client:
    """One session at a time to one node; `history` is shared by all clients."""

    node: str
    conninfo: str
    values: Values
    history: list[Operation]
    acknowledged: int = 0
    resumed: threading.Event = field(default_factory=threading.Event)
    busy: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write until `stop` is called."""
        while not self._stop.wait(BACKOFF_S):
            with (
                contextlib.suppress(psycopg.Error),
                _Connection.connect(
                    self.conninfo, autocommit=True, connect_timeout=round(patient(0.7))
                ) as session,
            ):
                warnings: list[str] = []
                session.add_notice_handler(lambda d, w=warnings: w.append(d.severity or ""))  # type: ignore[misc]
                while not self._stop.wait(PACE_S):
                    self.resumed.wait()
                    with self.busy:
                        written = self.resumed.is_set() and self._turn(session, warnings)
                    if not written:
                        self._stop.wait(BACKOFF_S)

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        self.resumed.set()

    def _turn(self, session: _Connection, warnings: list[str]) -> bool:
        """One transaction, unless this is a standby; returns whether it was acknowledged."""
        row = session.execute("SELECT pg_is_in_recovery()").fetchone()
        return row == (False,) and self._transact(session, warnings)

    def _transact(self, session: _Connection, warnings: list[str]) -> bool:
        """Perform and note one transaction; returns whether it was acknowledged."""
        micros: list[Append | Read] = []
        invoked = committing = time.monotonic()
        outcome, timeline, lsn = Outcome.FAIL, 0, 0
        warnings.clear()
        try:
            session.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
            for key, value in self.values.next():
                micros.append(_part(session, key, value))
            committing, outcome = time.monotonic(), Outcome.INFO
            cursor = session.execute(_COMMIT)
            committed = cursor.statusmessage == "COMMIT"
            if cursor.nextset() and committed and "WARNING" not in warnings:
                # a warning: the commit has not waited for the standby
                timeline, lsn = cursor.fetchone() or (0, 0)
                outcome = Outcome.OK
        except _NOT_COMMITTED:
            outcome = Outcome.FAIL
            session.execute("ROLLBACK")
        finally:
            completed = time.monotonic()
            self.history.append(
                Operation(
                    self.node, outcome, tuple(micros), invoked, committing, completed, timeline, lsn
                )
            )
            self.acknowledged += outcome is Outcome.OK
        return outcome is Outcome.OK


def _part(session: _Connection, key: int, value: int | None) -> Append | Read:
    if value is not None:
        session.execute(_APPEND, [key, str(value)])
        return Append(key, value)
    row = session.execute(_READ, [key]).fetchone()
    return Read(key, parsed(row[0]) if row else ())


def parsed(items: str) -> tuple[int, ...]:
    """A list as it is stored."""
    return tuple(int(item) for item in items.split(","))


def lists_of(server: Server, dbname: str) -> dict[int, tuple[int, ...]]:
    """All lists of a server."""
    with psycopg.connect(server.conninfo(dbname), autocommit=True) as connection:
        rows = connection.execute("SELECT id, items FROM lists").fetchall()
    return {key: parsed(items) for key, items in rows}


@contextlib.contextmanager
def writing(clients: list[Client]) -> Iterator[None]:
    """All clients write until the end of the block."""
    threads = [threading.Thread(target=client.run, name=client.node) for client in clients]
    resume(clients)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for client in clients:
            client.stop()
        for thread in threads:
            thread.join(patient(60))


def resume(clients: list[Client]) -> None:
    """Let them write."""
    for client in clients:
        client.resumed.set()


def pause(clients: list[Client]) -> None:
    """Let no transaction begin, and wait until none is open."""
    for client in clients:
        client.resumed.clear()
    for client in clients:
        if not client.busy.acquire(timeout=8 * ANSWER_S):
            raise AssertionError(f"a client at {client.node} does not come to its end")
        client.busy.release()
