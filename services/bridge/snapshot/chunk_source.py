"""Reads a chunk of rows for the place where the stream stands still.

    read       in the thread: a database snapshot, and under it the next rows of the table; or on a
               standby that has replayed all it sees; where the table ends, rows of tables after it
    judge      that snapshot sees all that was published before the place; else read again
    secure     the next mark is written; the standbys have all that was seen
    ahead      behind that mark, the next chunk is read, while this one goes to Kafka

What can't be had at once raises NotNow: it is tried again later, the stream goes on meanwhile.
Other tables that can't be had with the first one are left out: each becomes the first one.
"""

import time
import uuid
from concurrent.futures import Future
from typing import Final, NamedTuple

import structlog

from schemas.errors import SetupError
from schemas.snapshot import ReadFrom
from services.bridge.failpoints import reach
from services.bridge.snapshot.next_chunk import NextChunk
from services.bridge.snapshot.pace import Patience
from services.bridge.snapshot.places import WINDOW_MAX
from services.bridge.snapshot.progress import TableProgress
from services.bridge.snapshot.reader import SnapshotReader
from services.bridge.snapshot.reader_thread import ReaderThread
from services.bridge.snapshot.row_order import order_difference
from services.bridge.snapshot.row_reader import NotNow, RowReader
from services.bridge.snapshot.standby import NEAR_S, Standby
from services.bridge.snapshot.standby_state import require_written
from services.bridge.snapshot.tables import Chunk, shape_difference
from services.bridge.snapshot.visibility import PublishedXids, Sight

logger = structlog.get_logger(__name__)

_VISIBLE_S: Final = 0.3
_REPLAYED_S: Final = 0.5
_SECURED_S: Final = 1.0
_LOOK_S: Final = 0.002
_AHEAD_S: Final = 1.0
"""How long other tables are begun while the stream goes on."""
OTHERS_MAX: Final = 31
"""How many other tables are locked for a chunk, out of 64 locks for each session, by default."""
_ALONE_S: Final = 5.0
"""How long tables are read one by one after not all of a chunk's could be locked."""


class WrittenMark(NamedTuple):
    """A mark in the WAL: its token, and where its record ends."""

    token: str
    end_lsn: int


Chunks = list[tuple[TableProgress, Chunk]]


class ReadChunks(NamedTuple):
    """Chunks of tables, and the database snapshot that they were read under.

    `replayed`: how far the standby was that they were read from, by its name; "": the primary.
    `read_s`: how long reading took.
    """

    chunks: Chunks
    sight: Sight
    replayed: int
    standby: str
    read_s: float


class SeenChunks(NamedTuple):
    """Chunks of tables, a database snapshot, and the next mark: these bound what the rows show.

    `waited_s`: how long the stream stood still for what does not depend on the chunks' size.
    """

    chunks: Chunks
    sight: Sight
    next_mark: WrittenMark
    read_from: ReadFrom
    waited_s: float


class Ahead(NamedTuple):
    """Chunks that are read for the mark `token`."""

    token: str
    wanted: NextChunk
    read: Future[ReadChunks]


