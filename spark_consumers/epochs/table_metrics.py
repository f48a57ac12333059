"""The metrics of each table, by source table."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge

if TYPE_CHECKING:
    from spark_consumers.epochs.ledger import ParkedTable

_PARKED_LABELS = ("has", "refused_at", "reason", "remedy")


class TableMetrics:
    """Gauges of where each table is, and the counter of its rows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
            name = f"slottables_table_{name}"
            return Gauge(name, text, ["table", *labels], registry=registry)

        self.rows = Counter(
            "slottables_table_rows",
            "Events of rows that were applied to each table since `run` began, by source table.",
            ["table"],
            registry=registry,
        )
        self._lsn = gauge(
            "commit_lsn",
            "Commit LSN up to which the table has all, by source table. A parked table stays "
            "behind slottables_commit_lsn: the difference is its lag in bytes of WAL.",
        )
        self._seconds = gauge(
            "epoch_seconds",
            "Seconds that the table's part of the last epoch which brought it something took, by "
            "source table; parts of several tables run at the same time.",
        )
        self._rebuild = gauge(
            "rebuild",
            "1 while a table waits for its rebuild, or is being rebuilt, by source table.",
        )
        self._ratio = gauge(
            "rebuild_ratio",
            "How much of a table's topic its rebuild has read, from 0 to 1, by source table. No "
            "series without a rebuild.",
        )
        self._parked = gauge(
            "parked",
            "1 while a table is parked, by source table: it keeps its last epoch while the others "
            "go on. The labels say which LSN it has, where it was refused, why, and what to do.",
            _PARKED_LABELS,
        )
        self._filling = gauge(
            "filling",
            "1 while a table lacks rows from before the slot, which a snapshot of the bridge is "
            "yet to bring, by source table. No series without the section source.",
        )
        self._placed: set[str] = set()
        self._timed: set[str] = set()

    def reached(self, lsns: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Record how far each table is, and how long their parts of an epoch took."""
        for gauge, shown in ((self._lsn, self._placed), (self._seconds, self._timed)):
            for name in shown - lsns.keys():
                gauge.remove(name)
            shown &= lsns.keys()
        for name, lsn in lsns.items():
            self._lsn.labels(name).set(max(lsn, 0))
            self._placed.add(name)
        for name in seconds.keys() & lsns.keys():
            self._seconds.labels(name).set(seconds[name])
            self._timed.add(name)

    def parked(self, tables: Mapping[str, "ParkedTable"]) -> str:
        """Record which tables are parked; return them as a text, "" for none."""
        self._parked.clear()
        for name, found in tables.items():
            labels = found.parked.described()
            self._parked.labels(name, *(labels[label] for label in _PARKED_LABELS)).set(1)
        names = (f"{n} (has {p.parked.described()['has']})" for n, p in sorted(tables.items()))
        return f"parked: {', '.join(names)}" if tables else ""

    def rebuilding(self, tables: Mapping[str, float]) -> None:
        """Record which tables are made anew, each with how much of its topic is read (0 to 1)."""
        for gauge in (self._rebuild, self._ratio):
            gauge.clear()
        for name, ratio in tables.items():
            self._rebuild.labels(name).set(1)
            self._ratio.labels(name).set(ratio)

    def filling(self, tables: Iterable[str]) -> None:
        """Record which tables lack rows that a snapshot of the bridge has yet to bring."""
        self._filling.clear()
        for name in tables:
            self._filling.labels(name).set(1)
