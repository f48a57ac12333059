"""Status updates and heartbeats of a session, performed at intervals also during long work.

tick             the server is answered, the origin's SQL session is kept in use
commit_and_tick  Kafka transactions are ended and begun, too
"""

import time

from services.bridge.failpoints import reach
from services.bridge.progress.ledger import Ledger
from services.bridge.sink.group_commit import GroupCommit
from services.bridge.source.database import Primary
from services.bridge.source.heartbeat import Heartbeat
from services.bridge.source.newer_primary import NewerPrimary
from services.bridge.source.standby_status import StandbyStatus


class Liveness:
    """One session's status updates and heartbeats. Only the session's own thread may use it."""

    def __init__(
        self,
        primary: Primary,
        ledger: Ledger,
        standby_status: StandbyStatus,
        heartbeat: Heartbeat,
        group_commit: GroupCommit,
        newer_primary: NewerPrimary,
    ) -> None:
        self._primary = primary
        self._ledger = ledger
        self._standby_status = standby_status
        self._heartbeat = heartbeat
        self._group_commit = group_commit
        self._newer_primary = newer_primary

    def tick(self) -> None:
        """Answer the server in the middle of long work, and perform a heartbeat that is due."""
        reach("breathing")
        self._standby_status.answer()
        self._beat(time.monotonic())

    def commit_and_tick(self) -> None:
        """Commit to Kafka and tell the server while the stream stands still for a chunk of rows.

        What the chunk waits for may be a commit that waits for the bridge.
        """
        reach("breathing")
        self._standby_status.heard(time.monotonic())  # nobody listens meanwhile
        self._group_commit.perform(time.monotonic(), behind=False)
        self.report_position()

    def report_position(self) -> None:
        """Confirm what is to be confirmed by now, and perform a heartbeat that is due."""
        now = time.monotonic()
        if self._heartbeat.commits_wait:  # also of what had to wait until Kafka had committed
            self._standby_status.report_soon(follow=self._group_commit.settled)
        if now >= self._standby_status.due:
            self._group_commit.report()
        self._beat(now)

    def _beat(self, now: float) -> None:
        if now >= self._heartbeat.due:
            self._heartbeat.perform(self._primary, self._ledger)
            self._standby_status.commits_wait = self._heartbeat.commits_wait
            if self._heartbeat.read_only:
                self._newer_primary.require_none()
