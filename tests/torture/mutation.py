"""`make torture SABOTAGE=all`: is the rig strong enough to find a bridge with a mistake in it?

Runs the rig on a bridge with each mistake of `sabotage`, for longer and longer, until it finds
something; prints a table. A mistake that shows where faults that are drawn seldom come has a drill
instead (`drills`). Exit code 1 when one is missed, or anything is found in the control, which goes
through all drills, too.
"""

import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from services.testbed.bed import Bed
from tests.torture.brokers import Brokers
from tests.torture.checker import Finding
from tests.torture.drills import DRILLS, drilled
from tests.torture.faults import faults_with, only, shuffled_schedule
from tests.torture.report import Report
from tests.torture.rig import Rig
from tests.torture.sabotage import CONTROL, commits_wait, drill_of, names, telling
from tests.torture.servers import Kafka, servers

ROUNDS_S: Final = (25.0, 50.0, 100.0)
_EXAMPLE_CHARACTERS: Final = 160


class Outcome(NamedTuple):
    """What became of one mistake: `fire_s` seconds under fire, or in its `drill`."""

    name: str
    fire_s: float
    sigkills: int
    findings: list[Finding]
    drill: str = ""

    @property
    def as_expected(self) -> bool:
        """Found, or nothing in the control; a rig that fails has found nothing."""
        if any(finding.kind == "stuck" for finding in self.findings):
            return False
        return bool(self.findings) != (self.name == CONTROL)

    def row(self) -> str:
        """Of the table."""
        kinds = Counter(_verdict(finding) for finding in self.findings)
        verdict = ", ".join(f"{kind} {n}" for kind, n in kinds.most_common()) or "nothing"
        how = f"drill `{self.drill}`" if self.drill else f"{self.sigkills} kills"
        return f"| {self.name} | {self.fire_s:.0f} s, {how} | {verdict} |"


def _verdict(finding: Finding) -> str:
    """The kind; of an end that needs an operator, its exit code."""
    code = finding.what.partition(":")[0]
    return f"{finding.kind} ({code})" if code.startswith("exit code") else finding.kind


def tried(bed: Bed, brokers: Brokers, folder: Path, name: str, faults: str) -> Outcome:
    """Run after run until something is found; or its drill, where no `faults` are asked for."""
    drill = drill_of(name)
    if drill and not faults:
        return _drilled(bed, brokers, folder, name, drill)
    fire_s, sigkills = 0.0, 0
    for number, seconds in enumerate(ROUNDS_S, 1):
        kept_in = folder / f"{names().index(name)}-{number}"
        report = _run(bed, brokers, kept_in, name, seconds, faults)
        fire_s += report.fire_s
        sigkills += report.sigkills
        if report.findings:
            break
    findings = report.findings
    if name == CONTROL:
        for drill in DRILLS:
            findings += _drilled(bed, brokers, folder, name, drill).findings
    return Outcome(name, fire_s, sigkills, findings)


def _drilled(bed: Bed, brokers: Brokers, folder: Path, name: str, drill: str) -> Outcome:
    began = time.monotonic()
    kept_in = folder / f"{names().index(name)}-{drill.replace(' ', '-')}"
    kept_in.mkdir()
    brokers.recover()
    try:
        findings = drilled(bed, brokers, kept_in, name, drill)
    except Exception:
        findings = [_stuck(kept_in)]
    return Outcome(name, time.monotonic() - began, 0, findings, drill)


def _run(
    bed: Bed, brokers: Brokers, folder: Path, name: str, seconds: float, faults: str
) -> Report:
    seed = bed.pairs_made + 1
    folder.mkdir()
    try:
        brokers.recover()
        with bed.new_pair() as (pair, subscriber):
            drawn = only(
                shuffled_schedule(seed, brokers.count), _known(faults or telling(name), brokers)
            )
            rig = Rig(
                *(bed, folder, seed),
                brokers=brokers,
                sabotage=name,
                faults=drawn,
                commits_wait=commits_wait(name),
            )
            return rig.run((pair.primary, pair.standby), seconds, subscriber)
    except Exception:
        return Report(seed, findings=[_stuck(folder)])


def _stuck(folder: Path) -> Finding:
    """What the rig itself has met."""
    what = traceback.format_exc()
    (folder / "traceback.txt").write_text(what, encoding="utf-8")
    return Finding("stuck", what.strip().splitlines()[-1])


def _known(faults: str, brokers: Brokers) -> str:
    """Those that there are with so many brokers."""
    return ",".join(name for name in faults.split(",") if name in faults_with(brokers.count))


def _chosen(wanted: str) -> list[str]:
    """All, those of some numbers, or those whose name has these words in it."""
    numbers = wanted.split(",")
    return [
        name
        for number, name in enumerate(names())
        if wanted == "all" or str(number) in numbers or (wanted in name and wanted.strip())
    ]


def main(
    sabotage: Annotated[
        str, typer.Argument(help="`all`, numbers in the list (3,5), or words of a name.")
    ] = "all",
    folder: Annotated[Path | None, typer.Option(help="Keeps the logs.")] = None,
    faults: Annotated[str, typer.Option(help="Only these, by commas: broker killed,kill")] = "",
    brokers: Annotated[int, typer.Option(help="1, or 3 that replicate every topic.")] = 1,
) -> None:
    """Sabotage the bridge and see whether the rig finds out."""
    try:
        only(iter(()), faults)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    base = folder or Path(tempfile.mkdtemp(prefix="slotbridge-sabotage-"))
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o755)
    right = bool(chosen := _chosen(sabotage))
    sys.stdout.write("| mistake | found after | by |\n|---|---|---|\n")
    with servers(base / "servers", kafka=Kafka(brokers)) as (bed, kafka, _):
        for name in chosen:
            outcome = tried(bed, kafka, base, name, faults)
            right = right and outcome.as_expected
            sys.stdout.write(outcome.row() + "\n")
            sys.stdout.flush()
            for finding in outcome.findings[:2]:
                sys.stderr.write(f"    {finding.what[:_EXAMPLE_CHARACTERS]!r}\n")
    if folder is None and right:
        shutil.rmtree(base)
    raise SystemExit(int(not right))


if __name__ == "__main__":
    typer.run(main)
