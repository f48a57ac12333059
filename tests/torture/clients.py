"""Clients under fire: each knows of every transaction whether its end was acknowledged.

acknowledged   COMMIT (PREPARED) has returned
unknown        the connection broke while it ran
refused        an error came before
rolled back    the client wanted it so
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import psycopg

from tests.torture.bank import DDL, OWN_ROWS, Connection, Work

_PREPARED_SHARE: Final = 0.2
_LATER_SHARE: Final = 0.3
_LATER_S: Final = (0.5, 3.0)
_ROLLED_BACK_SHARE: Final = 0.08
_OPTIONS: Final = "-c lock_timeout=2s -c statement_timeout=30s"


@dataclass
class Outcomes:
    """tid -> its outcome, of all clients; `decided`: how prepared transactions were."""

    found: dict[str, str] = field(default_factory=dict)
    decided: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self, *how: str) -> None:
        """A prepared transaction was decided, each of `how`."""
        with self._lock:
            self.decided.update(how)

    def note(self, tid: str, outcome: str) -> None:
        """The last word counts."""
        with self._lock:
            self.found[tid] = outcome

    @property
    def acknowledged(self) -> set[str]:
        """The transactions that must survive."""
        return {tid for tid, outcome in self.found.items() if outcome == "acknowledged"}

    def counts(self) -> Counter[str]:
        """How many of each."""
        return Counter(self.found.values())


@dataclass
class Open:
    """A prepared transaction that is to be decided: `commit` or not, from `due` on.

    `session`: of its PREPARE.
    """

    commit: bool
    due: float
    touched: set[int]
    session: int


class Client(threading.Thread):
    """Runs transactions on whichever host is writable, until `end` is set.

    While `hold` is set it has no connection, and `held` says so.
    """

    def __init__(
        self, number: int, seed: int, conninfo: str, outcomes: Outcomes, pause_s: float
    ) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._number = number
        self._conninfo = conninfo
        self._outcomes = outcomes
        self._pause_s = pause_s
        self._random = random.Random(f"{seed}-{number}")
        self._work = Work(number, random.Random(f"{seed}-work-{number}"))
        self._count = 0
        self._session = 0
        self._open: dict[str, Open] = {}
        self.end = threading.Event()
        self.hold = threading.Event()
        self.held = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        """The thread's life; what is no server's failure ends it and is kept in `problem`."""
        try:
            while not self.end.is_set():
                try:
                    if self.hold.is_set():
                        self.held.set()
                        self.end.wait(0.1)
                    else:
                        self.held.clear()
                        self._connected()
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    self.end.wait(0.2)
        except BaseException as problem:
            self.problem = problem

    def _connected(self) -> None:
        with psycopg.connect(
            self._conninfo,
            autocommit=True,
            options=_OPTIONS,
            connect_timeout=3,
            target_session_attrs="read-write",
        ) as connection:
            self._session += 1
            self._find_what_is_open(connection)
            self._work.settle(connection)
            while not self.end.wait(self._random.random() * 2 * self._pause_s):
                if self.hold.is_set():
                    return
                self._transaction(connection)
                self._decide(connection, lambda one: time.monotonic() >= one.due)
            self._decide(connection, lambda _one: True)

    def _transaction(self, connection: Connection) -> None:
        self._count += 1
        tid = f"{self._number}-{self._count}"
        kind = self._work.choose()
        self._outcomes.note(tid, "refused")
        connection.execute("BEGIN")
        try:
            self._work.run(connection, kind, tid)
        except psycopg.OperationalError as error:
            if connection.broken or error.sqlstate is None:
                raise
            connection.execute("ROLLBACK")
            self._work.settle(connection)
            return
        except psycopg.Error:
            connection.execute("ROLLBACK")
            self._work.settle(connection)
            return
        chance = self._random.random()
        if chance < _PREPARED_SHARE and kind not in DDL:
            self._prepare(connection, tid, kind)
        elif chance < _PREPARED_SHARE + _ROLLED_BACK_SHARE:
            connection.execute("ROLLBACK")
            self._outcomes.note(tid, "rolled back")
            self._work.settle(connection)
        else:
            self._end(connection, tid, "COMMIT")

    def _prepare(self, connection: Connection, tid: str, kind: str) -> None:
        """PREPARE; what touches only our own rows is decided later, often after a fault."""
        commit = self._random.random() < 0.75
        later_s = self._random.uniform(*_LATER_S) if self._random.random() < _LATER_SHARE else 0.0
        due = time.monotonic() + later_s if kind in OWN_ROWS else 0.0
        self._outcomes.note(tid, "unknown")
        self._open[tid] = Open(commit, due, self._work.touched, self._session)
        connection.execute(f"PREPARE TRANSACTION '{tid}'".encode())
        self._work.locked |= self._work.touched
        self._work.settle(connection)

    def _decide(self, connection: Connection, which: Callable[[Open], bool]) -> None:
        """COMMIT PREPARED or ROLLBACK PREPARED."""
        for tid, one in [(tid, one) for tid, one in self._open.items() if which(one)]:
            verb = "COMMIT" if one.commit else "ROLLBACK"
            self._end(connection, tid, f"{verb} PREPARED '{tid}'")
            if not one.commit:
                self._outcomes.note(tid, "rolled back")
            later = "in another session" if one.session != self._session else "in its session"
            self._outcomes.decide(verb.lower(), later)
            self._forget(tid)
            self._work.settle(connection)

    def _forget(self, tid: str) -> None:
        del self._open[tid]
        self._work.locked = set().union(*(one.touched for one in self._open.values()))

    def _end(self, connection: Connection, tid: str, statement: str) -> None:
        self._outcomes.note(tid, "unknown")
        connection.execute(statement.encode())
        self._outcomes.note(tid, "acknowledged")

    def _find_what_is_open(self, connection: Connection) -> None:
        """Forget what the server does not have: never prepared, or decided, unknown to us."""
        rows = connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall()
        there = {row[0] for row in rows}
        for tid in [tid for tid in self._open if tid not in there]:
            self._forget(tid)


def stop_all(clients: list[Client], timeout_s: float) -> None:
    """End them; each decides what it has prepared. Raises what one met that was no server's."""
    for client in clients:
        client.end.set()
    deadline = time.monotonic() + timeout_s
    for client in clients:
        client.join(max(0.1, deadline - time.monotonic()))
        if client.problem is not None:
            raise client.problem
        assert not client.is_alive(), f"{client.name} does not end"


def decide_leftovers(connection: Connection) -> int:
    """Roll back what no client has decided; how many there were."""
    rows = connection.execute(
        "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    ).fetchall()
    for (gid,) in rows:
        connection.execute(f"ROLLBACK PREPARED '{gid}'".encode())
    return len(rows)
