"""The database on the primary where replicas of `watch` and commands meet: one session, kept.

leads     the replica whose session has the advisory lock; it ends with the process, and where the
          machine is gone without a word, the server ends the session after `idle_s` seconds. Where
          a Lease elects (watch.lease), only its holder takes the lock
paused    one row that all replicas follow (watch.pause)
at work   who holds the commands' lock
entries   the journal's last entries
"""

import contextlib
from dataclasses import dataclass, field, replace

from schemas.errors import SlotbridgeError
from services.failover.execute.history import LastDrill, read_entries, read_last_drill
from services.failover.execute.journal import Entry
from services.failover.execute.lock import holder
from services.failover.observe.cluster import Cluster
from services.failover.observe.server_link import ServerLink, Unreachable
from services.failover.watch.pause import Pause, newer, read_pause, write_pause
from services.postgres.server import Connection

KEY = 0x510_7FA_111
"""The advisory lock's number."""
_HELD = """
    SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND granted
       AND objsubid = 1 AND (classid::bigint << 32) + objid::bigint = %s
"""
_ENTRIES = 200


@dataclass(frozen=True, slots=True)
class SharedState:
    """The shared state of the replicas, read from the primary; empty without a primary."""

    leading: bool = False
    pause: Pause = field(default_factory=Pause)
    shared: bool = False
    """The pause is stored for all replicas."""
    at_work: str = ""
    entries: tuple[Entry, ...] = ()
    drill: LastDrill | None = None
    problem: str = ""


class SharedStateStore:
    """Reads and writes the shared state in one session of the primary; for one thread."""

    def __init__(self, cluster: Cluster, database: str, idle_s: float) -> None:
        self._cluster = cluster
        self._database = database
        self._idle_ms = int(idle_s * 1000)
        self._primary = ""
        self._link: ServerLink | None = None
        self._exits = contextlib.ExitStack()

    def look(
        self, primary: str, ours: Pause, *, may_lead: bool = True, ordered: bool = False
    ) -> SharedState:
        """Return the shared state ("": there is no primary); write our pause if it is the newer.

        `ordered`: our pause was ordered just now, so it counts as the newer one. `may_lead`: take
        the leader's lock if it is free; else let go of it.
        """
        if primary != self._primary:
            self.close()
        if not primary:
            return SharedState(pause=ours)
        if self._link is None:
            there = self._cluster.in_database(primary, self._database)
            self._link = self._exits.enter_context(there)
            self._primary = primary
        try:
            return self._link.ask(
                lambda c: _look(c, ours, self._idle_ms, may_lead=may_lead, ordered=ordered)
            )
        except Unreachable as error:
            return SharedState(pause=ours, problem=error.detail)
        except SlotbridgeError as error:
            return SharedState(pause=ours, problem=str(error))

    def close(self) -> None:
        """Let go of everything."""
        self._exits.close()
        self._link, self._primary = None, ""


def _look(
    connection: Connection, ours: Pause, idle_ms: int, *, may_lead: bool, ordered: bool
) -> SharedState:
    """Exchange the pause and the lead with other replicas through the database.

    `ordered`: our pause was ordered just now, so that it gets a newer version than theirs.
    """
    connection.execute("SELECT set_config('idle_session_timeout', %s, false)", [str(idle_ms)])
    theirs = read_pause(connection)
    if ordered and theirs.version >= ours.version:
        ours = replace(ours, version=theirs.version + 1)
    pause = newer(ours, theirs)
    shared = pause == theirs or write_pause(connection, pause)
    if shared:
        pause = read_pause(connection)  # another replica may have been faster
    return SharedState(
        leading=_take(connection) if may_lead else _let_go(connection),
        pause=pause,
        shared=shared,
        at_work=holder(connection),
        entries=tuple(read_entries(connection, _ENTRIES)),
        drill=read_last_drill(connection),
    )


def _take(connection: Connection) -> bool:
    """Take the lock if it is free; tell whether this session has it."""
    if connection.execute(_HELD, [KEY]).fetchone() is not None:
        return True
    row = connection.execute("SELECT pg_try_advisory_lock(%s)", [KEY]).fetchone()
    return bool(row and row[0])


def _let_go(connection: Connection) -> bool:
    """Let go of the lock if this session has it; return False, as it does not lead."""
    if connection.execute(_HELD, [KEY]).fetchone() is not None:
        connection.execute("SELECT pg_advisory_unlock(%s)", [KEY])
    return False
