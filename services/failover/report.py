"""What people read: one line a slot, one line a step; colour only on a terminal."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from services.failover.conditions import Condition
from services.failover.journal import BEGIN, END, Entry
from services.failover.plan.wish import Plan
from services.failover.readiness import Readiness
from services.failover.runner import Performed, Result


def on_stdout() -> Console:
    """Where answers go."""
    return Console(highlight=False, soft_wrap=True)


def on_stderr() -> Console:
    """Where the narration goes."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(report: dict[str, object]) -> None:
    """One JSON document on one line of stdout."""
    sys.stdout.write(json.dumps(report, ensure_ascii=False) + "\n")


def print_check(
    console: Console, verdicts: Iterable[Readiness], found: Iterable[Condition], notes: list[str]
) -> None:
    """A line for each slot, with the reasons of one that is not ready; then what does not hold."""
    for verdict in verdicts:
        console.print(_slot_line(verdict))
        for reason in verdict.reasons:
            console.print(Text(f"    because {reason}"))
            console.print(Text(f"    remedy: {reason.remedy}"))
    for condition in found:
        if not condition.holds:
            line = Text.assemble(("WARNING   ", "yellow"), f"on {condition.server} it is not so ")
            console.print(line.append(f"that {condition.name} ({condition.evidence})"))
            console.print(Text(f"    remedy: {condition.remedy}"))
    print_notes(console, notes)


def print_plan(console: Console, plan: Plan) -> None:
    """Every step, with its conditions and exact SQL; secrets are masked."""
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
    """A step that was performed, and how long it took."""
    console.print(Text(f"{done.seconds:7.3f} s  {done.step.text}: {done.detail}"))


def print_progress(console: Console, text: str) -> None:
    """How far the step is that takes its time."""
    console.print(Text(f"           … {text}", style="dim"))


def print_history(console: Console, entries: Iterable[Entry]) -> None:
    """A line for each run, and one for each of its steps."""
    for entry in entries:
        if entry.step == BEGIN:
            wanted = ", ".join(f"{k} {v}" for k, v in entry.intent.items() if v)
            console.print(Text(f"{entry.at}  {entry.command} by {entry.by}: {wanted}", "bold"))
        elif entry.step == END:
            console.print(Text(f"    {entry.seconds:7.3f} s  in all: {entry.outcome}"))
        else:
            console.print(Text(f"    {entry.seconds:7.3f} s  {entry.step}: {entry.outcome}"))


def history_as_json(entries: Iterable[Entry]) -> dict[str, object]:
    """The journal's entries, oldest first."""
    return {"entries": [asdict(entry) for entry in entries]}


def print_result(console: Console, result: Result) -> None:
    """The end of a failover."""
    for verdict in result.slots:
        console.print(_slot_line(verdict))
    _print_left(console, result)
    console.print(Text(f"{result.new_primary} is the primary; {result.seconds:.3f} s"))


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Remarks that ask for nothing."""
    for note in notes:
        console.print(Text.assemble(("NOTE      ", "cyan"), note))


def plan_as_json(plan: Plan) -> dict[str, object]:
    """A plan that was not carried out."""
    return {
        "new_primary": plan.new_primary,
        "why": plan.why,
        "steps": [
            {
                "step": step.text,
                "server": step.server,
                "before": step.before,
                "sql": list(step.shown),
                "after": step.after,
            }
            for step in plan.steps
        ],
        "slots": [slot.as_json() for slot in plan.slots],
        "left": [left.as_json() for left in plan.left],
        "notes": list(plan.notes),
    }


def _slot_line(verdict: Readiness) -> Text:
    state = ("ready     ", "green") if verdict.ready else ("NOT READY ", "bold red")
    where = f" on {verdict.standby}" if verdict.standby else ""
    return Text.assemble(state, verdict.slot, where)


def _print_left(console: Console, what: Plan | Result) -> None:
    print_notes(console, what.notes)
    for left in what.left:
        console.print(Text.assemble(("TO DO     ", "yellow"), left.line))
