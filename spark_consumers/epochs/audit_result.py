"""The result of an audit of one table, as the metrics and the log of audits have it. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of the last audit of a table, and when the table was last found equal.

    `verified_lsn` is 0 where it never was; the first audit was at `first_ts_ms`. `differences` are
    rows; `reason` says why the table was not judged, "" where it was. Times are ms since 1970.
    """

    lsn: int
    ts_ms: int
    differences: int
    reason: str = ""
    verified_lsn: int = 0
    verified_ts_ms: int = 0
    first_ts_ms: int = 0

    @property
    def equal(self) -> bool:
        """Whether the table was judged and is equal."""
        return not (self.differences or self.reason)
