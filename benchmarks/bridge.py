"""A bridge as a benchmark runs it, and what is measured of it."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import yaml

from services.testbed.bed import Bed

PREFIX = "bench"
SLOT = "bench"
WALSENDER = f"slotbridge_{SLOT}"
Connection = psycopg.Connection[tuple[Any, ...]]
Figures = dict[str, Any]


class BenchBridge:
    """`slotbridge run` on a bed's primary and broker; `bridge` are settings of that section.

    `options` are libpq's, for the bridge's sessions and those of `connect`.
    """

    def __init__(
        self, bed: Bed, *, tables: tuple[str, ...] = (), options: str = "", **bridge: Any
    ) -> None:
        self._bed = bed
        self.conninfo = bed.primary.conninfo(bed.dbname, options=options)
        self._config = bed.folder / "bench.yaml"
        document = {
            "source": {
                "conninfo": self.conninfo,
                "slot": SLOT,
                "publication": "bench",
                "tables": list(tables),
            },
            "kafka": {
                "bootstrap_servers": bed.kafka.bootstrap_servers,
                "topic_prefix": PREFIX,
                "partitions": 2,
            },
            "snapshot": {"mode": "never"},
            "bridge": {"spool_folder": str(bed.folder), **bridge},
        }
        self._config.write_text(yaml.safe_dump(document), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it streams."""
        program = Path(sys.executable).parent / "slotbridge"
        self._process = self._bed.spawn("slotbridge", [program, "run", "--config", self._config])
        with self.connect() as connection:
            wait_until(lambda: walsender(connection) is not None, what="the bridge streams")

    def stop(self) -> None:
        """SIGTERM; it must end with 0."""
        assert self._process is not None
        code = self._bed.processes.stop(self._process, grace_s=120)
        assert code == 0, f"slotbridge ended with {code}"

    def connect(self) -> Connection:
        """A connection to the primary, in autocommit mode."""
        return psycopg.connect(self.conninfo, autocommit=True)

    def peak_mib(self) -> float:
        """The most that was resident so far (VmHWM), in MiB."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024

    def caught_up(self, connection: Connection, *, timeout_s: float) -> float:
        """Wait until the slot is confirmed up to where the WAL is now; the seconds that it took."""
        row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        query = (
            "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots"
            " WHERE slot_name = %s"
        )
        since = time.monotonic()

        def confirmed() -> bool:
            assert self._process is not None and self._process.poll() is None, "the bridge ended"
            found = connection.execute(query, [row[0], SLOT]).fetchone()
            return found is not None and bool(found[0])

        wait_until(confirmed, what="the bridge has caught up", timeout_s=timeout_s)
        return time.monotonic() - since


def connect(bed: Bed) -> Connection:
    """A connection to the bed's primary, in autocommit mode."""
    return psycopg.connect(bed.primary.conninfo(bed.dbname), autocommit=True)


def walsender(connection: Connection) -> int | None:
    """The pid of the process that streams to the bridge."""
    query = "SELECT pid FROM pg_stat_replication WHERE application_name = %s"
    row = connection.execute(query, [WALSENDER]).fetchone()
    return None if row is None else int(row[0])


def wait_until(condition: Callable[[], bool], *, what: str, timeout_s: float = 60.0) -> None:
    """Poll; fail, naming `what`, after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.05)


def described(ages_s: list[float]) -> dict[str, float]:
    """Median, 99th percentile and worst of ages in seconds."""
    ages = sorted(ages_s)
    return {
        "median_s": round(statistics.median(ages), 2),
        "p99_s": round(ages[int(len(ages) * 0.99)], 2),
        "worst_s": round(ages[-1], 2),
    }


def report(rows: list[Figures], *, as_json: bool) -> None:
    """Print the rows of a table, or one JSON line."""
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    names = list(rows[0])
    texts = [names, *([_text(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in texts) for column in range(len(names))]
    for line in texts:
        cells = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells) + "\n")


def _text(value: Any) -> str:
    return (
        f"{value:,.1f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
