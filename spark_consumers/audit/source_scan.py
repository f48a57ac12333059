"""Reads a source table under a database snapshot, some pages at a time, with pauses between them.

A lock is held for one statement, not for the audit: each statement runs in a savepoint that is
rolled back after it. So a statement that has rewritten the table since the snapshot (TRUNCATE,
CLUSTER, some ALTER TABLE) may come between two of ours. It gives the table new files, and then the
table is not judged: such statements do not keep what older snapshots see.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from spark_consumers.events.columns import ColumnShape
from spark_consumers.verify import hashes, postgres
from spark_consumers.verify.forms import Layer

_STATEMENT_S: Final = 0.05
_PAGES_FIRST: Final = 32
_PAGES_MAX: Final = 65_536
_LOCK_MS: Final = 2_000
_ATTEMPTS: Final = 5
_RELATION: Final = """
    SELECT c.oid::bigint, c.relkind = 'p', n.nspname, c.relname
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')
"""
# The catalogs show what the snapshot sees; pg_relation_filenode and pg_partition_tree show
# what is now. The latter locks the partitions, so that none is detached until the savepoint ends.
_FILES: Final = """
    WITH RECURSIVE part AS (
        SELECT %(oid)s::oid AS oid
        UNION ALL
        SELECT i.inhrelid FROM part p JOIN pg_inherits i ON i.inhparent = p.oid
        JOIN pg_class c ON c.oid = i.inhrelid WHERE c.relispartition
    )
    SELECT coalesce(max(pg_relation_size(c.oid) / current_setting('block_size')::int), 0)::bigint,
           coalesce(bool_and(c.relfilenode IS NOT DISTINCT FROM pg_relation_filenode(c.oid)), true),
           NOT %(partitioned)s OR (SELECT array_agg(oid ORDER BY oid) FROM part)
           IS NOT DISTINCT FROM
           (SELECT array_agg(relid::oid ORDER BY relid::oid) FROM pg_partition_tree(%(oid)s::oid))
    FROM part p JOIN pg_class c ON c.oid = p.oid WHERE c.relkind = 'r'
"""
Progress = Callable[[int, int], None]
"""Takes the pages that are read, and all pages."""


class NotJudgedError(Exception):
    """Why a table can't be compared, in words."""


