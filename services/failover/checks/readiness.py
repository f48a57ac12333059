"""Whether a standby has each slot that must survive in a usable state. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.lsn import format_lsn
from services.failover.checks.facts import Facts, Required, required_slots
from services.failover.checks.loss import branched
from services.failover.checks.slots import GATE, PROMOTED, positions
from services.failover.checks.standby import standby_answers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from schemas.findings import Finding
    from services.failover.checks.model import Check
    from services.failover.model.view import Node, View


@dataclass(frozen=True, slots=True)
class Readiness:
    """The judgement on one slot, for one standby."""

    slot: str
    standby: str
    reasons: tuple[Finding, ...]
    """Why it is not ready."""
    confirmed_flush_lsn: int | None
    consumers: tuple[tuple[str, int], ...]
    received: int = 0
    """The WAL that the standby has."""

    @property
    def ready(self) -> bool:
        """The slot can be used after the standby's promotion."""
        return not self.reasons

    @property
    def since(self) -> str:
        """Since when the slot is not ready, if a catalog has it: the earliest of the reasons."""
        return min((reason.since for reason in self.reasons if reason.since), default="")

    def as_json(self) -> dict[str, object]:
        """Return the document of `--json`, with LSNs as PostgreSQL prints them."""
        flushed = self.confirmed_flush_lsn
        return {
            "slot": self.slot,
            "ready": self.ready,
            "standby": self.standby or None,
            "since": self.since or None,
            "confirmed_flush_lsn": None if flushed is None else format_lsn(flushed),
            "consumers": {name: format_lsn(lsn) for name, lsn in self.consumers},
            "standby_has_more_bytes": {
                name: self.received - lsn for name, lsn in self.consumers if self.standby
            },
            "reasons": [
                {
                    "check": reason.check,
                    "reason": reason.what,
                    "evidence": reason.evidence,
                    "remedy": reason.remedy.full,
                }
                for reason in self.reasons
            ],
        }


def judge(view: View, required: Required, standby: Node | None) -> Readiness:
    """Tell whether `standby` (None: there is none) has the slot in a usable state."""
    facts = Facts(view, standby, (required,))
    if not facts.below:
        reasons = _wrong((standby_answers,), facts)
        return Readiness(required.slot, "", reasons, None, positions(facts, required))
    return _readiness(facts, required, _wrong(GATE, facts))


def judge_all(view: View, standby: Node | None) -> tuple[Readiness, ...]:
    """Judge every required slot for one standby."""
    return tuple(judge(view, required, standby) for required in required_slots(view))


def judge_promoted(view: View, node: Node) -> tuple[Readiness, ...]:
    """Judge every required slot on the new primary itself: there, permanent and valid."""
    judged = []
    for required in required_slots(view):
        facts = Facts(view, node, (required,))
        judged.append(_readiness(facts, required, _wrong(PROMOTED, facts)))
    return tuple(judged)


def candidate(view: View) -> Node | None:
    """Return the standby to promote: on the newest timeline, with the most WAL.

    Among equals, take one that replays, then the one of the highest priority, then one with all
    slots ready. While a primary answers, a standby that streams from it and replays comes first:
    it will get the rest of the WAL. A standby on an older timeline lacks later commits, whatever
    its LSN says. A standby that was promoted beside the last primary is chosen only if there is no
    other. A standby of priority 0 is never chosen.
    """
    eligible = [node for node in view.standbys if node.priority]
    eligible = [node for node in eligible if not branched(view, node)] or eligible
    newest = max(map(_timeline, eligible), default=0)
    return min(
        (node for node in eligible if _timeline(node) == newest),
        key=lambda node: (
            view.primary is not None and (node.replay_paused or not _streams(node)),
            -node.received,
            node.replay_paused,
            -node.priority,
            sum(not slot.ready for slot in judge_all(view, node)),
            node.name,
        ),
        default=None,
    )


def passed_over(view: View, chosen: Node) -> list[str]:
    """Return notes on the standbys that `candidate` did not choose as their replay is paused."""
    return [
        f"{node.name} is not chosen: its replay is paused"
        for node in view.standbys
        if node.replay_paused and node.priority and node.received >= chosen.received
        if node is not chosen
    ]


def _streams(node: Node) -> bool:
    return node.state is not None and node.state.replication.receiver_streaming


def _timeline(node: Node) -> int:
    return node.state.server.timeline if node.state is not None else 0


def _readiness(facts: Facts, required: Required, reasons: tuple[Finding, ...]) -> Readiness:
    """Return whether a slot would survive the promotion of the standby, and why not."""
    copy = facts.copy(required.slot)
    standby = facts.standby
    return Readiness(
        required.slot,
        standby.name if standby is not None else "",
        reasons,
        copy.confirmed_flush_lsn if copy else None,
        positions(facts, required),
        standby.received if standby is not None else 0,
    )


def _wrong(checks: Iterable[Check], facts: Facts) -> tuple[Finding, ...]:
    return tuple(found for check in checks for found in check.findings(facts) if found.wrong)
