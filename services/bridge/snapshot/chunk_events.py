"""A chunk of rows as events: BEGIN, rows, END, at the mark where the stream stands. Pure."""

from typing import Final

from schemas.errors import SettingsError
from services.bridge.events.event import Event, Stamp
from services.bridge.snapshot.progress import SnapshotPlan, TableProgress
from services.bridge.snapshot.row_events import RowEvents
from services.bridge.snapshot.tables import Chunk
from services.bridge.snapshot.visibility import Sight

_XIDS: Final = 2**32


class ChunkEvents:
    """Makes the events of one session's chunks."""

    def __init__(self, row_events: RowEvents) -> None:
        self._row_events = row_events

    def rows(
        self,
        plan: SnapshotPlan,
        table: TableProgress,
        chunk: Chunk,
        sight: Sight,
        stamp: Stamp,
        lsn: int,
    ) -> tuple[list[Event], bool]:
        """Make the chunk's events; False where the table's key is not certain yet.

        `lsn`: the rows show nothing that was committed after. Raise SettingsError for rows whose
        events have no key.
        """
        if not chunk.rows:
            return [], True
        encoder, relation, count = self._row_events, table.shape.relation, len(chunk.rows)
        shapes, certain = encoder.describe(relation, stamp, (sight.xmin - 1) % _XIDS)
        if not certain:
            return shapes, False
        kinds = [plan.kind(table, n, count, ends=chunk.ends) for n in range(count)]
        rows = encoder.read(relation, chunk.rows, kinds.__getitem__, lsn)
        if not rows:  # a filter leaves them all out
            return shapes, True
        if rows[0].key is None and table.shape.key:
            raise SettingsError(
                f"events of {table.shape.name} have no key, so that no consumer could tell "
                "its rows from changes of them",
                operation="begin the snapshot",
                hint="set shaping.keys for it, or name it in snapshot.exclude",
            )
        return [*encoder.boundary("BEGIN"), *shapes, *rows, *encoder.boundary("END")], True
