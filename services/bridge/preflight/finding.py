"""One piece of advice: what was seen, what comes of it, and the exact change. Pure."""

from schemas.errors import Retryable, SlotbridgeError
from schemas.findings import Finding, Remedy, Severity

MIB = 2**20
START = "start"
"""Group of findings that say what a start of the bridge does, or why it is refused."""
ANSWERS = "answers"
"""Group of findings that name what could be connected to."""


def advice(
    check: str,
    severity: Severity,
    subject: str,
    evidence: str,
    consequence: str,
    change: str,
    *,
    refuses: bool = False,
) -> Finding:
    """Return a finding; `change`: what ends it. `refuses`: a start is refused while it lasts."""
    group = START if refuses else ""
    return Finding(check, severity, subject, evidence, consequence, Remedy(change), group=group)


def start_refusal(check: str, error: SlotbridgeError, subject: str = "") -> Finding:
    """Return the finding of an error that a start would end with."""
    code = int(error.exit_code)
    consequence = (
        f"a start tries until bridge.connect_deadline_ms, then ends with exit code {code}"
        if isinstance(error, Retryable)
        else f"a start ends with exit code {code}"
    )
    where = subject or error.subject
    change = error.hint or "as the evidence says"
    return advice(check, Severity.CRITICAL, where, error.message, consequence, change, refuses=True)


def contact(subject: str, evidence: str = "") -> Finding:
    """Return that something could be connected to."""
    return Finding("answers", Severity.OK, subject, evidence, "", Remedy(), group=ANSWERS)


def would(subject: str, what: str) -> Finding:
    """Return what a start would do."""
    return Finding("start", Severity.OK, subject, what, "", Remedy(), group=START)


def not_judged(subject: str, why: str) -> Finding:
    """Return what could not be looked at; nothing is known of it."""
    return Finding("not-judged", Severity.NOT_JUDGED, subject, why, "", Remedy())


def amount(count: float) -> str:
    """Return a number of bytes as people read it."""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def alter(setting: str, value: str) -> str:
    """Return the SQL that changes a setting of the server that needs no restart."""
    return f"ALTER SYSTEM SET {setting} = '{value}'; SELECT pg_reload_conf();"
