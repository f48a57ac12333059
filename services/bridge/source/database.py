"""The SQL side of the bridge: find the primary, prepare it, move the second witness (`witness`).

One ordinary connection, held as long as the session lasts. It owns the replication origin, or an
advisory lock alone where `source.witness` is a sequence: so a second bridge waits. While changes
flow, another one takes its place where the server ends it (`sql_session`).
"""

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping

import psycopg
import structlog

from schemas.errors import ExitCode, Retryable, SetupError
from schemas.events import HEARTBEAT_PREFIX
from schemas.settings import SourceSettings
from services.bridge import metrics
from services.bridge.pgoutput.type_names import PgType
from services.bridge.progress.consistency import Selection
from services.bridge.progress.errors import publication_gone
from services.bridge.source.awaited_commits import require_no_waiting_commits
from services.bridge.source.candidates import find_primary
from services.bridge.source.publication_reader import Answer, Question, without_waiting
from services.bridge.source.replication_connection import cut_off_after, walsender_name
from services.bridge.source.server_errors import session_error
from services.bridge.source.server_requirements import check_server, warn_unsynchronized
from services.bridge.source.sql_session import SqlSessionEnded, connect_again, in_any_session
from services.bridge.source.table_options import creation_statement
from services.bridge.source.type_catalog import money_digits, read_types
from services.bridge.source.visibility import await_visible
from services.bridge.source.witness import former_position, former_witness, lock, witness_of
from services.postgres import slots
from services.postgres.partitions import Partition, partitions
from services.postgres.publications import (
    PrimaryKey,
    primary_key,
    publication_oid,
    published_columns,
    rows_before,
    table_oid,
)
from services.postgres.published_tables import PublishedTable, published_tables
from services.postgres.server import is_synchronous_standby, setting, written_lsn
from services.postgres.slots import Slot, SlotStatistics
from services.postgres.stored_columns import StoredColumns, stored_columns
from services.waiter import Waiter

logger = structlog.get_logger(__name__)


