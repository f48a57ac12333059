"""The standby that rows are read from, to spare the primary (`snapshot.conninfo`).

    replayed >= an LSN    its database snapshots see every commit before that: one process replays
                          the WAL, and commits become visible in that order
    received timeline     it replays what the primary has written: a number alone is not an identity

A promoted standby is not a standby: rows are read from the primary then.
"""

import time
from typing import Final

import psycopg
import structlog

from schemas.errors import ExitCode, OperatorNeeded, SlotbridgeError
from services.bridge.snapshot.row_reader import NotNow, RowReader
from services.bridge.snapshot.standby_state import (
    StandbyState,
    read_state,
    require_all_rows,
    require_same_process,
    require_timeline,
)
from services.bridge.source.hosts import host_name
from services.postgres.server import Connection, Server

logger = structlog.get_logger(__name__)

NEAR_S: Final = 1.0
"""How long a chunk is not even begun because the standby is behind, at first."""
_LOOK_S: Final = 0.005
_LOOK_AGAIN_S: Final = 30.0
_OPERATION: Final = "read rows from a standby"


def is_database_of(found: Server, known: Server) -> bool:
    """Tell whether a server has the database of another one, as its standby has."""
    identity = (found.system_identifier, found.database)
    return identity == (known.system_identifier, known.database)


class Standby(RowReader):
    """Reads rows for one session, on a standby of `server`. It connects when it is first asked."""

    setting = "snapshot.conninfo"

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
        self._host = host_name(conninfo)
        self.name = f"the standby {self._host}"
        super().__init__(
            conninfo, publication, f"slot {slot}", deadline_ms=deadline_ms, workers=workers
        )
        self._logged = False
        self._server = server
        self._look_at = 0.0
        """When to look again whether it is a standby."""
        self._judged: StandbyState | None = None

    def approach(self, lsn: int, patience_s: float = NEAR_S) -> bool:
        """Connect if needed, then await the replay; the stream goes on meanwhile."""
        if time.monotonic() >= self._look_at:
            self._open_again()
        return self.await_replay(lsn, patience_s)

    def await_replay(self, lsn: int, patience_s: float) -> bool:
        """Wait until it has replayed the primary's WAL up to `lsn`; False: it is not a standby.

        Raise NotNow where it does not get there in time, or nobody can tell; OperatorNeeded where
        it belongs to another cluster; SetupError for what an operator must change.
        """
        until = time.monotonic() + patience_s
        while True:
            self._judged = state = self._state()
            if state is None:
                return False
            if state.replayed >= lsn:
                if not self._logged:
                    logger.info("rows are read from a standby", standby=self._host)
                self._logged = True
                return True
            if time.monotonic() > until:
                behind = lsn - state.replayed
                raise NotNow(
                    f"{self.name} is {behind} bytes of WAL behind after {patience_s:g} s "
                    f"(at most snapshot.standby_wait_ms){state.kept_by}"
                )
            time.sleep(_LOOK_S)

    def finish(self) -> int:
        """End the transaction that rows were read in; return how far the WAL is replayed now.

        Raise NotNow where the server has become another one since `await_replay`.
        """
        state = self._state()
        if state is None:
            raise NotNow(f"{self.name} was promoted while rows were read")
        require_same_process(self._judged, state, self.name)
        self.end()
        return state.replayed

    def _state(self) -> StandbyState | None:
        """Return the standby's state; None: not a standby. Raise NotNow without a connection."""
        if time.monotonic() < self._look_at:
            return None
        if not (self.connected or self._closed):
            raise NotNow(f"there is no connection to {self.name}")
        with self._statement("ask the standby's position"):
            state = read_state(self._rows)
        if not state.in_recovery:
            self._end_sessions()
            self._look_at = time.monotonic() + _LOOK_AGAIN_S
            logger.warning(
                "snapshot.conninfo names a server that is not a standby: rows are read from the "
                "primary",
                server=self._host,
            )
            return None
        require_timeline(state, self.name, self._server)
        require_all_rows(state, self.name)
        return state

    def _translated(
        self, error: psycopg.Error | OSError, operation: str, table: str
    ) -> SlotbridgeError | NotNow:
        """Translate an error: what the primary may do nevertheless does not end the bridge."""
        found = super()._translated(error, operation, table)
        if isinstance(found, NotNow) or self._closed:
            return found
        if found.exit_code in (ExitCode.PRIVILEGE_MISSING, ExitCode.WRONG_DATABASE):
            return found
        never = isinstance(error, psycopg.errors.FeatureNotSupported)
        return NotNow(f"{self.name}: {found.message}", slow=not never, never=never)

    def _require_the_server(self, connection: Connection) -> None:
        """Raise OperatorNeeded where the connection is with another cluster."""
        found, known = self._read_server(connection), self._server
        if not is_database_of(found, known):
            raise OperatorNeeded(
                f"snapshot.conninfo names another database: system identifier "
                f"{found.system_identifier}, {found.database}; the changes come from "
                f"{known.system_identifier}, {known.database}",
                operation=_OPERATION,
                subject=self._host,
                hint="name a standby of the primary in snapshot.conninfo, and its database",
                exit_code=ExitCode.WRONG_DATABASE,
            )
