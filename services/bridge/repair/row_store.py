"""Rows by key on disk, so that memory is bounded whatever a table's size: a SQLite file.

    folded   what the topics have of each key: its last row, UNKNOWN, or NULL where it was deleted
    present  the rows that the table has and the topics lack, or have otherwise
    differs  what makes the first equal to the second

Which of the folded keys the table has is noted in memory, in a bit for each. The file is of one
run; nothing is read from it after a crash.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from services.bridge.repair.comparison import Difference, difference
from services.waiter import Waiter

_CACHE_KIB: Final = 131_072
ITEMS_AT_ONCE: Final = 2_000
_KEYS_AT_ONCE: Final = 500
_KNOWN: Final = f"SELECT key, id, row FROM folded WHERE key IN ({', '.join('?' * _KEYS_AT_ONCE)})"  # noqa: S608
_LIVE: Final = "SELECT id, key, row FROM folded WHERE id BETWEEN ? AND ? AND row IS NOT NULL"
_ALL_BITS: Final = 255


class FoldedRow(NamedTuple):
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
            "CREATE TABLE folded (id INTEGER PRIMARY KEY, key BLOB UNIQUE, row BLOB,"
            " part INT, lsn INT, seq INT);"
            "CREATE TABLE present (key BLOB PRIMARY KEY, row BLOB) WITHOUT ROWID;"
            "CREATE TABLE differs (key BLOB PRIMARY KEY, op TEXT, before BLOB, after BLOB)"
            " WITHOUT ROWID;"
        )
        self._seen = bytearray()
        """Bit n % 8 of byte n // 8: the table has the key of the folded row `id` n."""
        self._one_key: bytes | None = None

    def close(self) -> None:
        """Close and remove the file."""
        self._db.close()
        self._path.unlink(missing_ok=True)

    def take_folded(self, partition: int, rows: Iterable[FoldedRow]) -> None:
        """Store the rows of a partition's records, in the order of their offsets.

        Of a key that several partitions have, the higher position counts: partitions were added.
        """
        self._db.execute("BEGIN")
        self._db.executemany(
            "INSERT INTO folded (key, row, part, lsn, seq) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (key) DO UPDATE SET"
            " row = excluded.row, part = excluded.part, lsn = excluded.lsn, seq = excluded.seq"
            " WHERE folded.part = excluded.part"
            "    OR (excluded.lsn, excluded.seq) >= (folded.lsn, folded.seq)",
            ((one.key, one.row, partition, *one.position) for one in rows),
        )
        self._db.execute("COMMIT")

    def folded(self, key: bytes) -> FoldedRow | None:
        """Return the stored row of a key, None if there is none."""
        found = self._db.execute("SELECT row, lsn, seq FROM folded WHERE key = ?", [key]).fetchone()
        return None if found is None else FoldedRow(key, found[0], (found[1], found[2]))

    def erase(self, partition: int, key: bytes) -> None:
        """Note that a partition has a tombstone of a key; the rows of other partitions stay.

        A tombstone has no position: it may be older than what another partition tells.
        """
        self._db.execute(
            "UPDATE folded SET row = NULL WHERE key = ? AND part = ? AND row IS NOT NULL",
            [key, partition],
        )

    def empty(self, partition: int) -> None:
        """Note that a partition has a truncate of the table."""
        self._db.execute("UPDATE folded SET row = NULL WHERE part = ?", [partition])

    def take_rows(self, rows: Iterable[tuple[bytes, bytes]]) -> int:
        """Take in rows of the table; return how many keys came a second time.

        Call this once all rows are folded.
        """
        repeated, items = 0, iter(rows)
        self._db.execute("BEGIN")
        while some := list(islice(items, _KEYS_AT_ONCE)):
            self._one_key = self._one_key or some[0][0]
            repeated += self._take_some(some)
        self._db.execute("COMMIT")
        return repeated

    def _take_some(self, rows: list[tuple[bytes, bytes]]) -> int:
        """Compare up to _KEYS_AT_ONCE rows with those of Kafka; keep those that differ.

        Return how many keys came more than once.
        """
        keys = [key for key, _ in rows]
        keys += keys[:1] * (_KEYS_AT_ONCE - len(keys))
        known = {key: (id_, row) for key, id_, row in self._db.execute(_KNOWN, keys)}
        repeated, others = 0, []
        for key, row in rows:
            if (known_row := known.get(key)) is None:
                others.append((key, row))
            elif self._saw(known_row[0]):
                repeated += 1
            elif known_row[1] != row:
                others.append((key, row))
        before = self._db.total_changes
        self._db.executemany("INSERT OR IGNORE INTO present VALUES (?, ?)", others)
        return repeated + len(others) - (self._db.total_changes - before)

    def _saw(self, id_: int) -> bool:
        """Note that the table has the key of a folded row; return whether that was known."""
        at, bit = id_ // 8, 1 << id_ % 8
        if at >= len(self._seen):
            self._seen.extend(bytes(max(at + 1 - len(self._seen), len(self._seen), 4_096)))
        known = self._seen[at] & bit
        self._seen[at] |= bit
        return known != 0

    def compare(self, waiter: Waiter, *, whole: bool) -> dict[str, int]:
        """Find and keep the differences; return how many there are, by op.

        Not `whole`: the topic lacks its first events, and the table is told to be empty before.
        """
        counts = {"c": 0, "u": 0, "d": 0}
        pairs = self._different_rows if whole else self._all_rows
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM differs")
        for key, known, present in waiter.each(pairs(), ITEMS_AT_ONCE):
            if (found := difference(key, known, present)) is not None:
                counts[found.op] += 1
                values = (found.key, found.op, found.before, found.after)
                self._db.execute("INSERT INTO differs VALUES (?, ?, ?, ?)", values)
        self._db.execute("COMMIT")
        return counts

    def _different_rows(self) -> Iterator[tuple[bytes, bytes | None, bytes | None]]:
        """Yield each key whose rows may differ: the topics' row and the table's, None for none."""
        yield from self._db.execute(
            "SELECT h.key, t.row, h.row FROM present h LEFT JOIN folded t ON t.key = h.key"
        )
        (count,) = self._db.execute("SELECT coalesce(max(id), 0) FROM folded").fetchone()
        for at in range(count // 8 + 1):
            if at < len(self._seen) and self._seen[at] == _ALL_BITS:
                continue
            for id_, key, row in self._db.execute(_LIVE, [8 * at, 8 * at + 7]):
                if not self._is_seen(id_):
                    yield key, row, None

    def _all_rows(self) -> Iterator[tuple[bytes, None, bytes]]:
        """Yield each key of the table with its row, as if the topics told none."""
        for key, row in self._db.execute("SELECT key, row FROM present"):
            yield key, None, row
        query = (
            "SELECT t.id, t.key, t.row FROM folded t LEFT JOIN present h ON h.key = t.key"
            " WHERE h.key IS NULL"
        )
        for id_, key, row in self._db.execute(query):
            if self._is_seen(id_):
                yield key, None, row

    def _is_seen(self, id_: int) -> bool:
        at = id_ // 8
        return at < len(self._seen) and self._seen[at] & 1 << id_ % 8 != 0

    def deletes_other_keys(self) -> bool:
        """Tell whether rows to delete have keys of other columns than the table's rows have."""
        if self._one_key is None:
            return False
        names = json.loads(self._one_key).keys()
        deleted = self._db.execute("SELECT key FROM differs WHERE op = 'd'")
        return any(json.loads(key).keys() != names for (key,) in deleted)

    def differences(self) -> Iterator[Difference]:
        """Yield the differences that `compare` found, in the order of their keys."""
        for row in self._db.execute("SELECT op, key, before, after FROM differs ORDER BY key"):
            yield Difference(*row)
