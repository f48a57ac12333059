"""From a commit in PostgreSQL to rows in all tables: pgbench, the bridge, `slottables run`.

`python -m benchmarks.tables.whole_way --rate 100 --seconds 60` prints one JSON line. The age of a
transaction is from its commit time (END) to the report of the epoch that brought it, on one clock.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.bridge import PREFIX, BenchBridge, described, wait_until
from benchmarks.tables.ways import ends
from schemas.lsn import parse_lsn
from services.testbed import jars
from services.testbed.bed import Bed
from services.testbed.java import find_java_home

_TIMEOUT_S = 300.0
_LOOK_INTERVAL_S = 0.02


class Tables:
    """`slottables run`, one of the bed's processes, and when it has reported each epoch."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self.epochs: list[tuple[int, float]] = []
        """(commit LSN, Unix time)."""
        config = bed.folder / "tables.yaml"
        options = {"spark.jars": jars.class_path("spark", ",")}
        kafka = {"bootstrap_servers": bed.kafka.bootstrap_servers, "topic_prefix": PREFIX}
        tables = {"warehouse": str(bed.folder / "warehouse"), "spark_options": options}
        config.write_text(yaml.safe_dump({"kafka": kafka, "tables": tables}), encoding="utf-8")
        program = Path(sys.executable).parent / "slottables"
        self._process = bed.spawn("slottables", [program, "run", "--config", config, "--json"])
        self._log = bed.processes.log_path("slottables").open("rb")
        self._stopped = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """SIGTERM; it must end with 0."""
        code = self._bed.processes.stop(self._process, grace_s=_TIMEOUT_S)
        self._stopped.set()
        self._reader.join()
        assert code == 0, f"slottables ended with {code}"

    def _read(self) -> None:
        line = b""
        while not self._stopped.is_set():
            line += self._log.readline()
            if not line.endswith(b"\n"):
                self._stopped.wait(_LOOK_INTERVAL_S)
                continue
            if line.startswith(b'{"epoch"'):
                self.epochs.append((parse_lsn(json.loads(line)["commit_lsn"]), time.time()))
            line = b""


def main() -> None:
    """Warm up, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=int, default=100, help="pgbench's transactions per second")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--warm-up-seconds", type=int, default=60, help="the same load before it")
    options = parser.parse_args()
    os.environ["JAVA_HOME"] = str(find_java_home())
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        Path(name).chmod(0o755)
        with Bed(Path(name) / "bed", synchronous=False, lazy=True) as bed:
            bed.start("pair", "kafka")
            found = measure(bed, options.rate, options.seconds, options.warm_up_seconds)
    sys.stdout.write(json.dumps(found) + "\n")


def measure(bed: Bed, rate: int, seconds: int, warm_up_s: int) -> dict[str, Any]:
    """Ages of the transactions of `seconds`, after a warm-up at the same rate."""
    conninfo = bed.primary.conninfo(bed.dbname)
    bed.primary.run_tool("pgbench", ["-i", "-q", "-I", "dtgp", conninfo])
    bridge = BenchBridge(bed)
    bridge.start()
    tables = Tables(bed)
    try:
        seconds_all = warm_up_s + seconds
        load = ["-n", "-c", "2", "-R", str(rate), "-T", str(seconds_all), conninfo]
        begun = time.time()
        bed.primary.run_tool("pgbench", load, timeout_s=seconds_all + _TIMEOUT_S)
        with bridge.connect() as connection:
            bridge.caught_up(connection, timeout_s=_TIMEOUT_S)
        transactions = _transactions(bed)
        last = max(lsn for lsn, _ in transactions)
        wait_until(
            lambda: bool(tables.epochs) and tables.epochs[-1][0] >= last,
            what="all is in the tables",
            timeout_s=_TIMEOUT_S,
        )
    finally:
        tables.stop()
        bridge.stop()
    ages = [
        next(at for lsn, at in tables.epochs if lsn >= end) - committed_at
        for end, committed_at in transactions
        if committed_at - begun > warm_up_s
    ]
    epochs = [at for _, at in tables.epochs if at - begun > warm_up_s]
    return {
        "transactions_per_s": rate,
        "warm_up_s": warm_up_s,
        "transactions": len(ages),
        "epochs": len(epochs),
        **described(ages),
    }


def _transactions(bed: Bed) -> list[tuple[int, float]]:
    """(commit LSN, commit time as Unix time) of each END."""
    found = ends(bed.kafka.bootstrap_servers, PREFIX)
    return [(end["commit_lsn"], end["ts_ms"] / 1000) for end in found]


if __name__ == "__main__":
    main()
