"""Who holds the lock that a session waits for: seen while it waits, over another connection.

Once the wait has ended, no server tells it any more.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from services.postgres.server import Connection

_PATIENCE_S = 0.5
"""Most statements have ended by then, and need no other connection."""
_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Holder:
    """A session, or prepared transactions, that others wait for."""

    pid: int
    """0: prepared transactions."""
    role: str
    application: str
    state: str
    """"" where our role may not see it."""
    since_s: float | None
    """How long its transaction has been open."""

    def __str__(self) -> str:
        if not self.pid:
            return "a prepared transaction (pg_prepared_xacts)"
        what = self.state or "what it does is hidden from our role"
        open_for = f" for {self.since_s:.0f} s" if self.since_s is not None and self.state else ""
        name = f"{self.role}, {self.application}" if self.application else self.role
        return f"pid {self.pid} of {name} ({what}{open_for})"

    @property
    def remedy(self) -> str:
        """How to make it let go of the lock."""
        if not self.pid:
            return "COMMIT PREPARED or ROLLBACK PREPARED it"
        return f"let its transaction end, or end it: SELECT pg_terminate_backend({self.pid})"


class LockHolders:
    """Looks from a thread of its own, while the block runs, who holds up the session `pid`.

    What can't be seen is not known: `last` is then None.
    """

    def __init__(self, connect: Callable[[], Connection], pid: int) -> None:
        self.last: Holder | None = None
        self._connect = connect
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lock holders", daemon=True)

    def __enter__(self) -> LockHolders:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()

    def _run(self) -> None:
        if self._ended.wait(_PATIENCE_S):
            return
        with contextlib.suppress(psycopg.Error), self._connect() as connection:
            while not self._ended.wait(_EVERY_S):
                self.last = _holder(connection, self._pid) or self.last


def _holder(connection: Connection, pid: int) -> Holder | None:
    """Return the oldest transaction that blocks the session `pid`, None if nothing blocks it."""
    row = connection.execute(
        """
        SELECT b.pid, coalesce(a.usename, ''), coalesce(a.application_name, ''),
               coalesce(a.state, ''),
               extract(epoch FROM clock_timestamp() - a.xact_start)::float8
          FROM unnest(pg_blocking_pids(%s)) b (pid) LEFT JOIN pg_stat_activity a USING (pid)
         ORDER BY a.xact_start NULLS LAST LIMIT 1
        """,
        [pid],
    ).fetchone()
    return Holder(*row) if row is not None else None
