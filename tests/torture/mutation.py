"""`make torture SABOTAGE=all`: is the rig strong enough to find a bridge with a mistake in it?

Runs the rig on a bridge with each mistake of `sabotage`, for longer and longer, until it finds
something; prints a table. Exit code 1 when it misses one, or finds anything in the control.
"""

import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from services.testbed.bed import Bed
from tests.torture.brokers import Brokers
from tests.torture.checker import Finding
from tests.torture.faults import faults_with, only, shuffled_schedule
from tests.torture.report import Report
from tests.torture.rig import Rig
from tests.torture.sabotage import CONTROL, commits_wait, names, telling
from tests.torture.servers import Kafka, servers

ROUNDS_S: Final = (25.0, 50.0, 100.0)
_EXAMPLE_CHARACTERS: Final = 160


class Outcome(NamedTuple):
    """What became of one mistake: `fire_s` seconds under fire, over `runs`."""

    name: str
    runs: int
    fire_s: float
    sigkills: int
    findings: list[Finding]

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
        return f"| {self.name} | {self.fire_s:.0f} s | {self.sigkills} | {verdict} |"


def _verdict(finding: Finding) -> str:
    """The kind; of an end that needs an operator, its exit code."""
    code = finding.what.partition(":")[0]
    return f"{finding.kind} ({code})" if code.startswith("exit code") else finding.kind


def tried(bed: Bed, brokers: Brokers, folder: Path, name: str, faults: str) -> Outcome:
    """Run after run until something is found."""
    fire_s, sigkills = 0.0, 0
    for number, seconds in enumerate(ROUNDS_S, 1):
        kept_in = folder / f"{names().index(name)}-{number}"
        report = _run(bed, brokers, kept_in, name, seconds, faults)
        fire_s += report.fire_s
        sigkills += report.sigkills
        if report.findings:
            break
    return Outcome(name, number, fire_s, sigkills, report.findings)


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
        what = traceback.format_exc()
        (folder / "traceback.txt").write_text(what, encoding="utf-8")
        return Report(seed, findings=[Finding("stuck", what.strip().splitlines()[-1])])


def _known(faults: str, brokers: Brokers) -> str:
    """Those that there are with so many brokers."""
    return ",".join(name for name in faults.split(",") if name in faults_with(brokers.count))


def _chosen(wanted: str) -> Iterator[str]:
    for number, name in enumerate(names()):
        if wanted == "all" or str(number) in wanted.split(","):
            yield name


def main(
    sabotage: Annotated[str, typer.Argument(help="`all`, or numbers in the list: 3,5")] = "all",
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
    right = True
    sys.stdout.write("| mistake | found after | kills | by |\n|---|---|---|---|\n")
    with servers(base / "servers", kafka=Kafka(brokers)) as (bed, kafka):
        for name in _chosen(sabotage):
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
