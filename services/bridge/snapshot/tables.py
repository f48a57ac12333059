"""A published table as a snapshot reads it, and the SQL of its next chunk. Pure.

Rows are read in the order of a unique key, on after the last row of the chunk before. The server
alone compares: its bounds are parameters in text form, cast to the columns' types, so that
collations, uuids, numerics and composite keys are ordered as the index has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.bridge.pgoutput.messages import Relation

CURSOR: Final = b"slotbridge_chunk"


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of the key that rows are read by; `type`: as SQL names it."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table as the publication has it. `relation`: as pgoutput describes it.

    `partitioned`: published as its root. `row_filter`: the publication's, "" for none. `key`: the
    columns of the primary key or the replica identity's index; () for a table with neither.
    """

    relation: Relation
    partitioned: bool
    row_filter: str
    key: tuple[KeyColumn, ...]

    @property
    def name(self) -> str:
        """Return the name as `schema.table`."""
        return f"{self.relation.schema}.{self.relation.table}"

    @property
    def key_names(self) -> list[str]:
        """The names of the key's columns."""
        return [column.name for column in self.key]

    @property
    def identifier(self) -> str:
        """The table in SQL, without the tables that inherit from it."""
        relation = self.relation
        name = f"{quote(relation.schema)}.{quote(relation.table)}"
        return name if self.partitioned else f"ONLY {name}"


def chunk_query(
    shape: TableShape, last: Sequence[str] | None, where: str, rows: int
) -> tuple[bytes, list[bytes]]:
    """Make the SQL that declares the cursor CURSOR over the next `rows` rows, and its parameters.

    After the key `last` (text forms), or from the beginning. The rows have the published columns
    and then those of the key.
    """
    key = [quote(column.name) for column in shape.key]
    columns = [quote(column.name) for column in shape.relation.columns] + key
    conditions = [f"({part})" for part in (shape.row_filter, where) if part]
    if last is not None:
        bounds = [f"${n}::{column.type}" for n, column in enumerate(shape.key, 1)]
        conditions.append(f"({', '.join(key)}) > ({', '.join(bounds)})")
    condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    query = (
        f"DECLARE {CURSOR.decode()} NO SCROLL CURSOR FOR SELECT {', '.join(columns)}"  # noqa: S608
        f" FROM {shape.identifier}{condition} ORDER BY {', '.join(key)} LIMIT {rows:d}"
    )
    return query.encode(), [value.encode() for value in last or ()]


def quote(name: str) -> str:
    """Write a name as an identifier in SQL."""
    return '"' + name.replace('"', '""') + '"'


class ChunkSize:
    """How many rows the next chunk has: as many as were read in `hold_s`, within bounds."""

    def __init__(self, rows_max: int, hold_s: float) -> None:
        self._rows_max = rows_max
        self._hold_s = hold_s
        self.rows = min(rows_max, 1_000)

    def learn(self, rows: int, took_s: float) -> None:
        """Note that `rows` rows held the stream for `took_s`: at most twice as many come next."""
        if rows:
            fit = int(rows * self._hold_s / max(took_s, 1e-4))
            self.rows = max(1, min(self._rows_max, 2 * self.rows, fit))

    def shrink(self) -> None:
        """Note that a chunk took too long to be read at all."""
        self.rows = max(1, self.rows // 4)
