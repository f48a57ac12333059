"""`python -m tests.promises.bridge.evidence --rounds 20 [--case restore] …`: rounds under load.

Prints a line for each round and a table of sums. Exit code 1 where a round was not refused by
name, or lost, repeated or made up a row.
"""

import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import typer

from services.testbed.bed import Bed
from tests.promises.bridge.evidence import cases, lone_witness, point_in_time
from tests.promises.bridge.evidence.cases import Case
from tests.promises.bridge.evidence.ground import Compared, new_ground
from tests.providers.memory import roomy_memory

CASES: Final[dict[str, Case]] = {
    "restore": cases.restore,
    "soon": cases.soon,
    "crash": cases.crash,
    "promotion": cases.promotion,
    "number": lone_witness.same_number,
    "foreign": lone_witness.foreign,
    "pitr": point_in_time.restored,
    "stale": cases.stale,
    "publication": cases.publication,
}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of each case.")] = 20,
    case: Annotated[list[str] | None, typer.Option(help="Only these; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first round; each takes the next.")] = 1,
) -> None:
    """Run them on servers of their own."""
    folder = Path(tempfile.mkdtemp(prefix="slotbridge-evidence-", dir=roomy_memory()))
    folder.chmod(0o755)
    failed = False
    table: list[str] = []
    with Bed(folder / "bed", lazy=True) as bed:
        bed.start("kafka")
        for name in case or CASES:
            outcomes: Counter[str] = Counter()
            sums = Compared(0, 0, 0, 0)
            for number in range(seed, seed + rounds):
                how, seen = _round(CASES[name], bed, folder, number)
                outcomes[how] += 1
                if seen is None:
                    failed = True
                    continue
                sums = Compared(*(getattr(sums, f) + getattr(seen, f) for f in _FIELDS))
            failed |= bool(sums.lost or sums.twice or sums.phantoms)
            table.append(
                f"{name:<12} {rounds:>3} rounds, {sums.rows} rows: lost {sums.lost}, "
                f"twice {sums.twice}, made up {sums.phantoms}"
            )
            table += [f"{'':<12} {count:>3} x {how}" for how, count in sorted(outcomes.items())]
    shutil.rmtree(folder)
    sys.stdout.write("\n".join(["", *table, ""]))
    raise SystemExit(int(failed))


_FIELDS = ("lost", "twice", "phantoms", "rows")


def _round(case: Case, bed: Bed, folder: Path, seed: int) -> tuple[str, Compared | None]:
    began = time.monotonic()
    logs = folder / f"{case.__name__}-{seed}"
    logs.mkdir()
    try:
        with new_ground(bed, bed.kafka, logs, seed) as ground:
            how, seen = case(ground)
    except Exception:
        what = traceback.format_exc()
        sys.stdout.write(f"{case.__name__} {seed}: {what}\n")
        return f"failed: {what.strip().splitlines()[-1][:150]}", None
    took_s = time.monotonic() - began
    sys.stdout.write(f"{case.__name__} {seed}: {how}; {seen} ({took_s:.0f} s)\n")
    sys.stdout.flush()
    return how, seen


if __name__ == "__main__":
    typer.run(main)
