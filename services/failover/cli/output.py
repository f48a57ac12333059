"""Output for people and plugins: one line a slot, check or step; colour only on a terminal."""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.text import Text

from schemas.errors import SlotbridgeError
from schemas.findings import Finding, Order, Severity
from services.failover.checks.check_report import NAGIOS, Checkup, nagios_of
from services.failover.checks.readiness import Readiness
from services.failover.drill.outcome import DrillPart, Outcome
from services.failover.execute.fix import Fixes
from services.failover.execute.history import done_or_broken_off
from services.failover.execute.journal import BEGIN, END, REMEMBERED, Entry
from services.failover.execute.pair_status import Status
from services.failover.execute.run import Performed, Result
from services.failover.plan.request import Plan
from services.runtime.process import visible


class _Console(Console):
    """A console that ignores a closed pipe or terminal, so that a run is not left half-done.

    Control characters in names, such as a subscription's, are shown and not obeyed.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        for found in objects:
            if isinstance(found, Text):
                found.plain = visible(found.plain)
        shown = (visible(found) if isinstance(found, str) else found for found in objects)
        super().print(*shown, **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _to_nowhere(self.file)


def _to_nowhere(file: IO[str]) -> None:
    """Lead a file whose reader is gone to /dev/null: else its flush at our exit fails."""
    with contextlib.suppress(OSError, ValueError):  # a file without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


def _write(line: str) -> None:
    """Write a line to stdout, whether or not anybody still reads it."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _to_nowhere(sys.stdout)


def on_stdout() -> Console:
    """Return the console on stdout, where answers go."""
    return _Console(highlight=False, soft_wrap=True)


def on_stderr() -> Console:
    """Return the console of the narration, which is on stderr."""
    return _Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _though_nobody_reads() -> Iterator[None]:
    """Ignore a terminal or pipe that is gone: it must not end a run half-way.

    The journal has all that would have been printed.
    """
    with contextlib.suppress(OSError):
        yield


def print_json(report: dict[str, object]) -> None:
    """Print one JSON document on one line of stdout."""
    _write(json.dumps(report, ensure_ascii=False))


def print_check(console: Console, checkup: Checkup, *, problems: bool = False) -> None:
    """Print a line for each slot and check, by group; below a problem its effect and remedy.

    With `problems`, print only what is wrong or was not judged.
    """
    for slot in checkup.slots:
        line = _slot_line(slot).append(_positions(slot))
        console.print(
            line.append(f"; but {checkup.withheld}" * bool(checkup.withheld and slot.ready))
        )
    shown = [f for f in checkup.findings if f.wrong or (f.ok and not problems)]
    for group, checks in groupby(
        sorted(shown, key=lambda f: _groups(checkup).index(f.group)),
        key=lambda finding: finding.group,
    ):
        console.print(Text(group, style="bold"))
        for _, same in groupby(checks, key=lambda finding: finding.check):
            _print_findings(console, list(same))
    for why, unjudged in checkup.unjudged_by_reason.items():
        line = Text.assemble(("NOT JUDGED ", "cyan"), f"{', '.join(unjudged)}: {why}")
        console.print(line)
    if checkup.outlook:
        console.print(Text(checkup.outlook))
    print_notes(console, checkup.notes)
    console.print(Text(checkup.summary, style="bold"))


def print_status(console: Console, status: Status) -> None:
    """Print a line for each node and consumer, and what follows from them."""
    for line in status.lines:
        style = "green" if line.good else "bold red"
        head = Text.assemble((f"{line.kind:10} ", style), f"{line.name:14} ")
        console.print(head.append(line.text))


@contextlib.contextmanager
def as_plugin() -> Iterator[None]:
    """Turn an error into a monitoring plugin's line and status (raises SystemExit)."""
    try:
        yield
    except SlotbridgeError as error:
        line, status = nagios_of(error)
        _write(" ".join(line.split()))
        raise SystemExit(status) from None


def print_nagios(checkup: Checkup) -> NoReturn:
    """Print the plugin's line and exit with its status (raise SystemExit)."""
    _write(" ".join(checkup.nagios.split()))
    raise SystemExit(NAGIOS[checkup.severity])


def orders_as_json(orders: Iterable[Order]) -> list[dict[str, str]]:
    """Return the performed remedies as JSON, with masked secrets."""
    return [
        {"server": order.server, "statement": statement}
        for order in orders
        for statement in order.shown
    ]


def print_fixes(console: Console, fixes: Fixes, printed: set[str]) -> None:
    """Print the remedies to perform, and those that are left but not `printed`, with reasons."""
    for finding in fixes.left if fixes.orders else ():
        if finding.what in printed:
            continue
        printed.add(finding.what)
        console.print(Text.assemble(("NOT DONE  ", "yellow"), f"{finding.check}: {finding.what}"))
        console.print(Text(f"    because {finding.remedy.by_hand}: {finding.remedy}"))
    for order in fixes.orders:
        for statement in order.shown:
            console.print(Text.assemble(("TO DO     ", "cyan"), f"{order.server}: {statement}"))
    if not fixes.orders:
        console.print("nothing can be done by --fix")


