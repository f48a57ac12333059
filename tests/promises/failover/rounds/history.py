"""Whether a history of transactions that append to lists can have happened with one primary.

After Jepsen's append test (Kingsbury and Alvaro, "Elle"): every value is appended once and to one
list, so the final lists tell in which order transactions took effect.

    lost          an acknowledged append is not there, and no accepted loss covers it
    duplicated    a value is there twice
    unknown       a value is there that nobody appended, or whose transaction had failed
    torn          one append of a transaction is there, another is not
    divergent     a read list is not how the final list begins
    internal      a transaction does not see its own appends, or a list changes under it
    stale         a read lacks what had been acknowledged before the transaction began
    reordered     what was acknowledged before another began stands behind it
    cycle         transactions that depend on each other in a circle
    two primaries nodes acknowledge on one timeline, or on an older timeline than somebody before

Pure: times, positions and lists are given.
"""

from __future__ import annotations

import graphlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

Lists = Mapping[int, tuple[int, ...]]


class Outcome(StrEnum):
    """What the client knows of its transaction."""

    OK = "ok"
    """It was acknowledged."""
    FAIL = "fail"
    """It was not committed, for certain."""
    INFO = "info"
    """It may have been committed: the answer to COMMIT did not come."""


class Append(NamedTuple):
    """A value that is put at the end of a list."""

    key: int
    value: int


class Read(NamedTuple):
    """What a list was when it was read."""

    key: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One transaction of a client; times in seconds of one clock."""

    node: str
    outcome: Outcome
    micros: tuple[Append | Read, ...]
    invoked: float
    """Before BEGIN was sent."""
    committing: float
    """Before COMMIT was sent."""
    completed: float
    """When the answer was there."""
    timeline: int = 0
    """The node's timeline right after an acknowledged commit."""
    lsn: int = 0
    """The node's WAL position then: the commit is before it."""

    @property
    def appends(self) -> tuple[Append, ...]:
        """What it wrote."""
        return tuple(each for each in self.micros if isinstance(each, Append))


@dataclass(frozen=True, slots=True)
class AcceptedLoss:
    """A person accepted to lose `size` bytes of a timeline's WAL, which another left at `lsn`."""

    timeline: int
    lsn: int
    size: int

    def covers(self, operation: Operation) -> bool:
        """Whether the commit of that transaction is in what was given up."""
        behind = operation.lsn - self.lsn
        return operation.timeline == self.timeline and 0 < behind <= self.size


class Anomaly(NamedTuple):
    """What can't have happened with one primary."""

    kind: str
    text: str


def check(
    history: Sequence[Operation], final: Lists, accepted: Sequence[AcceptedLoss] = ()
) -> list[Anomaly]:
    """All anomalies of the history, given the lists in the end."""
    there = {value for values in final.values() for value in values}
    kept = [
        operation
        for operation in history
        if operation.outcome is Outcome.OK and not any(loss.covers(operation) for loss in accepted)
    ]
    visible = [
        operation
        for operation in history
        if operation.outcome is Outcome.INFO and any(a.value in there for a in operation.appends)
    ]
    return [
        *_lost(kept, there),
        *_duplicated(final),
        *_unknown(history, final),
        *_torn(history, there),
        *_divergent(kept, final),
        *_internal(kept),
        *_stale(kept, final),
        *_reordered(kept, final),
        *_cycle([*kept, *visible], final),
        *two_primaries(history),
    ]


def two_primaries(history: Sequence[Operation]) -> Iterator[Anomaly]:
    """Where two nodes acknowledged writes at one time, whatever became of them."""
    acknowledged = [each for each in history if each.outcome is Outcome.OK]
    nodes: dict[int, set[str]] = {}
    first: dict[int, float] = {}
    for each in acknowledged:
        nodes.setdefault(each.timeline, set()).add(each.node)
        first[each.timeline] = min(each.completed, first.get(each.timeline, each.completed))
    for timeline, names in nodes.items():
        if len(names) > 1:
            text = f"{', '.join(sorted(names))} acknowledged on timeline {timeline}"
            yield Anomaly("two primaries", text)
    newer = dict.fromkeys(first, float("inf"))
    since = float("inf")
    for timeline in sorted(first, reverse=True):
        newer[timeline] = since
        since = min(since, first[timeline])
    for each in acknowledged:
        late_s = each.committing - newer[each.timeline]
        if late_s > 0:
            yield Anomaly(
                "two primaries",
                f"{each.node} acknowledged on timeline {each.timeline} what was committed "
                f"{late_s:.3f} s after a newer timeline had acknowledged",
            )


def _lost(kept: Sequence[Operation], there: set[int]) -> Iterator[Anomaly]:
    for each in kept:
        for append in each.appends:
            if append.value not in there:
                yield Anomaly(
                    "lost",
                    f"{append.value} of list {append.key}, acknowledged by {each.node} on timeline "
                    f"{each.timeline} before {each.lsn >> 32:X}/{each.lsn & 0xFFFFFFFF:08X}",
                )


