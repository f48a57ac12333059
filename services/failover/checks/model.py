"""The types of checks: a check, a finding, a remedy. Pure.

Check ── judge(Facts) ── Seen (evidence; what is wrong, or "")  ── Finding, for people and JSON
                          └─ Remedy ── Order (server, statements)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.failover.checks.facts import Facts


class Needs(StrEnum):
    """Which nodes must answer for a check to be judged."""

    NOTHING = "nothing"
    PRIMARY = "a primary"
    STANDBY = "a standby"
    BOTH = "a primary and its standby"


class Severity(StrEnum):
    """The severity of a finding, by its effect on a failover."""

    OK = "ok"
    NOT_JUDGED = "not judged"
    """It could not be looked at; nothing is known of it."""
    WARNING = "warning"
    """It can take place, at a cost, or this may turn into worse."""
    CRITICAL = "critical"
    """Something would be lost or stand still, now or with the next slot."""


@dataclass(frozen=True, slots=True)
class Order:
    """Statements for one server, run one by one outside of transactions."""

    server: str
    shown: tuple[str, ...]
    """With secrets masked."""
    sql: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A remedy: in words, in SQL if possible, and whether a program may perform it alone."""

    text: str = ""
    orders: tuple[Order, ...] = ()
    by_hand: str = ""
    """Why `check --fix` leaves it to a person; "" where it performs the orders."""
    follows: bool = False
    """It goes by itself, soon after its cause was repaired."""

    @property
    def fixes(self) -> bool:
        """`check --fix` performs it."""
        return bool(self.orders) and not self.by_hand

    @property
    def full(self) -> str:
        """Words and SQL in one line."""
        orders = (f"{order.server}: {'; '.join(order.shown)}" for order in self.orders)
        return ": ".join(filter(None, (self.text, " | ".join(orders))))

    def __str__(self) -> str:
        return self.full

    def as_json(self) -> dict[str, object]:
        """Return the document for `--json`."""
        return {
            "text": self.text,
            "sql": [
                {"server": order.server, "statement": statement}
                for order in self.orders
                for statement in order.shown
            ],
            "fix": self.fixes,
            "by_hand": self.by_hand or None,
        }


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of one server, slot or subscription that a check saw."""

    subject: str
    evidence: str
    what: str = ""
    """The problem; "" if there is none."""
    remedy: Remedy = Remedy()
    severity: Severity | None = None
    """Other than the check's own."""
    since: str = ""
    """Since when (UTC), if a catalog has it."""
    unknown: str = ""
    """Why it can't be judged; "" where it was."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The judgement of one check on one subject."""

    check: str
    group: str
    severity: Severity
    subject: str
    what: str
    """The problem; the check's title if there is none."""
    evidence: str
    consequence: str
    remedy: Remedy
    since: str

    @property
    def ok(self) -> bool:
        """Whether the check looked and found nothing wrong."""
        return self.severity is Severity.OK

    @property
    def wrong(self) -> bool:
        """Whether the check looked and found something wrong."""
        return self.severity in (Severity.WARNING, Severity.CRITICAL)

    def __str__(self) -> str:
        return f"{self.what} ({self.evidence})"

    def as_json(self) -> dict[str, object]:
        """Return the document for `--json`."""
        return {
            "check": self.check,
            "group": self.group,
            "severity": self.severity,
            "subject": self.subject or None,
            "what": self.what,
            "evidence": self.evidence or None,
            "consequence": self.consequence or None,
            "remedy": self.remedy.as_json() if self.wrong else None,
            "since": self.since or None,
        }


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
        missing = [Seen("", "", unknown=why) for why in facts.missing(self)]
        hidden = [Seen("", "", unknown=why) for why in facts.hidden(self)]
        seen = [*missing, *hidden, *(self.judge(facts) if not hidden else ())]
        return tuple(map(self._finding, seen or [Seen("", "")]))

    def _finding(self, seen: Seen) -> Finding:
        wrong = bool(seen.what)
        severity = (seen.severity or self.severity) if wrong else Severity.OK
        if seen.unknown:
            severity = Severity.NOT_JUDGED
        return Finding(
            check=self.name,
            group=self.group,
            severity=severity,
            subject=seen.subject,
            what=seen.unknown or seen.what or self.title,
            evidence=seen.evidence,
            consequence=self.consequence if wrong else "",
            remedy=seen.remedy,
            since=seen.since,
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
