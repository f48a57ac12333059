"""A failover rehearsed on a clone. The right column lists all that it does to production.

    copy      pg_basebackup of the standby                 reads there; one replication connection
    start     the clone streams from the primary           a physical slot there, its feedback
    slots     pg_sync_replication_slots() on the clone     reads there; standby snapshots in its WAL
    cut off   the clone lets go of the primary             the slot is dropped
    promote   the clone
    decode    a message is written in each slot's database of the clone, and read from the slot

A base backup has no slots (pg_replslot is left out), so the clone gets them as a standby does. A
slot is synchronized there only once its consumer has advanced a little: what an idle consumer, or a
disabled one, does not show in a drill, `slotfailover check` tells of the standby itself.
Source: PostgreSQL documentation 47.2.3 Replication Slot Synchronization; slotsync.c.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from schemas.errors import ExitCode, Retryable, SetupError, SlotbridgeError
from schemas.events import MARKER_PREFIX
from schemas.lsn import format_lsn
from services.failover.checks.facts import required_slots
from services.failover.drill.clone import LIMITS, SLOT, Clone
from services.failover.drill.outcome import DrillPart, Outcome, Usable
from services.failover.model import statements
from services.failover.model.conninfo import Conninfo
from services.failover.model.view import Node, View
from services.failover.observe.cluster import Cluster
from services.failover.observe.server_link import ServerLink, Unreachable
from services.postgres.rows import one_row
from services.postgres.server import Connection, read_received, read_settings
from services.postgres.slots import Slot, read_slots

KEY = 0x510_7FA_112
"""The advisory lock of drills: not that of the commands, which a drill must never keep waiting."""
_POLL_S = 0.2
_SYNCHRONIZE_MS = 1000
_START_S = 120.0
_RELEASE_S = 30.0


@dataclass(slots=True)
class Rehearsal:
    """One drill. `report` is called after each part; `slots_s` is the deadline for the slots."""

    cluster: Cluster
    view: View
    primary: Node
    standby: Node
    clone: Clone
    report: Callable[[DrillPart], None]
    copy_s: float
    slots_s: float
    settings: dict[str, str]
    parts: list[DrillPart] = field(default_factory=list)

    def run(self) -> Outcome:
        """Perform the whole drill. Raise SlotbridgeError where it could not be carried out."""
        begun = time.monotonic()
        wanted = [required.slot for required in required_slots(self.view)]
        with self._alone(), self._cleaned_up():
            with self._part("copy", f"a base backup of {self.standby.name}"):
                self.clone.copy(self._conninfo(self.standby), self.copy_s)
            with self._part("start", f"the clone streams from {self.primary.name}"):
                self._start()
            user, databases = self._who_and_where()
            with self.clone.link(user, databases[0], self.slots_s) as clone:
                self._catch_up(clone)
                with self._part("slots", "the clone has them"):
                    missing = self._slots(clone, wanted)
                with self._part("cut off", f"it is on its own, {SLOT} is dropped"):
                    self._cut_off(clone)
                with self._part("promote", "it takes writes"):
                    _promote(clone, self.slots_s)
            found = [
                Usable(name, missing[name]) if name in missing else self._decoded(name, user)
                for name in wanted
            ]
        seconds = time.monotonic() - begun
        return Outcome(self.standby.name, tuple(self.parts), tuple(found), seconds)

    def clean(self) -> list[str]:
        """Remove the remains of a killed drill; return their names."""
        with self._alone():
            return self._remove()

    @contextlib.contextmanager
    def _part(self, name: str, detail: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.parts.append(DrillPart(name, time.monotonic() - begun, detail))
        self.report(self.parts[-1])

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the drills' lock on the primary. Raise Retryable (LOCKED)."""
        database = self.cluster.nodes[self.primary.name].conninfo.value("dbname") or "postgres"
        with reachable(), self.cluster.in_database(self.primary.name, database) as link:
            if not link.ask(_lock):
                raise Retryable(
                    "another drill is at work",
                    operation="drill",
                    subject=self.primary.name,
                    hint="wait until the other drill ends, or end its process",
                    exit_code=ExitCode.LOCKED,
                )
            yield

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Remove what an earlier drill left before the block, and what this one made after it."""
        self._remove()
        try:
            yield
        except BaseException:
            with contextlib.suppress(
                SlotbridgeError, Unreachable
            ):  # the first error is the telling
                self._remove()
            raise
        self._remove()

    def _remove(self) -> list[str]:
        """Remove the clone and its slot on every node; return what was done."""
        done = []
        if self.clone.exists:
            self.clone.remove()
            done.append(f"removed {self.clone.folder}")
        # on all nodes: a primary of then may be a standby now
        there = [node.name for node in self.view.nodes if node.state is not None]
        done += [f"dropped the slot {SLOT} on {name}" for name in there if self._drop_slot(name)]
        return done

    def _drop_slot(self, name: str) -> bool:
        """Drop the drill's slot once nobody uses it. Raise SetupError where somebody goes on."""
        link = self.cluster.nodes[name]
        deadline = time.monotonic() + _RELEASE_S
        while (found := self._own_slot(link)) is not None:
            if found.active_pid is None:
                try:
                    link.order(_drop)
                except SetupError:
                    pass  # it was taken or dropped meanwhile: seen in the next round
                else:
                    return True
            if time.monotonic() > deadline:
                raise SetupError(
                    f"the slot {SLOT} is in use (process {found.active_pid})",
                    operation="drill",
                    subject=name,
                    hint="if a drill was killed on another machine: slotfailover drill --clean "
                    f"there, then SELECT pg_drop_replication_slot('{SLOT}') on {name}",
                )
            time.sleep(_POLL_S)
        return False

    def _own_slot(self, link: ServerLink) -> Slot | None:
        return next((s for s in link.ask(read_slots) if s.slot_name == SLOT), None)

    def _conninfo(self, node: Node) -> Conninfo:
        """Return the connection by which the clone's programs reach a node, which is our own."""
        pairs = self.cluster.nodes[node.name].conninfo.pairs
        return Conninfo(tuple(p for p in pairs if p[0] not in ("target_session_attrs", "service")))

    def _start(self) -> None:
        """Make the clone's slot on the primary, and start the clone as its standby."""
        link = self.cluster.nodes[self.primary.name]
        limits = link.ask(lambda c: read_settings(c, list(LIMITS)))
        link.order(lambda c: c.execute(statements.create_physical_slot(SLOT)[0].encode()))
        given = self._conninfo(self.primary)
        if not given.value("dbname"):
            given = given.with_value("dbname", "postgres")
        given = given.with_value("application_name", SLOT)
        values = {name: setting.value for name, setting in limits.items()}
        self.clone.isolate(given, values, self.settings)
        self.clone.start(_START_S)

    def _who_and_where(self) -> tuple[str, list[str]]:
        """Return the name of a superuser who may log in, and the names of the databases."""
        link = self.cluster.nodes[self.primary.name]
        return link.ask(_superuser), link.ask(_databases)

    def _catch_up(self, clone: ServerLink) -> None:
        """Wait until the clone has all WAL that the primary had at this moment."""
        target = self.cluster.observe().node(self.primary.name).received
        with self._part("catch up", f"it has the WAL up to {format_lsn(target)}"):
            _until(lambda: (clone.ask(read_received) or 0) >= target, self.slots_s, "catch up")

    def _slots(self, clone: ServerLink, wanted: list[str]) -> dict[str, str]:
        """Synchronize until the clone has all slots for good; return slot -> why it lacks it."""
        deadline = time.monotonic() + self.slots_s
        reason = ""
        while True:
            try:
                clone.order(_synchronize)
                reason = ""
            except SlotbridgeError as error:  # another is temporary: once more
                reason = error.message
            except Unreachable as error:  # one is ahead of the replay; or it is gone: asked below
                reason = error.detail
            there = {slot.slot_name for slot in clone.ask(read_slots) if slot.ready}
            missing = [name for name in wanted if name not in there]
            if not missing or time.monotonic() > deadline:
                why = reason or "its consumer did not advance meanwhile"
                text = f"not synchronized within {self.slots_s:.0f} s: {why}"
                return dict.fromkeys(missing, text)
            self.cluster.nodes[self.primary.name].order(
                lambda c: c.execute(statements.SNAPSHOT.encode())
            )
            time.sleep(_POLL_S)

    def _cut_off(self, clone: ServerLink) -> None:
        self.clone.cut_off()
        clone.order(lambda c: c.execute(statements.RELOAD.encode()))
        self._drop_slot(self.primary.name)

    def _decoded(self, name: str, user: str) -> Usable:
        """Decode from a slot, from where it was synchronized to a message written on the clone."""
        begun = time.monotonic()
        slot = self.view.node(self.primary.name).state
        found = slot.slot(name) if slot is not None else None
        database = found.database if found is not None else None
        if found is None or database is None:
            return Usable(name, f"it is not on {self.primary.name}")
        try:
            with self.clone.link(user, database, self.slots_s) as link:
                changes, seen = link.order(lambda c: _peek(c, name, found.plugin or ""))
        except Unreachable as error:
            return Usable(name, f"the clone went away: {error.detail}")
        except SlotbridgeError as error:
            return Usable(name, error.message)
        reason = "" if seen else "what was written after the promotion is not decoded from it"
        seconds = time.monotonic() - begun
        self.report(DrillPart("decode", seconds, f"{name}: {changes} changes"))
        return Usable(name, reason, changes, seconds)


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """Turn Unreachable into a Retryable."""
    try:
        yield
    except Unreachable as error:
        raise Retryable(
            f"a server went away: {error.detail}",
            operation="drill",
            hint="once all answer: slotfailover drill --clean, then the drill again",
        ) from error


