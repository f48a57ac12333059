"""A new failover slot, and the tables' rows exactly where it begins.

    CREATE_REPLICATION_SLOT … (SNAPSHOT 'export')    what committed before its LSN, and no more
    SET TRANSACTION SNAPSHOT                          rows are read under that
    LOCK TABLE … ACCESS SHARE                         no table changes its form meanwhile
    the same form and files as now?                   else rows are not to be seen: TRUNCATE and
                                                      ALTER TABLE make new files

All calls block. VACUUM keeps what the snapshot sees until `close`.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg
import structlog

from schemas.errors import ExitCode, Retryable, SetupError
from schemas.events import HEARTBEAT_PREFIX
from schemas.lsn import format_lsn
from schemas.settings import SourceSettings
from schemas.snapshot import SlotBeginning
from services.bridge.compiled import Messages, new_messages
from services.bridge.repair.diagnosis import OPERATION
from services.bridge.snapshot.copied_rows import copy_lines, end_copy, form_of, require_copy
from services.bridge.snapshot.row_reader import shape_of
from services.bridge.snapshot.slot_creation import import_snapshot
from services.bridge.snapshot.tables import TableShape
from services.bridge.snapshot.visibility import parse_sight
from services.bridge.source.readiness import wait_readable
from services.bridge.source.replication_connection import (
    ReplicationConnection,
    cut_off_after,
)
from services.bridge.source.server_errors import connect_error, session_error
from services.postgres import slots
from services.postgres.identifiers import identifier
from services.postgres.publications import publishes_all_tables, unpublished_changes
from services.postgres.published_tables import published_tables
from services.postgres.rows import one_row
from services.postgres.server import Connection, Server, written_lsn
from services.postgres.sessions import REPAIR, REPAIR_LOCK_S, open_session
from services.waiter import Waiter

logger = structlog.get_logger(__name__)

SEGMENTS_MAX: Final = 4_096
"""How many WAL segments are skipped at most, to get beyond what Kafka has."""
ROWS_DEADLINE_S: Final = 3_600.0
"""How long the server may look for the next rows: a filter may fit few of a large table."""
_LOOK_S: Final = 0.5
_PART_BYTES: Final = 2**20
_LOG_EVERY_S: Final = 5.0
_OPEN: Final = """
    SELECT who || ' since ' || to_char(began, 'YYYY-MM-DD HH24:MI:SS TZ') FROM (
      SELECT format('pid %s (%s)', pid, coalesce(nullif(application_name, ''), usename)), xact_start
        FROM pg_stat_activity WHERE backend_xid IS NOT NULL
       UNION ALL
      SELECT format('prepared transaction %s', gid), prepared FROM pg_prepared_xacts
    ) AS open (who, began) ORDER BY began LIMIT 3"""
_EMIT: Final = "SELECT pg_logical_emit_message(false, %s, %s)"
"""With the prefix of heartbeats: a bridge of another slot does not publish it."""


class Baseline:
    """A new slot and its database snapshot: `make`, then read `shapes` and `rows`, then `close`."""

    def __init__(
        self,
        conninfo: str,
        source: SourceSettings,
        server: Server,
        waiter: Waiter,
        *,
        sql_deadline_ms: int,
    ) -> None:
        """Open two connections: one for rows of the snapshot, one for the server as it is now."""
        self._conninfo = conninfo
        self._server = server
        self._deadline_s = sql_deadline_ms / 1000 + REPAIR_LOCK_S
        self._waiter = waiter
        self._logged_s = 0.0
        self._slot = source.slot
        self._publication = source.publication
        self._rows: Connection = self._connect()
        self._now: Connection = self._connect()
        self._exporter: ReplicationConnection | None = None
        self.lsn = 0
        """Where the slot begins."""
        self.sight = ""
        """The slot's database snapshot, as the server prints it."""

    @property
    def commit_lsn(self) -> int:
        """The LSN of the repair's events: after all before the slot, before all that it decodes."""
        return max(0, self.lsn - 1)

    @property
    def xmin(self) -> int:
        """Return an xid such that everybody sees all transactions before it."""
        return parse_sight(self.sight).xmin

    def beginning(self, ts_ms: int) -> SlotBeginning:
        """Tell where the slot begins. Rows of tables without a key may be in Kafka from before."""
        with self._statement("read the publication"):
            all_tables = publishes_all_tables(self._rows, self._publication)
        return SlotBeginning(
            slot=self._slot,
            lsn=self.lsn,
            timeline=self._server.timeline,
            sight=self.sight,
            all_tables=all_tables,
            files={},
            ts_ms=ts_ms,
        )

    def close(self) -> None:
        """End the connections and the database snapshot."""
        for connection in (self._rows, self._now):
            connection.close()
        if self._exporter is not None:
            self._exporter.close()

    def published(self) -> list[TableShape]:
        """Return the published tables as they are now."""
        with self._statement("inspect the published tables"):
            return [shape_of(one) for one in published_tables(self._now, self._publication)]

    def unpublished(self) -> tuple[str, ...] | None:
        """Return the kinds of changes that the publication leaves out; None: there is none."""
        with self._statement("read the publication"):
            return unpublished_changes(self._now, self._publication)

    def require_none_prepared(self) -> None:
        """Raise SetupError where transactions are prepared: the new slot would wait for them."""
        with self._statement("read the prepared transactions"):
            rows = self._now.execute("SELECT gid FROM pg_prepared_xacts ORDER BY prepared LIMIT 5")
            gids = ", ".join(gid for (gid,) in rows)
        if gids:
            raise SetupError(
                f"a new slot would wait for prepared transactions that are not decided: {gids}",
                operation=OPERATION,
                subject=f"slot {self._slot}",
                hint="COMMIT PREPARED or ROLLBACK PREPARED each of them, then run this again",
                exit_code=ExitCode.SERVER_SETTING,
            )

    def now_xmin(self) -> int:
        """Return an xid such that everybody sees all transactions before it."""
        with self._statement("read a snapshot"):
            row = one_row(self._now.execute("SELECT pg_current_snapshot()::text"))
            return parse_sight(row[0]).xmin

    def move_beyond(self, lsn: int) -> None:
        """Write WAL until new positions are beyond `lsn`, which the server may not have reached.

        Raise SetupError where that is too far, or the role may not switch WAL files.
        """
        logged_s = 0.0
        for _ in range(SEGMENTS_MAX):
            self._waiter.turn()
            with self._statement("move the WAL on"):
                now_lsn = written_lsn(self._now)
                if now_lsn > lsn:
                    return
                if time.monotonic() - logged_s > _LOG_EVERY_S:
                    logged_s = time.monotonic()
                    logger.info(
                        "moving the WAL beyond what Kafka has",
                        lsn=format_lsn(now_lsn),
                        beyond=format_lsn(lsn),
                    )
                self._now.execute(_EMIT, [HEARTBEAT_PREFIX, self._slot])
                self._now.execute("SELECT pg_switch_wal()")
        raise SetupError(
            f"the server's WAL is at {format_lsn(now_lsn)}, Kafka has events up to "
            f"{format_lsn(lsn)}: new events would get positions of events that Kafka has",
            operation=OPERATION,
            subject=f"slot {self._slot}",
            hint="stop the server, and move its WAL beyond Kafka's position by pg_resetwal "
            "--next-wal-file",
            exit_code=ExitCode.SERVER_SETTING,
        )

    def make(self, *, two_phase: bool, wal_sender_timeout_ms: int, deadline_s: float) -> None:
        """Recreate the slot, and keep its snapshot. Raise Retryable if another server answers."""
        with self._statement("drop the slot"):
            if slots.read_slot(self._now, self._slot) is not None:
                self._now.execute("SELECT pg_drop_replication_slot(%s)", [self._slot])
        self._exporter = ReplicationConnection(
            self._conninfo,
            self._slot,
            wal_sender_timeout_ms=wal_sender_timeout_ms,
            sql_deadline_ms=int(1000 * deadline_s),
            name=REPAIR.application,
        )
        if self._exporter.identify() != (self._server.system_identifier, self._server.timeline):
            raise Retryable(
                "another server or timeline answers than before",
                operation=OPERATION,
                subject=f"slot {self._slot}",
                hint="run `slotbridge recover` again: nothing was published",
            )
        self._logged_s = time.monotonic()
        self.lsn, snapshot = self._exporter.create_slot(
            Waiter(self._log_open),
            two_phase=two_phase,
            export=True,
            deadline_s=deadline_s,
        )
        with self._statement("import the database snapshot"):
            self.sight = import_snapshot(self._rows, snapshot)
        logger.info("made the slot anew", slot=self._slot, lsn=format_lsn(self.lsn))

    def _log_open(self) -> None:
        """Say now and then which transactions the new slot waits for."""
        self._waiter.turn()
        if time.monotonic() - self._logged_s < _LOG_EVERY_S:
            return
        self._logged_s = time.monotonic()
        with self._statement("look for open transactions"):
            found = self._now.execute(_OPEN).fetchall()
        logger.info(
            "the new slot waits for the transactions that are open",
            oldest=[who for (who,) in found],
        )

    def shapes(self) -> list[TableShape]:
        """Lock the published tables, and return them as they were where the slot begins.

        Raise Retryable where one has another form by now, or new files: its rows can't be seen.
        """
        with self._statement("inspect the published tables"):
            found = published_tables(self._rows, self._publication)
        shapes = [shape_of(one) for one in found]
        for shape in shapes:
            with self._statement("lock the table", shape.name):
                self._lock(shape)
        oids = [one.oid for one in found]
        with self._statement("inspect the published tables"):
            same = self._files(self._rows, oids) == self._files(self._now, oids)
        if not same or shapes != self.published():
            raise _changed("a published table was truncated, altered or created")
        return shapes

    def _lock(self, shape: TableShape) -> None:
        """Lock a table against changes of its form. Raise Retryable where it is gone."""
        try:
            self._rows.execute(f"LOCK TABLE {shape.identifier} IN ACCESS SHARE MODE".encode())
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            raise _changed(f"table {shape.name} was dropped or renamed") from error

    def rows(self, shape: TableShape) -> Iterator[Messages]:
        """Yield the table's rows, some at once, in any order."""
        columns = ", ".join(identifier(column.name) for column in shape.relation.columns)
        condition = f" WHERE {shape.row_filter}" if shape.row_filter else ""
        query = f"SELECT {columns} FROM {shape.identifier}{condition}"  # noqa: S608
        connection, form, state = self._rows.pgconn, form_of(shape.relation), 1
        with self._statement("read rows", shape.name, bounded=False):
            connection.send_query_params(f"COPY ({query}) TO STDOUT".encode(), [])
            until = time.monotonic() + ROWS_DEADLINE_S
            while connection.is_busy():
                self._await(until)
            require_copy(connection.get_result())
            while state >= 0:
                rows = new_messages()
                state, *_ = copy_lines(
                    connection, rows, form, sys.maxsize, _PART_BYTES, nonblocking=True
                )
                if len(rows):
                    yield rows
                    until = time.monotonic() + ROWS_DEADLINE_S
                elif state == 0:
                    self._await(until)
            end_copy(connection)

    def _files(self, connection: Connection, oids: Sequence[int]) -> list[Any]:
        """Return (oid, file) of tables and of what inherits from them."""
        return connection.execute(
            """
            WITH RECURSIVE below AS (
              SELECT unnest(%s::oid[]) AS oid
               UNION
              SELECT i.inhrelid FROM below b JOIN pg_inherits i ON i.inhparent = b.oid)
            SELECT c.oid::bigint, c.relfilenode::bigint
              FROM below b JOIN pg_class c ON c.oid = b.oid ORDER BY 1
            """,
            [list(oids)],
        ).fetchall()

    def _await(self, until: float) -> None:
        """Wait a moment for more from the server. Raise OperationalError after `until`."""
        self._waiter.turn()
        if time.monotonic() > until:
            raise psycopg.OperationalError("the server does not answer")
        wait_readable([self._rows.pgconn.socket], _LOOK_S)
        self._rows.pgconn.consume_input()

    def _connect(self) -> Connection:
        try:
            return open_session(REPAIR, self._conninfo)
        except psycopg.Error as error:
            raise connect_error(error, f"slot {self._slot}") from error

    @contextlib.contextmanager
    def _statement(
        self, operation: str, table: str = "", *, bounded: bool = True
    ) -> Iterator[None]:
        """Translate psycopg's errors; cut off both connections where the server does not answer.

        `bounded` False: the block bounds its statements itself.
        """
        subject = table or f"slot {self._slot}"
        try:
            with contextlib.ExitStack() as bounds:
                for connection in (self._rows, self._now) if bounded else ():
                    bounds.enter_context(cut_off_after(self._deadline_s, connection.fileno()))
                yield
        except psycopg.Error as error:
            if error.sqlstate is None:
                raise Retryable(
                    "the connection to the server is lost",
                    operation=operation,
                    subject=subject,
                    hint="run `slotbridge recover` again: nothing was published",
                    exit_code=ExitCode.SERVER_UNREACHABLE,
                ) from error
            refused = session_error(error, operation, subject)
            if isinstance(refused, Retryable):
                refused.hint = "run `slotbridge recover` again"
            raise refused from error


def _changed(what: str) -> Retryable:
    return Retryable(
        f"{what} while the slot was made",
        operation=OPERATION,
        hint="run `slotbridge recover` again",
        exit_code=ExitCode.SERVER_UNREACHABLE,
    )
