"""Events of one table -> at most one change for each row, in the table's columns. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from spark_consumers.apply.events import RowEvent
from spark_consumers.apply.values import column
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.iceberg.layout import Layout
from spark_consumers.key_index.keys import Keys, keys_of


class FoldedChanges(NamedTuple):
    """The rows that an epoch's events leave in a table.

    `touched`: the keys whose rows are not as they were; None of a table without a key. `rows`:
    those that are there afterwards, in the table's columns; `keys`: theirs, in the same order.
    """

    rows: pa.Table
    keys: Keys | None
    touched: Keys | None


def changes_of(events: Iterable[RowEvent], layout: Layout) -> FoldedChanges:
    """Fold events: the last one of a key tells its row; without a key each one is a row."""
    given = sorted(
        (event for event in events if event.op != "t"), key=lambda e: (e.commit_lsn, e.seq)
    )
    last = _by_position(given) if layout.shape.keyless else _by_key(given, layout)
    left = [event for event in last if event.op != "d"]
    rows = _rows(left, layout)
    if layout.shape.keyless:
        if len(left) < len(last):
            raise Unsuited("a delete without a key")
        return FoldedChanges(rows, None, None)
    return FoldedChanges(rows, _keys(left, layout), _keys(last, layout))


def _by_position(events: Sequence[RowEvent]) -> list[RowEvent]:
    return list({(event.commit_lsn, event.seq): event for event in events}.values())


def _by_key(events: Sequence[RowEvent], layout: Layout) -> list[RowEvent]:
    """Return the last event of each key; its column's texts tell a key of the kinds of an index."""
    names = layout.shape.key
    try:
        return list({tuple(event.image[n] for n in names): event for event in events}.values())
    except LookupError as error:
        raise Unsuited("a row without a column of its key") from error


def _keys(events: Sequence[RowEvent], layout: Layout) -> Keys:
    columns = layout.shape.columns
    found = []
    for field in layout.key:
        texts = [event.image[columns[field.source_index].name] for event in events]
        if None in texts:
            raise Unsuited("a key without a value")
        found.append(column(texts, field.type))
    return keys_of(found)


def keys_in(rows: pa.Table, layout: Layout) -> Keys:
    """Return the keys of rows in the table's columns."""
    return keys_of([rows[field.name].combine_chunks() for field in layout.key])


def _rows(events: Sequence[RowEvent], layout: Layout) -> pa.Table:
    """Return the rows that events tell, each as a whole, in the table's columns."""
    names = layout.shape.names
    wanted = set(names)
    if any(event.image.keys() != wanted for event in events):
        raise Unsuited("a row of other columns")
    found: dict[str, pa.Array] = {}
    for field in layout.fields:
        name = names[field.source_index]
        found[field.name] = column([event.image[name] for event in events], field.type)
    found["_commit_lsn"] = pa.array([event.commit_lsn for event in events], pa.int64())
    found["_seq"] = pa.array([event.seq for event in events], pa.int64())
    return pa.table(found)
