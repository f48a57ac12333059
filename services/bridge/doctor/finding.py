"""One piece of advice: what was seen, what comes of it, and the exact change. Pure."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

MIB = 2**20


class Severity(StrEnum):
    """How much a finding matters."""

    CRITICAL = "critical"
    """Something is broken, or will be."""
    WARNING = "warning"
    NOTE = "note"
    """It costs something, and may be wanted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `change`: the statement, command or setting that ends it."""

    name: str
    severity: Severity
    subject: str
    evidence: str
    consequence: str
    change: str

    def as_json(self) -> dict[str, Any]:
        """Return the finding, for `--json`."""
        return {**asdict(self), "severity": str(self.severity)}


def amount(count: float) -> str:
    """Return a number of bytes as people read it."""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def alter(setting: str, value: str) -> str:
    """Return the SQL that changes a setting of the server that needs no restart."""
    return f"ALTER SYSTEM SET {setting} = '{value}'; SELECT pg_reload_conf();"
