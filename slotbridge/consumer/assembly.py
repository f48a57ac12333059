"""Events and transactions' ends, as partitions bring them -> whole transactions in order. Pure.

    END of transaction 7: public.a 2 events, public.b 1
    a[0]  … (7, seq 0)        a[1]  (7, seq 2) …        b[0]  (7, seq 1)
          -> transaction 7 with seq 0, 1, 2

A truncate is in every partition of its topic, with one number. What Kafka refused is in
`<prefix>.dead` instead, and counts.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from schemas.errors import OperatorNeeded
from schemas.lsn import format_lsn
from slotbridge.consumer.position import Partition, Position


class Change(NamedTuple):
    """An event of a table, as docs/DEBEZIUM.md describes it; `key` None: the table has none.

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
        self._commit_lsn = position.commit_lsn
        self._read = dict(position.offsets)
        """Partition -> the offset after the last record that was taken."""
        self._ends: deque[End] = deque()
        self._found: dict[int, dict[tuple[str, int], Change | Refused]] = {}
        """commit_lsn -> (table, seq) -> what was found."""
        self._counted: dict[int, Counter[str]] = {}
        """commit_lsn -> how much was found of each table."""
        self._held: dict[Partition, deque[tuple[int, int]]] = {}
        """Partition -> (offset, commit_lsn) of its events whose transactions are not given yet."""

    @property
    def first(self) -> End | None:
        """The next transaction's end."""
        return self._ends[0] if self._ends else None

    def lacking(self) -> Collection[str]:
        """Return the tables of which the next transaction lacks events."""
        end = self.first
        if end is None:
            return ()
        counted = self._counted.get(end.commit_lsn, Counter())
        return [table for table, count in end.counts.items() if counted[table] < count]

    def held(self, partition: Partition) -> int:
        """Count the records of a partition that wait for their transaction."""
        if partition == self._ends_at:
            return len(self._ends)
        return len(self._held.get(partition, ()))

    def take_end(self, end: End) -> None:
        """Take in an END. Raise OperatorNeeded where positions have gone back."""
        last = self._ends[-1].commit_lsn if self._ends else self._commit_lsn
        if end.commit_lsn <= last:
            raise OperatorNeeded(
                f"the transaction at {format_lsn(end.commit_lsn)} comes behind that at "
                f"{format_lsn(last)}: the bridge has gone on from an earlier position",
                operation="read transactions",
                subject=f"{self._ends_at[0]}, offset {end.offset}",
                lsn=end.commit_lsn,
                hint="an operator has accepted a divergence (docs/DELIVERY.md): begin anew",
            )
        self._ends.append(end)

    def take(
        self, partition: Partition, offset: int, commit_lsn: int, found: Change | Refused
    ) -> None:
        """Take in an event; one of a transaction that the caller has changes nothing."""
        self.passed(partition, offset)
        if commit_lsn > self._commit_lsn:
            there = self._found.setdefault(commit_lsn, {})
            if (found.table, found.seq) not in there:
                there[found.table, found.seq] = found
                self._counted.setdefault(commit_lsn, Counter())[found.table] += 1
            self._held.setdefault(partition, deque()).append((offset, commit_lsn))

    def passed(self, partition: Partition, offset: int) -> None:
        """Note that a partition was read beyond the record at `offset`."""
        self._read[partition] = offset + 1

    def give(self) -> Transaction | None:
        """Return the next transaction if it is whole."""
        end = self.first
        if end is None or self.lacking():
            return None
        self._ends.popleft()
        self._commit_lsn = end.commit_lsn
        found = self._found.pop(end.commit_lsn, {})
        self._counted.pop(end.commit_lsn, None)
        for held in self._held.values():
            while held and held[0][1] <= end.commit_lsn:
                held.popleft()
        offsets = dict(self._read)
        offsets |= {where: held[0][0] for where, held in self._held.items() if held}
        offsets[self._ends_at] = end.offset + 1
        ordered = sorted(found.values(), key=lambda one: one.seq)
        return Transaction(
            end.id,
            end.commit_lsn,
            end.commit_ts_ms,
            [one for one in ordered if isinstance(one, Change)],
            [one for one in ordered if isinstance(one, Refused)],
            Position(end.commit_lsn, offsets),
        )
