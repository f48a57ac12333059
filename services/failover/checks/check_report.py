"""The answer of `slotfailover check`: slots, findings, and what they mean to whoever asked. Pure.

    exit code   --nagios
    0           0 OK / 1 WARNING    no finding is critical (a warning alone does not say no)
    0           3 UNKNOWN           nothing wrong was found, but not all could be looked at
    1 (--strict)                    a warning, or something that was not judged
    1           2 CRITICAL          something would be lost at a failover, now or soon
    2, 10 …     3 UNKNOWN           it can't be judged
    31, 35      2 CRITICAL          nodes of different clusters, two primaries

Source: Monitoring Plugins Development Guidelines (one line, `| label=value;warn;crit;min`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.errors import ExitCode, OperatorNeeded, SettingsError, SlotbridgeError
from schemas.findings import Severity
from services.failover.checks.facts import facts_of, required_slots
from services.failover.checks.loss import last_contact, slots_not_judged
from services.failover.checks.readiness import Readiness, candidate, judge_all
from services.failover.checks.registry import CHECKS, run_checks
from services.failover.model.preconditions import require_one_system

if TYPE_CHECKING:
    from collections.abc import Iterable

    from schemas.findings import Finding
    from services.failover.model.view import Node, View

NAGIOS_UNKNOWN = 3
NAGIOS = {
    Severity.OK: 0,
    Severity.WARNING: 1,
    Severity.CRITICAL: 2,
    Severity.NOT_JUDGED: NAGIOS_UNKNOWN,
}
LAG = "standby-lag"
REPLAY = "replay"
_GRAVITY = tuple(Severity)


@dataclass(frozen=True, slots=True)
class Checkup:
    """The findings for one standby."""

    primary: str
    standby: str
    slots: tuple[Readiness, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    outlook: str = ""
    """The WAL of the primary that the standby lacks; without a primary, the possible loss."""

    @property
    def ready(self) -> bool:
        """Every slot would survive the loss of the primary now, and the commits within limits."""
        critical = {f.check for f in self.findings if f.severity is Severity.CRITICAL}
        hindered = bool(critical & {LAG, REPLAY})
        return bool(self.standby) and not hindered and all(slot.ready for slot in self.slots)

    @property
    def withheld(self) -> str:
        """Why the standby is not promoted whatever its slots are, "" where nothing hinders it."""
        paused = (f for f in self.findings if f.check == REPLAY and f.severity is Severity.CRITICAL)
        return next((f"a promotion is refused (34): {found.what}" for found in paused), "")

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are problems."""
        return tuple(finding for finding in self.findings if finding.wrong)

    @property
    def unjudged(self) -> tuple[Finding, ...]:
        """The findings that were not judged, with the reasons."""
        return tuple(f for f in self.findings if f.severity is Severity.NOT_JUDGED)

    @property
    def unjudged_by_reason(self) -> dict[str, list[str]]:
        """Why something could not be looked at -> the checks that it concerns."""
        found: dict[str, list[str]] = {}
        for finding in self.unjudged:
            found.setdefault(f"{finding.what}", []).append(finding.check)
        return {why: list(dict.fromkeys(checks)) for why, checks in found.items()}

    @property
    def severity(self) -> Severity:
        """The gravest severity of all findings."""
        found = {finding.severity for finding in self.findings}
        return max(found, key=_GRAVITY.index, default=Severity.OK)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command."""
        return ExitCode.CHECK_FAILED if self.severity is Severity.CRITICAL else ExitCode.OK

    @property
    def strict_exit_code(self) -> ExitCode:
        """As `exit_code`, and no where a warning was found or something was not judged."""
        return ExitCode.OK if self.severity is Severity.OK else ExitCode.CHECK_FAILED

    @property
    def summary(self) -> str:
        """The result in one line."""
        ready = sum(slot.ready for slot in self.slots)
        where = f" on {self.standby}" if self.standby else ""
        return (
            f"{ready} of {len(self.slots)} slots ready{where}; "
            f"{self._count(Severity.CRITICAL)} critical, {self._count(Severity.WARNING)} warnings, "
            f"{self._count(Severity.NOT_JUDGED)} not judged in {len(CHECKS)} checks"
        )

    @property
    def nagios(self) -> str:
        """One line with performance data."""
        worst = next((f for f in self.findings if f.severity is self.severity), None)
        worst = None if self.severity is Severity.OK else worst
        reason = f"; {worst.check}: {worst.what}" if worst is not None else ""
        ready = sum(slot.ready for slot in self.slots)
        data = [
            f"ready={ready};{len(self.slots)}:;;0;{len(self.slots)}",
            f"critical={self._count(Severity.CRITICAL)};;0;0",
            f"warning={self._count(Severity.WARNING)};0;;0",
            f"'not judged'={self._count(Severity.NOT_JUDGED)};0;;0",
            *(
                f"'{slot.slot} ahead'={max(0, *(lsn - slot.received for _, lsn in slot.consumers))}"
                "B;;0;0"
                for slot in self.slots
                if slot.standby and slot.consumers
            ),
        ]
        word = "UNKNOWN" if self.severity is Severity.NOT_JUDGED else self.severity.upper()
        line = f"SLOTFAILOVER {word} - {self.summary}{reason}"
        return f"{line.replace('|', '/')} | {' '.join(data)}"

    def as_json(self) -> dict[str, object]:
        """Return the document of `--json`: every finding of every check."""
        return {
            "ready": self.ready,
            "severity": self.severity,
            "primary": self.primary or None,
            "standby": self.standby or None,
            "slots": [slot.as_json() for slot in self.slots],
            "findings": [finding.as_json() for finding in self.findings],
            "notes": list(self.notes),
            "outlook": self.outlook or None,
        }

    def _count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)


def check_up(view: View, standby: str = "") -> Checkup:
    """Judge the view for the standby of that name, or for the one that a failover would promote.

    Raise OperatorNeeded (WRONG_DATABASE, SPLIT_BRAIN); SettingsError for a name that is not a
    standby.
    """
    require_one_system(view)
    require_single_primary(view)
    chosen = _named(view, standby) if standby else candidate(view)
    findings = run_checks(facts_of(view, chosen))
    lag = next((f.evidence for f in findings if f.check == LAG and f.evidence), "")
    alone = chosen is not None and chosen.standby and view.primary is None
    return Checkup(
        primary=view.primary.name if view.primary else "",
        standby=chosen.name if chosen is not None else "",
        slots=judge_all(view, chosen),
        findings=findings,
        notes=tuple(_notes(view)),
        outlook=f"{last_contact(view, chosen)}; {slots_not_judged(view)}"
        if chosen is not None and alone
        else lag,
    )


def nagios_of(error: SlotbridgeError) -> tuple[str, int]:
    """Return the plugin's line and status for an error that left everything unjudged."""
    status = NAGIOS[Severity.CRITICAL] if isinstance(error, OperatorNeeded) else NAGIOS_UNKNOWN
    word = "CRITICAL" if status == NAGIOS[Severity.CRITICAL] else "UNKNOWN"
    return f"SLOTFAILOVER {word} - {error}".replace("|", "/"), status


