"""Four copies of the same tables, compared row by row. Pure.

The surviving database is the truth. Kafka's copy is rebuilt from its events in (commit_lsn, seq)
order; an identity that comes twice is a duplicate, whatever its row.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Row = tuple[Any, ...]
Rows = Counter[Row]
"""A table's content: each row and how often it is there."""


class Change(NamedTuple):
    """One event of a table.

    `copy`: the partition of a truncate's copy, else 0. `row`, `key`: as in the envelope, in column
    order.
    """

    commit_lsn: int
    seq: int
    copy: int
    op: str
    key: str | None
    row: Row | None


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A table as its events make it. `repeated`: events beyond the first of an identity."""

    rows: Rows
    events: int
    updates: int
    repeated: int


@dataclass(frozen=True, slots=True)
class TableResult:
    """One table's verdict: rows in each copy, and what is missing or too many."""

    table: str
    database_rows: int
    subscriber_rows: int
    kafka_rows: int
    iceberg_rows: int
    kafka_events: int
    lost: int
    duplicated: int
    subscriber_equal: bool
    iceberg_equal: bool

    @property
    def equal(self) -> bool:
        """Whether all four copies agree."""
        return (
            not self.lost and not self.duplicated and self.subscriber_equal and self.iceberg_equal
        )


@dataclass(frozen=True, slots=True)
class IcebergTable:
    """The result of `slottables verify` for a table."""

    rows: int
    equal: bool


@dataclass(frozen=True, slots=True)
class Copies:
    """Everything that is compared, by table.

    `updates`: how many update events a table must have; a lost one can hide behind a later one.
    """

    database: Mapping[str, Rows]
    subscriber: Mapping[str, Rows]
    kafka: Mapping[str, Rebuilt]
    iceberg: Mapping[str, IcebergTable] = field(default_factory=dict)
    updates: Mapping[str, int] = field(default_factory=dict)


def rebuild(changes: Iterable[Change]) -> Rebuilt:
    """Apply `changes` (in any order) and return the table that they make."""
    identities: Counter[tuple[int, int, int]] = Counter()
    keyed: dict[str, Row] = {}
    keyless: Rows = Counter()
    events = 0
    updates = 0
    for change in sorted(changes, key=lambda change: change[:3]):
        events += 1
        updates += change.op == "u"
        identities[change[:3]] += 1
        if change.op == "t":
            keyed.clear()
            keyless.clear()
        elif change.op == "d" or change.row is None:
            keyed.pop(change.key or "", None)
        elif change.key is None:
            keyless[change.row] += 1
        else:
            keyed[change.key] = change.row
    repeated = sum(count - 1 for count in identities.values())
    return Rebuilt(keyless + Counter(keyed.values()), events, updates, repeated)


def compare(copies: Copies) -> list[TableResult]:
    """Return one result for each table of the database."""
    results = []
    for table, truth in sorted(copies.database.items()):
        kafka = copies.kafka.get(table, Rebuilt(Counter(), 0, 0, 0))
        subscriber = copies.subscriber.get(table, Counter())
        iceberg = copies.iceberg.get(table, IcebergTable(0, equal=False))
        missing_updates = copies.updates.get(table, kafka.updates) - kafka.updates
        results.append(
            TableResult(
                table=table,
                database_rows=truth.total(),
                subscriber_rows=subscriber.total(),
                kafka_rows=kafka.rows.total(),
                iceberg_rows=iceberg.rows,
                kafka_events=kafka.events,
                lost=max((truth - kafka.rows).total(), missing_updates),
                duplicated=max(kafka.repeated, (kafka.rows - truth).total(), -missing_updates),
                subscriber_equal=subscriber == truth,
                iceberg_equal=iceberg.equal,
            )
        )
    return results
