"""The report of an epoch, for people, machines and metrics."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schemas.lsn import format_lsn

if TYPE_CHECKING:
    from spark_consumers.epochs.topic_summary import TopicSummary


@dataclass(frozen=True, slots=True)
class TableReport:
    """The changes of one table in an epoch.

    `duplicates`: events that it has had before. `way`: how its rows came into the table
    (table_writer.Way), empty where it has had the epoch. `why`: why Spark has brought them, and not
    the driver by itself.
    """

    rows: int
    events: int
    duplicates: int
    commit_lsn_max: int
    way: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class EpochReport:
    """The changes of an epoch, by source table; all tables have everything up to `commit_lsn`.

    `ts_ms_max` is the latest commit time in it (ms since 1970), `dead_letters` the events that
    Kafka has refused and that the tables therefore lack, `quarantined` those put aside. `traces`:
    headers `traceparent` of its transactions, none while tracing is off. `refused`: tables that the
    epoch has parked, with the reason.
    """

    epoch: int
    commit_lsn: int
    transactions: int
    seconds: float
    ts_ms_max: int
    tables: dict[str, TableReport]
    dead_letters: int = 0
    quarantined: int = 0
    traces: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """Return the report as JSON; `lag_ms` is the time from the latest commit to now."""
        reports = self.tables.values()
        return {
            "epoch": self.epoch,
            "commit_lsn": format_lsn(self.commit_lsn),
            "transactions": self.transactions,
            "rows": sum(report.rows for report in reports),
            "events": sum(report.events for report in reports),
            "duplicates": sum(report.duplicates for report in reports),
            "commit_ts_ms_max": self.ts_ms_max,
            "dead_letters": self.dead_letters,
            "quarantined": self.quarantined,
            "refused": dict(self.refused),
            "lag_ms": max(0, int(time.time() * 1000) - self.ts_ms_max),
            "seconds": round(self.seconds, 3),
            "tables": {
                name: {
                    "rows": report.rows,
                    "events": report.events,
                    "duplicates": report.duplicates,
                    "commit_lsn_max": format_lsn(report.commit_lsn_max),
                    "way": report.way,
                    "why": report.why,
                }
                for name, report in sorted(self.tables.items())
            },
        }


def table_reports(
    topics: Mapping[str, str],
    summaries: "Mapping[str, TopicSummary]",
    ways: Mapping[str, str],
    why: Mapping[str, str],
) -> dict[str, TableReport]:
    """Return the reports of tables, whose `topics` may have brought them nothing.

    `ways`: how each part was written, `why`: the reason if by Spark; neither if a table has had it.
    """
    reports = {}
    for name, topic in topics.items():
        found, reports[name] = summaries.get(topic), TableReport(0, 0, 0, 0)
        if found is not None:
            reports[name] = TableReport(
                found.rows,
                found.events,
                found.late + found.duplicates,
                found.lsn_max,
                way=ways.get(name, ""),
                why=why.get(name, ""),
            )
    return reports


def late_described(commit_lsn: int) -> dict[str, str]:
    """Return what is to be known of a table that lacks what the others have until the next epoch.

    `commit_lsn`: of the last epoch that it has, -1 for none.
    """
    return {
        "has": "nothing" if commit_lsn < 0 else format_lsn(commit_lsn),
        "reason": "the table was dropped, or left out of tables.tables, and lacks what others have",
        "remedy": "wait for the next epoch, which the source's next transactions make",
    }
