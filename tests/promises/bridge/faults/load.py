"""A small load that never ends by itself, and what must be true after it."""

import threading
from types import TracebackType

import psycopg

from tests.promises.bridge.oracle import assert_rebuilt
from tests.promises.bridge.running import Bridge
from tests.providers.waiting import eventually, patient

_PAUSE_S = 0.02
_RECONNECT_S = 0.1
TABLE = "CREATE TABLE IF NOT EXISTS t (id int PRIMARY KEY, note text)"


class Load:
    """Inserts, updates and deletes in small transactions; comes back after a lost connection.

    It starts at the first `more`, when the slot is there: else Kafka would lack the first rows.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self.committed = 0

    def __enter__(self) -> "Load":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """No more of it."""
        self._enough.set()
        if self._thread.ident is not None:
            self._thread.join(patient(30))

    def more(self, count: int = 10) -> None:
        """Wait until it has committed `count` more transactions."""
        if self._thread.ident is None:
            self._thread.start()
        wanted = self.committed + count
        eventually(lambda: self.committed >= wanted, what=f"{count} more transactions")

    def _run(self) -> None:
        number = 0
        while not self._enough.is_set():
            try:
                with psycopg.connect(self._conninfo, options="-c synchronous_commit=local") as one:
                    number = _first_free(one)
                    while not self._enough.wait(_PAUSE_S):
                        number += 1
                        _transaction(one, number)
                        one.commit()
                        self.committed += 1
            except psycopg.Error:
                self._enough.wait(_RECONNECT_S)


def _first_free(connection: psycopg.Connection[tuple[int | None]]) -> int:
    row = connection.execute("SELECT max(id) FROM t").fetchone()
    connection.commit()
    return (row[0] if row is not None and row[0] is not None else 0) + 1


def _transaction(connection: psycopg.Connection[tuple[int | None]], number: int) -> None:
    connection.execute("INSERT INTO t VALUES (%s, %s)", [number, f"n{number}"])
    connection.execute("UPDATE t SET note = note || 'u' WHERE id = %s", [number - 1])
    if number % 5 == 0:
        connection.execute("DELETE FROM t WHERE id = %s", [number - 3])


def await_session(bridge: Bridge, number: int) -> None:
    """Wait until the bridge, which must not end, streams for the `number`th time."""

    def streams() -> bool:
        assert bridge.running, bridge.output
        return bridge.sessions >= number

    eventually(streams, what=f"session {number} streams", timeout_s=60)


def assert_intact(bridge: Bridge, load: Load, conninfo: str) -> None:
    """The bridge still works; all that was committed is in Kafka, nothing twice."""
    load.more()
    load.stop()
    bridge.caught_up(conninfo)
    assert bridge.stop() == 0, bridge.output
    assert_rebuilt(bridge)
