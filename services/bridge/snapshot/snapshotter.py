"""Puts chunks of the tables' rows into the stream of changes, exactly where they belong.

    perform   a mark is written into the WAL                           the stream goes on
    emit      the mark arrives; a database snapshot is taken, which    the stream stands still
              sees all that was published before; the chunk is read
              under it; the next mark is written; the standbys have
              all that it saw; its rows go to Kafka as a transaction
              at the mark, with the progress that covers them

As the next mark lies behind all that was committed meanwhile, the stream catches up between two
chunks by itself. What can't be had at once (a locked table, a transaction that is decoded but not
visible yet, a standby that is behind) is tried again later; the stream goes on meanwhile.
"""

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from typing import Any, Final, ParamSpec, TypeVar

import structlog

from schemas.errors import SettingsError, SetupError
from schemas.snapshot import SnapshotSettings
from services.bridge import metrics
from services.bridge.events.event import Event, Stamp
from services.bridge.events.shaping.tables import Shaping
from services.bridge.failpoints import reach
from services.bridge.snapshot.pace import ChunkSize, Patience
from services.bridge.snapshot.progress import (
    ChunkPosition,
    Known,
    Owner,
    Plan,
    TableProgress,
    plan,
    progress_event,
    require_keys,
    told_progress,
)
from services.bridge.snapshot.reader import Chunk, Inspection, NotNow, SnapshotReader
from services.bridge.snapshot.requests import asked_by, request_event
from services.bridge.snapshot.row_events import RowEvents
from services.bridge.snapshot.visibility import Published, Sight
from services.bridge.transactions.assembler import EventBatch, size_of

logger = structlog.get_logger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_XIDS: Final = 2**32
_LOOK_S: Final = 0.01
"""How often the session does its other work while a chunk is read."""
_VISIBLE_S: Final = 0.3
_SECURED_S: Final = 1.0
_AGAIN_S: Final = 0.5
_AGAIN_LATER_S: Final = 5.0
_NEW_TABLES_S: Final = 30.0
_TELL_S: Final = 10.0


