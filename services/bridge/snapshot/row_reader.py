"""Reads rows of tables under a database snapshot, on the primary or on a standby.

An ordinary connection, in transactions of its own. All calls block; the session makes them in a
thread of their own. Where the server ends a connection (a switchover's fence does), all of a reader
are opened again when needed: changes flow meanwhile.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import psycopg
import structlog
from psycopg import pq

from schemas.errors import OperatorNeeded, Retryable, SetupError, SlotbridgeError
from services.bridge.pgoutput.messages import Relation, RelationColumn
from services.bridge.snapshot.copied_rows import RowsTooLarge
from services.bridge.snapshot.places import (
    Blocks,
    Density,
    Place,
    RowsBefore,
    block_of,
    places_query,
)
from services.bridge.snapshot.ranges import RangeReader, Share, execute, share_of
from services.bridge.snapshot.row_order import Versions, order_versions
from services.bridge.snapshot.tables import (
    Chunk,
    KeyColumn,
    KeyRange,
    TableShape,
    bounds_query,
    chunk_query,
)
from services.bridge.snapshot.visibility import Sight, parse_sight
from services.bridge.source.replication_connection import cut_off_after
from services.bridge.source.server_errors import connect_error, server_error
from services.postgres.published_tables import PublishedTable, published_tables
from services.postgres.rows import one_row
from services.postgres.server import Connection, Server, read_server
from services.postgres.sessions import ROWS, Purpose, Session, open_session

logger = structlog.get_logger(__name__)

_SLOW: Final = ("57014", "40001")
"""A statement that took too long, or that stood in the way of a standby's recovery."""
_GONE: Final = ("42P01", "3F000")
_NOT_NOW: Final = ("55P03", "40P01", *_SLOW, *_GONE)
"""A lock that is held, a deadlock, a statement as above, a table that is gone."""
_SIZE: Final = """
    SELECT pg_relation_size(oid) / current_setting('block_size')::bigint, relfilenode::bigint
      FROM pg_class WHERE oid = %s::oid"""


KeyedTable = tuple[TableShape, Sequence[str] | None, str]
"""A table with a key: its form, the key after which it is read on, and a condition."""


class AnotherServer(Retryable):
    """The server that answers is not the one that is streamed from."""


class NotNow(Exception):
    """A chunk can't be read at this moment.

    `slow`: because it is too large. `changed`: because the table is gone or another than it was.
    `never`: because a standby can't read it at all.
    """

    def __init__(
        self, why: str, *, slow: bool = False, changed: bool = False, never: bool = False
    ) -> None:
        super().__init__(why)
        self.never = never
        self.slow = slow
        self.changed = changed


