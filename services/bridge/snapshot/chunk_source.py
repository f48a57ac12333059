"""Reads a chunk of rows for the place where the stream stands still.

    see      a database snapshot that sees all that was published before
    read     the next rows of the table, under it
    secure   the next mark is written; the standbys have all that was seen

What can't be had at once raises NotNow: it is tried again later, the stream goes on meanwhile.
"""

import time
import uuid
from typing import Final, NamedTuple

from schemas.errors import SetupError
from services.bridge.failpoints import reach
from services.bridge.snapshot.pace import Patience
from services.bridge.snapshot.places import WINDOW_MAX
from services.bridge.snapshot.progress import TableProgress
from services.bridge.snapshot.reader import NotNow, SnapshotReader
from services.bridge.snapshot.reader_thread import LOOK_S, ReaderThread
from services.bridge.snapshot.tables import Chunk
from services.bridge.snapshot.visibility import Published, Sight

_VISIBLE_S: Final = 0.3
_SECURED_S: Final = 1.0


class WrittenMark(NamedTuple):
    """A mark in the WAL: what it says, and where its record ends."""

    token: str
    end_lsn: int


class SeenChunk(NamedTuple):
    """A chunk, the database snapshot of its rows, and the next mark: it bounds what they show."""

    chunk: Chunk
    sight: Sight
    next_mark: WrittenMark


class ChunkSource:
    """One session's. The stream stands still from `take` to `end`."""

    def __init__(self, reader: SnapshotReader, thread: ReaderThread) -> None:
        self._reader = reader
        self._thread = thread
        self._visible, self._secured = Patience(_VISIBLE_S), Patience(_SECURED_S)

    def take(
        self, table: TableProgress, published: Published, *, rows_max: int, bytes_max: int
    ) -> SeenChunk:
        """Return the table's next chunk. Raise NotNow where it can't be had at this moment.

        The table stays locked against changes of its form until `end`.
        """
        sight = self._see(table, published)
        reach("chunk begun")
        chunk = self._read(table, sight, rows_max=rows_max, bytes_max=bytes_max)
        reach("chunk read")
        next_mark = self._secure()
        reach("chunk secured")
        return SeenChunk(chunk, sight, next_mark)

    def end(self) -> None:
        """End the chunk's transaction, if there is one."""
        self._thread.call(self._reader.end)

    def _see(self, table: TableProgress, published: Published) -> Sight:
        """Take a database snapshot that sees all that was published, begun on the table."""
        until = time.monotonic() + self._visible.seconds
        while True:
            sight = self._thread.call(self._reader.begin, table.shape)
            if published.seen_by(sight):
                self._visible.met()
                return sight
            if sight.xmin < published.floor:
                raise NotNow(
                    "transactions that were open when the snapshot began have not ended yet"
                )
            if time.monotonic() > until:
                self._visible.lost()
                raise NotNow("published transactions are not visible yet")
            self.end()
            self._thread.while_waiting()
            time.sleep(LOOK_S / 5)

    def _read(self, table: TableProgress, sight: Sight, *, rows_max: int, bytes_max: int) -> Chunk:
        shape = table.shape
        require_in_window(table, sight)
        if self._thread.call(self._reader.shape, shape.relation.oid) != shape:
            raise NotNow("the table has another form than at its mark", changed=True)
        try:
            return self._thread.call(
                self._reader.read,
                *(shape, table.last, table.where, table.before),
                rows_max=rows_max,
                bytes_max=bytes_max,
            )
        except SetupError as error:
            if not table.asked:
                raise
            raise NotNow(f"the condition of a signal fails: {error.message}", slow=True) from error

    def _secure(self) -> WrittenMark:
        """Wait until no failover can take back what the rows were read from.

        The next mark is flushed behind it: where the standbys have that, they have all of it.
        """
        token = uuid.uuid4().hex
        mark = WrittenMark(token, self._thread.call(self._reader.mark, token))
        reach("chunk marked")
        until = time.monotonic() + self._secured.seconds
        while not self._thread.call(self._reader.has_standbys_up_to, mark.end_lsn):
            if time.monotonic() > until:
                self._secured.lost()
                raise NotNow("the standbys in synchronized_standby_slots are behind")
            self._thread.while_waiting()
            time.sleep(LOOK_S)
        self._secured.met()
        return mark


def require_in_window(table: TableProgress, sight: Sight) -> None:
    """Raise SetupError where the xids of a table's rows may mean others than when it was begun."""
    if table.before is not None and sight.xmax - table.before.sight.xmax >= WINDOW_MAX:
        raise SetupError(
            "2^31 transactions have begun since the slot was made: rows from before it can't be "
            "told from later ones any more",
            operation="read rows",
            subject=table.shape.name,
            hint="name it in snapshot.exclude",
        )
