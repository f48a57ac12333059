"""Paused or not, by whom and why: one row on the primary that every replica of `watch` follows.

A replica remembers what it saw last: the newer of its own and the row's holds, and is written back,
so that a pause outlives a primary that was lost before a standby had the row.
"""

from dataclasses import asdict, dataclass
from typing import cast

from services.slots import Connection

_TABLE = """
    CREATE SCHEMA IF NOT EXISTS slotfailover;
    CREATE TABLE IF NOT EXISTS slotfailover.watch (
        one bool PRIMARY KEY DEFAULT true CHECK (one),
        paused bool NOT NULL, at text NOT NULL, by text NOT NULL, reason text NOT NULL)
"""
_WRITE = """
    INSERT INTO slotfailover.watch AS w (paused, at, by, reason) VALUES (%s, %s, %s, %s)
    ON CONFLICT (one) DO UPDATE
       SET paused = excluded.paused, at = excluded.at, by = excluded.by, reason = excluded.reason
     WHERE w.at < excluded.at
"""


@dataclass(frozen=True, slots=True)
class Pause:
    """`at`: UTC, ISO 8601; "" where nobody has ever paused or resumed."""

    paused: bool = False
    at: str = ""
    by: str = ""
    reason: str = ""

    def as_json(self) -> dict[str, object]:
        """For /v1/status."""
        return asdict(self)


def newer(one: Pause, other: Pause) -> Pause:
    """The one that was said last."""
    return max(one, other, key=lambda pause: pause.at)


def read_pause(connection: Connection) -> Pause:
    """What the table says; the default where there is none."""
    found = connection.execute("SELECT to_regclass('slotfailover.watch')").fetchone()
    if found is None or found[0] is None:
        return Pause()
    row = connection.execute("SELECT paused, at, by, reason FROM slotfailover.watch").fetchone()
    return Pause(*cast("tuple[bool, str, str, str]", row)) if row is not None else Pause()


def write_pause(connection: Connection, pause: Pause) -> bool:
    """Store it, without waiting for standbys; False in a database that publishes all its tables."""
    published = connection.execute("SELECT FROM pg_publication WHERE puballtables").fetchone()
    if published is not None:
        return False
    with connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = local")
        found = connection.execute("SELECT to_regclass('slotfailover.watch')").fetchone()
        if found is None or found[0] is None:
            connection.execute(_TABLE)
        connection.execute(_WRITE, [pause.paused, pause.at, pause.by, pause.reason])
    return True
