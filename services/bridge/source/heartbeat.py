"""What the bridge asks and tells the database at an interval, in its session with the origin.

The publication is there; whether commits wait for the bridge; whether the server withholds commits
for standbys; and the origin is moved, by a transaction that also advances an idle slot.
"""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from services.bridge import metrics
from services.bridge.failpoints import reach
from services.bridge.progress.ledger import Ledger
from services.bridge.source.database import Primary

logger = structlog.get_logger(__name__)

NEVER_RECEIVED: Final = -1


class Moved(NamedTuple):
    """Where the origin durably is on the present timeline; 0: not known.

    `wal_lsn`: the commit that moved it to `origin_lsn` ends here or before.
    """

    origin_lsn: int
    wal_lsn: int


class Heartbeat:
    """One for each session. `due` is when to perform it again (time.monotonic)."""

    def __init__(self, slot: str, *, interval_ms: int) -> None:
        self._slot = slot
        self.held: Callable[[], metrics.Held] = metrics.Held
        """What the session's spool holds, for the metrics."""
        self._written = (0, 0.0)
        """Where the WAL ended at the last heartbeat, and when that was (Unix time)."""
        self.interval_s = interval_ms / 1000
        self.due = 0.0
        self.commits_wait = False
        """Whether commits wait for the bridge (synchronous_standby_names)."""
        self.moved = Moved(0, 0)
        self._received = NEVER_RECEIVED
        self._withheld_by: tuple[str, ...] = ()

    @property
    def obstacle(self) -> str:
        """Why the server sends no commits; "" while it does."""
        if not self._withheld_by:
            return ""
        return f"the server withholds commits until a standby has them: {self._withheld_by[0]}"

    def perform(self, primary: Primary, ledger: Ledger) -> None:
        """Do all of it now. Raises SlotbridgeError."""
        primary.check_publication()
        self.commits_wait = primary.commits_wait()
        self._tell_of_standbys(primary, ledger.received)
        lsn = ledger.mark_origin()
        reach("before origin")
        wal_lsn = primary.move_origin(lsn)
        reach("after origin")
        self.moved = Moved(lsn, wal_lsn)
        self.delivered(ledger.durable.end_lsn)
        self._written = (wal_lsn, time.time())
        metrics.LIVE.observe(self.held(), *primary.slot_seen(), wal_lsn)
        if ledger.outstanding:
            reach("origin while open")
        metrics.ORIGIN_LSN.set(lsn)
        self.due = time.monotonic() + self.interval_s

    def delivered(self, durable_lsn: int) -> None:
        """Kafka has everything up to there; perhaps all that was there at the last heartbeat."""
        lsn, at_s = self._written
        if lsn and durable_lsn >= lsn:
            metrics.LIVE.delivered(at_s)

    def _tell_of_standbys(self, primary: Primary, received: int) -> None:
        """Say why nothing comes, once: since the last time there was WAL, at least our own."""
        withheld_by = primary.withheld_by() if received == self._received else ()
        self._received = received
        if withheld_by and withheld_by != self._withheld_by:
            logger.warning(
                "the server withholds commits: it waits for synchronized_standby_slots",
                slot=self._slot,
                standbys="; ".join(withheld_by),
                hint="start the standby, or remove its slot from synchronized_standby_slots",
            )
        elif self._withheld_by and not withheld_by:
            logger.info(
                "the standbys have confirmed: the server sends commits again", slot=self._slot
            )
        self._withheld_by = withheld_by
        metrics.STANDBYS_AWAITED.set(len(withheld_by))
