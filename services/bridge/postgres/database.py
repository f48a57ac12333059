"""The SQL side of the bridge: find the primary, prepare it, move the replication origin.

One ordinary connection, held as long as the session lasts. Its replication origin is session-owned
(`pg_replication_origin_session_setup`), which makes it the lock that keeps a second bridge waiting.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psycopg
import structlog
from psycopg.conninfo import conninfo_to_dict

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError
from schemas.events import HEARTBEAT_PREFIX
from schemas.lsn import format_lsn
from schemas.settings import SourceSettings
from services import slots
from services.bridge.events.values.catalog import PgType
from services.bridge.postgres.connection import cut_off_after, walsender_name
from services.bridge.postgres.hosts import host_name, single_hosts
from services.bridge.postgres.refusals import connect_error, server_error
from services.bridge.postgres.type_catalog import money_digits, read_types
from services.bridge.postgres.visibility import await_visible
from services.slots import Connection, PrimaryKey, Server, Slot

logger = structlog.get_logger(__name__)

MINIMUM_VERSION = 170005
TWO_PHASE_VERSION = 180000
ORIGIN_PREFIX = "slotbridge_"
MINIMUM_WAL_LEVEL = "logical"
_PROBE_DEADLINE_S = 10.0
# Its own commits don't wait for standbys: a synchronous one, it would wait for its own feedback.
_PROBE_OPTIONS = (
    "-c synchronous_commit=local -c statement_timeout=15s"
    " -c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5"
    " -c tcp_keepalives_count=3 -c tcp_user_timeout=20s -c idle_in_transaction_session_timeout=30s"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A reachable host that accepts writes."""

    conninfo: str
    server: Server
    connection: Connection