def _lock(connection: Connection) -> bool:
    row = connection.execute("SELECT pg_try_advisory_lock(%s)", [KEY]).fetchone()
    return bool(row and row[0])


def _drop(connection: Connection) -> None:
    connection.execute("SELECT pg_drop_replication_slot(%s)", [SLOT])


def _synchronize(connection: Connection) -> None:
    """Synchronize what can be synchronized now.

    PostgreSQL 19 waits until every slot is, also those that nobody advances meanwhile (slotsync.c):
    each try is short, and the caller looks at the slots themselves.
    """
    with connection.transaction():  # SET alone would replace what the session was pinned to
        connection.execute(f"SET LOCAL statement_timeout = {_SYNCHRONIZE_MS}".encode())
        connection.execute("SELECT pg_sync_replication_slots()")


def _superuser(connection: Connection) -> str:
    row = connection.execute(
        "SELECT rolname::text FROM pg_roles WHERE rolsuper AND rolcanlogin ORDER BY oid LIMIT 1"
    ).fetchone()
    return str(row[0]) if row is not None else "postgres"


def _databases(connection: Connection) -> list[str]:
    rows = connection.execute(
        "SELECT datname::text FROM pg_database WHERE datallowconn ORDER BY datname <> 'postgres'"
    ).fetchall()
    return [name for (name,) in rows]


