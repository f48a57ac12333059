"""Chunks of rows as events: BEGIN, rows, END, at the mark where the stream stands. Pure."""

from functools import partial
from typing import Final

from schemas.errors import SettingsError
from services.bridge.events.event import EVENT_OVERHEAD_BYTES, Event, Stamp, size_of
from services.bridge.snapshot.progress import SnapshotPlan, TableProgress
from services.bridge.snapshot.row_events import RowEvents
from services.bridge.snapshot.tables import Chunk
from services.bridge.snapshot.visibility import Sight

_XIDS: Final = 2**32


class ChunkEvents:
    """Makes the events of one session's chunks: `begin`, then `rows` of each table, then `whole`.

    `lsn`: the rows show nothing that was committed after. `count`: rows so far, of all tables;
    `bytes`: of their events, in memory; `described`: whether a table is new.
    """

    def __init__(self, row_events: RowEvents) -> None:
        self._row_events = row_events
        self._events: list[Event] = []
        self._begin: list[Event] = []
        self._lsn = self.count = self.bytes = 0
        self.described = False
        self._any = False

    def begin(self, stamp: Stamp, sight: Sight, lsn: int) -> None:
        """Begin the transaction `stamp`."""
        self._row_events.begin_chunks(stamp, (sight.xmin - 1) % _XIDS)
        self._begin = self._row_events.boundary("BEGIN")
        self._events, self._lsn, self._any = [], lsn, False
        self.count = self.bytes = 0
        self.described = False

    def rows(self, plan: SnapshotPlan, table: TableProgress, chunk: Chunk) -> tuple[int, bool]:
        """Make the events of a table's chunk; False where the table's key is not certain yet.

        Return also the bytes of their keys and values. Raise SettingsError for rows whose events
        have no key.
        """
        count = chunk.row_count
        if not count:
            return 0, True
        encoder, relation = self._row_events, table.shape.relation
        self.described |= relation.oid not in encoder.tables
        shapes, certain = encoder.describe(
            relation, self.count, partitioned=table.shape.partitioned
        )
        self._events += shapes
        self.bytes += size_of(shapes)
        if not certain:
            return 0, False
        kind = partial(plan.kind, table, count=count, ends=chunk.ends)
        rows, size = encoder.read(relation, chunk.parts, kind, self._lsn, self.count)
        if not rows:  # a filter leaves them all out
            return 0, True
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
        self.bytes += size
        return size - EVENT_OVERHEAD_BYTES * len(rows), True

    def whole(self) -> list[Event]:
        """Return the events of all tables; BEGIN and END are around them if there is any row."""
        if not self._any:
            return self._events
        return [*self._begin, *self._events, *self._row_events.boundary("END")]
