"""Events and transactions' ends, as partitions bring them -> whole transactions in order. Pure.

    END of transaction 7: public.a 2 events, public.b 1
    a[0]  … (7, seq 0)        a[1]  (7, seq 2) …        b[0]  (7, seq 1)
          -> transaction 7 with seq 0, 1, 2

A truncate is in every partition of its topic, with one number. What Kafka refused is in
`<prefix>.dead` instead, and counts. ENDs come in commit order: an event whose END has not come
before a later END does not get one.
"""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from schemas.errors import OperatorNeeded
from schemas.lsn import format_lsn
from slotbridge.consumer.position import OPERATION, Partition, Position

_REMEMBERED: Final = 100_000
"""Events and transactions that were given, of which one may come again, or without its END."""

_NAMED_MAX: Final = 20
"""Places of events that an error names."""


class Change(NamedTuple):
    """An event of a table, as in docs/reference/events.md; `key` None: the table has none.

    `table`: `schema.table`. `value` has op, before, after, source.
    """

    table: str
    seq: int
    key: Any
    value: Mapping[str, Any]

    @property
    def op(self) -> str:
        """`c`, `u`, `d`, `t` or `r`."""
        op: str = self.value["op"]
        return op


class Refused(NamedTuple):
    """An event that Kafka did not take; `<prefix>.dead` has it."""

    table: str
    seq: int


class Transaction(NamedTuple):
    """A whole transaction of the source; `position`: the position after it.

    `id`: `xid:commit_lsn`. `events`: of the chosen tables, in the order of the changes.
    """

    id: str
    commit_lsn: int
    commit_ts_ms: int
    events: Sequence[Change]
    refused: Sequence[Refused]
    position: Position


class End(NamedTuple):
    """The END of a transaction: how many events each chosen table has; `offset`: of the record."""

    id: str
    commit_lsn: int
    commit_ts_ms: int
    counts: Mapping[str, int]
    offset: int


