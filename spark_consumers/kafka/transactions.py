"""The transactions of a prefix, in commit order, and where epochs are cut.

An epoch always ends just after an END, so always between two transactions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

TRACES_MAX: Final = 128
"""How many Kafka transactions the span of an epoch names; OpenTelemetry's limit of links."""


class EndEvent(NamedTuple):
    """An END of `<prefix>.transaction`.

    `offset`: where the END is. `commit_lsn`: the transaction's. `read_ms`: Kafka's time stamp of
    the END, `ts_ms`: the commit time (both ms since 1970). `counts`: events by followed table.
    `trace`: its header `traceparent`, empty where it has none or tracing is off.
    """

    offset: int
    commit_lsn: int
    read_ms: int
    ts_ms: int
    counts: Counter[str]
    trace: str = ""


@dataclass(slots=True)
class Cut:
    """The transactions after the last epoch, up to and with the one of `commit_lsn`.

    `offset` is the first in the topic after them; `read_ms` Kafka's time stamp of the last END,
    `ts_ms` its commit time; `counts` their events by followed table. `traces`: their ENDs' headers
    `traceparent`, each once, the first TRACES_MAX.
    """

    commit_lsn: int
    offset: int
    read_ms: int = 0
    ts_ms: int = 0
    transactions: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    traces: dict[str, None] = field(default_factory=dict)

    def add(self, end: EndEvent) -> None:
        """Take in the next transaction."""
        self.commit_lsn, self.offset = end.commit_lsn, end.offset + 1
        self.read_ms, self.ts_ms = max(self.read_ms, end.read_ms), max(self.ts_ms, end.ts_ms)
        self.transactions += 1
        self.counts.update(end.counts)
        if end.trace and len(self.traces) < TRACES_MAX:
            self.traces[end.trace] = None


class Transactions:
    """The transactions that were read and are in no epoch yet, each once, in commit order. Pure."""

    def __init__(self, offset: int | None, after_lsn: int, begun_lsn: int | None = None) -> None:
        """Begin to read at `offset`, with transactions after `after_lsn`.

        The offset None is the first record's. Earlier transactions are left out: the tables have
        them. `begun_lsn`: where an epoch ends that is to be made again, whatever it brings.
        """
        self.offset = offset
        """Where the next records are to be read."""
        self._after_lsn = after_lsn
        self._begun_lsn = begun_lsn
        self._ends: list[EndEvent] = []

    def take(self, ends: Iterable[EndEvent], offset: int) -> None:
        """Take in the ENDs of the records up to `offset`, in their order."""
        for end in ends:
            last_lsn = self._ends[-1].commit_lsn if self._ends else self._after_lsn
            if end.commit_lsn <= last_lsn:  # the tables have it, or it was written twice
                continue
            last = self._ends[-1] if self._ends else None
            if last and not (end.counts or last.counts) and last_lsn != self._begun_lsn:
                self._ends.pop()  # of many that bring nothing, the last says it all
            self._ends.append(end)
        self.offset = offset

    def waiting(self) -> tuple[int, int]:
        """Return the first waiting transaction's commit time and the last one's commit LSN.

        The time is in ms since 1970. Both are zero when no transaction waits.
        """
        own = [end for end in self._ends if end.counts]
        return (own[0].ts_ms, own[-1].commit_lsn) if own else (0, 0)

    def cut(
        self, events_max: int, before_lsn: int | None = None, split_lsn: int | None = None
    ) -> Cut | None:
        """Cut an epoch of up to `events_max` events of followed tables; None without any.

        The epoch ends with a transaction that has events of followed tables, so that `upto` finds
        the same cut again. `before_lsn`, `split_lsn`: end before the transaction that commits
        there. The first transaction is taken even at `before_lsn`; a `split_lsn` at or before the
        first one has no effect.
        """
        found: Cut | None = None
        events = 0
        own = [end for end in self._ends if end.counts]
        limits = [] if before_lsn is None else [before_lsn]
        if own and split_lsn is not None and own[0].commit_lsn < split_lsn:
            limits.append(split_lsn)
        limit = min(limits, default=None)
        for end in own:
            events += end.counts.total()
            past = limit is not None and end.commit_lsn >= limit
            if found is not None and (events > events_max or past):
                break
            found = found or Cut(end.commit_lsn, end.offset)
            found.add(end)
        return found and self._with_the_rest(found)

    def upto(self, commit_lsn: int) -> Cut | None:
        """Return exactly the transactions up to `commit_lsn`, None if that is not one of them."""
        found = Cut(commit_lsn, 0)
        for end in self._ends:
            if end.commit_lsn <= commit_lsn:
                found.add(end)
        if not found.transactions or found.commit_lsn != commit_lsn:
            return None
        return self._with_the_rest(found)

    def upto_cut(self, cut: Cut) -> list[EndEvent]:
        """Return the ENDs up to a cut."""
        return [end for end in self._ends if end.commit_lsn <= cut.commit_lsn]

    def rest(self) -> Cut | None:
        """Return all transactions that were read, if none of them brings the tables anything.

        None without any. Their number is not known: of most, nothing is kept.
        """
        if not self._ends or any(end.counts for end in self._ends):
            return None
        last = self._ends[-1]
        found = Cut(last.commit_lsn, last.offset + 1, last.read_ms, last.ts_ms)
        return self._with_the_rest(found)

    def leave_out(self, cut: Cut, commit_lsns: Mapping[str, int]) -> Cut:
        """Leave events out of a cut's counts that tables have already; return the cut.

        `commit_lsns`: of each table. It may be later than the group's where the catalog takes one
        table after the other, or where tables were restored.
        """
        for name, lsn in commit_lsns.items():
            if lsn > self._after_lsn and name in cut.counts:
                own = (end for end in self._ends if end.commit_lsn <= min(lsn, cut.commit_lsn))
                cut.counts[name] -= sum(end.counts[name] for end in own)
        return cut

    def reaches(self, commit_lsn: int) -> bool:
        """Tell whether a transaction at or after `commit_lsn` was read."""
        return any(end.commit_lsn >= commit_lsn for end in self._ends)

    def begins_after(self, commit_lsn: int) -> bool:
        """Tell whether no transaction up to `commit_lsn` was read."""
        return all(end.commit_lsn > commit_lsn for end in self._ends)

    def done(self, cut: Cut) -> None:
        """Forget the transactions up to `cut`."""
        self._ends = [end for end in self._ends if end.commit_lsn > cut.commit_lsn]
        self._after_lsn = max(self._after_lsn, cut.commit_lsn)

    def _with_the_rest(self, cut: Cut) -> Cut:
        """Extend the cut over all that was read after it, if that brings the tables nothing."""
        rest = any(end.counts for end in self._ends if end.commit_lsn > cut.commit_lsn)
        if not rest and self.offset is not None:
            cut.offset = max(cut.offset, self.offset)
        return cut