class RowReader:
    """Reads for one session. Only one call at a time, from any thread; `interrupt` from another.

    Up to `workers` connections read rows, each a range of a chunk.
    """

    name = "the server"
    setting = "source.conninfo"
    """The setting that names the server."""

    def __init__(
        self, conninfo: str, publication: str, subject: str, *, deadline_ms: int, workers: int
    ) -> None:
        """Note where to connect, and how many connections may read rows; `_open_again` connects."""
        self._conninfo = conninfo
        self._publication = publication
        self._subject = subject
        self._deadline_s = deadline_ms / 1000
        self._closed = False
        self._density = Density()
        self._range_reader = RangeReader(workers, self._open_one)
        self._row_bytes: dict[int, float] = {}
        """Of each table (oid), as its last chunk had them."""
        self._sessions: tuple[Session, ...] = ()

    @property
    def _rows(self) -> Session:
        return self._sessions[0]

    @property
    def _all(self) -> tuple[Session, ...]:
        return (*self._sessions, *self._range_reader.others)

    def interrupt(self) -> None:
        """Let a call that is in progress in another thread fail soon."""
        self._closed = True
        for connection in self._all:
            with (
                contextlib.suppress(psycopg.Error, OSError),
                socket.socket(fileno=os.dup(connection.fileno())) as own,
            ):
                own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connections; no call is in progress."""
        self._closed = True
        self._range_reader.close()
        self._end_sessions()

    def begin(self, shape: TableShape, *others: TableShape) -> Sight:
        """Lock tables against changes of their forms, and take a database snapshot.

        In this order: a form that was changed after the snapshot would show it an empty table.
        Raises NotNow where a table is locked or gone; only the first one is waited for.
        """
        lock = "LOCK TABLE {} IN ACCESS SHARE MODE"
        with self._statement("begin a chunk", shape.name):
            self._rows.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            self._rows.execute(lock.format(shape.identifier).encode())
            if others:
                names = ", ".join(one.identifier for one in others)
                self._rows.execute(f"{lock.format(names)} NOWAIT".encode())
            row = one_row(self._rows.execute("SELECT pg_current_snapshot()::text"))
            return parse_sight(row[0])

    def shapes(self, oids: Sequence[int]) -> list[TableShape]:
        """Read tables as that snapshot sees them, without those that are not published any more."""
        with self._statement("inspect the tables"):
            found = published_tables(self._rows, self._publication, oids)
        return [shape_of(one) for one in found]

    def order_versions(self, shape: TableShape, where: str) -> Versions:
        """Read the versions of the collations that the table's chunks depend on."""
        with self._statement("read the collations' versions", shape.name):
            return order_versions(self._rows, shape, where)

    def read(
        self,
        shape: TableShape,
        last: Sequence[str] | None,
        where: str,
        before: RowsBefore | None = None,
        *,
        rows_max: int,
        bytes_max: int,
    ) -> Chunk:
        """Read up to `rows_max` rows after the key `last`, or until they have `bytes_max`.

        `before`: of a table without a key, which rows. Raises NotNow where that takes too long.
        """
        oid, within = shape.relation.oid, None
        row_bytes = self._row_bytes.get(oid)
        workers = 1 if row_bytes is None else self._range_reader.prepare()
        share = share_of(workers, rows_max, bytes_max, row_bytes)
        condition = ""
        if before is not None:
            within = self._blocks(shape, last, share.ranges * share.rows, before)
            condition = within.condition(before.sight)
        with self._statement("read rows", shape.name):
            bounds = self._bounds(shape, last, share, within)
            ranges = [KeyRange(*pair) for pair in pairwise([last, *bounds, None])]
            rows_each = share.rows if within is None else min(rows_max, 2 * share.rows)
            queries = [chunk_query(shape, one, where, rows_each + 1, condition) for one in ranges]
            chunk = self._range_reader.read(
                self._rows, queries, rows_max, rows_each=rows_each, bytes_each=share.bytes
            )
        self._learn(oid, chunk)
        if within is not None:
            read = within.read(chunk.last, whole=chunk.ends)
            self._density.learn(oid, chunk.looked_at, read)
            if chunk.ends:
                return chunk._replace(
                    last=[f"({within.until},0)"], ends=within.until >= within.size
                )
        return chunk

    def read_each(
        self, tables: Sequence[KeyedTable], *, rows_max: int, bytes_max: int
    ) -> list[Chunk]:
        """Read chunks of the first of `tables`, each by a connection; all of them share the limits.

        At least one is read, if any is given; all have keys. Raises NotNow as `read` does.
        """
        tables = tables[: min(self._range_reader.prepare(), rows_max)]
        if not tables:
            return []
        rows_each, bytes_each = rows_max // len(tables), bytes_max // len(tables)
        sizes = [self._row_bytes.get(shape.relation.oid) for shape, *_ in tables]
        rows_each = min(share_of(1, rows_each, bytes_each, size).rows for size in sizes)
        queries = [
            chunk_query(shape, KeyRange(last, None), where, rows_each + 1)
            for shape, last, where in tables
        ]
        with self._statement("read rows", tables[0][0].name):
            chunks = self._range_reader.read_each(
                self._rows, queries, rows_each=rows_each, bytes_each=bytes_each
            )
        for (shape, *_), chunk in zip(tables, chunks, strict=False):
            self._learn(shape.relation.oid, chunk)
        return chunks

    def _learn(self, oid: int, chunk: Chunk) -> None:
        if chunk.looked_at:
            self._row_bytes[oid] = chunk.bytes / chunk.looked_at

    def _blocks(
        self, shape: TableShape, last: Sequence[str] | None, rows: int, before: RowsBefore
    ) -> Blocks:
        """Return the blocks that may have about `rows` rows after the place `last`.

        Raise NotNow where the table has another file, in which its rows have other places, or where
        its publication was changed, so that changes may be missing.
        """
        oid = shape.relation.oid
        with self._statement("read the table's size", shape.name):
            size, found = one_row(self._rows.execute(_SIZE, [oid]))
            place = self._places(self._rows, [oid], before.sight).get(oid)
        if found != before.file:
            raise NotNow("the table was truncated or rewritten", changed=True)
        if place is None or not place.kept:
            raise NotNow("the publication was changed", changed=True)
        first = block_of(last[0]) if last is not None else 0
        return Blocks(first, min(size, first + self._density.blocks(oid, rows)), size)

    def end(self) -> None:
        """End the chunk's transaction, if there is one."""
        if not self._sessions or self._rows.closed:
            return
        if self._rows.info.transaction_status == pq.TransactionStatus.IDLE:
            return
        with contextlib.suppress(NotNow), self._statement("end a chunk"):
            self._rows.execute("ROLLBACK")

    def _bounds(
        self, shape: TableShape, last: Sequence[str] | None, share: Share, within: Blocks | None
    ) -> list[list[str]]:
        """Return the keys, or the places, up to which the ranges but the last one reach."""
        if share.ranges == 1:
            return []
        if within is not None:
            return within.bounds(share.ranges)
        found = execute(self._rows, bounds_query(shape, last, share.rows, share.ranges - 1))
        columns = range(found.nfields)
        return [
            [(found.get_value(row, column) or b"").decode() for column in columns]
            for row in range(found.ntuples)
        ]

    def _places(
        self, connection: Connection, oids: list[int], beginning: Sight
    ) -> dict[int, Place]:
        """Return where the rows of tables lie."""
        given = {"oids": oids, "publication": self._publication}
        rows = connection.execute(places_query(beginning), given).fetchall()
        return {oid: Place(*place) for oid, *place in rows}

    _purposes: tuple[Purpose, ...] = (ROWS,)
    """Of each connection, except those of RangeReader."""

    def _open(self) -> tuple[Session, ...]:
        """Make the connections. Raise SlotbridgeError."""
        with contextlib.ExitStack() as opened:
            sessions = []
            for purpose in self._purposes:
                sessions.append(self._open_one(purpose))
                opened.callback(sessions[-1].close)
            opened.pop_all()
        return tuple(sessions)

    def _open_one(self, purpose: Purpose = ROWS) -> Session:
        """Open a session. Raise where it reaches another server than the others."""
        try:
            connection = open_session(purpose, self._conninfo)
        except psycopg.Error as error:
            raise connect_error(error, self._subject, self.setting) from error
        try:
            self._require_the_server(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_the_server(self, connection: Connection) -> None:
        """Raise SlotbridgeError where the connection is with a server that is not to be read."""
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """Whether no connection is missing."""
        return bool(self._sessions) and not any(one.closed for one in self._sessions)

    def _open_again(self) -> None:
        """Open all connections where one is missing. Raise NotNow where that can't be done now."""
        if self._closed or self.connected:
            return
        first = not self._sessions
        self._end_sessions()
        try:
            self._sessions = self._open()
        except (AnotherServer, OperatorNeeded):
            raise
        except SlotbridgeError as error:
            if first and isinstance(error, SetupError):
                raise
            raise NotNow(f"{self.name} lets nobody in: {error.message}") from error
        if not first:
            logger.info("opened the snapshot's SQL sessions again", subject=self._subject)

    def _end_sessions(self) -> None:
        self._range_reader.end_others()
        for connection in self._sessions:
            connection.close()

    def _read_server(self, connection: Connection) -> Server:
        """Return which server answers. Raise SlotbridgeError."""
        try:
            with cut_off_after(self._deadline_s, connection.fileno()):
                return read_server(connection)
        except (psycopg.Error, OSError) as error:
            raise connect_error(error, self._subject, self.setting) from error

    @contextlib.contextmanager
    def _statement(self, operation: str, table: str = "") -> Iterator[None]:
        """Translate psycopg's errors; cut off all connections where the server does not answer."""
        try:
            with contextlib.ExitStack() as stack:
                for connection in self._all:
                    stack.enter_context(cut_off_after(self._deadline_s, connection.fileno()))
                yield
        except (psycopg.Error, OSError) as error:
            raise self._translated(error, operation, table) from error

    def _translated(
        self, error: psycopg.Error | OSError, operation: str, table: str
    ) -> SlotbridgeError | NotNow:
        """Return NotNow for what passes (locks, ended sessions), else our error."""
        if self._closed:
            return Retryable("the session ends", operation=operation, subject=self._subject)
        if isinstance(error, RowsTooLarge):
            self._row_bytes[error.oid] = error.row_bytes
            self._end_sessions()
            return NotNow(str(error))
        state = getattr(error, "sqlstate", None)
        if state is None or any(one.closed for one in self._all):
            self._end_sessions()
            said = "" if state is None else f": {message_of(error)}"
            return NotNow(f"{self.name} has ended the snapshot's SQL session{said}")
        message = message_of(error)
        if state in _NOT_NOW:
            return NotNow(message, slow=state in _SLOW, changed=state in _GONE)
        return server_error(state, message, operation, table or self._subject)


def message_of(error: psycopg.Error | OSError) -> str:
    """Return the server's message of an error, as one line."""
    said = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return " ".join((said or str(error)).split())


def shape_of(table: PublishedTable) -> TableShape:
    """Describe a table of the catalogs as pgoutput does."""
    columns = tuple(
        RelationColumn(one.name, one.type_oid, one.typmod, one.identity, one.type_name)
        for one in table.columns
    )
    relation = Relation(table.oid, table.schema, table.table, table.replica_identity, columns)
    key = tuple(KeyColumn(*column) for column in table.key)
    return TableShape(relation, table.partitioned, table.row_filter, key)
