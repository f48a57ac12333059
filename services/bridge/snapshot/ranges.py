"""Reads a chunk as ranges of rows, on several connections at once, under one database snapshot.

    first connection     has taken the snapshot and exports it; reads the first range
    each other one       imports it, compares what it sees, reads one range more

The chunk is the ranges in their order, up to the first one that is not read to its end: so it has
the next rows without a gap, as if one connection had read them. A connection that does not see the
snapshot reads nothing.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, LiteralString, NamedTuple

import psycopg
import structlog
from psycopg import pq

from schemas.errors import SlotbridgeError
from services.bridge.snapshot.copied_rows import copy_rows
from services.bridge.snapshot.tables import Chunk, Query
from services.postgres.rows import one_row
from services.postgres.sessions import Session, names_as_meant

logger = structlog.get_logger(__name__)

RETRY_S: Final = 30.0
"""How long fewer connections read where others could not be had, or saw another snapshot."""
ROWS_MAX: Final = 1_000
"""How many rows are read at once of a table whose rows are of an unknown size."""
_FILL: Final = 0.9
"""How much of its bytes a range is planned to have, as rows differ in size."""
_SEEN: Final[LiteralString] = """
    SELECT pg_current_snapshot()::text, pg_postmaster_start_time()::text"""


class NotShared(Exception):
    """A connection does not see the database snapshot of the first one."""


class Share(NamedTuple):
    """The share of a chunk that each of several ranges may have."""

    ranges: int
    rows: int
    bytes: int


def share_of(workers: int, rows_max: int, bytes_max: int, row_bytes: float | None) -> Share:
    """Share a chunk of rows of about `row_bytes` among workers; None: the size is not known.

    Then one worker reads it: if a range is not read to its end, the ranges behind it are useless.
    """
    if row_bytes is None:
        return Share(1, min(rows_max, ROWS_MAX), bytes_max)
    count = min(workers, rows_max)
    fill = _FILL if count > 1 else 1.0
    fit = int(fill * bytes_max / count / max(1.0, row_bytes))
    return Share(count, max(1, min(rows_max // count, fit)), bytes_max // count)


def joined(ranges: Sequence[Chunk], rows_max: int) -> Chunk:
    """Return ranges that follow each other as one, with no more than `rows_max` rows.

    Up to the first range that was not read to its end.
    """
    whole, size = ranges[0], sum(one.bytes for one in ranges)
    for one in ranges[1:]:
        count = whole.looked_at + one.looked_at
        if not whole.ends or count > rows_max:
            whole = whole._replace(ends=False)
            break
        whole = Chunk([*whole.parts, *one.parts], one.last or whole.last, count, one.ends)
    return whole._replace(bytes=size)


class RangeReader:
    """Reads for one RowReader, with up to `workers` - 1 connections beside its first one."""

    def __init__(self, workers: int, open_one: Callable[[], Session]) -> None:
        """`open_one` opens one more connection to the server; it may raise SlotbridgeError."""
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="snapshot-range")
        self._workers = workers
        self._open_one = open_one
        self._open_at = 0.0
        self.others: tuple[Session, ...] = ()

    def close(self) -> None:
        """Wait until the ranges that are being read have ended; end the other connections."""
        self._pool.shutdown(wait=True)
        self.end_others()

    def end_others(self) -> None:
        """End the other connections."""
        others, self.others = self.others, ()
        for connection in others:
            connection.close()

    def prepare(self) -> int:
        """Open the other connections that are missing; return how many read, with the first one.

        Rows do not depend on the others: those that can't be had now are left out for RETRY_S.
        """
        while len(self.others) + 1 < self._workers and time.monotonic() >= self._open_at:
            try:
                self.others = (*self.others, self._open_one())
            except SlotbridgeError as error:
                self._do_without(error.message)
        return len(self.others) + 1

    def _do_without(self, why: str) -> None:
        """Read with fewer connections, and try to open more after RETRY_S."""
        self._open_at = time.monotonic() + RETRY_S
        logger.warning(
            "fewer connections than snapshot.workers read rows",
            connections=len(self.others) + 1,
            reason=why,
        )

    def read(
        self,
        first: Session,
        queries: Sequence[Query],
        rows_max: int,
        *,
        rows_each: int,
        bytes_each: int,
    ) -> Chunk:
        """Read a range for each query, up to `rows_each` rows or `bytes_each`; join them.

        Raise psycopg.Error.
        """
        ranges = self.read_each(first, queries, rows_each=rows_each, bytes_each=bytes_each)
        if len(ranges) < len(queries):
            ranges = [ranges[0]._replace(ends=False)]
        return joined(ranges, rows_max)

    def read_each(
        self, first: Session, queries: Sequence[Query], *, rows_each: int, bytes_each: int
    ) -> list[Chunk]:
        """Read a range for each query, up to `rows_each` rows or `bytes_each`, at the same time.

        Return those of the first queries, at least of one: of all where all connections see the
        first one's snapshot. Raise psycopg.Error.
        """
        others = self.others[: len(queries) - 1]
        running = []
        if others:
            name = one_row(first.execute("SELECT pg_export_snapshot()"))[0]
            seen = one_row(first.execute(_SEEN))
            running = [
                self._pool.submit(_read_apart, one, name, seen, query, rows_each, bytes_each)
                for one, query in zip(others, queries[1:], strict=True)
            ]
        try:
            ranges = [read_range(first, queries[0], rows_each, bytes_each)]
        finally:
            wait(running)
        try:
            ranges += [one.result() for one in running]
        except NotShared as error:  # several servers behind one name: the first one's range stands
            self.end_others()
            self._do_without(f"they see another state of the database: {error}")
        return ranges


def _read_apart(
    connection: Session,
    snapshot: str,
    seen: tuple[str, str],
    query: Query,
    rows_max: int,
    bytes_max: int,
) -> Chunk:
    """Read a range in a transaction that imports `snapshot`, if it sees what `seen` tells."""
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        try:
            connection.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'".encode())
        except (psycopg.errors.InvalidParameterValue, psycopg.errors.UndefinedObject) as error:
            raise NotShared(str(error)) from error
        if one_row(connection.execute(_SEEN)) != seen:
            raise NotShared("it imports another snapshot of that name")
        return read_range(connection, query, rows_max, bytes_max)
    finally:
        with contextlib.suppress(psycopg.Error):
            connection.execute("ROLLBACK")


def read_range(connection: Session, query: Query, rows_max: int, bytes_max: int) -> Chunk:
    """Read up to `rows_max` rows of `query`, or those that have `bytes_max`."""
    with names_as_meant(connection) if query.meant else contextlib.nullcontext():
        rows = copy_rows(connection.pgconn, query.text, query.form, rows_max, bytes_max)
    return Chunk([rows.messages], rows.last, rows.looked_at, rows.ends, rows.bytes)


def execute(connection: Session, query: bytes) -> pq.abc.PGresult:
    """Return results in text form as the server has printed them, without psycopg's types."""
    result = connection.pgconn.exec_params(query, [])
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise psycopg.errors.error_from_result(result, encoding="utf-8")
    return result
