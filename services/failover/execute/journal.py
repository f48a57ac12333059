"""The audit journal: one entry a step, in a file of JSON lines and in a table on the primary.

{"run": …, "number": …, "at": …Z, "by": "user@host pid", "command": …, "step": …, "server": …,
 "sql": […], "outcome": …, "seen": {…}, "seconds": …, "intent": {…}}

A run opens with the step `begin`, which carries the intent, and closes with `end`. The table
`slotfailover.journal` travels to the standbys; while no node takes writes its entries wait. It is
not kept in a database that publishes all its tables, whose subscribers would fail on it.
"""

import getpass
import json
import os
import socket
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from schemas.errors import SlotbridgeError
from schemas.lsn import format_lsn
from services.failover.model.view import View
from services.failover.observe.cluster import Cluster
from services.failover.observe.own_tables import PublishesAllTables, writing
from services.failover.observe.server_link import Unreachable
from services.failover.plan.steps.step import NO_WAY_BACK, Step
from services.postgres.server import Connection

BEGIN, END, DONE = "begin", "end", "done"
SEEN = "seen"
"""The step of an entry in which `watch` noted a primary, outside of any run."""
STARTED = "started"
REMEMBERED = ("met", "failover_slots", "primary", "synchronous", "lsn")
"""The keys of what is remembered of a primary, beside what a run was asked to do."""
"""The outcome of a step that is about to be performed; its other entry follows."""
_NEXT = timedelta(milliseconds=1)
_SKEW_MAX = timedelta(days=1)
DRILL = "drill"
"""The command of a rehearsal."""
FIX = "check --fix"
"""The command that repairs what a check has found."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the journal. Secrets are masked already."""

    run: str
    number: int
    at: str
    by: str
    command: str
    step: str
    server: str = ""
    sql: list[str] = field(default_factory=list)
    outcome: str = ""
    seen: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    intent: dict[str, Any] = field(default_factory=dict)


class Journal:
    """Appends to the file `path` (None: no file) and to the table in `database`.

    An entry that can't be written never stops a failover: `problems` tells of it.
    """

    def __init__(self, path: Path | None, cluster: Cluster, database: str, command: str) -> None:
        self._path = path
        self._cluster = cluster
        self._database = database
        self._command = command
        self._run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"
        self._number = 0
        self._waiting: list[Entry] = []
        self.problems: list[str] = []

    def begin(self, view: View, intent: dict[str, Any]) -> None:
        """Record on disk that a run begins, what it was asked to do, and which primary it has met.

        A run that is killed, as by a power cut, records no end, and may have led subscriptions to
        that primary. The failover slots are not part of the entry: a new primary may lack some,
        which must stay known from earlier entries.
        """
        met = remembered_at(view)
        met.pop("failover_slots", None)
        self._add(view, step=BEGIN, intent={**intent, **met}, outcome="")
        self._to_disk()

    def started(self, step: Step, view: View) -> None:
        """Record that a step is about to be performed.

        One without a way back is on disk then: after a power cut here, it is known to be ordered.
        """
        self.write(step, view, 0.0, STARTED)
        if step.action in NO_WAY_BACK:
            self._to_disk()

    def write(self, step: Step, view: View, seconds: float, outcome: str) -> None:
        """Record a step and the state after it."""
        self._add(
            view,
            step=step.text,
            server=step.server,
            sql=[f"the command of failover.machines.{step.server}"]
            if step.command
            else list(step.shown),
            outcome=outcome,
            seconds=round(seconds, 3),
        )

    def note(self, view: View, step: str, server: str, seconds: float, outcome: str) -> None:
        """Record an event that is not a step of a plan."""
        rounded = round(seconds, 3)
        self._add(view, step=step, server=server, outcome=outcome, seconds=rounded)

    def fixing(self, view: View, server: str, sql: Iterable[str], outcome: str) -> None:
        """Record a remedy before it is performed, and its outcome."""
        statements = list(sql)
        step = f"fix: {'; '.join(statements)}"  # several on one server are told apart by it
        self._add(view, step=step, server=server, sql=statements, outcome=outcome)

    def end(self, view: View, outcome: str, seconds: float) -> None:
        """Record how the run ended; DONE where nothing is left."""
        self._add(
            view, step=END, outcome=outcome, seconds=round(seconds, 3), intent=remembered_at(view)
        )

    def remember(self, view: View) -> None:
        """Record the facts that only the primary knows, for the time after its loss."""
        self._add(view, step=SEEN, outcome=DONE, intent=remembered_at(view))

    def _add(self, view: View, **values: Any) -> None:
        """Write an entry: to the file at once, to the primary's table unless a step just starts."""
        self._number += 1
        # What this run has read was before it, whatever the clocks of other machines said.
        at = after(datetime.now(UTC), instant(self._cluster.recorded_at))
        entry = Entry(
            run=self._run,
            number=self._number,
            at=at.isoformat(timespec="milliseconds"),
            by=f"{_user()}@{socket.gethostname()} {os.getpid()}",
            command=self._command,
            seen=_seen(view),
            **values,
        )
        self._to_file(entry)
        self._waiting.append(entry)
        if values.get("outcome") == STARTED:
            return  # the table gets it with the next one
        if view.primary is not None and view.primary.writable:
            self._to_table(view.primary.name)

    def _to_file(self, entry: Entry) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(entry), ensure_ascii=False) + "\n")
        except OSError as error:
            self._problem(f"the journal {self._path} can't be written: {error.strerror}")

    def _to_disk(self) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            self._problem(f"the journal {self._path} can't be synced: {error.strerror}")

    def _to_table(self, primary: str) -> None:
        """Insert the waiting entries in the primary; after a failure they go on waiting."""
        try:
            with self._cluster.in_database(primary, self._database) as link:
                link.ask(lambda connection: _insert(connection, self._waiting))
            self._waiting.clear()
        except PublishesAllTables:
            self._problem(
                f"no journal is kept in {self._database}, as it publishes all its tables: choose "
                "another failover.journal_database"
            )
        except Unreachable as error:
            self._problem(f"the journal in {self._database} can't be written: {error.detail}")
        except SlotbridgeError as error:
            hint = f". Hint: {error.hint}" if error.hint else ""
            self._problem(
                f"the journal in {self._database} can't be written: {error.message}{hint}"
            )

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def after(now: datetime, recorded: datetime) -> datetime:
    """Return the time of a new entry: later than `recorded`, unless a clock is days ahead."""
    ahead = recorded - now
    return recorded + _NEXT if timedelta(0) <= ahead < _SKEW_MAX else now


