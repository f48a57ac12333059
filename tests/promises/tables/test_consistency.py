"""All tables move from one commit LSN to a later one together: seen at every epoch, under load."""

import itertools
import json
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from schemas.lsn import format_lsn
from spark_consumers.epochs.ledger import EpochRecord, Ledger
from spark_consumers.verify.as_of import verify_as_of
from spark_consumers.verify.comparison import verify_tables
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.running import Bridge
from tests.promises.tables.conftest import NewPipeline, Pipeline
from tests.promises.tables.tables import BANK, BANK_TABLES, LARGE, TRANSFER
from tests.promises.tables.test_job import Running
from tests.providers.interface import Provider
from tests.providers.waiting import eventually

RANDOM = """
    \\set aid random(1, 2000)
    \\set bid random(1, 3)
    \\set tid random(1, 30)
    \\set delta random(-5000, 5000)
"""
NAMES = {name: f":{name}" for name in ("aid", "bid", "tid", "delta")}
ONE = TRANSFER.format(aid=7, bid=1, tid=7, delta=11)
TABLES = ("pgbench_accounts", "pgbench_tellers", "pgbench_branches")


@dataclass
class Bank:
    """A source under load, its bridge, and what follows it."""

    pipeline: Pipeline
    bridge: Bridge
    conninfo: str


@pytest.fixture
def bank(
    pair: Provider,
    fresh_database: str,
    topic_prefix: str,
    new_bridge: NewBridge,
    new_pipeline: NewPipeline,
) -> Iterator[Bank]:
    """A bank whose large transactions leave in many parts; its first rows are there."""
    conninfo = pair.primary.conninfo(fresh_database)
    sums = {"source": "public.pgbench_history", "group_by": ["bid"], "sums": {"balance": "delta"}}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        bridge = new_bridge(conninfo, transaction_bytes_max=65536)
        bridge.start().streaming()
        connection.execute(BANK_TABLES.encode())
        connection.execute(BANK.encode())
        pipeline = new_pipeline(
            conninfo,
            publication=f"p_{topic_prefix}",
            slot=bridge.slot,
            sums={"branch_balance": sums},
        )
        yield Bank(pipeline, bridge, conninfo)


@pytest.fixture
def script() -> Iterator[Path]:
    """pgbench's, where PostgreSQL's user may read it: pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "transfer.sql"
        path.write_text(RANDOM + TRANSFER.format(**NAMES), encoding="utf-8")
        yield path


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "large_ones"), [(4, 1), (8, 3)], ids=["short", "long"])
def test_sums_agree_at_every_epoch_while_transfers_go_on(
    bank: Bank, pair: Provider, script: Path, seconds: int, large_ones: int
) -> None:
    pipeline = bank.pipeline
    spark, ledger = pipeline.spark, Ledger(pipeline.kafka.topic_prefix, pipeline.tables)
    dbname = psycopg.conninfo.conninfo_to_dict(bank.conninfo)["dbname"]
    options = ["-n", "-c", "3", "-T", str(seconds), "-R", "150", "-f", str(script), str(dbname)]
    load = threading.Thread(target=pair.primary.run_tool, args=("pgbench", options))
    seen: dict[int, tuple[int, ...]] = {}
    with Running(pipeline) as running:
        load.start()

        larger = itertools.repeat(LARGE, large_ones)

        def enough() -> bool:
            look(spark, ledger, seen)
            with psycopg.connect(bank.conninfo) as connection:
                connection.execute(next(larger, ONE).encode())
            load.join(timeout=2.0)
            several = len(seen) >= 3 and len(set(seen.values())) > 1
            return running.failure is not None or (several and not load.is_alive())

        eventually(enough, what="several epochs in the time of the load", timeout_s=240)
        bank.bridge.caught_up()
        last = last_commit(bank)
        eventually(
            lambda: running.failure or last_of(ledger, spark) >= last,
            what=f"the tables are at {format_lsn(last)}",
            timeout_s=120,
        )
        running.sound()
    look(spark, ledger, seen)
    equal = verify_tables(spark, pipeline.settings)
    assert all(found.equal for found in equal), [found.line() for found in equal]
    assert len(equal) == 4
    middle = sorted(seen)[len(seen) // 2]
    told = verify_as_of(spark, pipeline.settings, middle)
    assert all(found.equal for found in told), [found.line() for found in told]
    assert {found.table for found in told} == {found.table for found in equal}
    branches = spark.table(pipeline.identifier("pgbench_branches")).select("bid", "bbalance")
    derived = spark.table(pipeline.identifier("branch_balance")).select("bid", "balance")
    assert sorted(map(tuple, branches.collect())) == sorted(map(tuple, derived.collect()))


def look(spark: SparkSession, ledger: Ledger, seen: dict[int, tuple[int, ...]]) -> None:
    """Add up the tables as of each epoch that is new; they must agree."""
    for epoch in ledger.all(spark):
        if epoch.commit_lsn in seen or len(epoch.tables) < 4:
            continue
        sums = tuple(total(spark, epoch, table) for table in (*TABLES, "pgbench_history"))
        assert len(set(sums)) == 1, (epoch, sums)
        seen[epoch.commit_lsn] = sums


def total(spark: SparkSession, epoch: EpochRecord, table: str) -> int:
    """The sum of a table's balances as of an epoch."""
    column = {"pgbench_history": "delta"}.get(table, f"{table.removeprefix('pgbench_')[0]}balance")
    if f"public.{table}" not in epoch.tables:
        return 0
    name, snapshot, _ = epoch.tables[f"public.{table}"]
    row = spark.sql(f"SELECT sum({column}) FROM {name} VERSION AS OF {snapshot}").first()
    assert row is not None
    return int(row[0] or 0)


def last_commit(bank: Bank) -> int:
    """The commit LSN of the last transaction with events."""
    records = bank.bridge.records("transaction")
    return max(int(json.loads(value)["commit_lsn"]) for _, value in records if value)


def last_of(ledger: Ledger, spark: SparkSession) -> int:
    """The commit LSN that the tables are at."""
    record = ledger.last(spark)
    return -1 if record is None else record.commit_lsn
