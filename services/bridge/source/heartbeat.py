"""The SQL that the bridge runs at an interval: checks, and the message that moves the origin.

The publication is there; whether commits wait for the bridge; whether the server withholds commits
for standbys; and the origin is moved, by a transaction that also advances an idle slot.

A server that is fenced for a switchover is asked, but nothing is written there (`newer_primary`
ends the session where another was promoted). Where the server lets no SQL session be opened, the
bridge goes on with what the replication connection brings, and tells that nothing of this is
judged; not for longer than a start may take.
"""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from services.bridge import metrics
from services.bridge.failpoints import reach
from services.bridge.progress.ledger import Ledger
from services.bridge.source.database import Primary
from services.bridge.source.publication_reader import Question
from services.bridge.source.sql_session import SqlSessionEnded

logger = structlog.get_logger(__name__)

NEVER_RECEIVED: Final = -1
_COMPARED_EACH: Final = 30
"""After how many heartbeats the publication is compared with the settings again."""
_RETRY_SHARE: Final = 5
"""How many times as long as an attempt to open an SQL session the bridge waits for the next."""
_CHECKS: Final = "the publication, synchronous_standby_names, synchronized_standby_slots, the slot"


class Moved(NamedTuple):
    """Where the origin durably is on the present timeline; 0: not known.

    `wal_lsn`: the commit that moved it to `lsn` ends here or before.
    """

    lsn: int
    wal_lsn: int


class Heartbeat:
    """One for each session. `due` is when to perform it again (time.monotonic)."""

    def __init__(self, slot: str, *, interval_ms: int, patience_ms: int) -> None:
        """`patience_ms`: how long the server may let no SQL session be opened."""
        self._slot = slot
        self._beats = 0
        self.compare: Question[bool] = lambda _: True
        """Tells how the publication differs from the settings, asked now and then."""
        self._patience_s = patience_ms / 1000
        self._unjudged_since: float | None = None
        self._judged = False
        """Whether a heartbeat of this session was performed: until then nothing is proven."""
        self.read_only = False
        """Whether the server took no writes at the last heartbeat."""
        self.held: Callable[[], metrics.Held] = metrics.Held
        """The content of the session's spool, for the metrics."""
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
        """Why the server sends no commits, or may send none unnoticed; "" while it does."""
        if self._unjudged_since is not None:
            return f"not judged: {_CHECKS}: the server lets no SQL session be opened"
        if not self._judged:
            return f"not judged: {_CHECKS}: no heartbeat of this session was performed yet"
        if not self._withheld_by:
            return ""
        return f"the server withholds commits until a standby has them: {self._withheld_by[0]}"

    def perform(self, primary: Primary, ledger: Ledger) -> None:
        """Run all checks and write the heartbeat, as far as the server allows it.

        Raise SlotbridgeError.
        """
        began = time.monotonic()
        try:
            self._perform(primary, ledger)
        except SqlSessionEnded as error:
            self._go_on_without(error, began)
        else:
            if self._unjudged_since is not None:
                logger.info("an SQL session could be opened: all is judged again", slot=self._slot)
            self._unjudged_since, self._judged = None, True
            self.due = time.monotonic() + self.interval_s

    def _perform(self, primary: Primary, ledger: Ledger) -> None:
        """Check the publication, move the origin to what Kafka has, and measure the server."""
        primary.check_publication()
        self._beats += 1
        if self._beats % _COMPARED_EACH == 0:
            primary.ask("compare the publication with the settings", self.compare)
        self.commits_wait = primary.commits_wait()
        self._log_standbys(primary, ledger.received)
        lsn = ledger.mark_origin()
        reach("before origin")
        wal_lsn = primary.move_origin(lsn)
        reach("after origin")
        self._log_writes(read_only=wal_lsn is None)
        if wal_lsn is None:
            metrics.LIVE.observe(self.held(), *primary.slot_seen(), primary.wal_lsn())
            return
        self.moved = Moved(lsn, wal_lsn)
        self.delivered(ledger.durable.end_lsn)
        self._written = (wal_lsn, time.time())
        metrics.LIVE.observe(self.held(), *primary.slot_seen(), wal_lsn)
        if ledger.outstanding:
            reach("origin while open")
        metrics.ORIGIN_LSN.set(lsn)

    def _go_on_without(self, error: SqlSessionEnded, began: float) -> None:
        """Tell once what is not judged; raise `error` where that has lasted for too long."""
        now = time.monotonic()
        if self._unjudged_since is None:
            self._unjudged_since = now
            logger.warning(
                "the server has ended the SQL session and lets no other be opened: changes still "
                "flow, but no heartbeat is written and nothing else is judged",
                slot=self._slot,
                reason=error.message,
                not_judged=_CHECKS,
            )
        if now - self._unjudged_since > self._patience_s:
            raise error
        metrics.LIVE.observe(self.held(), None, None, 0)
        self.due = now + max(self.interval_s, _RETRY_SHARE * (now - began))

    def _log_writes(self, *, read_only: bool) -> None:
        """Log once that the server takes no writes, and once that it does again."""
        if read_only and not self.read_only:
            logger.warning(
                "the server takes no writes: no heartbeat is written until it does",
                slot=self._slot,
            )
        elif self.read_only and not read_only:
            logger.info("the server takes writes again: heartbeats go on", slot=self._slot)
        self.read_only = read_only

    def delivered(self, durable_lsn: int) -> None:
        """Note that Kafka has all up to `durable_lsn`, which may include the last heartbeat."""
        lsn, at_s = self._written
        if lsn and durable_lsn >= lsn:
            metrics.LIVE.delivered(at_s)

    def _log_standbys(self, primary: Primary, received: int) -> None:
        """Log once that the server withholds commits, and once that it sends them again."""
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
