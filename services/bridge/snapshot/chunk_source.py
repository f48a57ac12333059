"""Reads a chunk of rows for the place where the stream stands still.

    see      a database snapshot that sees all that was published before
    read     the next rows of the table, under it; or on a standby that has replayed all it sees
    others   where the table ends, rows of the tables after it, under the same snapshot
    secure   the next mark is written; the standbys have all that was seen

What can't be had at once raises NotNow: it is tried again later, the stream goes on meanwhile.
Other tables that can't be had with the first one are left out: each becomes the first one.
"""

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

import structlog

from schemas.errors import SetupError
from schemas.snapshot import ReadFrom
from services.bridge.failpoints import reach
from services.bridge.snapshot.pace import Patience
from services.bridge.snapshot.places import WINDOW_MAX
from services.bridge.snapshot.progress import TableProgress
from services.bridge.snapshot.reader import SnapshotReader
from services.bridge.snapshot.reader_thread import LOOK_S, ReaderThread
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
OTHERS_MAX: Final = 15
"""How many other tables are locked for a chunk: sixteen locks are cheap (lock.c, fast path)."""
_ALONE_S: Final = 5.0
"""How long tables are read one by one after not all of a chunk's could be locked."""


class WrittenMark(NamedTuple):
    """A mark in the WAL: what it says, and where its record ends."""

    token: str
    end_lsn: int


class SeenChunks(NamedTuple):
    """Chunks of tables, a database snapshot, and the next mark: these bound what the rows show.

    `waited_s`: how long the stream stood still for what does not depend on the chunks' size.
    """

    chunks: list[tuple[TableProgress, Chunk]]
    sight: Sight
    next_mark: WrittenMark
    read_from: ReadFrom
    waited_s: float


class ChunkSource:
    """One session's. The stream stands still from `take` to `end`."""

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
        table: TableProgress,
        others: Sequence[TableProgress],
        published: PublishedXids,
        *,
        rows_max: int,
        bytes_max: int,
    ) -> SeenChunks:
        """Return the table's next chunk; if the table ends there, also chunks of some `others`.

        Raise NotNow where the table's chunk can't be had at this moment. The tables stay locked
        against changes of their form until `end`. `others` have keys.
        """
        began = time.monotonic()
        from_standby = self._standby_for(table) is not None
        alike = [one for one in others if (self._standby_for(one) is not None) == from_standby]
        locked = alike[:OTHERS_MAX] if began > self._alone_until else []
        sight = self._see(table, locked, published)
        reach("chunk begun")
        require_in_window(table, sight)
        found = self._of_form(self._reader, table, *locked)
        standby = self._begin_on_standby(table, locked)
        read_began = time.monotonic()
        chunk = self._read(standby or self._reader, table, rows_max=rows_max, bytes_max=bytes_max)
        chunks = [(table, chunk)]
        if chunk.ends and from_standby == (standby is not None):
            rows_max, bytes_max = rows_max - chunk.looked_at, bytes_max - chunk.bytes
            until = read_began + self._hold_s
            chunks += self._read_others(standby, found, rows_max, bytes_max, until)
        replayed = 0 if standby is None else self._thread.call(standby.finish)
        read_s = time.monotonic() - read_began
        reach("chunk read")
        next_mark = self._secure()
        if standby is not None:
            require_written(replayed, next_mark.end_lsn, standby.name)
        reach("chunk secured")
        read_from: ReadFrom = "primary" if standby is None else "standby"
        return SeenChunks(chunks, sight, next_mark, read_from, time.monotonic() - began - read_s)

    def end(self) -> None:
        """End the chunk's transactions, if there are any."""
        self._thread.call(self._reader.end)
        if self._standby is not None:
            self._thread.call(self._standby.end)

    def _see(
        self, table: TableProgress, others: list[TableProgress], published: PublishedXids
    ) -> Sight:
        """Take a database snapshot that sees all that was published, begun on the tables."""
        shapes = [one.shape for one in (table, *others)]
        until = time.monotonic() + self._visible.seconds
        while True:
            try:
                sight = self._thread.call(self._reader.begin, *shapes)
            except (NotNow, SetupError) as error:
                self._alone_until = time.monotonic() + _ALONE_S
                if others and isinstance(error, SetupError):  # one of them may be the cause
                    raise NotNow(f"the tables can't be locked together: {error}") from error
                raise
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
            self._thread.waiter.pause(LOOK_S / 5)

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
        seen_lsn = self._thread.call(self._reader.mark, uuid.uuid4().hex)
        with self._replayed.kept():
            if not self._thread.call(standby.await_replay, seen_lsn, self._replayed.seconds):
                return None
        self._thread.call(standby.begin, *[one.shape for one in (table, *others)])
        self._of_form(standby, table)
        if self._is_in_order(standby, table):
            return standby
        self._thread.call(standby.end)
        return None

    def _is_in_order(self, standby: Standby, table: TableProgress) -> bool:
        """Whether the standby orders the table's rows as the primary; where not, tell so once."""
        given = (table.shape, table.where)
        here = self._thread.call(self._reader.order_versions, *given)
        found = order_difference(here, self._thread.call(standby.order_versions, *given))
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
        found = {one.relation.oid: one for one in self._thread.call(reader.shapes, oids)}
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
    ) -> list[tuple[TableProgress, Chunk]]:
        """Read tables in their order, several at once with several workers, within these limits."""
        chunks: list[tuple[TableProgress, Chunk]] = []
        try:
            if standby is not None and others:
                others = self._of_form(standby, None, *others)
            while others and rows_max > 0 and bytes_max > 0 and time.monotonic() < until:
                group, others = others[: self._workers], others[self._workers :]
                if standby is not None:
                    group = [one for one in group if self._is_in_order(standby, one)]
                given = [(one.shape, one.last, one.where) for one in group]
                found = self._thread.call(
                    (standby or self._reader).read_each,
                    given,
                    rows_max=rows_max,
                    bytes_max=bytes_max,
                )
                chunks += zip(group, found, strict=False)
                rows_max -= sum(one.looked_at for one in found)
                bytes_max -= sum(one.bytes for one in found)
        except (NotNow, SetupError) as error:
            self._alone_until = time.monotonic() + _ALONE_S
            if standby is not None:  # which is to tell how far it is in this transaction
                raise NotNow(f"another table can't be read with it: {error}") from error
        return chunks

    def _read(
        self, reader: RowReader, table: TableProgress, *, rows_max: int, bytes_max: int
    ) -> Chunk:
        try:
            return self._thread.call(
                reader.read,
                table.shape,
                table.last,
                table.where,
                table.before,
                rows_max=rows_max,
                bytes_max=bytes_max,
            )
        except NotNow as reason:
            if reason.never:
                self._leave_to_primary(table, str(reason))
            raise
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
            self._thread.waiter.pause(LOOK_S)
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
