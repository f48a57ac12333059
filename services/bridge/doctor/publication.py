"""The publication against the settings: tables, row filters, columns, operations. Pure."""

from collections.abc import Iterator

from services.bridge.doctor.facts import Facts
from services.bridge.doctor.finding import Finding, Severity


def publication(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each difference between the publication and the settings."""
    for one in facts.primary.differences:
        yield Finding(
            one.name, Severity.WARNING, one.subject, one.evidence, one.consequence, one.change
        )