def _duplicated(final: Lists) -> Iterator[Anomaly]:
    counts = Counter(value for values in final.values() for value in values)
    for value, count in counts.items():
        if count > 1:
            yield Anomaly("duplicated", f"{value} is there {count} times")


def _unknown(history: Sequence[Operation], final: Lists) -> Iterator[Anomaly]:
    tried = {(a.key, a.value): each.outcome for each in history for a in each.appends}
    for key, values in final.items():
        for value in values:
            outcome = tried.get((key, value))
            if outcome is None:
                yield Anomaly("unknown", f"nobody appended {value} to list {key}")
            elif outcome is Outcome.FAIL:
                yield Anomaly("unknown", f"{value} is in list {key}, its transaction had failed")


def _torn(history: Sequence[Operation], there: set[int]) -> Iterator[Anomaly]:
    for each in history:
        found = [append.value in there for append in each.appends]
        if any(found) and not all(found):
            yield Anomaly("torn", f"of {[a.value for a in each.appends]} only some are there")


def _divergent(kept: Sequence[Operation], final: Lists) -> Iterator[Anomaly]:
    for each in kept:
        for read in _reads(each):
            ended = final.get(read.key, ())
            if ended[: len(read.values)] != read.values:
                alike = itertools.takewhile(
                    lambda p: p[0] == p[1], zip(read.values, ended, strict=False)
                )
                same = sum(1 for _ in alike)
                yield Anomaly(
                    "divergent",
                    f"list {read.key} as read at {each.node} is another from its item {same} on: "
                    f"{read.values[same : same + 3]}, in the end {ended[same : same + 3]}",
                )


def _internal(kept: Sequence[Operation]) -> Iterator[Anomaly]:
    for each in kept:
        own: dict[int, tuple[int, ...]] = {}
        seen: dict[int, tuple[int, ...]] = {}
        for micro in each.micros:
            key = micro.key
            if isinstance(micro, Append):
                own[key] = (*own.get(key, ()), micro.value)
                continue
            mine = own.get(key, ())
            before = micro.values[: len(micro.values) - len(mine)]
            if before + mine != micro.values or seen.setdefault(key, before) != before:
                yield Anomaly("internal", f"list {key} changed inside a transaction of {each.node}")


def _stale(kept: Sequence[Operation], final: Lists) -> Iterator[Anomaly]:
    completed = {a.value: each.completed for each in kept for a in each.appends}
    earliest: dict[int, list[float]] = {}
    for key, values in final.items():
        times = [completed.get(value, float("inf")) for value in values]
        mins = list(itertools.accumulate(reversed(times), min))[::-1]
        earliest[key] = [*mins, float("inf")]
    for each in kept:
        for read in _reads(each):
            times = earliest.get(read.key, [float("inf")])
            missed = times[min(len(read.values), len(times) - 1)]
            if missed < each.invoked:
                yield Anomaly(
                    "stale",
                    f"list {read.key} as read at {each.node} lacks what was acknowledged "
                    f"{each.invoked - missed:.3f} s before",
                )


def _reordered(kept: Sequence[Operation], final: Lists) -> Iterator[Anomaly]:
    whose = {append.value: each for each in kept for append in each.appends}
    for key, values in final.items():
        latest = float("-inf")
        for value in values:
            writer = whose.get(value)
            if writer is None:
                continue
            if writer.completed < latest:
                yield Anomaly("reordered", f"{value} of list {key} is behind what began later")
            latest = max(latest, writer.invoked)


def _cycle(taking_part: Sequence[Operation], final: Lists) -> Iterator[Anomaly]:
    """Each transaction comes after whose values it follows or has read, and before whoever wrote
    what it has not read. At most one circle is told.
    """
    whose = {a.value: number for number, each in enumerate(taking_part) for a in each.appends}
    graph: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()

    def after(later: int | None, earlier: int | None) -> None:
        if later is not None and earlier is not None and later != earlier:
            graph.add(later, earlier)

    for values in final.values():
        writers = [whose[value] for value in values if value in whose]
        for earlier, later in itertools.pairwise(writers):
            after(later, earlier)
    for number, each in enumerate(taking_part):
        if each.outcome is not Outcome.OK:
            continue
        for read in _reads(each):
            ended, length = final.get(read.key, ()), len(read.values)
            if read.values:
                after(number, whose.get(read.values[-1]))
            if length < len(ended):
                after(whose.get(ended[length]), number)
    try:
        graph.prepare()
    except graphlib.CycleError as error:
        circle = [taking_part[number] for number in error.args[1]]
        text = " <- ".join(str([a.value for a in each.appends]) for each in circle)
        yield Anomaly("cycle", f"appends of {text}")


def _reads(operation: Operation) -> Iterator[Read]:
    return (each for each in operation.micros if isinstance(each, Read))
