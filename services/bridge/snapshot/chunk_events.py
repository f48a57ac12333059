"""Chunks of rows as events: BEGIN, rows, END, at the mark where the stream stands. Pure."""

from typing import Final

from schemas.errors import SettingsError
from services.bridge.events.event import Event, Stamp
from services.bridge.snapshot.progress import SnapshotPlan, TableProgress
from services.bridge.snapshot.row_events import RowEvents
from services.bridge.snapshot.tables import Chunk
from services.bridge.snapshot.visibility import Sight

_XIDS: Final = 2**32


class ChunkEvents:
    """Makes the events of one session's chunks: `begin`, then `rows` of each table, then `whole`.

    `lsn`: the rows show nothing that was committed after. `count`: rows so far, of all tables.
    """

    def __init__(self, row_events: RowEvents) -> None:
        self._row_events = row_events
        self._events: list[Event] = []
        self._begin: list[Event] = []
        self._lsn = self.count = 0
        self._any = False

    def begin(self, stamp: Stamp, sight: Sight, lsn: int) -> None:
        """Begin the transaction `stamp`."""
        self._row_events.begin_chunks(stamp, (sight.xmin - 1) % _XIDS)
        self._begin = self._row_events.boundary("BEGIN")
        self._events, self.count, self._lsn, self._any = [], 0, lsn, False

    def rows(
        self, plan: SnapshotPlan, table: TableProgress, chunk: Chunk
    ) -> tuple[list[Event], bool]:
        """Make the events of a table's chunk; False where the table's key is not certain yet.

        Raise SettingsError for rows whose events have no key.
        """
        if not chunk.rows:
            return [], True
        encoder, relation, count = self._row_events, table.shape.relation, len(chunk.rows)
        shapes, certain = encoder.describe(relation, self.count)
        self._events += shapes
        if not certain:
            return [], False
        kinds = [plan.kind(table, n, count, ends=chunk.ends) for n in range(count)]
        rows = encoder.read(relation, chunk.rows, kinds.__getitem__, self._lsn, self.count)
        if not rows:  # a filter leaves them all out
            return [], True
        if rows[0].key is None and table.shape.key:
            raise SettingsError(
                f"events of {table.shape.name} have no key, so that no consumer could tell "
                "its rows from changes of them",
                operation="begin the snapshot",
                hint="set shaping.keys for it, or name it in snapshot.exclude",
            )
        self._events += rows
        self._any = True
        self.count += count
        return rows, True

    def whole(self) -> list[Event]:
        """Return the events of all tables; BEGIN and END are around them if there is any row."""
        if not self._any:
            return self._events
        return [*self._begin, *self._events, *self._row_events.boundary("END")]
