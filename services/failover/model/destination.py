"""Where a run leads a subscription that it has disabled, as the comment's mark tells. Pure.

    [slotfailover leads to b: system 7412345678901234567, timeline 2 from 0/3000148]
    [slotfailover leads to b: system 7412345678901234567, beyond 0/3000100 of timeline 1]

stands right before `[disabled by slotfailover]`. The second form is that of a promotion to come:
nobody knows its timeline's number, as the server takes the next that has no history file. It leaves
timeline 1 where the standby has replayed it, or later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from schemas.lsn import format_lsn, parse_lsn
from services.failover.model.timelines import (
    LSN,
    History,
    Milestone,
    contradiction,
    left_at,
    milestone_in,
)

MARK = "[disabled by slotfailover]"
_LEADS = (
    r" ?\[slotfailover leads to (?P<node>[^\]:]*): system (?P<system>\d{1,20}), (?:"
    rf"timeline (?P<timeline>\d{{1,10}})(?: from (?P<began>{LSN}))?"
    rf"|beyond (?:(?P<beyond>{LSN}) of )?timeline (?P<left>\d{{1,10}}))\]"
)
_MARK = re.compile(rf"(?:{_LEADS})? ?\[disabled by slotfailover\]$")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a run leads a subscription; all empty where its mark does not tell."""

    system: str = ""
    node: str = ""
    """The new primary, as the run's settings name it."""
    met: Milestone | None = None
    """Its timeline, if it was a primary already."""
    left: int = 0
    """Else the timeline that it leaves by its promotion …"""
    beyond: int | None = None
    """… at this position or later; None where that was not known."""

    def __str__(self) -> str:
        if self.met is not None:
            return f"{self.node or 'the primary'} on {self.met}"
        if self.left:
            position = f"{format_lsn(self.beyond)} of " if self.beyond is not None else ""
            return f"{self.node}, once it is the primary beyond {position}timeline {self.left}"
        return "another primary"

    @property
    def identified(self) -> bool:
        """Whether it is a timeline that was met: its number alone may be that of another branch."""
        return self.met is not None and (self.met.began is not None or self.met.timeline == 1)

    @property
    def mark(self) -> str:
        """The mark as it stands at the end of a subscription's comment."""
        position = f"{format_lsn(self.beyond)} of " if self.beyond is not None else ""
        where = str(self.met) if self.met is not None else f"beyond {position}timeline {self.left}"
        has_timeline = self.met is not None or self.left
        leads = f"[slotfailover leads to {self.node}: system {self.system}, {where}] "
        return f"{leads if has_timeline else ''}{MARK}"

    def is_behind(self, timeline: int, history: History | None, noted: Milestone | None) -> bool:
        """Tell whether a primary on `timeline` may be older than this one.

        `noted`: the timeline that fed the subscription before, if its comment says.
        """
        if self.met is not None:
            return bool(contradiction(self.met, timeline, history))
        if self.left:
            left = left_at(history or (), self.left)
            return left is None or left < (self.beyond or 0)
        return noted is None or not 0 < noted.timeline < timeline


def named(node: str) -> str:
    """Return the name of a node as it can stand in a mark."""
    return re.sub(r"[\[\]:]", "_", node)


def destination_in(comment: str) -> Destination | None:
    """Return what a comment's mark tells, None where the comment has no mark."""
    found = _MARK.search(comment)
    if found is None:
        return None
    system, node = found["system"], found["node"]
    if system is None:
        noted = milestone_in(comment)  # its cluster is that of the note beside it
        return Destination(noted.system if noted is not None else "")
    if found["timeline"]:
        began = parse_lsn(found["began"]) if found["began"] else None
        return Destination(system, node, Milestone(system, int(found["timeline"]), began))
    beyond = parse_lsn(found["beyond"]) if found["beyond"] else None
    return Destination(system, node, None, int(found["left"]), beyond)


def timelines_in(comment: str) -> list[Milestone]:
    """Return the timelines that a comment says were met: by its note, and by a run's mark."""
    destination = destination_in(comment)
    led = (
        destination.met
        if destination is not None and destination.met and destination.met.began is not None
        else None
    )
    return [met for met in (milestone_in(comment), led) if met is not None]


def mark_in(comment: str) -> str:
    """Return the mark at the end of a comment as it stands there, "" without one."""
    found = _MARK.search(comment)
    return found[0] if found is not None else ""


def without_mark(comment: str) -> str:
    """Return the comment without its mark."""
    return _MARK.sub("", comment)