class ChunkSource:
    """One session's. The stream stands still in `take`."""

    def __init__(
        self,
        reader: SnapshotReader,
        standby: Standby | None,
        thread: ReaderThread,
        *,
        standby_wait_s: float,
        hold_s: float = 0.1,
        workers: int = 1,
    ) -> None:
        """Take `workers` other tables at once, and begin none after `hold_s`."""
        self._hold_s = hold_s
        self._workers = workers
        self._alone_until = 0.0
        self._ahead: Ahead | None = None
        self._reader = reader
        self._standby = standby
        self._thread = thread
        self._visible, self._secured = Patience(_VISIBLE_S), Patience(_SECURED_S)
        self._near = Patience(NEAR_S, standby_wait_s)
        self._replayed = Patience(_REPLAYED_S, standby_wait_s)
        self._on_primary: set[int] = set()
        """Tables (oid) that the standby can't read, or whose rows it may find otherwise."""
        self._not_judged: set[str] = set()

    def mark(self, token: str, table: TableProgress | None) -> Future[int]:
        """Write a mark for the next chunk of `table`, once its standby is near; do not wait.

        The stream goes on meanwhile, however far the standby is behind.
        """
        return self._thread.submit(self._mark, token, table)

    def _mark(self, token: str, table: TableProgress | None) -> int:
        if table is not None and (standby := self._standby_for(table)) is not None:
            with self._near.kept():
                standby.approach(self._reader.flushed_lsn(), self._near.seconds)
        return self._reader.mark(token)

    def take(
        self,
        token: str,
        wanted: NextChunk,
        published: PublishedXids,
        rows_max: int,
        bytes_max: int,
    ) -> SeenChunks:
        """Return the next chunk; if its table ends there, also chunks of some of the others.

        It belongs at the mark `token`. Raise NotNow where the chunk can't be had at this moment.
        """
        began = time.monotonic()
        read, read_s = self._taken_ahead(token, wanted), time.monotonic() - began
        if read is None or not published.seen_by(read.sight):
            read = self._thread.call(self._read, wanted, published, rows_max, bytes_max)
            read_s = read.read_s
        next_mark = self._thread.call(self._secure)
        if read.standby:
            require_written(read.replayed, next_mark.end_lsn, read.standby)
        reach("chunk secured")
        read_from: ReadFrom = "standby" if read.standby else "primary"
        waited_s = time.monotonic() - began - read_s
        return SeenChunks(read.chunks, read.sight, next_mark, read_from, waited_s)

    def read_ahead(self, token: str, wanted: NextChunk, rows_max: int, bytes_max: int) -> None:
        """Read a chunk for the mark `token`, which is written already; do not wait.

        All that the stream brings before the mark was committed before it was written: so the
        database snapshot that is taken now nearly always sees it.
        """
        read = self._thread.submit(self._read, wanted, None, rows_max, bytes_max)
        self._ahead = Ahead(token, wanted, read)

    def _taken_ahead(self, token: str, wanted: NextChunk) -> ReadChunks | None:
        """Return what was read ahead for this mark, None where that is another chunk."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.token != token:
            return None
        if ahead.wanted.table is not wanted.table or ahead.wanted.last != wanted.last:
            return None
        return self._thread.result(ahead.read)

    def _read(
        self, wanted: NextChunk, published: PublishedXids | None, rows_max: int, bytes_max: int
    ) -> ReadChunks:
        """Read chunks, in transactions of their own; in the thread."""
        table, last, others = wanted
        from_standby = self._standby_for(table) is not None
        alike = [one for one in others if (self._standby_for(one) is not None) == from_standby]
        locked = alike[:OTHERS_MAX] if time.monotonic() > self._alone_until else []
        try:
            sight = self._see(table, locked, published)
            reach("chunk begun")
            require_in_window(table, sight)
            found = self._of_form(self._reader, table, *locked)
            standby = self._begin_on_standby(table, locked)
            began = time.monotonic()
            limits = {"rows_max": rows_max, "bytes_max": bytes_max}
            chunk = self._read_first(standby or self._reader, table, last, **limits)
            chunks = [(table, chunk)]
            if chunk.ends and from_standby == (standby is not None):
                rows_max, bytes_max = rows_max - chunk.looked_at, bytes_max - chunk.bytes
                until = began + (_AHEAD_S if published is None else self._hold_s)
                chunks += self._read_others(standby, found, rows_max, bytes_max, until)
            replayed = 0 if standby is None else standby.finish()
            reach("chunk read")
            name = "" if standby is None else standby.name
            return ReadChunks(chunks, sight, replayed, name, time.monotonic() - began)
        finally:
            self._end()

    def _end(self) -> None:
        """End the chunk's transactions, if there are any."""
        self._reader.end()
        if self._standby is not None:
            self._standby.end()

    def _see(
        self, table: TableProgress, others: list[TableProgress], published: PublishedXids | None
    ) -> Sight:
        """Take a database snapshot that sees all that was published, begun on the tables.

        None: that is judged later.
        """
        shapes = [one.shape for one in (table, *others)]
        until = time.monotonic() + self._visible.seconds
        while True:
            try:
                sight = self._reader.begin(*shapes)
            except (NotNow, SetupError) as error:
                self._alone_until = time.monotonic() + _ALONE_S
                if others and isinstance(error, SetupError):  # one of them may be the cause
                    raise NotNow(f"the tables can't be locked together: {error}") from error
                raise
            if published is None or published.seen_by(sight):
                self._visible.met()
                return sight
            if sight.xmin < published.floor:
                raise NotNow(
                    "transactions that were open when the snapshot began have not ended yet"
                )
            if time.monotonic() > until:
                self._visible.lost()
                raise NotNow("published transactions are not visible yet")
            self._end()
            time.sleep(_LOOK_S)

    def _standby_for(self, table: TableProgress) -> Standby | None:
        """Return where the table's rows are to be read; None: from the primary."""
        on_primary = table.before is not None or table.shape.relation.oid in self._on_primary
        return None if on_primary else self._standby

    def _begin_on_standby(
        self, table: TableProgress, others: list[TableProgress]
    ) -> Standby | None:
        """Begin on the standby, once it has all that the primary's snapshot sees.

        That is what precedes a message that is written now. The primary's lock stays: the table has
        one form on both. None: there is no standby to read from.
        """
        standby = self._standby_for(table)
        if standby is None:
            return None
        seen_lsn = self._reader.mark(uuid.uuid4().hex)
        with self._replayed.kept():
            if not standby.await_replay(seen_lsn, self._replayed.seconds):
                return None
        standby.begin(*[one.shape for one in (table, *others)])
        self._of_form(standby, table)
        if self._is_in_order(standby, table):
            return standby
        standby.end()
        return None

    def _is_in_order(self, standby: Standby, table: TableProgress) -> bool:
        """Tell whether the standby orders the table's rows as the primary; log once if not."""
        given = (table.shape, table.where)
        here = self._reader.order_versions(*given)
        found = order_difference(here, standby.order_versions(*given))
        if found.different:
            self._leave_to_primary(table, f"the standby has other collations: {found.different}")
        elif found.not_judged and found.not_judged not in self._not_judged:
            self._not_judged.add(found.not_judged)
            logger.warning(
                "not judged: whether the standby has the primary's collations, as neither server "
                "tells their versions",
                collations=found.not_judged,
            )
        return not found.different

    def _leave_to_primary(self, table: TableProgress, why: str) -> None:
        self._on_primary.add(table.shape.relation.oid)
        logger.warning(
            "rows of a table are read from the primary", table=table.shape.name, reason=why
        )

    def _of_form(
        self, reader: RowReader, table: TableProgress | None, *others: TableProgress
    ) -> list[TableProgress]:
        """Return `others` that have the form that was planned; ask the catalogs once for all.

        Raise NotNow where `table` has another one.
        """
        tables = others if table is None else (table, *others)
        oids = [one.shape.relation.oid for one in tables]
        found = {one.relation.oid: one for one in reader.shapes(oids)}
        seen = None if table is None else found.get(table.shape.relation.oid)
        if table is not None and seen != table.shape:
            differs = shape_difference(table.shape, seen)
            raise NotNow(f"the table has another form than at its mark: {differs}", changed=True)
        return [one for one in others if found.get(one.shape.relation.oid) == one.shape]

    def _read_others(
        self,
        standby: Standby | None,
        others: list[TableProgress],
        rows_max: int,
        bytes_max: int,
        until: float,
    ) -> Chunks:
        """Read tables in their order, several at once with several workers, within these limits."""
        chunks: Chunks = []
        try:
            if standby is not None and others:
                others = self._of_form(standby, None, *others)
            while others and rows_max > 0 and bytes_max > 0 and time.monotonic() < until:
                group, others = others[: self._workers], others[self._workers :]
                if standby is not None:
                    group = [one for one in group if self._is_in_order(standby, one)]
                given = [(one.shape, one.last, one.where) for one in group]
                reader = standby or self._reader
                found = reader.read_each(given, rows_max=rows_max, bytes_max=bytes_max)
                chunks += zip(group, found, strict=False)
                rows_max -= sum(one.looked_at for one in found)
                bytes_max -= sum(one.bytes for one in found)
        except (NotNow, SetupError) as error:
            self._alone_until = time.monotonic() + _ALONE_S
            if standby is not None:  # which is to tell how far it is in this transaction
                raise NotNow(f"another table can't be read with it: {error}") from error
        return chunks

    def _read_first(
        self,
        reader: RowReader,
        table: TableProgress,
        last: list[str] | None,
        *,
        rows_max: int,
        bytes_max: int,
    ) -> Chunk:
        """Read a chunk of a table behind the key `last`. Raise NotNow where it must wait."""
        limits = {"rows_max": rows_max, "bytes_max": bytes_max}
        try:
            return reader.read(table.shape, last, table.where, table.before, **limits)
        except NotNow as reason:
            if reason.never:
                self._leave_to_primary(table, str(reason))
            raise
        except SetupError as error:
            if not table.asked:
                raise
            raise NotNow(f"the condition of a signal fails: {error.message}", slow=True) from error

    def _secure(self) -> WrittenMark:
        """Wait until no failover can take back what the rows were read from; in the thread.

        The next mark is flushed behind it: where the standbys have that, they have all of it.
        """
        token = uuid.uuid4().hex
        mark = WrittenMark(token, self._reader.mark(token))
        reach("chunk marked")
        until = time.monotonic() + self._secured.seconds
        while not self._reader.has_standbys_up_to(mark.end_lsn):
            if time.monotonic() > until:
                self._secured.lost()
                raise NotNow("the standbys in synchronized_standby_slots are behind")
            time.sleep(_LOOK_S)
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