def require_single_primary(view: View) -> None:
    """Raise OperatorNeeded (SPLIT_BRAIN) if more than one node is writable."""
    if len(view.writable) > 1:
        listing = ", ".join(
            f"{node.name} on timeline {node.state.server.timeline}"
            for node in view.writable
            if node.state is not None
        )
        raise OperatorNeeded(
            f"several nodes are writable: {listing}",
            operation="compare nodes",
            hint="stop the one that must not be the primary (usually that of the older timeline)",
            exit_code=ExitCode.SPLIT_BRAIN,
        )


def _named(view: View, name: str) -> Node:
    """Return the standby of this name. Raise SettingsError where it is not one that answers."""
    names = [node.name for node in view.nodes]
    if name not in names:
        raise SettingsError(
            f"{name} is not one of the nodes {', '.join(names)}",
            operation="check",
            hint="use a name of failover.nodes",
        )
    node = view.node(name)
    if node.state is not None and not node.standby:
        raise SettingsError(
            f"{name} is the primary",
            operation="check",
            hint="name a standby, or leave --standby out",
        )
    if node.state is None:
        raise SettingsError(
            f"{name} does not answer ({node.detail})",
            operation="check",
            hint="start the node, or name another standby",
        )
    return node


def _notes(view: View) -> Iterable[str]:
    """Yield what is left alone: subscriptions of other clusters, slots without a known consumer."""
    for where, subscription in view.strangers():
        yield f"{where.name}/{subscription.name} belongs to another cluster, it is left alone"
    for required in required_slots(view):
        if not required.wanted_by:
            yield (
                f"the settings name no consumer of the slot {required.slot}: whatever uses it must "
                "find the new primary by itself"
            )
