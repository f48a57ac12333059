"""This machine's memory of the last primary, in `<journal>.seen` beside the journal.

{"system": "7…", "node": "a", "timeline": 2, "lsn": "0/3000148", "at": "…Z", "synchronous": "…",
 "before": "…", "standbys": {"b": "…Z"}, "failover_slots": ["s1"]}

Every command and `watch` write it when they see a primary that takes writes: at once where more
than its position has changed, else at most once a second. So a failover knows how far the primary
was when it was last seen, which failover slots it had, and which standbys its commits waited for.
The journal's table, which travels to the standbys, tells the same to whoever has no such file
(`by_journals`), but only as of the last run or change. It is only a lower bound: it proves what was
there, never what was not.
"""

import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from schemas.lsn import format_lsn, parse_lsn
from schemas.settings import FailoverSettings
from services.failover.model.loss_limit import LossLimit, Sighting
from services.failover.model.view import View

_EVERY_S = 1.0
_CLOCKS_DIFFER = timedelta(seconds=60)
"""By how much an order to promote in another machine's journal counts as later."""


@dataclass(frozen=True, slots=True)
class JournalSighting:
    """The last primary as a journal has it."""

    system: str
    at: datetime
    sighting: Sighting


@dataclass(frozen=True, slots=True)
class _Note:
    """A sighting with its cluster and its time."""

    system: str
    at: datetime
    sighting: Sighting
    before: str
    """synchronous_standby_names of the primary before it, until it has one itself."""
    standbys: dict[str, datetime]
    """When each other node last answered, of those that answered as a standby then."""


