"""One piece of advice: what was seen, what comes of it, and the exact change. Pure."""

from schemas.findings import Finding, Remedy, Severity

MIB = 2**20


def advice(
    check: str, severity: Severity, subject: str, evidence: str, consequence: str, change: str
) -> Finding:
    """Return a finding; `change`: the statement, command or setting that ends it."""
    return Finding(check, severity, subject, evidence, consequence, Remedy(change))


def amount(count: float) -> str:
    """Return a number of bytes as people read it."""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def alter(setting: str, value: str) -> str:
    """Return the SQL that changes a setting of the server that needs no restart."""
    return f"ALTER SYSTEM SET {setting} = '{value}'; SELECT pg_reload_conf();"
