"""The primary's side of a snapshot: marks in the WAL, and what the standbys have.

Beside the connections that read rows, one more writes marks and asks what standbys have. On a
server that takes no writes nothing is marked: it may be fenced, and nothing of ours is to lie
behind its last commit.
"""

from typing import Final, LiteralString, NamedTuple

import psycopg

from schemas.lsn import format_lsn
from schemas.snapshot import SNAPSHOT_PREFIX
from services.bridge.snapshot.places import Place
from services.bridge.snapshot.row_reader import (
    AnotherServer,
    NotNow,
    RowReader,
    shape_of,
)
from services.bridge.snapshot.tables import TableShape
from services.bridge.snapshot.visibility import Sight
from services.postgres.publications import unpublished_changes
from services.postgres.published_tables import PublishedTable, published_tables
from services.postgres.rows import one_row
from services.postgres.server import Connection, Server, written_lsn
from services.postgres.sessions import MARKS, ROWS, Session

_READ_ONLY: Final = "the server takes no writes"
_IF_WRITABLE: Final = (
    "SELECT CASE WHEN current_setting('transaction_read_only') = 'off' THEN {} END"
)

_DENIED: LiteralString = """
    SELECT c.oid::bigint FROM pg_class c
     WHERE c.oid = ANY (%s::oid[])
       AND NOT (has_table_privilege(c.oid, 'SELECT') AND NOT row_security_active(c.oid)
                AND has_schema_privilege(c.relnamespace, 'USAGE')
                AND NOT EXISTS (
                    SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid
                      JOIN pg_type t ON t.oid = a.atttypid
                     WHERE i.indrelid = c.oid AND (i.indisprimary OR i.indisreplident)
                       AND a.attnum = ANY (i.indkey)
                       AND NOT has_schema_privilege(t.typnamespace, 'USAGE')))
"""


class Inspection(NamedTuple):
    """The published tables, and an xid that was assigned after they were read.

    `places`: where their rows lie, by oid, if it was asked for. `unpublished`: the kinds of
    changes that the publication leaves out. `denied`: oids of tables that our role may not read.
    """

    shapes: list[TableShape]
    rows_estimates: dict[str, int]
    xid: int
    places: dict[int, Place]
    unpublished: tuple[str, ...]
    denied: frozenset[int]


class SnapshotReader(RowReader):
    """Reads and marks for one session, on the server that it streams from."""

    _purposes = (ROWS, MARKS)

    def __init__(
        self,
        conninfo: str,
        publication: str,
        slot: str,
        server: Server,
        *,
        deadline_ms: int,
        workers: int = 1,
    ) -> None:
        """Connect to `server`. Raise SlotbridgeError."""
        super().__init__(
            conninfo, publication, f"slot {slot}", deadline_ms=deadline_ms, workers=workers
        )
        self._server = server
        self._sessions = self._open()

    @property
    def _marks(self) -> Session:
        return self._sessions[-1]

    def inspect(self, beginning: Sight | None = None) -> Inspection:
        """Read what the publication has now, then take an xid.

        In this order: what was committed to a table before it joined is not published, so that it
        must have ended before rows are read. Raise NotNow where the server takes no writes, and
        where somebody has locked a table whose row filter is to be read.
        `beginning`: that of the slot, if it is known which rows are from before it.
        """
        self._open_again()
        places: dict[int, Place] = {}
        found = self._published()
        with self._statement("inspect the published tables"):
            unpublished = unpublished_changes(self._marks, self._publication)
            if beginning is not None:
                places = self._places(self._marks, [one.oid for one in found], beginning)
            denied = self._marks.execute(_DENIED, [[one.oid for one in found]]).fetchall()
            row = one_row(self._marks.execute(_IF_WRITABLE.format("pg_current_xact_id()::text")))
        if row[0] is None:
            raise NotNow(_READ_ONLY)
        estimates = {f"{one.schema}.{one.table}": one.rows_estimate for one in found}
        shapes = [shape_of(one) for one in found]
        unreadable = frozenset(oid for (oid,) in denied)
        return Inspection(shapes, estimates, int(row[0]), places, unpublished or (), unreadable)

    def _published(self) -> list[PublishedTable]:
        """Return the published tables. Raise NotNow while one with a row filter is locked."""
        try:
            with self._statement("inspect the published tables"):
                return published_tables(self._marks, self._publication)
        except NotNow as reason:
            if isinstance(reason.__cause__, psycopg.errors.LockNotAvailable):
                raise NotNow(f"a published table with a row filter is locked: {reason}") from reason
            raise

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
        """Tell whether each standby of synchronized_standby_slots has flushed the WAL up to `lsn`.

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

    def flushed_lsn(self) -> int:
        """Return how far the server has flushed its WAL."""
        self._open_again()
        with self._statement("read the WAL's position"):
            return written_lsn(self._marks)

    def _require_the_server(self, connection: Connection) -> None:
        """Raise AnotherServer unless the connection is with the server that is streamed from."""
        found, known = self._read_server(connection), self._server
        identity = (found.system_identifier, found.timeline, found.in_recovery)
        if identity != (known.system_identifier, known.timeline, False):
            raise AnotherServer(
                "another server answers now",
                operation="open the snapshot's SQL sessions",
                subject=self._subject,
            )