def print_plan(console: Console, plan: Plan) -> None:
    """Print every step with its conditions and exact SQL; mask secrets."""
    console.print(Text(f"new primary: {plan.new_primary} ({plan.why})"))
    for verdict in plan.slots:
        console.print(_slot_line(verdict))
    for number, step in enumerate(plan.steps, 1):
        console.print(Text(f"{number}. {step.text}", style="bold"))
        console.print(Text(f"    before: {step.before}"))
        for statement in step.shown:
            console.print(Text(f"    {step.server}: {statement};"))
        console.print(Text(f"    after: {step.after}"))
    if not plan.steps:
        console.print("nothing is left to do")
    _print_left(console, plan)


def print_performed(console: Console, done: Performed) -> None:
    """Print a step that was performed, and how long it took."""
    with _though_nobody_reads():
        console.print(Text(f"{done.seconds:7.3f} s  {done.step.text}: {done.detail}"))


def print_progress(console: Console, text: str) -> None:
    """Print how far a step has come that takes its time."""
    with _though_nobody_reads():
        console.print(Text(f"           … {text}", style="dim"))


def print_history(console: Console, entries: Iterable[Entry]) -> None:
    """Print a line for each run, and one for each of its steps."""
    for entry in done_or_broken_off(entries):
        if entry.step == BEGIN:
            asked = {k: v for k, v in entry.intent.items() if v and k not in REMEMBERED}
            wanted = ", ".join(f"{k} {v}" for k, v in asked.items())
            console.print(Text(f"{entry.at}  {entry.command} by {entry.by}: {wanted}", "bold"))
        elif entry.step == END:
            console.print(Text(f"    {entry.seconds:7.3f} s  in all: {entry.outcome}"))
        else:
            console.print(Text(f"    {entry.seconds:7.3f} s  {entry.step}: {entry.outcome}"))


def print_part(console: Console, part: DrillPart) -> None:
    """Print a finished part of a drill."""
    console.print(Text(f"{part.seconds:7.3f} s  {part.name}: {part.detail}"))


def print_drill(console: Console, outcome: Outcome) -> None:
    """Print the end of a drill: a line for each slot, then a summary."""
    for slot in outcome.slots:
        state = ("NOT USABLE", "bold red") if slot.reason else ("usable    ", "green")
        what = slot.reason or f"{slot.changes} changes decoded in {slot.seconds:.3f} s"
        console.print(Text.assemble(state, f" {slot.slot}: {what}"))
    promotion = sum(part.seconds for part in outcome.parts if part.name == "promote")
    console.print(
        Text(
            f"a clone of {outcome.standby} was promoted in {promotion:.3f} s, and is removed; "
            f"{outcome.seconds:.3f} s in all",
            style="bold",
        )
    )


def print_result(console: Console, result: Result) -> None:
    """Print the end of a failover."""
    for verdict in result.slots:
        console.print(_slot_line(verdict))
    _print_left(console, result)
    console.print(Text(f"{result.new_primary} is the primary; {result.seconds:.3f} s"))


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print remarks that do not ask for anything."""
    for note in notes:
        console.print(Text.assemble(("NOTE      ", "cyan"), note))


def _groups(checkup: Checkup) -> list[str]:
    """Return the groups of checks in the order of their first findings."""
    return list(dict.fromkeys(finding.group for finding in checkup.findings))


def _print_findings(console: Console, findings: list[Finding]) -> None:
    """Print one check: a line if all is well, else a line for each problem."""
    problems = [finding for finding in findings if finding.wrong]
    if findings and all(finding.ok for finding in findings):
        evidence = "; ".join(filter(None, (finding.evidence for finding in findings)))
        line = Text.assemble(
            ("  ok        ", "green"), f"{findings[0].check:25} {findings[0].what}"
        )
        console.print(line.append(f" ({evidence})" if evidence else "", style="dim"))
    for finding in problems:
        style = "bold red" if finding.severity is Severity.CRITICAL else "yellow"
        line = Text.assemble((f"  {finding.severity.upper():9} ", style), f"{finding.check:25} ")
        since = f" since {finding.since}" if finding.since else ""
        console.print(line.append(f"{_about(finding)}{finding}{since}"))
        console.print(Text(f"            at failover: {finding.consequence}"))
        how = "check --fix does it" if finding.remedy.fixes else finding.remedy.by_hand
        console.print(Text(f"            remedy: {finding.remedy} [{how}]"))


def _about(finding: Finding) -> str:
    return "" if not finding.subject or finding.subject in finding.what else f"{finding.subject}: "


def _positions(slot: Readiness) -> str:
    """Describe how much more WAL the standby has than each consumer."""
    if not slot.standby:
        return ""
    more = (f"{name} +{slot.received - lsn} bytes" for name, lsn in slot.consumers)
    text = ", ".join(more)
    since = f" since {slot.since}" if slot.since else ""
    return since + (f" ({slot.standby} against {text})" if text else "")


def _slot_line(verdict: Readiness) -> Text:
    state = ("ready     ", "green") if verdict.ready else ("NOT READY ", "bold red")
    where = f" on {verdict.standby}" if verdict.standby else ""
    return Text.assemble(state, verdict.slot, where)


def _print_left(console: Console, what: Plan | Result) -> None:
    print_notes(console, what.notes)
    for left in (*what.left, *what.to_do):
        console.print(Text.assemble(("TO DO     ", "yellow"), left.line))
