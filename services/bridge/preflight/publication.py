"""The publication and its tables against the settings. Pure."""

from collections.abc import Iterator
from typing import Final

from schemas.findings import Finding, Severity
from services.bridge.preflight.facts import Facts
from services.bridge.preflight.finding import advice

_COLUMNS: Final = ("shaping.keys", "shaping.partition_by")


def publication(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each difference, and for each setting that does not fit a table."""
    for one in facts.primary.differences:
        yield advice(
            one.name, Severity.WARNING, one.subject, one.evidence, one.consequence, one.change
        )
    for error in facts.primary.unfit:
        yield advice(
            "shaping-does-not-fit" if error.subject in _COLUMNS else "expression-does-not-fit",
            Severity.CRITICAL,
            error.subject,
            error.message,
            "the bridge does not start with it, or stops at the table's next change (exit code 2)",
            error.hint,
            refuses=True,
        )
