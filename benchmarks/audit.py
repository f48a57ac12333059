"""The cost of a live audit for the primary: processor time of its backend, latency of pgbench.

    python -m benchmarks.audit [--scale 10] [--rate 200] [--json]

Each line reads pgbench_accounts (100,000 rows for each unit of the scale) as `slottables audit`
does, while pgbench runs its own transactions at a rate; the first line is pgbench alone. Processor
time is that of the audit's backend, of /proc.
"""

import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import psycopg
import typer

from benchmarks.bridge import Figures, connect, report
from services.testbed.bed import Bed
from spark_consumers.audit.source_scan import SourceScan
from spark_consumers.verify import hashes, postgres

_TABLE: Final = ("public", "pgbench_accounts")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SAMPLE_S: Final = 30


def measure(bed: Bed, scale: int, rate: int, shares: list[float]) -> Iterator[Figures]:
    """Yield a line for pgbench alone, and one for each share of busy time."""
    conninfo = bed.primary.conninfo(bed.dbname)
    bed.primary.run_tool("pgbench", ["-i", "-q", "-s", str(scale), conninfo], timeout_s=600)
    yield _line("pgbench alone", rate, _pgbench(bed, rate, _SAMPLE_S), 0, 0, 0, 0)
    for share in shares:
        stop, told = threading.Event(), list[str]()
        load = threading.Thread(target=lambda: told.append(_pgbench(bed, rate, _SAMPLE_S)))  # noqa: B023
        load.start()
        with connect(bed) as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cpu_s, began = _cpu_s(connection), time.monotonic()
            scan = SourceScan(connection, _TABLE, row_filter=None, busy_percent=share, stop=stop)
            columns = postgres.source_columns(connection, *_TABLE)
            kinds = postgres.column_layers(connection, _TABLE)
            layers = [kinds[column.name] for column in columns]
            found = scan.buckets(columns, layers, [0], hashes.bucket_count(scan.pages))
            seconds = time.monotonic() - began
            spent_s = _cpu_s(connection) - cpu_s
        load.join()
        rows = sum(number for number, _ in found.values())
        yield _line(f"audit at {share:g} %", rate, told[0], rows, seconds, scan.busy_s, spent_s)


def _pgbench(bed: Bed, rate: int, seconds: int) -> str:
    conninfo = bed.primary.conninfo(bed.dbname)
    load = ["-n", "-c", "2", "-R", str(rate), "-T", str(seconds), conninfo]
    return bed.primary.run_tool("pgbench", load, timeout_s=seconds + 60).stdout


def _cpu_s(connection: psycopg.Connection) -> float:
    """Return the processor time of the connection's backend."""
    stat = Path(f"/proc/{connection.info.backend_pid}/stat").read_text(encoding="ascii")
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _line(
    name: str, rate: int, told: str, rows: int, seconds: float, busy_s: float, cpu_s: float
) -> Figures:
    latency = re.search(r"latency average = ([0-9.]+)", told)
    return {
        "way": name,
        "pgbench/s": rate,
        "latency ms": float(latency[1]) if latency else 0.0,
        "rows": rows,
        "seconds": round(seconds, 1),
        "busy s": round(busy_s, 2),
        "cpu s": round(cpu_s, 2),
        "cpu %": round(100 * cpu_s / seconds, 1) if seconds else 0.0,
        "us/row": round(1e6 * cpu_s / rows, 2) if rows else 0.0,
    }


def main(
    scale: Annotated[int, typer.Option(min=1)] = 10,
    rate: Annotated[int, typer.Option(min=1, help="pgbench's transactions per second")] = 200,
    json_: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start a server of its own, measure, print."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        Path(name).chmod(0o755)
        with Bed(Path(name), synchronous=False, lazy=True) as bed:
            bed.start("pair")
            lines = list(measure(bed, scale, rate, [3.0, 100.0]))
    report(lines, as_json=json_)


if __name__ == "__main__":
    typer.run(main)
