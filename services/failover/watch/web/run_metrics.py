"""The metrics of runs, of the commands' lock and of steps, from the journal's last entries."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from services.failover.execute.history import done_or_broken_off, unfinished
from services.failover.execute.journal import BEGIN, DONE, DRILL, END, FIX, SEEN, Entry, instant
from services.failover.watch.snapshot import Snapshot
from services.runtime.families import Family

_STEP_CHARACTERS: Final = 100

UNFINISHED: Final = Family(
    "slotfailover_unfinished_run",
    "1 while the last run in the journal has left steps undone; no series otherwise.",
    ("command",),
)
UNFINISHED_AGE: Final = Family(
    "slotfailover_unfinished_run_age_seconds",
    "Seconds since the unfinished run began; no series otherwise.",
    ("command",),
)
LOCK: Final = Family(
    "slotfailover_lock_held",
    "1 while a slotfailover command holds the lock on the primary, with its holder, else 0.",
    ("holder",),
)
STEP: Final = Family(
    "slotfailover_last_run_step_seconds",
    "Seconds that each step of the last run took.",
    ("command", "step"),
)
RUN: Final = Family(
    "slotfailover_last_run_seconds",
    "Seconds that the last run took; a run that was killed does not count.",
    ("command",),
)
RUN_SUCCESS: Final = Family(
    "slotfailover_last_run_success",
    "1 if the last run left nothing undone, else 0; a run that was killed does not count.",
    ("command",),
)
RUN_AT: Final = Family(
    "slotfailover_last_run_timestamp_seconds",
    "Unix time at which the last run ended; a run that was killed does not count.",
    ("command",),
)
RUN_FAMILIES: Final = (UNFINISHED, UNFINISHED_AGE, LOCK, STEP, RUN, RUN_SUCCESS, RUN_AT)


def of_runs(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the metrics of the journal, with the steps of the last run only: few series."""
    holder = snapshot.at_work.partition(" since ")[0]
    yield LOCK.of({(holder,): float(bool(holder))})
    entries = list(snapshot.entries)
    begun = unfinished(entries)
    if begun is not None:
        yield UNFINISHED.of({(begun.command,): 1.0})
        age_s = max(0.0, snapshot.at_s - instant(begun.at).timestamp())
        yield UNFINISHED_AGE.of({(begun.command,): age_s})
    runs = [e for e in entries if e.command not in (DRILL, FIX) and e.step != SEEN]
    if not runs:
        return
    last = [entry for entry in done_or_broken_off(runs) if entry.run == runs[-1].run]
    steps: dict[tuple[str, ...], float] = {}
    for entry in last:
        if entry.step not in (BEGIN, END):
            key = (entry.command, entry.step[:_STEP_CHARACTERS])
            steps[key] = steps.get(key, 0.0) + entry.seconds
    yield STEP.of(steps)
    yield from _of_ended([entry for entry in runs if entry.step == END])


def _of_ended(ends: list[Entry]) -> Iterator[Metric]:
    if ends:
        end = ends[-1]
        yield RUN.of({(end.command,): end.seconds})
        yield RUN_SUCCESS.of({(end.command,): end.outcome == DONE})
        yield RUN_AT.of({(end.command,): instant(end.at).timestamp()})
