"""Standby status updates: often enough for the server's time-out, at once if a commit waits.

A server that waits for a synchronous commit learns from the flush position alone that it may go on;
one with a short wal_sender_timeout must hear from us also while Kafka keeps us waiting.
Source: src/backend/replication/walsender.c (ProcessStandbyReplyMessage, WalSndCheckTimeOut).
"""

import time
from collections.abc import Callable
from typing import Final

from schemas.errors import Retryable
from services.bridge import metrics
from services.bridge.progress.ledger import Ledger
from services.bridge.source.replication_connection import ReplicationConnection

INTERVAL_MAX_S: Final = 1.0
STOP_S: Final = 20.0
"""How long a session waits for anything once it was asked to end; unit and chart allow 60."""


class StoppedLate(Retryable):
    """The session has to end before the answer for which it waits, such as Kafka's, has come."""


class StandbyStatus:
    """Sends one session's status updates, in the thread that owns the connection.

    `due` is when to send again (time.monotonic); `beat` when it was sent last.
    """

    def __init__(
        self,
        connection: ReplicationConnection,
        ledger: Ledger,
        *,
        wal_sender_timeout_ms: int,
        subject: str,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._timeout_s = wal_sender_timeout_ms / 1000
        self._subject = subject
        self.interval_s = min(INTERVAL_MAX_S, self._timeout_s / 4)
        self.due = 0.0
        self.commits_wait = True
        """Whether commits may wait for the bridge, as they may until it is known."""
        self._reported = 0
        self._asked_to_end: Callable[[], bool] = lambda: False
        self._end_by = float("inf")
        self.beat = self._heard = time.monotonic()

    def end_with(self, is_stopping: Callable[[], bool]) -> None:
        """Let `answer` raise StoppedLate once `is_stopping` has been true for STOP_S."""
        self._asked_to_end = is_stopping

    def heard(self, now: float) -> None:
        """Note that the server has spoken, or that nobody listened, at `now` (time.monotonic)."""
        self._heard = now

    def report_soon(self, *, follow: bool) -> None:
        """Make the next status update due at once if the position to report has advanced."""
        if self._ledger.report(follow=follow) > self._reported:
            self.due = 0.0

    def send(self, *, follow: bool) -> None:
        """Send a status update. `follow`: Kafka has all that was read (see Ledger.report).

        Raise Retryable at the connection's end, and when the server has been silent for too long.
        """
        now = self.beat = time.monotonic()
        silence_s = now - self._heard
        if silence_s > self._timeout_s:
            raise Retryable(
                f"the server has been silent for {silence_s:.0f} s",
                operation="stream",
                subject=self._subject,
                hint="nothing to do: the bridge reconnects",
            )
        self._reported = self._ledger.report(follow=follow)
        # With synchronous_commit = remote_write a commit returns at the position written.
        written = self._reported if self.commits_wait else self._ledger.received
        self._connection.feedback(written, self._reported, ask=silence_s > self._timeout_s / 3)
        self.due = now + self.interval_s
        metrics.RECEIVED_LSN.set(self._ledger.received)

    def answer(self) -> None:
        """Send a status if one is due; call this often while you wait for anything else.

        Raise StoppedLate where the wait would keep the session from its end.
        """
        now = time.monotonic()
        if self._asked_to_end():
            self._end_by = min(self._end_by, now + STOP_S)
            if now > self._end_by:
                raise StoppedLate(
                    f"what is awaited has not come within {STOP_S:.0f} s of the request to stop",
                    operation="stop",
                    subject=self._subject,
                    hint="nothing to do: the next start goes on from what Kafka has",
                )
        self.heard(now)
        if now >= self.due:
            self.send(follow=False)