class Primary:
    """The chosen primary and the session that owns the origin. Close it when done."""

    def __init__(
        self, settings: SourceSettings, *, sql_deadline_ms: int, idle_timeout_ms: int
    ) -> None:
        self._settings = settings
        self._idle_timeout_ms = idle_timeout_ms
        self._deadline_s = sql_deadline_ms / 1000
        self.origin = ORIGIN_PREFIX + settings.slot
        chosen = _choose(_probe_all(settings))
        self.conninfo = chosen.conninfo
        self.server = chosen.server
        self._connection = chosen.connection
        self._origin_owned = False

    def close(self) -> None:
        """End the session, and with it the ownership of the origin."""
        self._connection.close()

    def prepare(self) -> None:
        """Check the server, make publication and origin where missing, take the origin.

        Raises SetupError for a server, privilege or setting that does not do, Retryable
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
        with self._statement("prepare the server"):
            self._ensure_publication()
            if not slots.origin_exists(self._connection, self.origin):
                slots.create_origin(self._connection, self.origin)
                logger.info("created origin", origin=self.origin)
            self._own_origin()

    def slot(self) -> Slot | None:
        """The bridge's slot; raises SetupError when it is of another kind than the bridge needs."""
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
                hint="choose another source.slot; the bridge makes its own",
            )
        if found.two_phase and not self._settings.two_phase:
            logger.warning(
                "the slot is two-phase: set source.two_phase to true", slot=self._settings.slot
            )
        if not found.failover:
            logger.warning(
                "the slot is not a failover slot and will not survive a promotion",
                slot=self._settings.slot,
            )
        return found

    def create_slot(self) -> int:
        """Create the failover slot; return the LSN from which it decodes."""
        with self._statement("create the slot"):
            lsn = slots.create_failover_slot(
                self._connection, self._settings.slot, two_phase=self._settings.two_phase
            )
        logger.info("created slot", slot=self._settings.slot, lsn=format_lsn(lsn))
        return lsn

    def origin_lsn(self) -> int | None:
        """The origin's position, None where it has never been moved."""
        with self._statement("read the origin"):
            return slots.origin_progress(self._connection, self.origin)

    def clock_ms(self) -> int:
        """The server's clock, in ms since 1970."""
        with self._statement("read the clock"):
            row = self._connection.execute(
                "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
            ).fetchone()
            return int(row[0]) if row is not None else 0

    def primary_key(self, relation_oid: int) -> PrimaryKey | None:
        """A table's primary key as it is now, None when the table is gone."""
        with self._statement("read the primary key"):
            return slots.primary_key(self._connection, relation_oid)

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
        """(schema, table) -> the columns of every table that the publication has now."""
        with self._statement("read the publication"):
            return slots.published_columns(self._connection, self._settings.publication)

    def types(self, oids: Iterable[int]) -> list[PgType]:
        """The types of `oids` and what those consist of; one that is gone by now is left out."""
        with self._statement("read the types"):
            return read_types(self._connection, oids)

    def money_digits(self) -> int:
        """How many digits money has after the decimal point in this database's locale."""
        with self._statement("read the locale"):
            return money_digits(self._connection)

    def move_origin(self, lsn: int) -> None:
        """Record `lsn` in the origin, with the heartbeat message, in one small transaction."""
        with self._statement("move the origin"), self._connection.transaction():
            self._connection.execute(
                "SELECT pg_replication_origin_xact_setup(%s::pg_lsn, clock_timestamp()),"
                " pg_logical_emit_message(true, %s, %s)",
                [format_lsn(lsn), HEARTBEAT_PREFIX, self._settings.slot],
            )

    def check_publication(self) -> None:
        """Raise SetupError when the publication is gone: the server then sends nothing, silently.

        Source: pgoutput.c, LoadPublications ("skipped loading publication", a WARNING on 18).
        """
        with self._statement("read the publication"):
            if not slots.publication_exists(self._connection, self._settings.publication):
                raise SetupError(
                    "the publication is gone: what is committed without it is not sent",
                    operation="check the publication",
                    subject=f"publication {self._settings.publication}",
                    hint="make it again, and compare what its tables got meanwhile",
                )

    def commits_wait(self) -> bool:
        """Whether the server lists the bridge's walsender in synchronous_standby_names."""
        with self._statement("read the state of replication"):
            return slots.is_synchronous_standby(
                self._connection, walsender_name(self._settings.slot)
            )

    def withheld_by(self) -> tuple[str, ...]:
        """The standbys that the walsender waits for before it sends a commit, with their state."""
        with self._statement("read the state of replication"):
            return slots.withheld_by(self._connection, walsender_name(self._settings.slot))

    def _ensure_publication(self) -> None:
        name = self._settings.publication
        if slots.publication_exists(self._connection, name):
            return
        slot = slots.read_slot(self._connection, self._settings.slot)
        if slot is not None and slot.plugin == "pgoutput":
            self.check_publication()
        slots.create_publication(self._connection, name, self._settings.tables)
        tables = ", ".join(self._settings.tables) or "all tables"
        logger.info("created publication", publication=name, tables=tables)

    def _own_origin(self) -> None:
        if self._origin_owned:
            return
        self._connection.execute(
            "SELECT set_config('idle_session_timeout', %s, false),"
            " pg_replication_origin_session_setup(%s)",
            [f"{self._idle_timeout_ms}ms", self.origin],
        )
        self._origin_owned = True

    @contextlib.contextmanager
    def _statement(self, operation: str) -> Iterator[None]:
        """Translate psycopg's errors; cut the connection off when the server does not answer."""
        try:
            with cut_off_after(self._deadline_s, self._connection.fileno()):
                yield
        except psycopg.Error as error:
            raise self._translated(error, operation) from error

    def _translated(self, error: psycopg.Error, operation: str) -> SlotbridgeError:
        message = error.diag.message_primary or str(error)
        subject = f"slot {self._settings.slot}"
        if error.sqlstate is None:
            return connect_error(message, subject)
        return server_error(error.sqlstate, " ".join(message.split()), operation, subject)


