"""The knowledge of `watch` after an observation: made by the loop, read by all others. Pure.

Also what is derived from it for the page, the API and the metrics: lags, roles, events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.failover.checks.facts import required_slots
from services.failover.watch.decision import Decision, Memory, Verdict
from services.failover.watch.pause import Pause

if TYPE_CHECKING:
    from services.failover.checks.check_report import Checkup
    from services.failover.execute.history import LastDrill
    from services.failover.execute.journal import Entry
    from services.failover.model.view import Node, View
    from services.failover.watch.lease.elector import LeaseReport


@dataclass(frozen=True, slots=True)
class Point:
    """How much WAL each standby and consumer lacks at a time, in bytes."""

    at: float
    """Seconds since the epoch."""
    lags: dict[str, int]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that watch has seen or done. `at`: UTC, ISO 8601."""

    at: str
    text: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Since the process began."""

    observations: int = 0
    promotions: int = 0
    repoints: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot. `at`: UTC, ISO 8601; "" before the first observation."""

    at: str = ""
    at_s: float = 0.0
    took_s: float = 0.0
    view: View | None = None
    checkup: Checkup | None = None
    problem: str = ""
    """Why the view can't be had or judged."""
    memory: Memory = field(default_factory=Memory)
    decision: Decision = field(default_factory=lambda: Decision(Verdict.WAIT, "not yet observed"))
    leading: bool = False
    lease: LeaseReport | None = None
    """None: no Lease elects."""
    automatic: bool = False
    pause: Pause = field(default_factory=Pause)
    points: tuple[Point, ...] = ()
    events: tuple[Event, ...] = ()
    entries: tuple[Entry, ...] = ()
    """The journal's last entries, oldest first."""
    at_work: str = ""
    """Who holds the commands' lock on the primary."""
    counts: Counts = field(default_factory=Counts)
    drilled: LastDrill | None = None
    contacts: tuple[tuple[str, float], ...] = ()
    """(server, Unix time) of the last answer of each server that has answered this process."""


def lags_of(view: View) -> dict[str, int]:
    """Return how many bytes of WAL each standby and consumer lacks; {} without a primary."""
    primary = view.primary
    if primary is None or primary.state is None:
        return {}
    written = primary.state.replication.written_lsn or 0
    lags = {
        f"standby {node.name}": max(0, written - node.received)
        for node in sorted(view.standbys, key=lambda node: node.name)
    }
    for required in required_slots(view):
        slot = primary.state.slot(required.slot)
        confirmed = (slot.confirmed_flush_lsn if slot is not None else None) or 0
        # a consumer confirms WAL beyond its own position if that has no changes for it
        for name, lsn in required.consumers:
            lags[name] = max(0, written - max(lsn, confirmed))
    return lags


def role_of(node: Node) -> str:
    """Describe a node's role in a word or two."""
    if node.state is None:
        return str(node.reach)
    if node.leading:
        return "fenced primary" if node.fenced else "primary"
    return "standby"


def position_of(node: Node) -> int | None:
    """Return the end of the WAL that a node has written or received, None if it does not answer."""
    return node.received or None