def _promote(clone: ServerLink, deadline_s: float) -> None:
    clone.order(lambda c: c.execute(statements.PROMOTE.encode()))
    _until(lambda: not clone.ask(_in_recovery), deadline_s, "promote")


def _in_recovery(connection: Connection) -> bool:
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    return bool(row and row[0])


def _until(so: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Wait until `so()`. Raise Retryable, which names `what`, after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not so():
        if time.monotonic() > deadline:
            raise Retryable(
                f"the clone did not {what} within {deadline_s:.0f} s",
                operation="drill",
                hint="raise failover.drill.slots_deadline_ms if the clone only needs more time",
                exit_code=ExitCode.DEADLINE,
            )
        time.sleep(_POLL_S / 4)


def _peek(connection: Connection, slot: str, plugin: str) -> tuple[int, bool]:
    """Count a slot's changes, and tell whether they include a message written just now.

    Peeking leaves the slot as it is.
    """
    row = one_row(
        connection.execute("SELECT pg_logical_emit_message(true, %s, %s)", [MARKER_PREFIX, SLOT])
    )
    options: list[str] = []
    if plugin == "pgoutput":
        names = connection.execute("SELECT quote_ident(pubname) FROM pg_publication").fetchall()
        listed = ",".join(name for (name,) in names) or '"none"'
        options = ["proto_version", "4", "messages", "true", "publication_names", listed]
    found = one_row(
        connection.execute(
            "SELECT count(*), coalesce(bool_or(lsn >= %s::pg_lsn), false)"
            " FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, VARIADIC %s::text[])",
            [row[0], slot, options],
        )
    )
    return int(found[0]), bool(found[1])
