"""The standby that rows are read from, to spare the primary (`snapshot.conninfo`).

    replayed >= an LSN    its database snapshots see every commit before that: one process replays
                          the WAL, and commits become visible in that order
    received timeline     it replays what the primary has written: a number alone is not an identity

A promoted standby is not a standby: rows are read from the primary then.
"""

import time
from typing import Final

import structlog

from schemas.errors import ExitCode, OperatorNeeded, SetupError
from services.bridge.snapshot.row_reader import ROWS_OPTIONS, NotNow, RowReader
from services.bridge.source.hosts import host_name
from services.postgres.rows import one_row
from services.postgres.server import Connection, Server

logger = structlog.get_logger(__name__)

NEAR_S: Final = 1.0
"""How long a chunk is not even begun because the standby is behind."""
_LOOK_S: Final = 0.005
_LOOK_AGAIN_S: Final = 30.0
_OPERATION: Final = "read rows from a standby"
_STATE: Final = """
    SELECT pg_is_in_recovery(), coalesce((pg_last_wal_replay_lsn() - '0/0')::bigint, 0),
           CASE WHEN pg_is_in_recovery() AND pg_is_wal_replay_paused()
                THEN '; its replay is paused' ELSE '' END,
           pid, received_tli
      FROM (VALUES (1)) one LEFT JOIN pg_stat_wal_receiver ON true"""


def is_database_of(found: Server, known: Server) -> bool:
    """Whether a server has the database of another one, as its standby has."""
    identity = (found.system_identifier, found.database)
    return identity == (known.system_identifier, known.database)


class Standby(RowReader):
    """Reads rows for one session, on a standby of `server`. It connects when it is first asked."""

    def __init__(
        self, conninfo: str, publication: str, slot: str, server: Server, *, deadline_ms: int
    ) -> None:
        self._host = host_name(conninfo)
        self.name = f"the standby {self._host}"
        super().__init__(conninfo, publication, f"slot {slot}", deadline_ms=deadline_ms)
        self._server = server
        self._look_at = 0.0
        """When to look again whether it is a standby."""

    def await_replay(self, lsn: int, patience_s: float = NEAR_S) -> bool:
        """Wait until it has replayed the primary's WAL up to `lsn`; False: it is not a standby.

        Raise NotNow where it does not get there in time, or nobody can tell; OperatorNeeded where
        it belongs to another cluster; SetupError for what an operator must change.
        """
        until = time.monotonic() + patience_s
        while True:
            state = self._replayed()
            if state is None:
                return False
            replayed, paused = state
            if replayed >= lsn:
                return True
            if time.monotonic() > until:
                raise NotNow(f"{self.name} is {lsn - replayed} bytes of WAL behind{paused}")
            time.sleep(_LOOK_S)

    def require_standby(self) -> None:
        """Raise NotNow where it has become another one since `await_replay`."""
        if self._replayed() is None:
            raise NotNow(f"{self.name} was promoted while rows were read")

    def _replayed(self) -> tuple[int, str] | None:
        """Return up to where it has replayed the WAL, and what keeps it; None: not a standby."""
        if time.monotonic() < self._look_at:
            return None
        self._open_again()
        with self._statement("ask the standby's position"):
            recovers, replayed, paused, receiver, timeline = one_row(self._rows.execute(_STATE))
        if not recovers:
            self._end_sessions()
            self._look_at = time.monotonic() + _LOOK_AGAIN_S
            logger.warning(
                "snapshot.conninfo names a server that is not a standby: rows are read from the "
                "primary",
                server=self._host,
            )
            return None
        if receiver is None:
            raise NotNow(f"{self.name} does not stream: which timeline it replays is not judged")
        if timeline is None:
            raise SetupError(
                "the role can't see which timeline the standby replays (pg_stat_wal_receiver)",
                operation=_OPERATION,
                subject=self.name,
                hint="GRANT pg_read_all_stats TO the role of snapshot.conninfo",
                exit_code=ExitCode.PRIVILEGE_MISSING,
            )
        if timeline != self._server.timeline:
            raise NotNow(
                f"{self.name} replays timeline {timeline}, the primary writes "
                f"{self._server.timeline}"
            )
        return int(replayed), paused

    def _open(self) -> tuple[Connection, ...]:
        """Open the connection. Raise OperatorNeeded where it is with another cluster."""
        connection, known = self._connect(ROWS_OPTIONS), self._server
        try:
            found = self._read_server(connection)
        except BaseException:
            connection.close()
            raise
        if not is_database_of(found, known):
            connection.close()
            raise OperatorNeeded(
                f"snapshot.conninfo names another database: system identifier "
                f"{found.system_identifier}, {found.database}; the changes come from "
                f"{known.system_identifier}, {known.database}",
                operation=_OPERATION,
                subject=self._host,
                hint="name a standby of the primary in snapshot.conninfo, and its database",
                exit_code=ExitCode.WRONG_DATABASE,
            )
        if found.in_recovery:
            logger.info("rows are read from a standby", standby=self._host)
        return (connection,)
