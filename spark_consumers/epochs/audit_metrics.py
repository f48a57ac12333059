"""The metrics of audits, by source table: no series of a table before its first audit."""

import functools
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge

from spark_consumers.epochs.audit_result import AuditResult


class AuditMetrics:
    """Gauges of the last audit of each table, and of how long ago the table was equal."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._shown: set[str] = set()
        self._lsn, self._age, self._differences, self._unjudged = (
            Gauge(f"slottables_{name}", text, ["table"], registry=registry)
            for name, text in (
                (
                    "verified_lsn",
                    "LSN of the source at which an audit last found the table equal to its source "
                    "table; 0: not yet.",
                ),
                (
                    "verified_age_seconds",
                    "Seconds since the snapshot of the source at which an audit last found the "
                    "table equal; since its first audit where none did.",
                ),
                (
                    "audit_differences",
                    "Rows that the last audit of the table found missing, extra or different.",
                ),
                ("audit_not_judged", "1 if the last audit could not judge the table, else 0."),
            )
        )

    def show(self, findings: Mapping[str, AuditResult]) -> None:
        """Take over the results of the last audits, by source table; the series of others go."""
        for table in self._shown - findings.keys():
            for gauge in (self._lsn, self._age, self._differences, self._unjudged):
                gauge.remove(table)
        self._shown = set(findings)
        for table, found in findings.items():
            since_ms = found.verified_ts_ms or found.first_ts_ms
            self._lsn.labels(table).set(found.verified_lsn)
            self._age.labels(table).set_function(functools.partial(_age_s, since_ms))
            self._differences.labels(table).set(found.differences)
            self._unjudged.labels(table).set(bool(found.reason))


def _age_s(since_ms: int) -> float:
    return max(0.0, time.time() - since_ms / 1000)
