"""Shows how far `slottables run` is, by its own metrics: no Spark, no Kafka, no catalog."""

import math
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.table import Table
from rich.text import Text

from schemas.errors import BadInput, ExitCode, Retryable, SettingsError
from schemas.lsn import format_lsn
from schemas.tables import TablesSettings

_TIMEOUT_S: Final = 5.0
_BAR_WIDTH: Final = 20
_STEPS: Final = ("events_read", "tables_written", "tables")
_OPERATION: Final = "ask slottables run"
_EVERYWHERE: Final = ("0.0.0.0", "::", "")  # noqa: S104 - addresses to listen on, not to ask


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One look at a run: its last epoch, how far it is behind, and its tables.

    `epoch`, `commit_lsn`, `lag_bytes`, `lag_seconds`: None while they are not known yet; `epoch` is
    0 before the first one. `events_since_start`: of rows, that the run has applied to each table
    since it began; not the table's rows. `rebuilding`: tables that are made anew;
    `rebuild_ratio`: how much of its topic each has read, 0 to 1. `filling`: tables that lack rows
    of a snapshot. `parked`: tables that stay behind, each with `has` and `refused_at` (LSNs),
    `reason` and `remedy`. `time_s`: when it was, by a clock that only goes forwards. `under_way`:
    events, events_read, tables and tables_written of the epoch that is being made.
    """

    epoch: int | None
    commit_lsn: int | None
    lag_bytes: int | None
    lag_seconds: float | None
    events_since_start: dict[str, int]
    rebuilding: list[str]
    rebuild_ratio: dict[str, float]
    filling: list[str]
    parked: dict[str, dict[str, str]]
    time_s: float
    under_way: dict[str, int] = field(default_factory=dict)

    def rates(self, before: "RunStatus | None") -> dict[str, float]:
        """Return events a second of each table since an earlier state of the run, {} for none."""
        events = self.events_since_start
        past = before.events_since_start if before else {}
        if before is None or any(events.get(name, 0) < count for name, count in past.items()):
            return {}
        spent_s = max(self.time_s - before.time_s, 1e-3)
        return {name: (count - past.get(name, 0)) / spent_s for name, count in events.items()}

    def document(self, before: "RunStatus | None" = None) -> dict[str, object]:
        """Return the run's state as JSON, with rates since `before`; null: not known yet."""
        lsn = None if self.commit_lsn is None else format_lsn(self.commit_lsn)
        document = asdict(self) | {"commit_lsn": lsn}
        del document["time_s"]
        rates = {name: round(rate, 1) for name, rate in self.rates(before).items()}
        return document | {"events_per_second": rates}

    def screen(self, before: "RunStatus | None" = None) -> Group:
        """Return the run's state as a screen for people, with rates since `before`."""
        rates, events = self.rates(before), self.events_since_start
        table = Table("table", "events\nsince start", "events/s", "", box=None)
        for name in sorted({*events, *self.rebuilding, *self.filling, *self.parked}):
            rate = f"{rates[name]:,.0f}" if name in rates else ""
            note = "filling: a snapshot has rows to bring" if name in self.filling else ""
            note = _bar(self.rebuild_ratio.get(name, 0.0)) if name in self.rebuilding else note
            note = f"parked, has {self.parked[name]['has']}" if name in self.parked else note
            table.add_row(Text(name), f"{events.get(name, 0):,}", rate, note)
        notes = (
            Text(f"{n} was refused at {p['refused_at']}: {p['reason']}. Remedy: {p['remedy']}")
            for n, p in sorted(self.parked.items())
        )
        return Group(Text(self._head()), table, *notes)

    def _head(self) -> str:
        """Return the first line: the last epoch, and how far it is behind."""
        place = "last epoch not known yet" if self.epoch is None else "no epoch yet"
        if self.epoch and self.commit_lsn is not None:
            place = f"epoch {self.epoch}, {format_lsn(self.commit_lsn)}"
        if now := self.under_way.get("events"):
            read, made, all_ = (self.under_way[n] for n in _STEPS)
            of_tables = f", wrote {made} of {all_} tables" if all_ else ", writes its tables next"
            place = f"{place}; the next one has read {read:,} of {now:,} events{of_tables}"
        if self.lag_bytes is None or self.lag_seconds is None:
            return f"{place}; lag not known yet"
        return f"{place}; {self.lag_bytes:,} bytes and {self.lag_seconds:.1f} s behind"


def _bar(ratio: float) -> str:
    done = int(ratio * _BAR_WIDTH)
    return f"being rebuilt {'█' * done}{'░' * (_BAR_WIDTH - done)} {ratio:.0%} of its topic read"


def read_run_status(settings: TablesSettings) -> RunStatus:
    """Ask the run's /metrics.

    Raise SettingsError without a port, Retryable where nothing answers, BadInput where something
    else does.
    """
    if not settings.http_port:
        raise SettingsError(
            "the port of the run is not known",
            operation=_OPERATION,
            hint="set tables.http_port, such as 9189, in the file of `run`, restart that, and name "
            "the same file here",
        )
    host = "127.0.0.1" if settings.http_host in _EVERYWHERE else settings.http_host
    place = f"{f'[{host}]' if ':' in host else host}:{settings.http_port}"
    try:
        with urllib.request.urlopen(f"http://{place}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise Retryable(
            "slottables run does not answer",
            operation=_OPERATION,
            subject=place,
            hint="start `slottables run`, with the tables.http_host and http_port of this file",
            exit_code=ExitCode.SERVER_UNREACHABLE,
        ) from error
    try:
        return parsed_status(text, time.monotonic())
    except (KeyError, ValueError) as error:
        raise BadInput(
            "what answers is not slottables run of this version",
            operation=_OPERATION,
            subject=place,
            hint="check tables.http_port",
            exit_code=ExitCode.UNDECODABLE,
        ) from error


def parsed_status(text: str, time_s: float) -> RunStatus:
    """Read a run's metrics as text. Raise KeyError where one is not there. Pure."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    plain = {sample.name: sample.value for sample in samples if not sample.labels}
    by_table = [(s.name, s.labels["table"], s.value) for s in samples if "table" in s.labels]
    parked = [s.labels for s in samples if s.name == "slottables_table_parked" and s.value]
    return RunStatus(
        _whole(plain["slottables_epoch"]),
        _whole(plain["slottables_commit_lsn"]),
        _whole(plain["slottables_lag_bytes"]),
        None if math.isnan(lag_s := plain["slottables_lag_seconds"]) else lag_s,
        {n: int(v) for metric, n, v in by_table if metric == "slottables_table_rows_total"},
        sorted(n for metric, n, v in by_table if metric == "slottables_table_rebuild" and v),
        {n: v for metric, n, v in by_table if metric == "slottables_table_rebuild_ratio"},
        sorted(n for metric, n, v in by_table if metric == "slottables_table_filling" and v),
        {found["table"]: {n: v for n, v in found.items() if n != "table"} for found in parked},
        time_s,
        {name: int(plain[f"slottables_epoch_{name}"]) for name in ("events", *_STEPS)},
    )


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)
