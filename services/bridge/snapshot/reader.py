"""The database side of a snapshot: marks in the WAL, and chunks of rows under a database snapshot.

Two ordinary connections: one reads rows in transactions of its own, the other one writes marks and
asks what standbys have. All calls block; the session makes them in a thread of their own. Where the
server ends a connection (a switchover's fence does), both are opened again when needed: changes
flow meanwhile. On a server that takes no writes nothing is marked: it may be fenced, and nothing of
ours is to lie behind its last commit.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import psycopg
import structlog
from psycopg import pq

from schemas.errors import Retryable, SlotbridgeError
from schemas.lsn import format_lsn
from schemas.snapshot import SNAPSHOT_PREFIX
from services.bridge.pgoutput.messages import Relation, RelationColumn, Row
from services.bridge.snapshot.cursor import parts
from services.bridge.snapshot.places import (
    Blocks,
    Density,
    Place,
    RowsBefore,
    block_of,
    places_query,
)
from services.bridge.snapshot.tables import (
    CURSOR,
    Chunk,
    KeyColumn,
    TableShape,
    chunk_query,
    filtered,
)
from services.bridge.snapshot.visibility import Sight, parse_sight
from services.bridge.source.replication_connection import SESSION_OPTIONS, cut_off_after
from services.bridge.source.server_errors import connect_error, server_error
from services.postgres.publications import unpublished_changes
from services.postgres.published_tables import PublishedTable, published_tables
from services.postgres.rows import one_row
from services.postgres.server import Connection, Server, read_server

logger = structlog.get_logger(__name__)

APPLICATION: Final = "slotbridge_snapshot"
LOCK_MS: Final = 200
"""How long a chunk waits for a locked table; the stream stands still meanwhile."""
STATEMENT_MS: Final = 10_000
_SLOW: Final = "57014"
_GONE: Final = ("42P01", "3F000")
_NOT_NOW: Final = ("55P03", _SLOW, "40P01", *_GONE)
"""A lock that is held, a statement that took too long, a deadlock, a table that is gone."""


_READ_ONLY: Final = "the server takes no writes"
_IF_WRITABLE: Final = (
    "SELECT CASE WHEN current_setting('transaction_read_only') = 'off' THEN {} END"
)
_SIZE: Final = """
    SELECT pg_relation_size(oid) / current_setting('block_size')::bigint, relfilenode::bigint
      FROM pg_class WHERE oid = %s::oid"""


class _AnotherServer(Retryable):
    """The server that answers is not the one that is streamed from."""


class NotNow(Exception):
    """A chunk can't be read at this moment.

    `slow`: because it is too large. `changed`: because the table is gone or another than it was.
    """

    def __init__(self, why: str, *, slow: bool = False, changed: bool = False) -> None:
        super().__init__(why)
        self.slow = slow
        self.changed = changed


class Inspection(NamedTuple):
    """The published tables, and an xid that was assigned after they were read.

    `places`: of those without a key, by oid, where it was asked for. `unpublished`: the kinds of
    changes that the publication leaves out.
    """

    shapes: list[TableShape]
    rows_estimates: dict[str, int]
    xid: int
    places: dict[int, Place]
    unpublished: tuple[str, ...]


class SnapshotReader:
    """Reads for one session. Only one call at a time, from any thread; `interrupt` from another."""

    def __init__(
        self, conninfo: str, publication: str, slot: str, server: Server, *, deadline_ms: int
    ) -> None:
        """Connect to `server`, of which the session streams. Raise SlotbridgeError."""
        self._conninfo = conninfo
        self._publication = publication
        self._subject = f"slot {slot}"
        self._server = server
        self._deadline_s = deadline_ms / 1000
        self._closed = False
        self._density = Density()
        self._marks, self._rows = self._open()

    def interrupt(self) -> None:
        """Let a call that is in progress in another thread fail soon."""
        self._closed = True
        for connection in (self._marks, self._rows):
            with (
                contextlib.suppress(psycopg.Error, OSError),
                socket.socket(fileno=os.dup(connection.fileno())) as own,
            ):
                own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End both connections; no call is in progress."""
        self._closed = True
        self._marks.close()
        self._rows.close()

    def inspect(self, beginning: Sight | None = None) -> Inspection:
        """Read what the publication has now, then take an xid.

        In this order: what was committed to a table before it joined is not published, so that it
        must have ended before rows are read. Raise NotNow where the server takes no writes.
        `beginning`: that of the slot, where tables without a key are read.
        """
        self._open_again()
        places: dict[int, Place] = {}
        with self._statement("inspect the published tables"):
            found = published_tables(self._marks, self._publication)
            unpublished = unpublished_changes(self._marks, self._publication)
            if beginning is not None:
                keyless = [one.oid for one in found if not one.key]
                places = self._places(self._marks, keyless, beginning)
            row = one_row(self._marks.execute(_IF_WRITABLE.format("pg_current_xact_id()::text")))
        if row[0] is None:
            raise NotNow(_READ_ONLY)
        estimates = {f"{one.schema}.{one.table}": one.rows_estimate for one in found}
        shapes = [shape_of(one) for one in found]
        return Inspection(shapes, estimates, int(row[0]), places, unpublished or ())

    def _places(
        self, connection: Connection, oids: list[int], beginning: Sight
    ) -> dict[int, Place]:
        """Return where the rows of tables lie."""
        given = {"oids": oids, "publication": self._publication}
        rows = connection.execute(places_query(beginning), given).fetchall()
        return {oid: Place(*place) for oid, *place in rows}

    def mark(self, token: str) -> int:
        """Write `token` into the WAL and flush it; return where its record ends.

        Raise NotNow where the server takes no writes.
        """
        self._open_again()
        with self._statement("mark where a chunk belongs"):
            message = "(pg_logical_emit_message(false, %s, %s, true) - '0/0')::bigint"
            query = _IF_WRITABLE.format(message)
            row = one_row(self._marks.execute(query, [SNAPSHOT_PREFIX, token]))
        if row[0] is None:
            raise NotNow(_READ_ONLY)
        return int(row[0])

    def has_standbys_up_to(self, lsn: int) -> bool:
        """Whether each standby of synchronized_standby_slots has flushed the WAL up to `lsn`.

        Source: slot.c, StandbySlotsHaveCaughtup.
        """
        with self._statement("ask for the standbys' positions"):
            row = one_row(
                self._marks.execute(
                    """
                    SELECT NOT EXISTS (
                      SELECT FROM unnest(string_to_array(
                             current_setting('synchronized_standby_slots'), ',')) entry,
                             trim(entry, ' "') listed (name)
                        LEFT JOIN pg_replication_slots s ON s.slot_name = listed.name
                       WHERE listed.name <> ''
                         AND (s.restart_lsn IS NULL OR s.restart_lsn < %s::pg_lsn))
                    """,
                    [format_lsn(lsn)],
                )
            )
            return bool(row[0])

    def begin(self, shape: TableShape) -> Sight:
        """Lock the table against changes of its form, and take a database snapshot.

        In this order: a form that was changed after the snapshot would show it an empty table.
        Raises NotNow where the table is locked or gone.
        """
        with self._statement("begin a chunk", shape.name):
            self._rows.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            self._rows.execute(f"LOCK TABLE {shape.identifier} IN ACCESS SHARE MODE".encode())
            row = one_row(self._rows.execute("SELECT pg_current_snapshot()::text"))
            return parse_sight(row[0])

    def shape(self, oid: int) -> TableShape | None:
        """Read the table as that snapshot sees it; None where it is not published any more."""
        with self._statement("inspect the table"):
            found = published_tables(self._rows, self._publication, oid)
        return shape_of(found[0]) if found else None

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
        within = Blocks(0, 0, 0)
        if before is not None:
            within = self._blocks(shape, last, rows_max, before)
        query, parameters = chunk_query(
            shape, last, where, rows_max + 1, within.condition(before.sight) if before else ""
        )
        with self._statement("read rows", shape.name):
            self._execute(query, parameters)
            rows, ends = self._fetch(rows_max, bytes_max)
            self._execute(b"CLOSE " + CURSOR, [])
        last_key = None
        if rows:
            width = len(shape.relation.columns)
            key = rows[-1][width : width + len(shape.read_by)]
            last_key = [value.decode() if isinstance(value, bytes) else "" for value in key]
        if before is not None:
            self._density.learn(shape.relation.oid, len(rows), within.read(last_key, whole=ends))
            if ends:
                last_key, ends = [f"({within.until},0)"], within.until >= within.size
        wanted = [row for row in rows if row[-1] == b"t"] if filtered(shape, where) else rows
        return Chunk(wanted, last_key, len(rows), ends)

    def _blocks(
        self, shape: TableShape, last: Sequence[str] | None, rows: int, before: RowsBefore
    ) -> Blocks:
        """Return the blocks that may have about `rows` rows after the place `last`.

        Raise NotNow where the table has another file, so that its rows have other places now, or
        where its publication was changed, so that changes may not have come.
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
        if self._rows.closed or self._rows.info.transaction_status == pq.TransactionStatus.IDLE:
            return
        with contextlib.suppress(NotNow), self._statement("end a chunk"):
            self._rows.execute("ROLLBACK")

    def _fetch(self, rows_max: int, bytes_max: int) -> tuple[list[Row], bool]:
        """Return up to `rows_max` rows, or those that have `bytes_max`; and whether none follow."""
        rows: list[Row] = []
        size = 0
        for part in parts(self._fetch_from_cursor, rows_max + 1):
            rows += part.rows
            size += part.bytes
            if part.ends:
                return rows[:rows_max], len(rows) <= rows_max
            if size >= bytes_max:
                break
        return rows[:rows_max], False

    def _fetch_from_cursor(self, count: int) -> pq.abc.PGresult:
        return self._execute(b"FETCH %d FROM %s" % (count, CURSOR), [])

    def _execute(self, query: bytes, parameters: list[bytes]) -> pq.abc.PGresult:
        """Text results as the server has printed them, without psycopg's types."""
        result = self._rows.pgconn.exec_params(query, parameters)
        if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
            raise psycopg.errors.error_from_result(result, encoding="utf-8")
        return result

    def _open(self) -> tuple[Connection, Connection]:
        """Open both connections. Raise Retryable where another server answers."""
        with contextlib.ExitStack() as opened:
            marks = self._connect("-c synchronous_commit=local")
            opened.callback(marks.close)
            rows = self._connect(
                f"-c lock_timeout={LOCK_MS} -c row_security=off -c jit=off"
                " -c idle_in_transaction_session_timeout=60s"
            )
            opened.callback(rows.close)
            for connection in (marks, rows):
                self._require_the_server(connection)
            opened.pop_all()
        return marks, rows

    def _open_again(self) -> None:
        """Open both connections again where one was lost. Raise NotNow where that can't be done."""
        if self._closed or not (self._marks.closed or self._rows.closed):
            return
        self._marks.close()
        self._rows.close()
        try:
            self._marks, self._rows = self._open()
        except _AnotherServer:
            raise
        except SlotbridgeError as error:
            raise NotNow(error.message) from error
        logger.info("opened the snapshot's SQL sessions again", subject=self._subject)

    def _connect(self, options: str) -> Connection:
        given = psycopg.conninfo.conninfo_to_dict(self._conninfo).get("options") or ""
        try:
            return psycopg.connect(
                self._conninfo,
                autocommit=True,
                options=f"{given} {SESSION_OPTIONS} -c statement_timeout={STATEMENT_MS} {options}",
                application_name=APPLICATION,
                client_encoding="UTF8",
            )
        except psycopg.Error as error:
            raise connect_error(str(error), self._subject) from error

    def _require_the_server(self, connection: Connection) -> None:
        """Raise _AnotherServer unless the connection is with the server that is streamed from."""
        try:
            with cut_off_after(self._deadline_s, connection.fileno()):
                found = read_server(connection)
        except (psycopg.Error, OSError) as error:
            raise connect_error(str(error), self._subject) from error
        known = self._server
        identity = (found.system_identifier, found.timeline, found.in_recovery)
        if identity != (known.system_identifier, known.timeline, False):
            raise _AnotherServer(
                "another server answers now",
                operation="open the snapshot's SQL sessions",
                subject=self._subject,
            )

    @contextlib.contextmanager
    def _statement(self, operation: str, table: str = "") -> Iterator[None]:
        """Translate psycopg's errors; cut off both connections where the server does not answer."""
        try:
            with (
                cut_off_after(self._deadline_s, self._rows.fileno()),
                cut_off_after(self._deadline_s, self._marks.fileno()),
            ):
                yield
        except (psycopg.Error, OSError) as error:
            raise self._translated(error, operation, table) from error

    def _translated(
        self, error: psycopg.Error | OSError, operation: str, table: str
    ) -> SlotbridgeError | NotNow:
        if self._closed:
            return Retryable("the session ends", operation=operation, subject=self._subject)
        state = getattr(error, "sqlstate", None)
        if state is None or self._marks.closed or self._rows.closed:
            self._marks.close()
            self._rows.close()
            return NotNow("the server has ended the snapshot's SQL session")
        assert isinstance(error, psycopg.Error)
        message = " ".join((error.diag.message_primary or str(error)).split())
        if state in _NOT_NOW:
            return NotNow(message, slow=state == _SLOW, changed=state in _GONE)
        return server_error(state, message, operation, table or self._subject)


def shape_of(table: PublishedTable) -> TableShape:
    """Describe a table of the catalogs as pgoutput does."""
    columns = tuple(
        RelationColumn(one.name, one.type_oid, one.typmod, one.identity, one.type_name)
        for one in table.columns
    )
    relation = Relation(table.oid, table.schema, table.table, table.replica_identity, columns)
    key = tuple(KeyColumn(name, kind) for name, kind in table.key)
    return TableShape(relation, table.partitioned, table.row_filter, key)
