"""`make torture SEED=1 MINUTES=3`, `make torture SEEDS=1-40 BROKERS=3`: a JSON line for each run.

Ends with a table of sums over them, or over all lines of the file TOTALS.
"""

import itertools
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Annotated, Final

import typer

from tests.torture.checker import Finding
from tests.torture.faults import only, schedule
from tests.torture.report import Report, exit_code, sums, table
from tests.torture.rig import Rig, kept
from tests.torture.servers import Kafka, Servers, servers
from tests.torture.snapshot_goal import Met

_GOAL_S: Final = 7200.0
"""When a run is given up whose goal is not met."""
_PAUSE_S: Final = 0.18
_GOAL_PAUSE_S: Final = 0.6
"""Between two transactions of a client: all of Kafka's records must fit into memory at the end."""


def one_run(
    ground: Servers,
    folder: Path,
    seed: int,
    seconds: float,
    *,
    faults: str,
    commits_wait: bool,
    to_tables: bool,
    goal: Met | None,
) -> Report:
    """With a pair of its own. The folder is kept when something is found, or the rig fails."""
    folder.mkdir(exist_ok=True)
    brokers = ground.brokers
    try:
        brokers.recover()
        with ground.new_pair() as (pair, subscriber):
            rig = Rig(
                *(ground.bed, folder, seed),
                brokers=brokers,
                tls=ground.tls.conninfo if ground.tls is not None else None,
                faults=only(schedule(seed, brokers.count), faults),
                commits_wait=commits_wait,
                to_tables=to_tables,
                goal=goal,
                pause_s=_PAUSE_S if goal is None else _GOAL_PAUSE_S,
            )
            report = rig.run((pair.primary, pair.standby), seconds, subscriber)
    except Exception:
        what = traceback.format_exc()
        (folder / "traceback.txt").write_text(what, encoding="utf-8")
        report = Report(seed, findings=[Finding("rig", what.splitlines()[-1])])
    kept(folder, report)
    if not report.findings:
        shutil.rmtree(folder)
    return report


def main(
    seed: Annotated[int, typer.Option(help="The first seed; each run takes the next.")] = 1,
    seeds: Annotated[str, typer.Option(help="FIRST-LAST: one run each, however long.")] = "",
    minutes: Annotated[float, typer.Option(help="How long to go on starting runs.")] = 3.0,
    run_seconds: Annotated[float, typer.Option(help="How long each run is under fire.")] = 100.0,
    folder: Annotated[Path | None, typer.Option(help="Keeps what is found.")] = None,
    totals: Annotated[Path | None, typer.Option(help="Append each run's line to it.")] = None,
    commits_wait: Annotated[
        bool, typer.Option("--commits-wait", help="Put the bridge in synchronous_standby_names.")
    ] = False,
    postgres: Annotated[
        str, typer.Option(help="Another PostgreSQL than the package's: 17.5 or 17.10.")
    ] = "",
    brokers: Annotated[
        int, typer.Option(help="1, or 3 that replicate every topic: then their own faults, too.")
    ] = 1,
    secured: Annotated[
        bool,
        typer.Option("--secured", help="To Kafka by SASL_SSL, to PostgreSQL by TLS."),
    ] = False,
    skew_hours: Annotated[
        float, typer.Option(help="Clocks: one broker's right, one so fast, one so slow.")
    ] = 0.0,
    faults: Annotated[str, typer.Option(help="Only these, by commas: disk lost,kill")] = "",
    kills: Annotated[
        int, typer.Option(help="One run each until the bridge got so many within snapshots.")
    ] = 0,
    failovers: Annotated[int, typer.Option(help="With --kills: so many, between them.")] = 5,
    to_tables: Annotated[
        bool, typer.Option("--tables", help="Fill Iceberg tables at the end, compare them.")
    ] = False,
) -> None:
    """Torture the bridge. Exit code 1 when anything is wrong, or a full run has not met all."""
    if kills:
        seeds, run_seconds = seeds or f"{seed}-{seed}", _GOAL_S
    base = folder or Path(tempfile.mkdtemp(prefix="slotbridge-torture-"))
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o755)
    first, _, last = (seeds or f"{seed}-").partition("-")
    wanted = itertools.count(int(first)) if not last else range(int(first), int(last) + 1)
    try:
        only(iter(()), faults)
        wanted_kafka = Kafka(brokers, secured, skew_hours)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    lines = []
    wrong = False
    with servers(base / "servers", postgres, wanted_kafka) as ground:
        until = time.monotonic() + 60 * minutes
        for number in wanted:
            if not last and time.monotonic() > until:
                break
            kept_in = base / f"seed-{number}"
            report = one_run(
                *(ground, kept_in, number, run_seconds),
                faults=faults,
                commits_wait=commits_wait,
                to_tables=to_tables,
                goal=Met(kills, failovers) if kills else None,
            )
            lines.append(report.as_json())
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
            if totals is not None:
                with totals.open("a", encoding="utf-8") as file:
                    file.write(lines[-1] + "\n")
            if report.findings:
                wrong = True
                sys.stderr.write(f"findings and logs: {kept_in}\n")
    content = totals.read_text(encoding="utf-8").splitlines() if totals is not None else lines
    total = sums(content)
    sys.stdout.write("\n".join(table(total)) + "\n")
    raise SystemExit(exit_code(total, wrong=wrong))


if __name__ == "__main__":
    typer.run(main)
