"""Keeps two commands that change something apart: on every node that answers, and on this machine.

An advisory lock in `failover.journal_database` of each node, held by a connection of its own, and a
lock on a file beside the journal. Both end with the process, however it ends.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import ExitCode, Retryable, SettingsError
from services.failover.model.view import Reach, View
from services.failover.observe.client_sessions import COMMAND_LOCK as KEY
from services.failover.observe.cluster import Cluster
from services.failover.observe.server_link import ServerLink, Unreachable
from services.postgres.server import Connection


class Lock:
    """The advisory locks of one command, on every node that has answered meanwhile."""

    def __init__(self, cluster: Cluster, database: str, stack: contextlib.ExitStack) -> None:
        self._cluster = cluster
        self._database = database
        self._stack = stack
        self._links: dict[str, ServerLink] = {}

    def hold(self, view: View) -> None:
        """Check that the lock is held on every node that answers; take it where a session was lost.

        The session that holds a lock may be ended by the server or by what is between, and a node
        may come back. Raise Retryable (LOCKED) that names the other command.
        """
        for node in view.nodes:
            if node.state is None:
                continue
            try:
                taken_by = self._link(node.name).ask(_try)
            except Unreachable as error:
                if error.reach is not Reach.CLOSED:
                    continue  # it went away: what it is needed for will tell
                raise SettingsError(
                    f"can't take the commands' lock on {node.name}: {error.detail}",
                    operation="take the lock",
                    subject=self._database,
                    hint="correct failover.journal_database",
                ) from error
            if taken_by:
                raise _taken(f"on {node.name}: {taken_by}")

    def _link(self, name: str) -> ServerLink:
        if name not in self._links:
            there = self._cluster.in_database(name, self._database)
            self._links[name] = self._stack.enter_context(there)
        return self._links[name]


@contextlib.contextmanager
def locked(cluster: Cluster, view: View, database: str, journal: Path | None) -> Iterator[Lock]:
    """Hold the lock. Raise Retryable (LOCKED) that names the other command."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_file_lock(_lock_file(cluster, journal)))
        lock = Lock(cluster, database, stack)
        lock.hold(view)
        yield lock


def _try(connection: Connection) -> str:
    """Take the lock; "" if it was free or is ours already, else who has it."""
    row = connection.execute("SELECT pg_try_advisory_lock(%s)", [KEY]).fetchone()
    return "" if row and row[0] else holder(connection) or "another session"


def holder(connection: Connection) -> str:
    """Return who holds the lock, "" if nobody does."""
    row = connection.execute(
        """
        SELECT concat(usename, ' from ', coalesce(host(client_addr), 'there'), ' since ',
                      to_char(backend_start, 'HH24:MI:SS'))
          FROM pg_locks JOIN pg_stat_activity USING (pid)
         WHERE locktype = 'advisory' AND granted AND objsubid = 1
           AND (classid::bigint << 32) + objid::bigint = %s
        """,
        [KEY],
    ).fetchone()
    return str(row[0]) if row else ""


def _lock_file(cluster: Cluster, journal: Path | None) -> Path:
    if journal is not None:
        return journal.with_name(journal.name + ".lock")
    addresses = " ".join(f"{name} {cluster.address(name)}" for name in sorted(cluster.nodes))
    digest = hashlib.sha256(addresses.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"slotfailover-{os.getuid()}-{digest}.lock"


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of this machine's journal file. Raise Retryable while another process does."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = os.fdopen(os.open(path, flags, 0o600), "a+", encoding="utf-8")
    except OSError:
        yield  # the nodes' lock is there; a journal that can't be written is told of elsewhere
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _taken(f"on this machine: process {file.read().strip() or '?'}") from None
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


def _taken(who: str) -> Retryable:
    return Retryable(
        f"another slotfailover command is at work ({who})",
        operation="take the lock",
        hint="wait until the other command ends, or end its process, which frees the lock",
        exit_code=ExitCode.LOCKED,
    )
