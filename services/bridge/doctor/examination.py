"""Facts to findings, the gravest first. Pure."""

from typing import Final

from schemas.findings import Finding, Severity
from services.bridge.doctor.decoding import decoding
from services.bridge.doctor.facts import Facts
from services.bridge.doctor.publication import publication
from services.bridge.doctor.retention import retention
from services.bridge.doctor.snapshot_standby import snapshot_standby
from services.bridge.doctor.tables import tables
from services.bridge.doctor.topics import topics

RULES: Final = (decoding, publication, retention, snapshot_standby, tables, topics)


def examine(facts: Facts) -> list[Finding]:
    """Return every finding; what could not be read is in `facts.unread`, and not judged."""
    order = list(reversed(Severity))
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: order.index(finding.severity))
