"""Findings of slotbridge preflight and slotfailover check: severity and remedy. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters, the gravest last."""

    OK = "ok"
    NOT_JUDGED = "not judged"
    """It could not be looked at; nothing is known of it."""
    NOTE = "note"
    """It costs something, and may be wanted."""
    WARNING = "warning"
    """It goes on, at a cost, or this may turn into worse."""
    CRITICAL = "critical"
    """Something is broken, or would be lost or stand still at the next failover or restart."""


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
class Finding:
    """The judgement of one check on one subject."""

    check: str
    severity: Severity
    subject: str
    evidence: str
    consequence: str
    remedy: Remedy
    what: str = ""
    """The problem; the check's title if there is none, "" where the check's name says it."""
    group: str = ""
    since: str = ""

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
        has_remedy = self.severity not in (Severity.OK, Severity.NOT_JUDGED)
        return {
            "check": self.check,
            "group": self.group or None,
            "severity": self.severity,
            "subject": self.subject or None,
            "what": self.what or None,
            "evidence": self.evidence or None,
            "consequence": self.consequence or None,
            "remedy": self.remedy.as_json() if has_remedy else None,
            "since": self.since or None,
        }