class Assembly:
    """Takes records of all partitions; gives transactions. `ends`: the transaction topic's."""

    def __init__(self, position: Position, ends: Partition) -> None:
        self._ends_at = ends
        self._commit_lsn = self._begun_lsn = position.commit_lsn
        self._last_end = position.commit_lsn
        """The commit LSN of the last END that was taken."""
        self._began = position.began
        if position.began is None and ends not in position.offsets:
            self._began = (position.commit_lsn, -1)
        self._given: deque[int] = deque()
        self._known: dict[int, frozenset[tuple[str, int]]] = {}
        """The last transactions that were given, beyond `_from`: commit LSN -> its events."""
        self._remembered = 0
        self._from = position.commit_lsn
        self._read = dict(position.offsets)
        """Partition -> the offset after the last record that was taken."""
        self._ends: deque[End] = deque()
        self._ended: set[int] = set()
        """The commit LSNs of `_ends`."""
        self._unended: list[int] = []
        """A heap of the commit LSNs beyond `_last_end` of which there are events."""
        self._found: dict[int, dict[tuple[str, int], Change | Refused]] = {}
        """commit_lsn -> (table, seq) -> what was found."""
        self._counted: dict[int, Counter[str]] = {}
        """commit_lsn -> how much was found of each table."""
        self._held: dict[Partition, deque[tuple[int, int]]] = {}
        """Partition -> (offset, commit_lsn) of its events whose transactions are not given yet."""
        self.progress = 0
        """Grows with each record that the next transaction needed, or that lies before it."""

    @property
    def commit_lsn(self) -> int:
        """The commit LSN of the last transaction that was given, or that the caller has."""
        return self._commit_lsn

    @property
    def any_end(self) -> bool:
        """Whether an END was taken."""
        return self._last_end > self._begun_lsn

    @property
    def first(self) -> End | None:
        """The next transaction's end."""
        return self._ends[0] if self._ends else None

    @property
    def waits(self) -> bool:
        """Whether something is missing that Kafka must have: events, or an END.

        Events of two transactions that have not an END yet: the END of the earlier is in Kafka,
        because the bridge publishes one transaction after the other.
        """
        return bool(self.lacking()) or self.endless is not None

    @property
    def endless(self) -> int | None:
        """The commit LSN of a transaction whose END must be in Kafka and has not come."""
        return self._unended[0] if not self._ends and len(self._unended) > 1 else None

    def lacking(self) -> Collection[str]:
        """Return the tables of which the next transaction lacks events."""
        end = self.first
        if end is None:
            return ()
        counted = self._counted.get(end.commit_lsn, Counter())
        return [table for table, count in end.counts.items() if counted[table] < count]

    def ahead(self, partition: Partition, most: int) -> bool:
        """Tell whether more than `most` records are held of a partition that may be held back.

        A partition is in commit order: after an event of a later transaction, no event of the next
        one follows there. While the next transaction is unknown, its END is missing, which is in
        another partition.
        """
        end = self.first
        if partition == self._ends_at:
            return len(self._ends) > most
        held = self._held.get(partition)
        if held is None or len(held) <= most:
            return False
        return end is None or held[-1][1] > end.commit_lsn

    def take_end(self, end: End) -> None:
        """Take in an END.

        Raise OperatorNeeded where positions have gone back, or where the END of an earlier
        transaction of which there are events has not come.
        """
        if end.commit_lsn <= self._last_end:
            raise OperatorNeeded(
                f"the transaction at {format_lsn(end.commit_lsn)} comes behind that at "
                f"{format_lsn(self._last_end)}: the bridge has gone on from an earlier position",
                operation=OPERATION,
                subject=f"{self._ends_at[0]}, offset {end.offset}",
                lsn=end.commit_lsn,
                hint="an operator has accepted a divergence (docs/why/delivery.md): begin anew",
            )
        while self._unended and self._unended[0] <= end.commit_lsn:
            if self._unended[0] < end.commit_lsn:
                raise self.no_end(self._unended[0])
            heapq.heappop(self._unended)
        self.passed(self._ends_at, end.offset)
        if self._began is not None and self._began[1] < 0:
            self._began = (self._began[0], end.commit_lsn)
        self.progress += not self._ends
        self._ends.append(end)
        self._ended.add(end.commit_lsn)
        self._last_end = end.commit_lsn

    def take(
        self, partition: Partition, offset: int, commit_lsn: int, event: Change | Refused
    ) -> None:
        """Take in an event; one of a transaction that the caller has changes nothing.

        Raise OperatorNeeded for an event whose END has not come before a later one, or that its
        END does not count.
        """
        self.passed(partition, offset, commit_lsn)
        if commit_lsn <= self._commit_lsn:
            known = self._known.get(commit_lsn)
            if known is not None and (event.table, event.seq) not in known:
                raise _surplus(event.table, commit_lsn, f"{partition[0]}[{partition[1]}]@{offset}")
            if self._was_left_out(commit_lsn):
                raise self.no_end(commit_lsn, f"{partition[0]}[{partition[1]}]@{offset}")
            return
        there = self._found.get(commit_lsn)
        held = self._held.setdefault(partition, deque())
        held.append((offset, commit_lsn))
        if there is None:
            there = self._found[commit_lsn] = {}
            if commit_lsn > self._last_end:
                heapq.heappush(self._unended, commit_lsn)
            elif commit_lsn not in self._ended:
                raise self.no_end(commit_lsn)
        if (event.table, event.seq) not in there:
            there[event.table, event.seq] = event
            self._counted.setdefault(commit_lsn, Counter())[event.table] += 1

    def passed(self, partition: Partition, offset: int, commit_lsn: int | None = None) -> None:
        """Note that a partition was read beyond `offset`, where a record of `commit_lsn` was."""
        self._read[partition] = max(offset + 1, self._read.get(partition, 0))
        end = self.first
        if end is not None and commit_lsn is not None and commit_lsn <= end.commit_lsn:
            self.progress += 1

    def read_to(self, partition: Partition) -> int:
        """Return the offset up to which a partition was read."""
        return self._read.get(partition, 0)

    def position(self) -> Position:
        """Return the position after the last transaction that was given, as far as is read now."""
        offsets = dict(self._read)
        offsets |= {where: held[0][0] for where, held in self._held.items() if held}
        if self._ends:
            offsets[self._ends_at] = self._ends[0].offset
        return Position(self._commit_lsn, offsets, self._began)

    def give(self) -> Transaction | None:
        """Return the next transaction if it is whole.

        Raise OperatorNeeded where there are more events than its END counts.
        """
        end = self.first
        if end is None or self.lacking():
            return None
        for table, count in self._counted.get(end.commit_lsn, Counter()).items():
            if count > end.counts.get(table, 0):
                places = islice(self._places(end.commit_lsn), _NAMED_MAX)
                raise _surplus(table, end.commit_lsn, ", ".join(places))
        self._ends.popleft()
        self._ended.discard(end.commit_lsn)
        self._commit_lsn = end.commit_lsn
        found = self._found.pop(end.commit_lsn, {})
        self._remember(end.commit_lsn, frozenset(found))
        self._counted.pop(end.commit_lsn, None)
        for held in self._held.values():
            while held and held[0][1] <= end.commit_lsn:
                held.popleft()
        ordered = sorted(found.values(), key=lambda one: one.seq)
        return Transaction(
            end.id,
            end.commit_lsn,
            end.commit_ts_ms,
            [one for one in ordered if isinstance(one, Change)],
            [one for one in ordered if isinstance(one, Refused)],
            self.position(),
        )

    def _remember(self, commit_lsn: int, events: frozenset[tuple[str, int]]) -> None:
        """Remember a given transaction's events, to leave out repeated ones; forget the oldest."""
        self._given.append(commit_lsn)
        self._known[commit_lsn] = events
        self._remembered += 1 + len(events)
        while self._remembered > _REMEMBERED:
            self._from = self._given.popleft()
            self._remembered -= 1 + len(self._known.pop(self._from))

    def _was_left_out(self, commit_lsn: int) -> bool:
        """Tell whether later transactions were given, and not that of an event (again)."""
        after, since = self._began or (-1, -1)
        if after < commit_lsn < since:
            return True
        return commit_lsn > self._from and commit_lsn not in self._known

    def _places(self, commit_lsn: int) -> Iterator[str]:
        """Yield the places of the events of a transaction that is not given yet."""
        for (topic, number), held in self._held.items():
            yield from (f"{topic}[{number}]@{offset}" for offset, lsn in held if lsn == commit_lsn)

    def no_end(self, commit_lsn: int, place: str = "") -> OperatorNeeded:
        """Return the error for events of a transaction whose END Kafka does not have."""
        return OperatorNeeded(
            f"Kafka has events of a transaction, and not its END in {self._ends_at[0]}: retention "
            "has removed it there, or the bridge did not write any then",
            operation=OPERATION,
            subject=place or next(self._places(commit_lsn), self._ends_at[0]),
            lsn=commit_lsn,
            hint=f"keep {self._ends_at[0]} for at least as long as the topics of tables. To begin "
            "after what it lacks: Position.after(LSN) of a copy that you have otherwise "
            "(docs/guides/consumers.md, Where a reader begins)",
        )


def _surplus(table: str, commit_lsn: int, place: str) -> OperatorNeeded:
    return OperatorNeeded(
        f"Kafka has more events of {table} than the END of their transaction counts",
        operation=OPERATION,
        subject=place,
        lsn=commit_lsn,
        hint="only the bridge may write to its topics: deny all others to do so (ACLs), and begin "
        "anew behind the record, with Position.after(LSN) of a copy that you have otherwise "
        "(docs/guides/consumers.md, Where a reader begins)",
    )
