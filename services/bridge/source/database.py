"""The SQL side of the bridge: find the primary, prepare it, move the replication origin.

One ordinary connection, held as long as the session lasts. Its replication origin is session-owned
(`pg_replication_origin_session_setup`), which makes it the lock that keeps a second bridge waiting.
While changes flow, another one takes its place where the server ends it (`sql_session`).
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import psycopg
import structlog

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError
from schemas.events import HEARTBEAT_PREFIX
from schemas.lsn import format_lsn
from schemas.settings import SourceSettings
from services.bridge import metrics
from services.bridge.pgoutput.type_names import PgType
from services.bridge.progress.consistency import Selection
from services.bridge.progress.errors import publication_gone
from services.bridge.source.awaited_commits import require_no_waiting_commits
from services.bridge.source.candidates import find_primary
from services.bridge.source.publication_reader import Answer, Question, without_waiting
from services.bridge.source.replication_connection import cut_off_after, walsender_name
from services.bridge.source.server_errors import connect_error, server_error
from services.bridge.source.server_requirements import check_server
from services.bridge.source.sql_session import SqlSessionEnded, connect_again, in_any_session
from services.bridge.source.table_options import creation_statement
from services.bridge.source.type_catalog import money_digits, read_types
from services.bridge.source.visibility import await_visible
from services.postgres import origins, slots
from services.postgres.partitions import Partition, partitions
from services.postgres.publications import (
    PrimaryKey,
    primary_key,
    publication_oid,
    published_columns,
    rows_before,
)
from services.postgres.published_tables import PublishedTable, published_tables
from services.postgres.server import is_synchronous_standby, setting, written_lsn
from services.postgres.slots import Slot, SlotStatistics
from services.postgres.stored_columns import StoredColumns, stored_columns

logger = structlog.get_logger(__name__)

ORIGIN_PREFIX = "slotbridge_"


class Primary:
    """The chosen primary and the session that owns the origin. Close it when done."""

    def __init__(
        self, settings: SourceSettings, *, sql_deadline_ms: int, idle_timeout_ms: int
    ) -> None:
        self._settings = settings
        self._idle_timeout_ms = idle_timeout_ms
        self._deadline_s = sql_deadline_ms / 1000
        self.origin = ORIGIN_PREFIX + settings.slot
        chosen = find_primary(settings)
        self.conninfo = chosen.conninfo
        self.server = chosen.server
        self._connection = chosen.connection
        self._origin_owned = False
        self._pid = 0
        """Of the server's process that owns the origin."""
        self.streams = False
        """Whether the replication connection streams, so that the server is known to be there."""
        self._slot_read = False
        self._publication_oid: int | None = None

    def close(self) -> None:
        """End the session, and with it the ownership of the origin."""
        self._connection.close()

    def reopen(self, ended: SqlSessionEnded) -> None:
        """Open another session with the same server, and own the origin in it.

        Raise SqlSessionEnded where the server lets no other be opened, Retryable where another
        bridge owns the origin by now, or another server answers.
        """
        self._connection.close()
        if not self.streams:
            raise ended
        slot = self._settings.slot
        self._connection = connect_again(self.conninfo, self.server, slot, self._pid)
        self._origin_owned = False
        with self._statement("take the origin again"):
            self._own_origin()
        logger.info("opened another SQL session", slot=slot, reason=ended.message)

    def prepare(self) -> None:
        """Check the server and take the origin, where there is one. Nothing is made.

        Raise SetupError for a server, privilege or setting that does not do, Retryable
        (SLOT_IN_USE) while another bridge owns the origin.
        """
        server = self.server
        check_server(server, two_phase=self._settings.two_phase)
        if not server.synchronized_standby_slots:
            logger.warning(
                "synchronized_standby_slots is empty: after a failover Kafka may hold transactions "
                "that the new primary never had",
                slot=self._settings.slot,
            )
        with self._statement("take the origin"):
            if origins.origin_exists(self._connection, self.origin):
                self._own_origin()

    def establish(self) -> None:
        """Make publication and origin where missing, and take the origin. Raise as `prepare`."""
        with self._statement("prepare the server"):
            self._ensure_publication()
            if not origins.origin_exists(self._connection, self.origin):
                origins.create_origin(self._connection, self.origin)
                logger.info("created origin", origin=self.origin)
            self._own_origin()

    def require_free_slot(self, operation: str) -> None:
        """Raise Retryable while something streams from the slot, SetupError while commits wait."""
        found = self.slot()
        if found is not None and found.active_pid is not None:
            raise Retryable(
                f"a bridge uses the slot (walsender {found.active_pid})",
                operation=operation,
                subject=f"slot {self._settings.slot}",
                hint="stop the bridge, then run the command again",
                exit_code=ExitCode.SLOT_IN_USE,
            )
        with self._statement("read synchronous_standby_names"):
            require_no_waiting_commits(self._connection, self._settings.slot, operation)

    @in_any_session
    def wal_lsn(self) -> int:
        """Return how far the server has flushed its WAL."""
        with self._statement("read the WAL's position"):
            return written_lsn(self._connection)

    def selection(self) -> Selection:
        """Return what chooses the changes that are sent; oid 0 where there is no such publication.

        `check_publication` holds the server to this publication.
        """
        name = self._settings.publication
        with self._statement("read the publication"):
            self._publication_oid = publication_oid(self._connection, name)
        return Selection(name, self._publication_oid or 0, self._settings.origin)

    def slot(self) -> Slot | None:
        """Return the bridge's slot, None if it is missing.

        Raise SetupError for a slot of another kind than the bridge needs.
        """
        with self._statement("read the slot"):
            found = slots.read_slot(self._connection, self._settings.slot)
        if found is None:
            return None
        wrong = (
            f"is a {found.slot_type} slot of {found.plugin}"
            if found.plugin != "pgoutput"
            else f"belongs to database {found.database}"
            if found.database != self.server.database
            else "is temporary"
            if found.temporary
            else ""
        )
        if wrong:
            raise SetupError(
                f"the slot {wrong}",
                operation="check the slot",
                subject=f"slot {self._settings.slot}",
                hint="choose another source.slot: the bridge creates its slot",
            )
        if not self._slot_read:
            self._slot_read = True
            self._warn_of_slot(found)
        return found

    def _warn_of_slot(self, found: Slot) -> None:
        if found.two_phase and not self._settings.two_phase:
            logger.warning(
                "the slot decodes two-phase: set source.two_phase to true", slot=self._settings.slot
            )
        if not found.failover:
            logger.warning(
                "the slot is not a failover slot and will not survive a promotion",
                slot=self._settings.slot,
            )

    def tell_rows_before(self) -> None:
        """Log how many rows the tables have that the new slot, which begins after them, lacks."""
        with self._statement("estimate the rows of tables"):
            before = rows_before(self._connection, self._settings.publication)
        if before.rows or before.tables_unknown:
            tell = logger.warning if before.rows else logger.info
            tell(
                "rows that the tables already have are not sent: the slot begins after them",
                rows_about=before.rows,
                tables=before.tables,
                tables_not_judged=before.tables_unknown,
                hint="snapshot.mode: initial sends them (docs/SNAPSHOTS.md)",
            )

    def origin_lsn(self) -> int | None:
        """Return the origin's position, None where it has never been moved."""
        with self._statement("read the origin"):
            if not origins.origin_exists(self._connection, self.origin):
                return None
            return origins.origin_progress(self._connection, self.origin)

    def drop_origin(self) -> None:
        """Give the origin up, and drop it."""
        with self._statement("drop the origin"):
            origins.drop_own_origin(self._connection, self.origin)
            self._origin_owned = False

    def clock_ms(self) -> int:
        """Return the server's clock, in ms since 1970."""
        with self._statement("read the clock"):
            row = self._connection.execute(
                "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
            ).fetchone()
            return int(row[0]) if row is not None else 0

    @in_any_session
    def primary_key(self, relation_oid: int) -> PrimaryKey | None:
        """Return a table's primary key as it is now, None when the table is gone."""
        with self._statement("read the primary key"):
            return primary_key(self._connection, relation_oid)

    @in_any_session
    def partitions(self, relation_oid: int) -> tuple[Partition, ...]:
        """Return the partitions that a table has now, () for a table without."""
        with self._statement("read the partitions of a table"):
            return partitions(self._connection, [relation_oid]).get(relation_oid, ())

    @in_any_session
    def stored_columns(self, relation_oid: int) -> StoredColumns | None:
        """Return what the catalog says of a table's columns now, None when the table is gone."""
        with self._statement("read the columns of a table"):
            return stored_columns(self._connection, relation_oid, self._settings.publication)

    @in_any_session
    def await_visible(self, xid: int, while_waiting: Callable[[], None]) -> bool:
        """Wait until the catalog shows what the transaction `xid` made; False if it does not.

        Not waited for where commits wait for the bridge: they would wait for each other.
        """
        deadline_s = 0 if self.commits_wait() else self._deadline_s / 4
        with self._statement("read a snapshot"):
            return await_visible(
                self._connection, xid, deadline_s=deadline_s, while_waiting=while_waiting
            )

    def published(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return (schema, table) -> the columns of every table that the publication has now."""
        with self._statement("read the publication"):
            return published_columns(self._connection, self._settings.publication)

    def published_tables(self) -> list[PublishedTable]:
        """Return the tables of the publication as pgoutput describes them, with their keys."""
        with self._statement("read the publication"):
            return published_tables(self._connection, self._settings.publication)

    @in_any_session
    def types(self, oids: Iterable[int]) -> list[PgType]:
        """Return the types of `oids` and the types that these consist of, without dropped ones."""
        with self._statement("read the types"):
            return read_types(self._connection, oids)

    def money_digits(self) -> int:
        """Return how many digits money has after the decimal point in this database's locale."""
        with self._statement("read the locale"):
            return money_digits(self._connection)

    @in_any_session
    def move_origin(self, lsn: int) -> int | None:
        """Record `lsn` in the origin, with the heartbeat message, in one small transaction.

        Return where that transaction's commit ends, or later. It was flushed (synchronous_commit =
        local), so that no crash of the server takes it back. None on a server that takes no writes,
        which may be fenced for a switchover: nothing of ours is to lie behind its last commit.
        """
        with self._statement("move the origin"):
            with self._connection.transaction():
                if setting(self._connection, "transaction_read_only") == "on":
                    return None
                self._connection.execute(
                    "SELECT pg_replication_origin_xact_setup(%s::pg_lsn, clock_timestamp()),"
                    " pg_logical_emit_message(true, %s, %s)",
                    [format_lsn(lsn), HEARTBEAT_PREFIX, self._settings.slot],
                )
            return written_lsn(self._connection)

    @in_any_session
    def slot_seen(self) -> tuple[Slot | None, SlotStatistics | None]:
        """Return the slot and the server's statistics of it, as they are now."""
        with self._statement("read the slot"):
            of = (self._connection, self._settings.slot)
            return slots.read_slot(*of), slots.read_slot_statistics(*of)

    @in_any_session
    def check_publication(self) -> None:
        """Raise SetupError when the publication is gone: the server then sends nothing, silently.

        Also where there is another one of its name, since `selection` was asked.
        Source: pgoutput.c, LoadPublications ("skipped loading publication", a WARNING on 18).
        """
        name = self._settings.publication
        with self._statement("read the publication"):
            oid = publication_oid(self._connection, name)
        if oid is None or oid != self._publication_oid:
            raise publication_gone(name, made_again=oid is not None)

    @in_any_session
    def commits_wait(self) -> bool:
        """Tell whether the server lists the bridge's walsender in synchronous_standby_names."""
        with self._statement("read the state of replication"):
            return is_synchronous_standby(self._connection, walsender_name(self._settings.slot))

    @in_any_session
    def withheld_by(self) -> tuple[str, ...]:
        """Return the standbys, and their states, that the walsender awaits to send a commit."""
        with self._statement("read the state of replication"):
            return slots.withheld_by(self._connection, walsender_name(self._settings.slot))

    def ask(self, operation: str, question: Question[Answer]) -> Answer | None:
        """Return the answer to a question, None where the server gives none (`without_waiting`)."""
        with self._statement(operation):
            return without_waiting(self._connection, question)

    def _ensure_publication(self) -> None:
        name = self._settings.publication
        if publication_oid(self._connection, name) is not None:
            return
        slot = slots.read_slot(self._connection, self._settings.slot)
        if slot is not None and slot.plugin == "pgoutput":
            raise publication_gone(name)
        self._connection.execute(creation_statement(self._connection, self._settings))
        tables = ", ".join(self._settings.tables) or "all tables"
        logger.info("created publication", publication=name, tables=tables)

    def _own_origin(self) -> None:
        if self._origin_owned:
            return
        row = self._connection.execute(
            "SELECT pg_backend_pid(), set_config('idle_session_timeout', %s, false),"
            " pg_replication_origin_session_setup(%s)",
            [f"{self._idle_timeout_ms}ms", self.origin],
        ).fetchone()
        self._pid = int(row[0]) if row is not None else 0
        self._origin_owned = True

    @contextlib.contextmanager
    def _statement(self, operation: str) -> Iterator[None]:
        """Translate psycopg's errors; cut the connection off when the server does not answer."""
        was_open, since = not self._connection.closed, time.monotonic()
        try:
            with cut_off_after(self._deadline_s, self._connection.fileno()):
                yield
        except psycopg.Error as error:
            translated = self._translated(error, operation)
            if self._connection.closed and time.monotonic() - since < self._deadline_s:
                if was_open and self.streams:
                    metrics.SQL_SESSIONS_LOST.inc()
                subject = f"slot {self._settings.slot}"
                raise SqlSessionEnded(
                    translated.message,
                    operation=operation,
                    subject=subject,
                    hint=translated.hint,
                    exit_code=translated.exit_code,
                ) from error
            raise translated from error

    def _translated(self, error: psycopg.Error, operation: str) -> SlotbridgeError:
        message = error.diag.message_primary or str(error)
        subject = f"slot {self._settings.slot}"
        if error.sqlstate is None:
            return connect_error(message, subject)
        return server_error(error.sqlstate, " ".join(message.split()), operation, subject)
