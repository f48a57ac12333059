"""`make torture SEED=1 MINUTES=3`: runs with SEED, SEED+1 … until the time is over."""

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from services.local.bed import Bed
from tests.torture.rig import Rig, kept


def main(
    seed: Annotated[int, typer.Option(help="The first seed; each run takes the next.")] = 1,
    minutes: Annotated[float, typer.Option(help="How long to go on starting runs.")] = 3.0,
    run_seconds: Annotated[float, typer.Option(help="How long each run is under fire.")] = 75.0,
    folder: Annotated[Path | None, typer.Option(help="Kept when something is found.")] = None,
) -> None:
    """Torture the bridge and print one JSON line a seed. Exit code 1 when anything is wrong."""
    base = folder or Path(tempfile.mkdtemp(prefix="slotbridge-torture-"))
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o755)
    wrong = False
    with Bed(base / "servers", lazy=True) as bed:
        bed.start("kafka")
        started = time.monotonic()
        while time.monotonic() - started < 60 * minutes:
            run_folder = base / f"seed-{seed}"
            run_folder.mkdir(exist_ok=True)
            with bed.new_pair() as (pair, _subscriber):
                rig = Rig(bed, run_folder, seed)
                seconds = run_seconds
                report = rig.run((pair.primary, pair.standby), seconds)
            sys.stdout.write(report.as_json() + "\n")
            sys.stdout.flush()
            if report.findings:
                wrong = True
                kept(run_folder, report)
                sys.stderr.write(f"findings, log and settings: {run_folder}\n")
            seed += 1
    raise SystemExit(int(wrong))


typer.run(main)
