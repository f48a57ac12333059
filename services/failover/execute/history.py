"""Past runs by the journals: the table of a node that answers, and the file."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from schemas.errors import SlotbridgeError
from services.failover.execute.journal import BEGIN, DONE, DRILL, END, FIX, SEEN, STARTED, Entry
from services.failover.model.view import View
from services.failover.observe.cluster import Cluster
from services.failover.observe.own_tables import reading
from services.failover.observe.server_link import Unreachable
from services.postgres.server import Connection

_ENTRIES_MAX = 5000
"""Of a journal's file or table: of what runs have written, and of what `watch` has seen."""
_KEYS = frozenset(each.name for each in fields(Entry))
_MINIMUM: dict[str, Any] = {"at": "", "by": "", "command": "", "step": ""}


def read_history(
    cluster: Cluster,
    view: View,
    path: Path | None,
    database: str,
    unread: list[str] | None = None,
) -> list[Entry]:
    """Return all entries that can be read, oldest first, each once.

    `unread` gets the places whose entries could not be read.
    """
    problems: list[str] = [] if unread is None else unread
    found: dict[tuple[str, int], Entry] = {}
    for node in view.nodes:
        if node.state is not None:
            found |= {
                (entry.run, entry.number): entry
                for entry in _table(cluster, node.name, database, problems)
            }
    found |= {(entry.run, entry.number): entry for entry in _file(path, problems)}
    begun: dict[str, str] = {}
    for entry in sorted(found.values(), key=lambda e: e.at):
        begun.setdefault(entry.run, entry.at)
    return sorted(found.values(), key=lambda e: (begun[e.run], e.run, e.number))


@dataclass(frozen=True, slots=True)
class LastDrill:
    """The last rehearsal that came to its end. `at`: UTC, ISO 8601; `age_s` by the server."""

    at: str
    outcome: str
    age_s: float

    @property
    def well(self) -> bool:
        """Whether every slot was usable."""
        return self.outcome == DONE


def read_last_drill(connection: Connection) -> LastDrill | None:
    """Read the last drill from the journal's table in the connected database."""
    with reading(connection, "journal") as there:
        if not there:
            return None
        row = connection.execute(
            "SELECT to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), outcome,"
            " greatest(0, extract(epoch FROM clock_timestamp() - at))::float8"
            " FROM slotfailover.journal WHERE command = %s AND step = %s ORDER BY at DESC LIMIT 1",
            [DRILL, END],
        ).fetchone()
    return LastDrill(*cast("tuple[str, str, float]", row)) if row is not None else None


def unfinished(entries: list[Entry]) -> Entry | None:
    """Return the `begin` entry of the last run, if the run left something to do.

    Drills and runs that were repaired since do not count.
    """
    no_run = (DRILL, FIX)
    entries = [entry for entry in entries if entry.command not in no_run and entry.step != SEEN]
    if not entries:
        return None
    run = [entry for entry in entries if entry.run == entries[-1].run]
    ended = run[-1].step == END and run[-1].outcome == DONE
    return run[0] if run[0].step == BEGIN and not ended else None


def _table(cluster: Cluster, node: str, database: str, problems: list[str]) -> list[Entry]:
    """Return the entries of a node's journal, () and a problem where it can't be read."""
    try:
        with cluster.in_database(node, database) as link:
            return link.ask(lambda c: read_entries(c, _ENTRIES_MAX))
    except (Unreachable, SlotbridgeError) as error:  # another node or the file may have it
        why = error.detail if isinstance(error, Unreachable) else error.message
        problems.append(f"the journal of {node} in {database} can't be read: {why}")
        return []


def read_entries(connection: Connection, entries_max: int) -> list[Entry]:
    """Return the last entries of the table in the connected database, oldest first.

    Up to `entries_max` of what runs have written, and as many of what `watch` has seen: however
    often that changes, no run is forgotten for it.
    """
    with reading(connection, "journal") as there:
        if not there:
            return []
        rows = connection.execute(
            "SELECT to_jsonb(j) || jsonb_build_object('at', to_char(at AT TIME ZONE 'UTC',"
            ' \'YYYY-MM-DD"T"HH24:MI:SS.MS"+00:00"\'))'
            " FROM ((SELECT * FROM slotfailover.journal WHERE step = %(seen)s"
            " ORDER BY at DESC, number DESC LIMIT %(count)s)"
            " UNION ALL (SELECT * FROM slotfailover.journal WHERE step IS DISTINCT FROM %(seen)s"
            " ORDER BY at DESC, number DESC LIMIT %(count)s)) j ORDER BY at, number",
            {"seen": SEEN, "count": entries_max},
        ).fetchall()
    return [_entry(document) for (document,) in rows]


def _file(path: Path | None, problems: list[str]) -> list[Entry]:
    """Return the last entries of the journal's file; sightings are counted apart from steps."""
    if path is None or not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        problems.append(f"the journal {path} can't be read: {error.strerror}")
        return []
    entries = []
    left = {True: _ENTRIES_MAX, False: _ENTRIES_MAX}
    for line in reversed(lines):
        try:
            entry = _entry(json.loads(line))
        except (ValueError, TypeError):
            continue  # the last line of a killed writer, or an older form
        if left[entry.step == SEEN]:
            left[entry.step == SEEN] -= 1
            entries.append(entry)
        elif not any(left.values()):
            break
    return entries[::-1]


def _entry(document: dict[str, Any]) -> Entry:
    """Make an entry from a document of any version: skip unknown keys, fill in missing ones."""
    known = {key: value for key, value in document.items() if key in _KEYS and value is not None}
    return Entry(**{**_MINIMUM, **known})


def done_or_broken_off(entries: Iterable[Entry]) -> list[Entry]:
    """Leave out the entry that a step is about to be performed, where another says how it went."""
    found = list(entries)
    after = {(e.run, e.step, e.server) for e in found if e.outcome != STARTED}
    return [e for e in found if e.outcome != STARTED or (e.run, e.step, e.server) not in after]


def history_as_json(entries: Iterable[Entry]) -> dict[str, object]:
    """Return the journal's entries as JSON, oldest first."""
    return {"entries": [asdict(entry) for entry in entries]}
