"""Facts to findings. Pure."""

from collections.abc import Iterable
from typing import Final

from schemas.findings import Finding, Severity
from services.bridge.preflight.decoding import decoding
from services.bridge.preflight.facts import Facts
from services.bridge.preflight.publication import publication
from services.bridge.preflight.retention import retention
from services.bridge.preflight.snapshot_standby import snapshot_standby
from services.bridge.preflight.tables import tables
from services.bridge.preflight.topics import topics

RULES: Final = (decoding, publication, retention, snapshot_standby, tables, topics)


def examine(facts: Facts) -> list[Finding]:
    """Return every finding; what could not be read is in `facts.unread`, and not judged."""
    return [finding for rule in RULES for finding in rule(facts)]


def gravest_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in the order in which a person should read them."""
    order = list(reversed(Severity))

    def place(finding: Finding) -> tuple[int, str]:
        return order.index(finding.severity), finding.group if finding.ok else ""

    return sorted(findings, key=place)
