"""Rows by key on disk, so that memory is bounded whatever a table's size: a SQLite file.

    told    what the topics tell of each key: its last row, UNKNOWN, or NULL where it was deleted
    there   the rows that the table has
    differs what makes the first equal to the second, in order

The file is of one run; nothing is read from it after a crash.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from services.bridge.repair.comparison import Difference, differences

_CACHE_KIB: Final = 131_072
_ITEMS_AT_ONCE: Final = 2_000
Item = TypeVar("Item")


def in_time(items: Iterable[Item], while_waiting: Callable[[], None]) -> Iterator[Item]:
    """Yield `items`, and do the process's other work now and then."""
    for number, item in enumerate(items):
        if number % _ITEMS_AT_ONCE == 0:
            while_waiting()
        yield item


class Told(NamedTuple):
    """The row of a key by an event or tombstone. `row` None: the key is gone.

    `position`: (commit_lsn, seq) of the event, which orders events of different partitions.
    """

    key: bytes
    row: bytes | None
    position: tuple[int, int]


class RowStore:
    """The rows of one table, from its topic and from the table. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600, exist_ok=False)
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(
            "CREATE TABLE told (key BLOB PRIMARY KEY, row BLOB, part INT, lsn INT, seq INT)"
            " WITHOUT ROWID;"
            "CREATE TABLE there (key BLOB PRIMARY KEY, row BLOB) WITHOUT ROWID;"
            "CREATE TABLE differs"
            " (number INTEGER PRIMARY KEY, op TEXT, key BLOB, before BLOB, after BLOB);"
        )

    def close(self) -> None:
        """Close and remove the file."""
        self._db.close()
        self._path.unlink(missing_ok=True)

    def take_told(self, partition: int, told: Iterable[Told]) -> None:
        """Store the rows of a partition's records, in the order of their offsets.

        Of a key that several partitions have, the higher position counts: partitions were added.
        """
        self._db.execute("BEGIN")
        self._db.executemany(
            "INSERT INTO told VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET"
            " row = excluded.row, part = excluded.part, lsn = excluded.lsn, seq = excluded.seq"
            " WHERE told.part = excluded.part"
            "    OR (excluded.lsn, excluded.seq) >= (told.lsn, told.seq)",
            ((one.key, one.row, partition, *one.position) for one in told),
        )
        self._db.execute("COMMIT")

    def told(self, key: bytes) -> Told | None:
        """Return the stored row of a key, None if there is none."""
        found = self._db.execute("SELECT row, lsn, seq FROM told WHERE key = ?", [key]).fetchone()
        return None if found is None else Told(key, found[0], (found[1], found[2]))

    def empty(self, partition: int) -> None:
        """Note that a partition has a truncate of the table."""
        self._db.execute("UPDATE told SET row = NULL WHERE part = ?", [partition])

    def take_there(self, rows: Iterable[tuple[bytes, bytes]]) -> int:
        """Take in rows of the table; return how many keys came a second time."""
        before = self._db.total_changes
        taken = 0
        self._db.execute("BEGIN")
        for key, row in rows:
            self._db.execute("INSERT OR IGNORE INTO there VALUES (?, ?)", [key, row])
            taken += 1
        self._db.execute("COMMIT")
        return taken - (self._db.total_changes - before)

    def compare(self, *, whole: bool, while_waiting: Callable[[], None]) -> dict[str, int]:
        """Find and keep the differences; return how many there are, by op.

        Not `whole`: the topic lacks its first events, and the table is told to be empty before.
        """
        counts = {"c": 0, "u": 0, "d": 0}
        told = "SELECT key, row FROM told WHERE row IS NOT NULL ORDER BY key"
        there = "SELECT key, row FROM there ORDER BY key"
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM differs")
        topic_rows = in_time(self._db.execute(told), while_waiting) if whole else ()
        for found in differences(topic_rows, in_time(self._db.execute(there), while_waiting)):
            counts[found.op] += 1
            self._db.execute(
                "INSERT INTO differs (op, key, before, after) VALUES (?, ?, ?, ?)", found
            )
        self._db.execute("COMMIT")
        return counts

    def deletes_other_keys(self) -> bool:
        """Tell whether rows to delete have keys of other columns than the table's rows have."""
        one = self._db.execute("SELECT key FROM there LIMIT 1").fetchone()
        deleted = self._db.execute("SELECT key FROM differs WHERE op = 'd'")
        return one is not None and any(
            json.loads(key).keys() != json.loads(one[0]).keys() for (key,) in deleted
        )

    def differences(self) -> Iterator[Difference]:
        """Yield the differences that `compare` found, in order."""
        for row in self._db.execute("SELECT op, key, before, after FROM differs ORDER BY number"):
            yield Difference(*row)