class Sightings:
    """The memory of this process, and of the file if there is one.

    Threads may share it: the newest note wins.
    """

    def __init__(self, settings: FailoverSettings) -> None:
        journal = settings.journal
        self._limit = LossLimit(
            settings.lag_bytes_max_on_failover, settings.lag_seconds_max_on_failover
        )
        self._path = journal.with_name(journal.name + ".seen") if journal is not None else None
        self._last: _Note | None = None
        self._written: _Note | None = None
        self._written_s = 0.0
        self.by_journals: JournalSighting | None = None
        """The last primary by the journals (execute.timeline_memory)."""

    def complete(self, view: View) -> View:
        """Return the view with the sightings of the last primary and of the one before."""
        seen = self._remember(view)
        before = self._last.before if self._last is not None and seen is None else ""
        return replace(
            view,
            sighting=seen,
            synchronous_before=before,
            loss_limit=self._limit,
            seen_writable=self._last.sighting.node if self._last is not None else "",
            known_standbys=self._known_standbys(view),
        )

    def close(self) -> None:
        """Note the last sighting, unless it is noted already, or somebody has noted a later one."""
        if self._last is None or self._last is self._written:
            return
        found = self._read()
        if found is None or found.at < self._last.at:
            self._write(self._last)

    def _known_standbys(self, view: View) -> frozenset[str]:
        """Return the nodes that were standbys when last seen.

        Nodes that were promoted since, or told to promote themselves, are left out.
        """
        note, journaled = self._newest(view), self._of_journals(view)
        if note is None or (
            journaled is not None and journaled.sighting.position > note.sighting.position
        ):
            return frozenset()  # there was a primary since: who stood by then is not known
        return frozenset(
            node.name
            for node in view.nodes
            if (at := note.standbys.get(node.name)) is not None
            and not node.leading
            and not any(
                name == node.name and _instant(begun) > at - _CLOCKS_DIFFER
                for name, begun in view.promotions
            )
        )

    def _newest(self, view: View) -> _Note | None:
        """Return the newest note of the view's cluster."""
        systems = {n.state.server.system_identifier for n in view.nodes if n.state is not None}
        kept = [note for note in (self._last, self._read()) if note is not None]
        fitting = [note for note in kept if note.system in systems]
        return max(fitting, key=lambda note: note.at, default=None)

    def _remember(self, view: View) -> Sighting | None:
        """Note the primary of the view, if it has one; else return what was noted of the last."""
        systems = {n.state.server.system_identifier for n in view.nodes if n.state is not None}
        if len(view.writable) == 1:
            self._note(view, *systems)
            return None
        names = {node.name for node in view.nodes}
        kept = [
            (found.sighting, found.at)
            for found in (self._newest(view), self._of_journals(view))
            if found is not None and found.sighting.node in names
        ]
        if not kept:
            return None
        seen, at = max(kept, key=lambda pair: (pair[0].position, pair[1]))
        if seen.failover_slots is None:  # an entry of the journal may tell none
            others = (other.failover_slots for other, _ in kept if other.failover_slots is not None)
            seen = replace(seen, failover_slots=next(others, None))
        return seen.aged(max(0.0, (datetime.now(UTC) - at).total_seconds()))

    def _of_journals(self, view: View) -> JournalSighting | None:
        """Return what the journals tell, None if it is of another cluster than the view's."""
        systems = {n.state.server.system_identifier for n in view.nodes if n.state is not None}
        return (
            self.by_journals
            if self.by_journals is not None and self.by_journals.system in systems
            else None
        )

    def _note(self, view: View, *systems: str) -> None:
        """Note the primary, its timeline and position, and its standbys, for when it is away.

        An older timeline is not noted: it is an old primary's. The file is written every _EVERY_S,
        and at once where more than the position has changed.
        """
        (primary,) = view.writable
        written = primary.known_state.replication.written_lsn
        if written is None or len(systems) != 1:
            return
        seen = Sighting(
            primary.name,
            primary.known_state.server.timeline,
            written,
            0.0,
            primary.known_state.setting("synchronous_standby_names"),
            failover_slots=primary.known_state.failover_slots,
        )
        last = self._last or self._read()
        known = last is not None and last.system == systems[0]
        if last is not None and known and last.sighting.timeline > seen.timeline:
            return  # an old primary that came back is not what was last
        before = ""
        if last is not None and last.system == systems[0] and not seen.synchronous:
            same = last.sighting.node == primary.name
            before = last.before if same else last.sighting.synchronous or last.before
        now = datetime.now(UTC)
        standbys = dict(last.standbys) if last is not None and known else {}
        for node in view.nodes:
            if node.standby:
                standbys[node.name] = now
            elif node.leading:
                standbys.pop(node.name, None)
        self._last = _Note(systems[0], now, seen, before, standbys)
        moved_only = self._written is not None and _but_for_time(self._written, self._last)
        if not moved_only or time.monotonic() - self._written_s > _EVERY_S:
            self._write(self._last)

    def _write(self, note: _Note) -> None:
        """Replace the file. Ignore a failure: it only means less evidence later."""
        self._written, self._written_s = note, time.monotonic()
        if self._path is None:
            return
        document = {
            "system": note.system,
            "node": note.sighting.node,
            "timeline": note.sighting.timeline,
            "lsn": format_lsn(note.sighting.lsn),
            "at": note.at.isoformat(),
            "synchronous": note.sighting.synchronous,
            "before": note.before,
            "standbys": {name: at.isoformat() for name, at in note.standbys.items()},
            "failover_slots": sorted(note.sighting.failover_slots or ()),
        }
        name = ""
        try:
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file)
                os.fchmod(file.fileno(), 0o644)  # watch and an operator may be different users
            Path(name).replace(self._path)
        except OSError:
            if name:  # the disk is full: an empty file is left
                Path(name).unlink(missing_ok=True)

    def _read(self) -> _Note | None:
        """Return the note of the file, None where there is none or it can't be read."""
        if self._path is None:
            return None
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            seen = Sighting(
                str(found["node"]),
                int(found["timeline"]),
                parse_lsn(found["lsn"]),
                0.0,
                str(found["synchronous"]),
                failover_slots=frozenset(map(str, found["failover_slots"])),
            )
            at, before = datetime.fromisoformat(found["at"]), str(found["before"])
            standbys = {
                str(name): datetime.fromisoformat(when) for name, when in found["standbys"].items()
            }
            return _Note(str(found["system"]), at, seen, before, standbys)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def _but_for_time(earlier: _Note, other: _Note) -> bool:
    """Tell whether two notes differ in positions and times alone."""
    mine, theirs = (replace(note.sighting, lsn=0) for note in (earlier, other))
    same = (earlier.system, earlier.before, set(earlier.standbys)) == (
        (other.system, other.before, set(other.standbys))
    )
    return same and mine == theirs


def _instant(text: str) -> datetime:
    """Parse a journal's time; return one later than all others if it can't be parsed."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return datetime.max.replace(tzinfo=UTC)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
