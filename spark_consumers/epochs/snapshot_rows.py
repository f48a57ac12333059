"""The LSN up to which inserts may concern rows that a snapshot has brought already.

A chunk of rows (op r) is read a moment after its place among the transactions, and may show what
commits after that place: an insert of such a row comes once more, as a change, maybe in a later
epoch. Up to the LSN that the rows tell, inserts are therefore merged by key instead of appended. A
property of the table says so, which the commit that brings the rows sets.
"""

from collections.abc import Mapping
from dataclasses import replace

from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.tables import OpenTable, State


def raise_bounds(
    seen: Mapping[str, int], opened: dict[str, OpenTable], states: dict[str, State]
) -> None:
    """Raise the bounds of tables that get rows of a snapshot, in `opened` and in `states`.

    `seen`: the LSN that the rows of each table tell, 0 without such rows.
    """
    for name, lsn in seen.items():
        table, state = opened[name], states.get(name)
        if lsn > max(table.seen_lsn, 0):
            opened[name] = replace(table, seen_lsn=lsn)
            if state is not None:
                states[name] = replace(state, seen_lsn=lsn)


def bound(table: OpenTable) -> dict[str, str]:
    """Return the property that tells a table's bound, {} where it has no rows of a snapshot."""
    return {catalog.SEEN_LSN: str(table.seen_lsn)} if table.seen_lsn > 0 else {}
