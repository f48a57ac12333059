"""Timelines: how one branched off another, and which was the newest that somebody has met. Pure.

A timeline's number is not an identity: two standbys promoted apart both begin a timeline 2. Its
number together with the LSN where it began is one, within a cluster (system identifier).

    [slotfailover: system 7412345678901234567, timeline 2 from 0/3000148, at 10.0.0.2:5432]

is a milestone as it stands in the comment of a subscription: the newest timeline from which that
subscription was fed, and the address by which it was.
Source: PostgreSQL documentation 25.3.6 Timelines; timeline.c for the history file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from schemas.lsn import format_lsn, parse_lsn
from schemas.timelines import switch_points

History = tuple[tuple[int, int], ...]
"""(timeline, LSN where the next one left it), oldest first; empty on timeline 1."""
LSN = r"[0-9A-F]{1,8}/[0-9A-F]{1,8}"
_NOTE = re.compile(
    rf" ?\[slotfailover: system (\d{{1,20}})(?:, timeline (\d{{1,10}})(?: from ({LSN}))?)?,"
    r" at ([^\]]*)\]"
)


@dataclass(frozen=True, slots=True)
class Milestone:
    """A timeline that was met: no primary may be followed that does not descend from it."""

    system: str
    timeline: int
    """0 where only the cluster is known."""
    began: int | None
    """Where it left its parent; None on timeline 1, or where that was not recorded."""
    address: str = ""
    """The address by which a subscription reached its primary then (`host:port`)."""

    def __str__(self) -> str:
        where = f" from {format_lsn(self.began)}" if self.began is not None else ""
        return f"timeline {self.timeline}{where}"

    @property
    def note(self) -> str:
        """The milestone as it stands in a subscription's comment."""
        met = f", {self}" if self.timeline else ""
        return f"[slotfailover: system {self.system}{met}, at {self.address}]"


@dataclass(frozen=True, slots=True)
class Feeding:
    """A stream of physical replication, as one end of it tells; `slot` "" without one."""

    slot: str
    application: str
    timeline: int = 0
    """Only at the receiving end."""
    host: str = ""
    port: str = ""
    """Receiving end: the server that sends, as primary_conninfo names it."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a node comes from, and what it is connected with."""

    started: str = ""
    """When its postmaster started, to the microsecond: with the system identifier, which server
    it is, under whatever name it was reached."""
    history: History | None = ()
    """How its timeline came about; None where our role can't read it."""
    may_read_history: bool = True
    feeds: tuple[Feeding, ...] = ()
    """The standbys that stream from it."""
    fed: Feeding | None = None
    """Standby: the stream that it receives."""
    managers: tuple[str, ...] = ()
    """Traces of a manager that promotes by itself: Patroni, CloudNativePG …, with the evidence."""


def milestone_in(comment: str) -> Milestone | None:
    """Return the milestone that a comment carries, None where it has none."""
    found = _NOTE.search(comment)
    if found is None:
        return None
    system, timeline, began, address = found.groups()
    where = parse_lsn(began) if began else None
    return Milestone(system, int(timeline or 0), where, address)


def without_milestone(comment: str) -> str:
    """Return the comment without its milestone."""
    return _NOTE.sub("", comment).strip()


def parse_history(text: str) -> History:
    """Parse the text of a history file, oldest timeline first."""
    return tuple(switch_points(text).items())


def began(history: History, timeline: int) -> int | None:
    """Return where `timeline` left its parent, by a history that has both; None for the first.

    Raise KeyError where the history does not have it.
    """
    known = [number for number, _ in history]
    if timeline in known:
        index = known.index(timeline)
    elif not history or timeline > known[-1]:
        index = len(known)
    else:
        raise KeyError(timeline)
    return history[index - 1][1] if index else None


def left_at(history: History, timeline: int) -> int | None:
    """Return where the history leaves `timeline`, None if it never was on it or still is."""
    return dict(history).get(timeline)


def contradiction(met: Milestone, timeline: int, history: History | None) -> str:
    """Return why a server on `timeline` does not descend from the timeline met, "" if it does.

    `history` is that of `timeline`, None where unknown: the answer is then a reason as well.
    """
    if not met.timeline:
        return ""
    if timeline < met.timeline:
        return f"it is on timeline {timeline}, older than {met}"
    if timeline == 1:
        return ""
    if history is None:
        return (
            f"it is on timeline {timeline}, whose history can't be read: nobody can tell whether "
            f"it descends from {met}"
        )
    if timeline > met.timeline and left_at(history, met.timeline) is None:
        return f"its timeline {timeline} does not descend from {met}"
    own = began(history, met.timeline)
    if met.began is not None and own is not None and own != met.began:
        return f"its timeline {met.timeline} began at {format_lsn(own)}: another branch than {met}"
    return ""
