"""The table whose rows are read next, and those that may share its chunk. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from services.bridge.snapshot.progress import SnapshotPlan, TableProgress
from services.bridge.snapshot.tables import Chunk


class NextChunk(NamedTuple):
    """A chunk of `table`, read after the key `last`.

    `others`: the tables with keys that are read after it, in order, where it may end in this chunk.
    """

    table: TableProgress
    last: list[str] | None
    others: Sequence[TableProgress]


def next_chunk(
    plan: SnapshotPlan,
    taken: Sequence[tuple[TableProgress, Chunk]],
    rows_estimates: Mapping[str, int],
    rows_max: int,
) -> NextChunk | None:
    """Return what is read next once the chunks `taken` are in Kafka; None: nothing is left."""
    read = {table.shape.name: chunk for table, chunk in taken}
    ended = {name for name, chunk in read.items() if chunk.ends}
    left = [
        table
        for name, table in plan.tables.items()
        if not (table.done or table.paused or name in ended)
    ]
    if not left:
        return None
    table, last, rows = left[0], left[0].last, left[0].rows
    name = table.shape.name
    if name in read:
        last, rows = read[name].last or last, rows + read[name].row_count
    fits = may_end(rows, rows_estimates.get(name, -1), rows_max)
    return NextChunk(table, last, [one for one in left[1:] if not one.before] if fits else [])


def may_end(rows: int, rows_estimate: int, rows_max: int) -> bool:
    """Whether a table of which `rows` are read may have no rows after its next `rows_max`.

    `rows_estimate` -1: there is none. Once rows are read, one that is missing or too low does not
    count.
    """
    left = rows_estimate - rows
    return left <= rows_max and (left > 0 or rows == 0)