class Snapshotter:
    """One session's. `take` gets every batch; `while_waiting` does the session's other work."""

    def __init__(
        self,
        settings: SnapshotSettings,
        reader: SnapshotReader,
        row_events: RowEvents,
        found: Known,
        shaping: Shaping,
        owner: Owner,
        prefix: str,
        *,
        bytes_max: int,
        take: Callable[[EventBatch], None],
        while_waiting: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._reader = reader
        self._row_events = row_events
        own = [one for one in found.progress if one.slot == owner.slot]
        self._found = {(one.schema_, one.table): one for one in own}
        self._requests = [*found.requests]
        self._shaping = shaping
        self._owner = owner
        self._prefix = prefix
        self._bytes_max = bytes_max
        self._take = take
        self._while_waiting = while_waiting
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._size = ChunkSize(settings.chunk_rows_max, settings.hold_ms / 1000)
        self._visible, self._secured = Patience(_VISIBLE_S), Patience(_SECURED_S)
        self._published: Published | None = None
        self._plan: Plan | None = None
        self._estimates: dict[str, int] = {}
        self._inspecting: Future[Inspection] | None = None
        self._marking: Future[int] | None = None
        self._awaited = ""
        self._due = self._told = 0.0
        self._refused_told = ""

    @property
    def over(self) -> bool:
        """Whether all rows are read, and nothing else is wanted (`initial_only`)."""
        return (
            self._settings.mode == "initial_only"
            and self._plan is not None
            and self._plan.done == len(self._plan.tables)
        )

    def close(self) -> None:
        """End the connections and what runs on them."""
        self._reader.interrupt()
        self._pool.shutdown(wait=True)
        self._reader.close()

    def perform(self, now: float) -> None:
        """Begin what is due at `now` (time.monotonic); does not block. Raises SlotbridgeError."""
        try:
            self._begin_due(now)
        except NotNow as reason:
            self._awaited, self._due = "", now + _AGAIN_LATER_S
            if now - self._told > _TELL_S:
                self._told = now
                logger.warning("the snapshot waits", reason=str(reason))

    def _begin_due(self, now: float) -> None:
        if self._marking is not None and self._marking.done():
            marking, self._marking = self._marking, None
            marking.result()
        if self._inspecting is not None:
            if self._inspecting.done():
                inspecting, self._inspecting = self._inspecting, None
                self._learn(inspecting.result(), now)
        elif now >= self._due and not self._awaited:
            if self._plan is None or self._plan.next is None:
                self._published = Published()  # before the xid that is taken now
                self._inspecting = self._pool.submit(self._reader.inspect)
            else:
                self._mark()

    def emit(self, batch: EventBatch) -> None:
        """Hand a batch on; where it is a mark that was awaited, with a chunk of rows."""
        if batch.mark:
            if batch.mark == self._awaited:
                batch = self._fill(batch)
        elif self._published is not None:
            self._published.add(one.stamp.xid for one in batch.ended)
            if batch.stamp is not None:
                self._published.add([batch.stamp.xid])
        if self._settings.signal_table is not None and batch.events and not batch.mark:
            batch = self._with_requests(batch)
        self._take(batch)
        if batch.mark and batch.events:
            reach("chunk handed")

    def _with_requests(self, batch: EventBatch) -> EventBatch:
        """Add the requests of signals that the batch has; the tables are planned anew."""
        table, owner = self._settings.signal_table or "", self._owner
        asked, ignored = asked_by(batch, table, owner.slot, owner.timeline)
        for id_, reason in ignored:
            logger.warning("a signal is ignored", id=id_, reason=reason)
        if not asked:
            return batch
        for one in asked:
            logger.info("a signal came", id=one.id, type=one.type, tables=one.tables)
        self._requests += asked
        self._plan, self._awaited, self._due = None, "", 0.0
        records = [request_event(self._prefix, one) for one in asked]
        staging, size = [*batch.staging, *records], batch.bytes + size_of(records)
        return batch._replace(staging=staging, bytes=size)

    def _learn(self, seen: Inspection, now: float) -> None:
        """Take the published tables as they are now."""
        assert self._published is not None
        self._published.floor = seen.xid
        self._estimates = seen.rows_estimates
        known = (self._found.values(), self._settings, self._shaping, self._owner, self._requests)
        found = plan(seen.shapes, *known)
        if not (self._found or self._requests):
            require_keys(found)
        if found.refusals and found.refusals != self._refused_told:
            logger.warning(
                "rows of tables that can't be read by their key are not published",
                tables=found.refusals,
                hint="give them a primary key, or name them in snapshot.exclude",
            )
        self._refused_told = found.refusals
        if found.undone:
            logger.warning(
                "rows that a snapshot read may show changes that the failover has undone: the "
                "tables are read anew, and rows that only the lost timeline had stay in Kafka",
                tables=", ".join(found.undone),
                hint="name the standby's slot in synchronized_standby_slots",
            )
        if self._plan is None or found.next is not None:
            logger.info(
                "snapshot", tables=len(found.tables), done=found.done, refused=len(found.refused)
            )
        self._plan = found
        self._tell_tables()
        if found.next is None:
            self._published = None
            self._due = now + _NEW_TABLES_S

    def _mark(self) -> None:
        self._awaited = uuid.uuid4().hex
        self._marking = self._pool.submit(self._reader.mark, self._awaited)
        reach("chunk marked")

    def _fill(self, batch: EventBatch) -> EventBatch:
        """Return the batch with the next chunk of rows, or as it is where none can be had now."""
        self._awaited = ""
        found = self._plan
        table = found.next if found is not None else None
        if found is None or table is None or batch.position.seq:
            return batch
        began = time.monotonic()
        try:
            filled, count = self._chunk(batch, found, table)
        except NotNow as reason:
            self._postpone(table, reason)
            return batch
        finally:
            self._call(self._reader.end)
            took_s = time.monotonic() - began
            metrics.SNAPSHOT_HOLD_SECONDS.observe(took_s)
        self._size.learn(count, took_s)
        self._tell(found, table)
        return filled

    def _chunk(
        self, batch: EventBatch, found: Plan, table: TableProgress
    ) -> tuple[EventBatch, int]:
        shape = table.shape
        sight = self._see(table)
        reach("chunk begun")
        if self._call(self._reader.shape, shape.relation.oid) != shape:
            raise NotNow("the table has another form than at its mark", changed=True)
        try:
            chunk = self._call(
                self._reader.read,
                *(shape, table.last, table.where),
                rows_max=self._size.rows,
                bytes_max=self._bytes_max,
            )
        except SetupError as error:
            if not table.asked:
                raise
            raise NotNow(f"the condition of a signal fails: {error.message}", slow=True) from error
        reach("chunk read")
        seen_lsn = self._secure()
        reach("chunk secured")
        assert batch.stamp is not None
        events = self._events(batch.stamp, sight, found, table, chunk, seen_lsn)
        if events is None:
            return batch, 0
        end_lsn = batch.position.end_lsn
        self._owner = self._owner._replace(end_lsn=end_lsn)
        return batch._replace(events=events, bytes=size_of(events)), chunk.looked_at

    def _see(self, table: TableProgress) -> Sight:
        """Take a database snapshot that sees all that was published, begun on the table."""
        assert self._published is not None
        until = time.monotonic() + self._visible.seconds
        while True:
            sight: Sight = self._call(self._reader.begin, table.shape)
            if self._published.seen_by(sight):
                self._visible.met()
                return sight
            if sight.xmin < self._published.floor:
                raise NotNow(
                    "transactions that were open when the snapshot began have not ended yet"
                )
            if time.monotonic() > until:
                self._visible.lost()
                raise NotNow("published transactions are not visible yet")
            self._call(self._reader.end)
            self._while_waiting()
            time.sleep(_LOOK_S / 5)

    def _secure(self) -> int:
        """Wait until no failover can take back what the rows were read from.

        The next mark is flushed behind it: where the standbys have that, they have all of it.
        Return where that mark ends.
        """
        self._awaited = uuid.uuid4().hex
        lsn = self._call(self._reader.mark, self._awaited)
        reach("chunk marked")
        until = time.monotonic() + self._secured.seconds
        while not self._call(self._reader.has_standbys_up_to, lsn):
            if time.monotonic() > until:
                self._secured.lost()
                raise NotNow("the standbys in synchronized_standby_slots are behind")
            self._while_waiting()
            time.sleep(_LOOK_S)
        self._secured.met()
        return lsn

    def _events(
        self,
        stamp: Stamp,
        sight: Sight,
        found: Plan,
        table: TableProgress,
        chunk: Chunk,
        seen_lsn: int,
    ) -> list[Event] | None:
        """Make BEGIN, rows, END and the progress; None where the table's key is not certain yet."""
        encoder, relation, count = self._row_events, table.shape.relation, len(chunk.rows)
        events: list[Event] = []
        if chunk.rows:
            shapes, certain = encoder.describe(relation, stamp, (sight.xmin - 1) % _XIDS)
            if not certain:
                return shapes or None
            kinds = [found.kind(table, n, count, ends=chunk.ends) for n in range(count)]
            rows = encoder.read(relation, chunk.rows, kinds.__getitem__, seen_lsn)
            if rows[0].key is None:
                raise SettingsError(
                    f"events of {table.shape.name} have no key, so that no consumer could tell "
                    "its rows from changes of them",
                    operation="begin the snapshot",
                    hint="set shaping.keys for it, or name it in snapshot.exclude",
                )
            events = [*encoder.boundary("BEGIN"), *shapes, *rows, *encoder.boundary("END")]
        table.rows += count
        table.chunks += 1
        table.last, table.done = chunk.last or table.last, chunk.ends
        now_ms = time.time_ns() // 1_000_000
        position = ChunkPosition(stamp.commit_lsn, max(0, count - 1), seen_lsn)
        told = told_progress(self._owner, table, position, now_ms)
        self._found[told.schema_, told.table] = told
        metrics.SNAPSHOT_CHUNKS.inc()
        return [*events, progress_event(self._prefix, told)]

    def _postpone(self, table: TableProgress, reason: NotNow) -> None:
        metrics.SNAPSHOT_POSTPONED.inc()
        self._awaited = ""
        now = time.monotonic()
        self._due = now + _AGAIN_S
        if reason.changed:
            self._plan = None  # the next mark lies behind whatever has changed the table
        if reason.slow:
            self._size.shrink()
            self._due = now + _AGAIN_LATER_S
        if now - self._told > _TELL_S:
            self._told = now
            logger.info("a chunk is read later", table=table.shape.name, reason=str(reason))

    def _tell(self, found: Plan, table: TableProgress) -> None:
        now = time.monotonic()
        if table.done or now - self._told > _TELL_S:
            self._told = now
            logger.info(
                "table is done" if table.done else "reading a table",
                table=table.shape.name,
                rows=table.rows,
                rows_about=max(self._estimates.get(table.shape.name, -1), table.rows),
                tables_done=found.done,
                tables=len(found.tables),
            )
        if table.done:
            self._tell_tables()
        if found.next is None:
            logger.info("snapshot is done", tables=found.done)
            self._published, self._due = None, now + _NEW_TABLES_S
            self._awaited = ""

    def _tell_tables(self) -> None:
        found = self._plan
        if found is not None:
            waiting = len(found.tables) - found.done
            for state, count in (
                ("waiting", waiting),
                ("done", found.done),
                ("refused", len(found.refused)),
            ):
                metrics.SNAPSHOT_TABLES.labels(state).set(count)

    def _call(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Call it in the reader's thread; the session does its other work meanwhile."""
        future: Future[Any] = self._pool.submit(function, *args, **kwargs)
        while True:
            try:
                result: Result = future.result(_LOOK_S)
            except StillRunning:
                if future.done():
                    raise
                self._while_waiting()
            else:
                return result
