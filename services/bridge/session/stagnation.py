"""Sessions that open, stream and fail in the same way, without progress in Kafka. Pure.

Each loss of a session is followed by another session: most causes pass. One that does not would be
retried for ever, with readiness going up and down and no exit code. After SESSIONS_MIN sessions
that ended alike, and `patience_s`, the bridge ends with that error. What the server itself reports
each time while it decodes one place of the WAL (ServerFault) needs an operator then.
"""

from typing import Final

from schemas.errors import BadInput, ExitCode, Retryable, SlotbridgeError
from services.bridge.progress.ledger import Position
from services.bridge.source.server_errors import ServerFault

SESSIONS_MIN: Final = 6


class Stagnation:
    """The outcomes of the last sessions. `patience_s`: how long equal failures may repeat."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._reached: Position | None = None
        self._kind: tuple[ExitCode, str] | None = None
        self._since = 0.0
        self._sessions = 0

    def ended(self, error: Retryable, reached: Position, now: float) -> SlotbridgeError | None:
        """Count a session that ended with `error` at `now`, when Kafka had `reached`.

        Return the error to give up with, None to go on.
        """
        kind = (error.exit_code, error.operation)
        if kind != self._kind or self._reached is None or reached > self._reached:
            self._kind, self._since, self._sessions = kind, now, 0
            self._reached = reached
        self._sessions += 1
        if self._sessions < SESSIONS_MIN or now - self._since < self._patience_s:
            return None
        return _final(error, self._sessions, reached)


def _final(error: Retryable, sessions: int, reached: Position) -> SlotbridgeError:
    """Return the error that ends the process after sessions without progress."""
    ended = f"{error.message} ({sessions} sessions in a row ended like this, without progress)"
    fault = isinstance(error, ServerFault)
    return (BadInput if fault else Retryable)(
        ended,
        operation=error.operation,
        subject=error.subject,
        lsn=reached.end_lsn if error.lsn is None else error.lsn,
        hint="the server can't decode what follows this LSN; its log says why (a value that is too "
        "large as text, a lack of memory, a damaged catalog)"
        if fault
        else error.hint,
        exit_code=ExitCode.UNDECODABLE if fault else error.exit_code,
    )