class SourceScan:
    """One table of the source, or all partitions of a partitioned one."""

    def __init__(
        self,
        connection: psycopg.Connection,
        table: tuple[str, str],
        *,
        row_filter: str | None,
        busy_percent: float,
        stop: threading.Event,
        progress: Progress = lambda _done, _pages: None,
    ) -> None:
        """Look the table up. Raise NotJudgedError where the snapshot does not see it."""
        self._connection = connection
        self._table = table
        self._row_filter = row_filter
        self._pause = 100 / busy_percent - 1
        self._stop = stop
        self._progress = progress
        self.busy_s = 0.0
        """Seconds that the source has worked so far."""
        row = connection.execute(_RELATION, table).fetchone()
        if row is None:
            raise NotJudgedError("the source does not have the table")
        self._oid, self._partitioned = int(row[0]), bool(row[1])
        self.pages = 0
        self._apart(lambda: None)

    @property
    def oid(self) -> int:
        """The number of the table in pg_class."""
        return self._oid

    def buckets(
        self,
        columns: Sequence[ColumnShape],
        layers: Sequence[Sequence[Layer]],
        key: Sequence[int],
        count: int,
    ) -> dict[int, tuple[int, int]]:
        """Return bucket -> number of rows, sum of hashes; `key`: places in `columns`, or none."""
        found: dict[int, tuple[int, int]] = {}

        def read(condition: sql.Composable) -> None:
            table = sql.SQL("{} WHERE {}").format(sql.Identifier(*self._table), condition)
            query = hashes.source_query(table, columns, layers, key, count)
            for bucket, rows, total in self._connection.execute(query).fetchall():
                before = found.get(bucket, (0, 0))
                found[bucket] = before[0] + int(rows), before[1] + int(total)

        self._each(read)
        return found

    def has_rows(self) -> bool:
        """Tell whether the snapshot sees a row of the table."""
        found: list[object] = []

        def read(condition: sql.Composable) -> None:
            table = sql.Identifier(*self._table)
            query = sql.SQL("SELECT FROM {} WHERE {} LIMIT 1").format(table, condition)
            if not found:
                found.extend(self._connection.execute(query).fetchall())

        self._each(read)
        return bool(found)

    def export(
        self,
        columns: Sequence[ColumnShape],
        layers: Mapping[str, Sequence[Layer]],
        bucket: sql.Composable,
        wanted: Sequence[int],
        folder: Path,
    ) -> None:
        """Write the rows whose `bucket` is wanted to files in `folder`."""
        numbers = itertools.count()
        part = folder / "_part"  # Spark does not read folders of such names
        part.mkdir()
        chosen = sql.SQL("{} = ANY ({})").format(bucket, sql.Literal(list(wanted)))

        def read(condition: sql.Composable) -> None:
            where = sql.SQL("{} AND {}").format(condition, chosen).as_string(self._connection)
            postgres.export(self._connection, self._table, tuple(columns), where, part, layers)
            for file in part.iterdir():
                if file.stat().st_size:
                    file.rename(folder / f"{next(numbers):09d}.json")

        self._each(read)

    def _each(self, read: Callable[[sql.Composable], None]) -> None:
        """Call `read` with the condition of each range of pages, at the pace; raise at a stop."""
        for condition, done in self._ranges():
            began = time.monotonic()
            self._apart(functools.partial(read, condition))
            self._took = time.monotonic() - began
            self.busy_s += self._took
            self._progress(done, self.pages)
            if self._stop.wait(self._took * self._pause):
                raise NotJudgedError("the audit was stopped")

    def _ranges(self) -> Iterator[tuple[sql.Composable, int]]:
        """Yield conditions that part the table; each range is as long as the pace allows."""
        own = "true" if self._partitioned else f"tableoid = {self._oid}"
        first, length, self._took = 0, _PAGES_FIRST, _STATEMENT_S
        while first < self.pages:
            end = min(first + length, self.pages)
            condition = f"{own} AND ctid >= '({first},0)' AND ctid < '({end},0)'"
            if self._row_filter:
                condition += f" AND ({self._row_filter})"
            yield sql.Composed([sql.SQL(condition)]), end
            first = end
            ratio = _STATEMENT_S / max(self._took, 0.001)
            length = max(1, min(_PAGES_MAX, int(length * min(2.0, ratio))))

    def _apart(self, read: Callable[[], None]) -> None:
        """Call `read`, and see that the table has the snapshot's files; free the locks.

        Before `read`, too: a partition that was away for a moment has the same file again.
        """
        for attempt in range(_ATTEMPTS):
            self._connection.execute("SAVEPOINT part")
            try:
                self._connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS}".encode())
                if self._partitioned:
                    self._require_files()
                read()
                pages = self._require_files()
            except psycopg.errors.LockNotAvailable:
                if attempt == _ATTEMPTS - 1:
                    raise NotJudgedError("the table stays locked at the source") from None
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
                raise NotJudgedError(_REWRITTEN) from None
            except psycopg.errors.InsufficientPrivilege as error:
                raise NotJudgedError(
                    f"the role may not read it: {error.diag.message_primary}"
                ) from None
            else:
                self.pages = self.pages or pages
                return
            finally:
                self._connection.execute("ROLLBACK TO SAVEPOINT part")

    def _require_files(self) -> int:
        """Return the table's pages. Raise NotJudgedError where it has other files by now."""
        row = self._connection.execute(
            _FILES, {"oid": self._oid, "partitioned": self._partitioned}
        ).fetchone()
        assert row is not None
        if not row[1]:
            raise NotJudgedError(_REWRITTEN)
        if not row[2]:
            raise NotJudgedError("its partitions changed at the source since the snapshot")
        return int(row[0]) + 1


_REWRITTEN = "the table was rewritten or changed at the source since the snapshot"