class Primary:
    """The chosen primary and the session that owns the origin. Close it when done."""

    def __init__(
        self,
        settings: SourceSettings,
        waiter: Waiter | None = None,
        *,
        sql_deadline_ms: int,
        idle_timeout_ms: int,
    ) -> None:
        self._settings = settings
        self.waiter = waiter or Waiter()
        self._idle_timeout_ms = idle_timeout_ms
        self._deadline_s = sql_deadline_ms / 1000
        self.witness = witness_of(settings.witness, settings.slot)
        self.kind_of_witness = settings.witness
        self._former = former_witness(settings.witness, settings.slot)
        chosen = find_primary(settings)
        self.conninfo = chosen.conninfo
        self.server = chosen.server
        self._connection = chosen.connection
        self._locked = self._origin_owned = False
        self._pid = 0
        """Of the server's process that owns the origin or holds the lock."""
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
        self._locked = self._origin_owned = False
        with self._statement("take the witness again"):
            self._own_witness()
        logger.info("opened another SQL session", slot=slot, reason=ended.message)

    def prepare(self) -> None:
        """Check the server and take the origin, where there is one. Nothing is made.

        Raise SetupError for a server, privilege or setting that does not do, Retryable
        (SLOT_IN_USE) while another bridge owns the origin.
        """
        server = self.server
        check_server(server, two_phase=self._settings.two_phase)
        if not server.synchronized_standby_slots:
            warn_unsynchronized(self._settings.slot)
        with self._statement("take the witness"):
            if self.witness.exists(self._connection):
                self._own_witness()
            else:
                self._lock()

    def establish(self) -> None:
        """Make publication and witness where missing, and take the witness. Raise as `prepare`."""
        with self._statement("prepare the server"):
            self._ensure_publication()
            if not self.witness.exists(self._connection):
                self.witness.create(self._connection)
                logger.info(f"created {self._settings.witness}", witness=self.witness.name)
            self._own_witness()

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
        """Return the bridge's slot, None if it is missing. Raise SetupError for another kind."""
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

    def _warn_of_slot(self, slot: Slot) -> None:
        """Warn of a slot that decodes two-phase against the settings, or is not a failover slot."""
        if slot.two_phase and not self._settings.two_phase:
            logger.warning(
                "the slot decodes two-phase: set source.two_phase to true", slot=self._settings.slot
            )
        if not slot.failover:
            logger.warning(
                "the slot is not a failover slot and will not survive a promotion",
                slot=self._settings.slot,
            )

    def log_rows_before(self) -> None:
        """Log how many rows the tables have that the new slot, which begins after them, lacks."""
        with self._statement("estimate the rows of tables"):
            before = rows_before(self._connection, self._settings.publication)
        if before.rows or before.tables_unknown:
            log = logger.warning if before.rows else logger.info
            log(
                "rows that the tables already have are not sent: the slot begins after them",
                rows_about=before.rows,
                tables=before.tables,
                tables_not_judged=before.tables_unknown,
                hint="snapshot.mode: initial sends them (docs/guides/snapshots.md)",
            )

    def origin_lsn(self) -> int | None:
        """Return the witness's position, None where it has never been moved."""
        with self._statement("read the witness"):
            return self.witness.position(self._connection)

    def former_lsn(self) -> int | None:
        """Return the position of the other kind of witness, None where none is known."""
        with self._statement("read the former witness"):
            return former_position(self._connection, self._former)

    def forget_origin(self) -> None:
        """Leave no trace of a position in the witness."""
        with self._statement("forget the witness"):
            self.witness.forget(self._connection)
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
    def table_oid(self, schema: str, table: str) -> int:
        """Return the oid of the table that has this name now, 0 where there is none."""
        with self._statement("look up a table"):
            return table_oid(self._connection, schema, table)

    @in_any_session
    def partitions(self, relation_oid: int) -> tuple[Partition, ...] | None:
        """Return the partitions that a table has now, None for a table that is not partitioned."""
        with self._statement("read the partitions of a table"):
            return partitions(self._connection, [relation_oid]).get(relation_oid)

    @in_any_session
    def stored_columns(self, relation_oid: int) -> StoredColumns | None:
        """Return what the catalog says of a table's columns now, None when the table is gone."""
        with self._statement("read the columns of a table"):
            return stored_columns(self._connection, relation_oid, self._settings.publication)

    @in_any_session
    def await_visible(self, xid: int) -> bool:
        """Wait until the catalog shows what the transaction `xid` made; False if it does not.

        Not waited for where commits wait for the bridge: they would wait for each other.
        """
        deadline_s = 0 if self.commits_wait() else self._deadline_s / 4
        with self._statement("read a snapshot"):
            return await_visible(self._connection, xid, self.waiter, deadline_s=deadline_s)

    def published(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return (schema, table) -> the columns of every table that the publication has now."""
        with self._statement("read the publication"):
            return published_columns(self._connection, self._settings.publication)

    def published_tables(self) -> list[PublishedTable]:
        """Return the tables of the publication as pgoutput describes them, with their keys."""
        with self._statement("read the publication"):
            return published_tables(self._connection, self._settings.publication)

    @in_any_session
    def types(self, oids: Collection[int], names: Mapping[int, str] | None = None) -> list[PgType]:
        """Return the types of `oids` and the types that these consist of, as `read_types` does."""
        with self._statement("read the types"):
            return read_types(self._connection, oids, names)

    def money_digits(self) -> int:
        """Return how many digits money has after the decimal point in this database's locale."""
        with self._statement("read the locale"):
            return money_digits(self._connection)

    @in_any_session
    def move_origin(self, lsn: int) -> int | None:
        """Record `lsn` in the witness, with the heartbeat message, in one small transaction.

        Return where that transaction's commit ends, or later. It was flushed (synchronous_commit =
        local), so that no crash of the server takes it back. None on a server that takes no writes,
        which may be fenced for a switchover: nothing of ours is to lie behind its last commit.
        """
        with self._statement("move the witness"):
            with self._connection.transaction():
                if setting(self._connection, "transaction_read_only") == "on":
                    return None
                self.witness.move(self._connection, lsn)
                self._connection.execute(
                    "SELECT pg_logical_emit_message(true, %s, %s)",
                    [HEARTBEAT_PREFIX, self._settings.slot],
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

        Raise it, too, where another publication has got its name since `selection` was asked.
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
        """Make the publication unless it exists. Raise where the slot has used one that is gone."""
        name = self._settings.publication
        if publication_oid(self._connection, name) is not None:
            return
        slot = slots.read_slot(self._connection, self._settings.slot)
        if slot is not None and slot.plugin == "pgoutput":
            raise publication_gone(name)
        with self._statement(f"make the publication {name}, which does not exist"):
            self._connection.execute(creation_statement(self._connection, self._settings))
        tables = ", ".join(self._settings.tables) or "all tables"
        logger.info("created publication", publication=name, tables=tables)

    def _own_witness(self) -> None:
        if not self._origin_owned:
            self._note_session()
            self.witness.own(self._connection)
            self._origin_owned = True
        self._lock()

    def _lock(self) -> None:
        if not self._locked:
            self._note_session()
            lock(self._connection, self._settings.slot)
            self._locked = True

    def _note_session(self) -> None:
        """Let the server end this session where it idles: it keeps other bridges waiting."""
        row = self._connection.execute(
            "SELECT pg_backend_pid(), set_config('idle_session_timeout', %s, false)",
            [f"{self._idle_timeout_ms}ms"],
        ).fetchone()
        self._pid = int(row[0]) if row is not None else 0

    @contextlib.contextmanager
    def _statement(self, operation: str) -> Iterator[None]:
        """Translate psycopg's errors; cut the connection off when the server does not answer."""
        was_open, since = not self._connection.closed, time.monotonic()
        try:
            with cut_off_after(self._deadline_s, self._connection.fileno()):
                yield
        except psycopg.Error as error:
            translated = session_error(error, operation, f"slot {self._settings.slot}")
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
