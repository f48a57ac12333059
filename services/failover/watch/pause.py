"""Paused or not, by whom and why: one row on the primary that every replica of `watch` follows.

A replica remembers what it saw last: the newer of its own and the row's holds, and is written back,
so that a pause outlives a primary that was lost before a standby had the row.
"""

from dataclasses import asdict, dataclass
from typing import cast

from services.failover.observe.own_tables import PublishesAllTables, reading, writing
from services.postgres.server import Connection

_WRITE = """
    INSERT INTO slotfailover.watch AS w (paused, at, by, reason, version)
    VALUES (%s, %s, %s, %s, %s)
    ON CONFLICT (one) DO UPDATE
       SET paused = excluded.paused, at = excluded.at, by = excluded.by, reason = excluded.reason,
           version = excluded.version
     WHERE w.version < excluded.version
"""


@dataclass(frozen=True, slots=True)
class Pause:
    """`at`: UTC, ISO 8601; "" where nobody has ever paused or resumed."""

    paused: bool = False
    at: str = ""
    by: str = ""
    reason: str = ""
    version: int = 0
    """The higher holds: clocks of replicas differ."""

    def as_json(self) -> dict[str, object]:
        """Return the document for /v1/status."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ordered:
    """The outcome of an order to pause or resume."""

    pause: Pause
    """The pause in effect."""
    in_effect: bool
    """It is what was ordered, as far as is known."""
    shared: bool
    """Every replica follows it; else this one alone."""

    @property
    def status_code(self) -> int:
        """200 done, 202 taken here and not yet known to all, 409 somebody said otherwise since."""
        if self.in_effect:
            return 200 if self.shared else 202
        return 409 if self.shared else 202

    def as_json(self) -> dict[str, object]:
        """Return the document of the HTTP answer."""
        return {**self.pause.as_json(), "in_effect": self.in_effect, "shared": self.shared}


def newer(first: Pause, other: Pause) -> Pause:
    """Return the pause that holds; of two that were ordered independently, the one that pauses."""
    return max(first, other, key=lambda pause: (pause.version, pause.paused, pause.at, pause.by))


def read_pause(connection: Connection) -> Pause:
    """Return the pause in the table, the default if there is no table."""
    with reading(connection, "watch") as there:
        if not there:
            return Pause()
        row = connection.execute(
            "SELECT paused, at, by, reason, version FROM slotfailover.watch"
        ).fetchone()
    return Pause(*cast("tuple[bool, str, str, str, int]", row)) if row is not None else Pause()


def write_pause(connection: Connection, pause: Pause) -> bool:
    """Store a pause without waiting for standbys; return False if the database publishes all.

    A table in such a database would be published.
    """
    try:
        with writing(connection, "watch"):
            values = [pause.paused, pause.at, pause.by, pause.reason, pause.version]
            connection.execute(_WRITE, values)
    except PublishesAllTables:
        return False
    return True