def instant(text: str) -> datetime:
    """Parse an entry's time; return one earlier than all others if it can't be parsed."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _insert(connection: Connection, entries: list[Entry]) -> None:
    """Add the entries. The table may have columns of a newer version."""
    with writing(connection, "journal"):
        documents = [json.dumps(asdict(entry)) for entry in entries]
        connection.execute(
            "INSERT INTO slotfailover.journal (run, number, at, by, command, step, server, sql,"
            " outcome, seen, seconds, intent)"
            " SELECT e.run, e.number, e.at, e.by, e.command, e.step, e.server, e.sql, e.outcome,"
            " e.seen, e.seconds, e.intent"
            " FROM unnest(%s::jsonb[]) d, jsonb_to_record(d) e (run text, number int,"
            " at timestamptz, by text, command text, step text, server text, sql jsonb,"
            " outcome text, seen jsonb, seconds float8, intent jsonb)"
            " ON CONFLICT DO NOTHING",
            [documents],
        )


def remembered(view: View) -> dict[str, Any]:
    """Return the primary's timeline, failover slots and synchronous standbys; {} without one."""
    primary = view.primary
    met = primary.milestone("") if primary is not None else None
    if primary is None or primary.state is None or met is None:
        return {}
    return {
        "met": met.note,
        "failover_slots": sorted(primary.state.failover_slots),
        "primary": primary.name,
        "synchronous": primary.state.setting("synchronous_standby_names"),
    }


def remembered_at(view: View) -> dict[str, Any]:
    """Return what `remembered` returns, and how far the primary's WAL was."""
    found, primary = remembered(view), view.primary
    written = primary.state.replication.written_lsn if primary and primary.state else None
    return {**found, "lsn": format_lsn(written)} if found and written is not None else found


def _seen(view: View) -> dict[str, str]:
    """Describe each server in a few words."""
    seen = {}
    for node in view.nodes:
        if node.state is None:
            seen[node.name] = f"{node.reach}: {node.detail}"
            continue
        role = "fenced primary" if node.fenced else "primary" if node.leading else "standby"
        timeline = node.state.server.timeline
        position = node.received or node.state.replication.written_lsn or 0
        seen[node.name] = f"{role}, timeline {timeline}, at {format_lsn(position)}"
    for subscriber in view.subscribers:
        if not subscriber.usable:
            seen[subscriber.name] = f"{subscriber.reach}: {subscriber.detail}"
    return seen


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
