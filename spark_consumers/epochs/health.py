"""The answers of /healthz and /readyz: whether the query gets on, and whether the tables follow.

/healthz fails where nothing was seen of the query's work for tables.progress_deadline_ms, beyond
the trigger's interval. Signs of work:

    the query       a micro-batch is done, or the query has looked and there is none (every 10 s)
    between two     an epoch, a part of a rebuild, or the maintenance of the tables is done
    a long epoch    Spark's jobs have ended tasks, or read or written rows; this process computes;
                    a table's step is done, of an epoch, a start or the maintenance (liveness)

/readyz fails before the tables' state is known, after an epoch that failed until the query gets on
again, and once `run` ends. Parked tables do not matter: the others go on.
"""

import time
from collections.abc import Callable

_BUSY_MIN = 0.2
"""This share of a processor is beyond what waiting takes."""


class Health:
    """The signs of work and the failures of one run; every thread may tell and ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline_s = 0.0
        self._sign_at = self._looked_at = clock()
        self._work: object = None
        self._busy_s = 0.0
        self._known = False
        self._failure = ""
        self.remark = ""
        """A text that passing answers have, too."""

    def expect(self, deadline_s: float) -> None:
        """Let /healthz fail after that time without a sign of work; without this call: never."""
        self._deadline_s = deadline_s
        self.worked()

    def worked(self) -> None:
        """Record a sign of work."""
        self._sign_at = self._clock()

    def got_on(self) -> None:
        """Record that the query has come round: what failed before is over."""
        self.worked()
        self._failure = ""

    def looked(self, work: object, busy_s: float) -> None:
        """Compare Spark's running work and this process' time (`busy_s`) with the last look."""
        now = self._clock()
        spent_s = max(now - self._looked_at, 1e-3)
        if work != self._work or busy_s - self._busy_s > _BUSY_MIN * spent_s:
            self._sign_at = now
        self._looked_at, self._work, self._busy_s = now, work, busy_s

    def known(self) -> None:
        """Record that the tables' state is known."""
        self._known = True
        self.worked()

    def failed(self, reason: str) -> None:
        """Record why the last epoch failed; `reason` holds neither values nor passwords."""
        self._failure = reason

    def answer(self, path: str) -> tuple[bool, str]:
        """Return whether a probe passes, and the text that it gets."""
        problem = self._stalled() if path == "/healthz" else self._failure
        passed = not problem and (path == "/healthz" or self._known)
        return passed, ": ".join(filter(None, ("ok" if passed else "no", problem, self.remark)))

    def _stalled(self) -> str:
        idle_s = self._clock() - self._sign_at
        if not self._deadline_s or idle_s <= self._deadline_s:
            return ""
        return f"the streaming query has not come round for {idle_s:.0f} s, and nothing works"