def check_server(server: Server, *, two_phase: bool = False) -> None:
    """Raise SetupError (SERVER_VERSION, WAL_LEVEL) for a server that has no failover slots."""
    if server.version < MINIMUM_VERSION:
        raise SetupError(
            f"PostgreSQL {server.version // 10000}.{server.version % 10000} is too old",
            operation="check the server",
            hint="update it to 17.5 or newer: failover slots came with 17, and an older 17 decodes "
            "rows by a table's or publication's old state when that changes beside an open "
            "transaction",
            exit_code=ExitCode.SERVER_VERSION,
        )
    if two_phase and server.version < TWO_PHASE_VERSION:
        raise SetupError(
            f"PostgreSQL {server.version // 10000} can lose prepared transactions at a failover: "
            "it does not copy a slot's two_phase_at to the standby",
            operation="check the server",
            hint="set source.two_phase to false, or use PostgreSQL 18",
            exit_code=ExitCode.SERVER_VERSION,
        )
    if server.wal_level != MINIMUM_WAL_LEVEL:
        raise SetupError(
            f"wal_level is {server.wal_level}",
            operation="check the server",
            hint="ALTER SYSTEM SET wal_level = logical, then restart the server",
            exit_code=ExitCode.WAL_LEVEL,
        )


def _probe_all(settings: SourceSettings) -> list[Candidate | SlotbridgeError]:
    """Try every host at once: one result each, in the order of the connection setting."""
    hosts = single_hosts(settings)
    with ThreadPoolExecutor(len(hosts), thread_name_prefix="probe") as pool:
        return list(pool.map(_probe, hosts))


def writable_servers(settings: SourceSettings) -> list[Server]:
    """The hosts that accept writes now, asked at the same time; those that don't are left out."""
    found = [result for result in _probe_all(settings) if isinstance(result, Candidate)]
    for candidate in found:
        candidate.connection.close()
    return [candidate.server for candidate in found]


def _probe(conninfo: str) -> Candidate | SlotbridgeError:
    where = conninfo_to_dict(conninfo)
    options = f"{where.get('options') or ''} {_PROBE_OPTIONS}"
    subject = host_name(conninfo)
    try:
        connection: Connection = psycopg.connect(
            conninfo,
            autocommit=True,
            options=options,
            application_name="slotbridge",
            client_encoding="UTF8",
        )
    except psycopg.Error as error:
        return connect_error(str(error), subject)
    try:
        with cut_off_after(_PROBE_DEADLINE_S, connection.fileno()):
            server = slots.read_server(connection)
            read_only = slots.setting(connection, "transaction_read_only") == "on"
    except psycopg.Error as error:
        connection.close()
        if error.sqlstate is None:
            return connect_error(str(error), subject)
        return server_error(error.sqlstate, error.diag.message_primary or "", "probe", subject)
    if read_only:
        connection.close()
        return Retryable(
            "the server is read-only" + (" (a standby)" if server.in_recovery else ""),
            operation="connect",
            subject=subject,
            hint="name the primary in source.conninfo, or promote the standby",
        )
    return Candidate(conninfo, server, connection)


def _choose(results: list[Candidate | SlotbridgeError]) -> Candidate:
    """The writable host on the newest timeline: a revived old primary is on an older one.

    Raises the most telling error when there is none.
    """
    candidates = [result for result in results if isinstance(result, Candidate)]
    errors = [result for result in results if isinstance(result, SlotbridgeError)]
    if not candidates:
        raise _no_primary(errors)
    chosen = max(candidates, key=lambda candidate: candidate.server.timeline)
    for other in candidates:
        if other is not chosen:
            other.connection.close()
            logger.warning(
                "a second host accepts writes; the one on the newer timeline is used",
                timeline=chosen.server.timeline,
                other_timeline=other.server.timeline,
            )
    return chosen


def _no_primary(errors: list[SlotbridgeError]) -> SlotbridgeError:
    """What one host says when it is the only one, or when an operator is needed; else all."""
    needs_operator = [error for error in errors if not isinstance(error, Retryable)]
    if needs_operator or len(errors) == 1:
        return (needs_operator or errors)[0]
    reasons = "; ".join(f"{error.subject}: {_short(error.message)}" for error in errors)
    return Retryable(
        f"no host accepts writes: {reasons}",
        operation="connect",
        hint="check that source.conninfo names the primary, or promote the standby",
        exit_code=ExitCode.SERVER_UNREACHABLE,
    )


def _short(message: str) -> str:
    """libpq's text without the address that it repeats and the question that it asks."""
    for part in ("Connection refused", "timeout expired", "No route to host"):
        if part in message:
            return part.lower()
    return message
