"""Resident memory of the bridge with many large transactions open at once, then committed.

    python -m benchmarks.large_transactions [--transactions 10] [--rows 1000000] [--json]

The transactions insert in turns, so that their blocks interleave; all are streamed and spooled
before the first commits. Checks that Kafka has every row, by the END records of the transactions.
"""

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import psycopg
import typer

from benchmarks.bridge import PREFIX, SLOT, BenchBridge, Connection, Figures, report, wait_until
from schemas.events import transaction_topic
from services.demo.copies import committed
from services.testbed.bed import Bed

TURN_ROWS = 50_000
WORK_MEM = "-c logical_decoding_work_mem=4MB"
"""Less than one turn, so that every transaction is streamed."""
DEADLINE_S = 3600.0


def measure(bed: Bed, *, transactions: int, rows: int) -> list[Figures]:
    """One line for each stage: seconds, and the peak of resident memory so far."""
    bridge = BenchBridge(bed, options=WORK_MEM)
    with contextlib.ExitStack() as stack:
        watcher = stack.enter_context(bridge.connect())
        watcher.execute("CREATE TABLE t (id bigint, note text, at timestamptz DEFAULT now())")
        bridge.start()
        watcher.execute("INSERT INTO t VALUES (0, 'first')")
        bridge.caught_up(watcher, timeout_s=60)
        lines = [_line("idle", 0.0, bridge)]
        writers = [
            stack.enter_context(psycopg.connect(bridge.conninfo)) for _ in range(transactions)
        ]
        since = time.monotonic()
        for start in range(0, rows, TURN_ROWS):
            for number, writer in enumerate(writers):
                first = number * rows + start
                _insert(writer, first, first + min(TURN_ROWS, rows - start))
        bridge.caught_up(watcher, timeout_s=DEADLINE_S)
        wait_until(lambda: _streamed(watcher) >= transactions, what="all are streamed")
        lines.append(_line(f"{transactions} open", time.monotonic() - since, bridge))
        since = time.monotonic()
        for writer in writers:
            writer.commit()
            bridge.caught_up(watcher, timeout_s=DEADLINE_S)
        lines.append(_line("committed", time.monotonic() - since, bridge))
        _check(bed, transactions, rows)
        bridge.stop()
    return lines


def _insert(writer: Connection, first: int, end: int) -> None:
    writer.execute(
        "INSERT INTO t SELECT g, md5(g::text) FROM generate_series(%s::bigint, %s) g",
        [first, end - 1],
    )


def _line(stage: str, seconds: float, bridge: BenchBridge) -> Figures:
    return {"stage": stage, "seconds": round(seconds, 1), "peak MiB": round(bridge.peak_mib(), 1)}


def _streamed(connection: Connection) -> int:
    row = connection.execute(
        "SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = %s", [SLOT]
    ).fetchone()
    return 0 if row is None else int(row[0])


def _check(bed: Bed, transactions: int, rows: int) -> None:
    ends = [
        json.loads(value)
        for _, _, value in committed(bed.kafka.bootstrap_servers, transaction_topic(PREFIX))
        if value is not None
    ]
    counts = sorted(end["event_count"] for end in ends if end["status"] == "END")
    assert counts == [1, *[rows] * transactions], counts


def main(
    transactions: Annotated[int, typer.Option(min=1)] = 10,
    rows: Annotated[int, typer.Option(min=1)] = 1_000_000,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start servers of its own, measure, print."""
    with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
        Path(name).chmod(0o755)
        with Bed(Path(name), lazy=True) as bed:
            bed.start("pair", "kafka")
            lines = measure(bed, transactions=transactions, rows=rows)
    report(lines, as_json=json)


if __name__ == "__main__":
    typer.run(main)
