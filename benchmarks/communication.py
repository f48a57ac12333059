"""What waiting costs: commits that wait for the bridge, a long filtered transaction, a still Kafka.

    python -m benchmarks.communication [--rows 5000000] [--stall-s 60] [--json]

commits       pgbench, one client, in turns: commits wait for nobody, or for the bridge; its tables
              published or not
filtered      one transaction of `rows` unpublished rows under wal_sender_timeout = 2 s
still Kafka   the broker is stopped by SIGSTOP for `stall-s` seconds under load, time-out 3 s
"""

import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.bridge import (
    WALSENDER,
    BenchBridge,
    Connection,
    Figures,
    report,
    wait_until,
    walsender,
)
from benchmarks.bridge import connect as connected
from services.testbed.bed import Bed
from services.testbed.pair import set_parameter

TURNS = 7
DEADLINE_S = 1800.0
LOAD_PAUSE_S = 0.5


def commits(bed: Bed, *, published: bool, transactions: int) -> list[Figures]:
    """Median over TURNS of pgbench's mean latency, without and with waiting, in turns."""
    bed.primary.run_tool("pgbench", ["-i", "-q", "-I", "dtgp", bed.primary.conninfo(bed.dbname)])
    with connected(bed) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS published (id int)")
        bridge = BenchBridge(bed, tables=() if published else ("public.published",))
        bridge.start()
        figures: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * TURNS):
            waits = bool(turn % 2)
            _let_commits_wait(bed, connection, waits=waits)
            bridge.caught_up(connection, timeout_s=60)
            figures[waits].append(_latency_ms(bed, transactions))
        _let_commits_wait(bed, connection, waits=False)
        bridge.stop()
    alone, waiting = (statistics.median(figures[waits]) for waits in (False, True))
    kind = "published" if published else "filtered"
    return [
        {"measured": f"{kind} commit, waits for nobody", "value": round(alone, 2), "unit": "ms"},
        {
            "measured": f"{kind} commit, waits for the bridge",
            "value": round(waiting, 2),
            "unit": "ms",
        },
        {"measured": f"{kind} commit, ratio", "value": round(waiting / alone, 2), "unit": "x"},
    ]


def filtered(bed: Bed, *, rows: int) -> list[Figures]:
    """The same walsender before and after."""
    with connected(bed) as connection:
        connection.execute("CREATE TABLE published (id int)")
        connection.execute("CREATE TABLE other (id int)")
        bridge = BenchBridge(bed, tables=("public.published",), wal_sender_timeout_ms=2000)
        bridge.start()
        before = walsender(connection)
        connection.execute("INSERT INTO other SELECT generate_series(1, %s::int)", [rows])
        seconds = bridge.caught_up(connection, timeout_s=DEADLINE_S)
        assert walsender(connection) == before, "the bridge was disconnected"
        bridge.stop()
    return [
        {
            "measured": f"{rows:,} filtered rows, same walsender",
            "value": round(seconds, 1),
            "unit": "s",
        }
    ]


def still_kafka(bed: Bed, *, stall_s: float) -> list[Figures]:
    """The same walsender before and after, and all is delivered."""
    with connected(bed) as connection:
        connection.execute("CREATE TABLE t (id int, note text)")
        bridge = BenchBridge(bed, wal_sender_timeout_ms=3000)
        bridge.start()
        connection.execute("INSERT INTO t VALUES (0)")
        bridge.caught_up(connection, timeout_s=60)
        before = walsender(connection)
        bed.kafka.pause()
        since = time.monotonic()
        while time.monotonic() - since < stall_s:
            connection.execute(
                "INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 2000) g"
            )
            assert walsender(connection) == before, "the bridge was disconnected"
            time.sleep(LOAD_PAUSE_S)
        bed.kafka.resume()
        seconds = bridge.caught_up(connection, timeout_s=DEADLINE_S)
        assert walsender(connection) == before, "the bridge was disconnected"
        bridge.stop()
    return [
        {"measured": "Kafka still, same walsender", "value": float(stall_s), "unit": "s"},
        {"measured": "caught up afterwards in", "value": round(seconds, 1), "unit": "s"},
    ]


def _let_commits_wait(bed: Bed, connection: Connection, *, waits: bool) -> None:
    names = WALSENDER if waits else ""
    set_parameter(bed.primary, "synchronous_standby_names", names)
    query = "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s"
    wanted = ("sync" if waits else "async",)
    wait_until(
        lambda: connection.execute(query, [WALSENDER]).fetchone() == wanted,
        what=f"the bridge is {wanted[0]}",
    )
    time.sleep(2.5 if waits else 0)  # the bridge looks at every heartbeat


def _latency_ms(bed: Bed, transactions: int) -> float:
    arguments = ["-n", "-c", "1", "-t", str(transactions), bed.primary.conninfo(bed.dbname)]
    output = bed.primary.run_tool("pgbench", arguments).stdout
    found = re.search(r"latency average = ([0-9.]+) ms", output)
    assert found, output
    return float(found[1])


def main(
    rows: Annotated[int, typer.Option(min=1)] = 5_000_000,
    stall_s: Annotated[float, typer.Option(min=1)] = 60.0,
    transactions: Annotated[int, typer.Option(min=1)] = 500,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Each measurement on servers of its own; print all."""
    lines: list[Figures] = []
    measurements: tuple[Callable[[Bed], list[Figures]], ...] = (
        lambda bed: commits(bed, published=False, transactions=transactions),
        lambda bed: commits(bed, published=True, transactions=transactions),
        lambda bed: filtered(bed, rows=rows),
        lambda bed: still_kafka(bed, stall_s=stall_s),
    )
    for measurement in measurements:
        with tempfile.TemporaryDirectory(prefix="slotbridge-bench-") as name:
            Path(name).chmod(0o755)
            with Bed(Path(name), lazy=True, synchronous=False) as bed:
                bed.start("pair", "kafka")
                lines += measurement(bed)
    report(lines, as_json=json)


if __name__ == "__main__":
    typer.run(main)
