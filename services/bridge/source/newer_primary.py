"""Whether another host of `source.conninfo` has become the primary, asked while ours is read-only.

A switchover fences the old primary, which then may run on for ever, and promotes a standby. The
walsender of the fenced server goes on, so that nothing else would end the session. Evidence is a
host that takes writes, of the same system, on a later timeline: a host that does not answer, or is
on our timeline, proves nothing.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from schemas.errors import Retryable
from schemas.settings import SourceSettings
from services.bridge.source.candidates import writable_servers
from services.bridge.source.hosts import single_hosts
from services.postgres.server import Server


def promoted(streamed_from: Server, writable: Iterable[Server]) -> Server | None:
    """Return the newest server that was promoted after `streamed_from`, None if none was.

    `writable` are servers that take writes.
    """
    newer = [
        server
        for server in writable
        if server.system_identifier == streamed_from.system_identifier
        and server.timeline > streamed_from.timeline
        and not server.in_recovery
    ]
    return max(newer, key=lambda server: server.timeline, default=None)


class NewerPrimary:
    """One session's search, in a thread of its own: a host may take long not to answer."""

    def __init__(self, settings: SourceSettings, streamed_from: Server) -> None:
        """`streamed_from` is the server that the session streams from."""
        self._settings = settings
        self._known = streamed_from
        self._pool: ThreadPoolExecutor | None = None
        self._asked: Future[list[Server]] | None = None

    def require_none(self) -> None:
        """Raise Retryable where the last search has found a newer primary; begin another search.

        Does not wait. The next session chooses among all hosts.
        """
        if len(single_hosts(self._settings)) < 2 or (self._asked and not self._asked.done()):
            return
        found = promoted(self._known, self._asked.result()) if self._asked else None
        if found is not None:
            raise Retryable(
                "the server takes no writes, and another host of source.conninfo is the primary "
                f"on timeline {found.timeline}, later than timeline {self._known.timeline}",
                operation="stream",
                subject=f"slot {self._settings.slot}",
                hint="nothing to do: the bridge moves to that host",
            )
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="newer-primary")
        self._asked = self._pool.submit(writable_servers, self._settings)

    def close(self) -> None:
        """Do not wait for a search that is in progress."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
