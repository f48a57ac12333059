"""Kills executors of a standalone cluster while `slottables run` works, and compares every row.

`python -m tests.promises.tables.executor_kills --kills 20` prints one JSON line of totals; exit 0
when all rows of all tables are equal to the source's and no epoch came twice. A few kills beside
spark-submit are in test_cluster.py.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import psycopg
import yaml

from schemas.lsn import parse_lsn
from tests.promises.bridge.running import Bridge
from tests.promises.tables.drill import VERIFY, Load, Slottables, report_of
from tests.promises.tables.one_java import run_all
from tests.promises.tables.own_servers import own_servers
from tests.promises.tables.standalone_cluster import QUICK, Cluster, standalone_cluster
from tests.promises.tables.tables import BANK, BANK_TABLES, ROWS, TABLES
from tests.providers.interface import Broker, Server
from tests.providers.waiting import eventually

PREFIX = "executors"
_BOTH = 0.2
"""How often both executors are killed at once."""


@dataclass
class Totals:
    """The counts of one run."""

    seed: int
    kills: int = 0
    tasks_lost: int = 0
    """Tasks that ran on a killed executor, as the driver has logged."""
    epochs_begun_again: int = 0
    epochs: int = 0
    epochs_twice: int = 0
    duplicates: int = 0
    parked: int = 0
    transactions: int = 0
    tables: int = 0
    rows: int = 0
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all tables are equal, none was parked, and no epoch came twice."""
        wrong = self.epochs_twice + self.duplicates + self.parked
        return self.tables >= 10 and not wrong and not self.different


def kill_executors(cluster: Cluster, chance: random.Random) -> int:
    """SIGKILL an executor, now and then both, and wait until they are gone; return how many."""
    there = eventually(cluster.executors, what="an executor", timeout_s=120)
    chosen = there if chance.random() < _BOTH else [chance.choice(there)]
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not set(chosen) & set(cluster.executors()), what="the killed are gone")
    return len(chosen)


def executor_kills(
    primary: Server,
    dbname: str,
    kafka: Broker,
    folder: Path,
    *,
    kills: int,
    seed: int,
    pause_s: float = 0.5,
    spark_options: Mapping[str, str] | None = None,
) -> Totals:
    """Kill executors `kills` times at random moments of an epoch, under load, and compare."""
    totals, chance, started = Totals(seed), random.Random(seed), time.monotonic()
    conninfo = primary.conninfo(dbname)
    bridge = Bridge(folder, conninfo, kafka, PREFIX)
    source = {"conninfo": conninfo, "publication": bridge.publication, "slot": bridge.slot}
    tables = Slottables(folder, source, kafka.bootstrap_servers, PREFIX)
    with standalone_cluster(folder) as cluster:
        document = yaml.safe_load(tables.config.read_text(encoding="utf-8"))
        document["tables"]["spark_options"] |= {
            "spark.master": cluster.url,
            "spark.executor.memory": "500m",
            "spark.executor.extraJavaOptions": " ".join(QUICK),
            "spark.pyspark.python": sys.executable,
            "spark.sql.shuffle.partitions": "4",
            **(spark_options or {}),
        }
        tables.config.write_text(yaml.safe_dump(document), encoding="utf-8")
        try:
            bridge.start().streaming()
            with psycopg.connect(conninfo, autocommit=True) as connection:
                for script in (BANK_TABLES, BANK, TABLES, ROWS):
                    connection.execute(script.encode())
            load = Load(conninfo, seed, pause_s)
            try:
                tables.start()
                while totals.kills < kills:
                    tables.await_epoch()
                    time.sleep(chance.uniform(0.0, tables.last_epoch_s))
                    tables.require_running()
                    totals.kills += kill_executors(cluster, chance)
                tables.await_epoch()
            finally:
                load.stop()
            bridge.caught_up()
            tables.stop()
            assert bridge.stop() == 0, bridge.output
            _count(totals, tables)
            brought, verified = run_all(tables.config, ("run", "--once", "--json"), VERIFY)
            assert brought.code == 0, brought.log
        finally:
            tables.end()
            bridge.end()
    report = report_of(verified)
    totals.transactions = load.transactions
    totals.tables = len(report["tables"])
    totals.rows = sum(table["table_rows"] for table in report["tables"])
    totals.different = [json.dumps(t) for t in report["tables"] if not t["equal"]]
    totals.seconds = round(time.monotonic() - started, 1)
    return totals


def _count(totals: Totals, tables: Slottables) -> None:
    """Count what `run` has reported and logged."""
    epochs, log = tables.epochs(), tables.log
    lsns = [parse_lsn(epoch["commit_lsn"]) for epoch in epochs]
    numbers = [epoch["epoch"] for epoch in epochs]
    totals.epochs = len(epochs)
    totals.epochs_twice = sum(a >= b for a, b in pairwise(lsns))
    totals.epochs_twice += sum(a + 1 != b for a, b in pairwise(numbers))
    totals.duplicates = sum(epoch["duplicates"] for epoch in epochs)
    totals.tasks_lost = log.count("ExecutorLostFailure")
    totals.epochs_begun_again = log.count("restarting an epoch")
    totals.parked = log.count("a table is refused and parked")


def main() -> None:
    """Run it on servers of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=0.5, help="of the load")
    parser.add_argument("--max-failures", type=int, default=4, help="spark.task.maxFailures")
    options = parser.parse_args()
    with own_servers("executors", synchronous=False) as (trio, kafka, folder):
        totals = executor_kills(
            *(trio.primary, trio.dbname, kafka, folder),
            kills=options.kills,
            seed=options.seed,
            pause_s=options.pause_s,
            spark_options={"spark.task.maxFailures": str(options.max_failures)},
        )
    sys.stdout.write(json.dumps(asdict(totals)) + "\n")
    raise SystemExit(not totals.passed)


if __name__ == "__main__":
    main()
