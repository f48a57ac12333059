"""The log lines and metrics of a snapshot.

That a table or all of them are done is told once Kafka has committed it, not before.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import structlog

from services.bridge import metrics
from services.bridge.snapshot.progress import SnapshotPlan, TableProgress
from services.bridge.snapshot.readable import remedies
from services.bridge.snapshot.row_reader import NotNow

logger = structlog.get_logger(__name__)

_LOG_EVERY_S: Final = 10.0
_PLANS_MAX: Final = 5
_LONG_S: Final = 60.0
"""How long a snapshot reads no chunk before each warning of it."""


class Narration:
    """Tells of one session, each thing seldom."""

    def __init__(self, durable_lsn: Callable[[], int]) -> None:
        """`durable_lsn`: returns up to which LSN Kafka has everything."""
        self._durable_lsn = durable_lsn
        self._claims: deque[tuple[int, Callable[[], None]]] = deque()
        """What is to be told once Kafka has everything up to an LSN, in the LSNs' order."""
        self._logged_s = {"progress": 0.0, "reason": 0.0, "anew": 0.0}
        self._anew = 0
        self._refused_logged: Mapping[str, str] = {}
        self._stalled_at: float | None = None
        self._stall_logged_s = 0.0

    def planned(self, found: SnapshotPlan, *, again: bool, standby: bool) -> None:
        """Log a plan. `again`: log its tables only if rows are left to read.

        `standby`: rows are read from one, but for those of tables without a key.
        """
        if found.refused != self._refused_logged:
            if refusals := found.refusals(unfit=False):
                logger.warning(
                    "rows of tables that can't be read by their key are not published",
                    tables=refusals,
                    hint="give them a primary key, or name them in snapshot.exclude",
                )
            if refusals := found.refusals(unfit=True):
                logger.warning(
                    "rows of tables are not published, as the settings or the server refuse them",
                    tables=refusals,
                    hint=remedies(found),
                )
        self._refused_logged = found.refused
        if found.undone:
            logger.warning(
                "rows that a snapshot read may show changes that the failover has undone: the "
                "tables are read anew, and rows that only the lost timeline had stay in Kafka",
                tables=", ".join(found.undone),
                hint="name the standby's slot in synchronized_standby_slots",
            )
        at_lsn = self._claims[-1][0] if self._claims else 0  # `found` knows what these tell
        if found.next is not None or not again:
            counts = {"done": found.done, "refused": len(found.refused)}
            line = partial(logger.info, "snapshot", tables=len(found.tables), **counts)
            self._claims.append((at_lsn, line))
        keyless = [name for name, one in found.tables.items() if one.before and not one.done]
        if standby and keyless and not again:
            logger.info(
                "rows of tables without a key are read from the primary", tables=", ".join(keyless)
            )
        if found.next is None:
            self._advances()
        self._claims.append((at_lsn, _count(found)))
        self.log_durable()

    def chunk(
        self,
        found: SnapshotPlan,
        table: TableProgress,
        estimates: Mapping[str, int],
        at_lsn: int,
    ) -> None:
        """Tell that the table's next chunk is in the stream, at `at_lsn`."""
        self._anew = 0
        self._advances()
        if self._is_time("progress") or table.done:
            line = partial(
                logger.info,
                "table is done" if table.done else "reading a table",
                table=table.shape.name,
                rows=table.rows,
                rows_about=max(estimates.get(table.shape.name, -1), table.rows),
                tables_done=found.done,
                tables=len(found.tables),
            )
            self._claims.append((at_lsn, line))
        if table.done:
            self._claims.append((at_lsn, _count(found)))
        if found.next is None:
            line = partial(logger.info, "snapshot is done", tables=found.done)
            self._claims.append((at_lsn, line))

    def log_durable(self) -> None:
        """Tell what Kafka has committed since the last call."""
        durable_lsn = self._durable_lsn()
        while self._claims and self._claims[0][0] <= durable_lsn:
            self._claims.popleft()[1]()

    def postponed(self, table: TableProgress, reason: NotNow) -> None:
        """Tell that a chunk could not be had now."""
        metrics.SNAPSHOT_POSTPONED.inc()
        self._anew = self._anew + 1 if reason.changed else 0
        if self._anew >= _PLANS_MAX and self._is_time("anew"):
            logger.warning(
                "the snapshot is planned anew each time, and reads no rows",
                table=table.shape.name,
                times=self._anew,
                reason=str(reason),
                hint="see whether a program alters the table or its publication again and again",
            )
        if self._is_time("reason"):
            logger.info("postponed a chunk", table=table.shape.name, reason=str(reason))
        self._stall(reason)

    def stalls(self, reason: NotNow) -> None:
        """Tell that no chunk can be begun now."""
        self.waits(reason)
        self._stall(reason)

    def waits(self, reason: NotNow) -> None:
        """Tell that nothing can be begun now."""
        if self._is_time("reason"):
            logger.warning("the snapshot waits", reason=str(reason))

    def _stall(self, reason: NotNow) -> None:
        """Note that no chunk could be read; warn of it once a minute."""
        now = time.monotonic()
        if self._stalled_at is None:
            self._stalled_at, self._stall_logged_s = now, 0.0
        seconds = now - self._stalled_at
        metrics.SNAPSHOT_WAITING_SECONDS.set(seconds)
        if seconds - self._stall_logged_s >= _LONG_S:
            self._stall_logged_s = seconds
            logger.warning(
                "the snapshot does not advance",
                seconds=round(seconds),
                reason=str(reason),
                hint="changes flow; `slotbridge preflight` examines the servers",
            )

    def _advances(self) -> None:
        self._stalled_at = None
        metrics.SNAPSHOT_WAITING_SECONDS.set(0)

    def _is_time(self, kind: str) -> bool:
        """Tell whether a line of that kind is due now, and note that it was written."""
        now = time.monotonic()
        due = now - self._logged_s[kind] > _LOG_EVERY_S
        if due:
            self._logged_s[kind] = now
        return due


def _count(found: SnapshotPlan) -> Callable[[], None]:
    """Return what sets the metric of tables by state, to the counts as they are now."""
    counts = {"waiting": found.waiting, "done": found.done, "refused": len(found.refused)}

    def set_counts() -> None:
        for state, count in counts.items():
            metrics.SNAPSHOT_TABLES.labels(state).set(count)

    return set_counts
