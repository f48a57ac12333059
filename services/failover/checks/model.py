"""The types of checks: a check, and what it saw. Pure.

Check ── judge(Facts) ── Seen (evidence; what is wrong, or "")  ── Finding, for people and JSON
                          └─ Remedy ── Order (server, statements)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from schemas.findings import Finding, Remedy, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.failover.checks.facts import Facts


class Needs(StrEnum):
    """Which nodes must answer for a check to be judged."""

    NOTHING = "nothing"
    PRIMARY = "a primary"
    STANDBY = "a standby"
    BOTH = "a primary and its standby"


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of one server, slot or subscription that a check saw."""

    subject: str
    evidence: str
    what: str = ""
    """The problem; "" if there is none."""
    remedy: Remedy = field(default_factory=Remedy)
    severity: Severity | None = None
    """Other than the check's own."""
    since: str = ""
    """Since when (UTC), if a catalog has it."""
    unknown: str = ""
    """Why it can't be judged; "" where it was."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold. `consequence` is what a failover does if it does not."""

    name: str
    group: str
    title: str
    consequence: str
    severity: Severity
    needs: Needs
    reads: tuple[str, ...]
    """The settings without which it can't be judged, of the nodes that it needs."""
    wants: bool
    """It judges the slots that subscriptions want."""
    applies: Callable[[Facts], bool]
    judge: Callable[[Facts], Iterable[Seen]]

    def findings(self, facts: Facts) -> tuple[Finding, ...]:
        """Return the findings, also those not judged: at least one if the check applies."""
        if not self.applies(facts):
            return ()
        missing = [Seen("", "", unknown=why) for why in self._missing(facts)]
        hidden = [Seen("", "", unknown=why) for why in self._hidden(facts)]
        seen = [*missing, *hidden, *(self.judge(facts) if not hidden else ())]
        return tuple(map(self._finding, seen or [Seen("", "")]))

    def _missing(self, facts: Facts) -> list[str]:
        """Return which servers a check needs and does not have, each as a reason."""
        found = []
        if self.needs in (Needs.PRIMARY, Needs.BOTH) and not facts.above:
            found.append("no node answers as the primary")
        if self.needs in (Needs.STANDBY, Needs.BOTH) and not facts.below:
            found.append("no node answers as a standby")
        if self.wants:
            found += [
                f"{subscriber.name} does not answer: the slots that it needs are unknown"
                for subscriber in facts.view.subscribers
                if not subscriber.usable
            ]
        return found

    def _hidden(self, facts: Facts) -> list[str]:
        """Return the settings that a check reads and that are unknown."""
        nodes = [*facts.above] if self.needs in (Needs.PRIMARY, Needs.BOTH) else []
        nodes += [*facts.below] if self.needs in (Needs.STANDBY, Needs.BOTH) else []
        return [
            f"{name} of {node.name} is not known to our role"
            for node, state in nodes
            for name in self.reads
            if name not in state.settings
        ]

    def _finding(self, result: Seen) -> Finding:
        """Return the finding of what the check has seen, OK where nothing is wrong."""
        wrong = bool(result.what)
        severity = (result.severity or self.severity) if wrong else Severity.OK
        if result.unknown:
            severity = Severity.NOT_JUDGED
        return Finding(
            check=self.name,
            group=self.group,
            severity=severity,
            subject=result.subject,
            what=result.unknown or result.what or self.title,
            evidence=result.evidence,
            consequence=self.consequence if wrong else "",
            remedy=result.remedy,
            since=result.since,
        )


def check(
    name: str,
    *,
    group: str,
    title: str,
    consequence: str,
    severity: Severity = Severity.CRITICAL,
    needs: Needs = Needs.NOTHING,
    reads: tuple[str, ...] = (),
    wants: bool = False,
    applies: Callable[[Facts], bool] = lambda _facts: True,
) -> Callable[[Callable[[Facts], Iterable[Seen]]], Check]:
    """Make a function of the facts the check of that name (`checks.registry` lists them)."""

    def made(judge: Callable[[Facts], Iterable[Seen]]) -> Check:
        return Check(name, group, title, consequence, severity, needs, reads, wants, applies, judge)

    return made
