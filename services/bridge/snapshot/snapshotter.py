"""Puts chunks of the tables' rows into the stream of changes, exactly where they belong.

    perform   a mark is written into the WAL                           the stream goes on
    emit      the mark arrives; a chunk is taken that was read under   the stream stands still
              a database snapshot which sees all that was published
              before; the next mark is written; the standbys have
              all that was seen; the rows go to Kafka as a transaction
              at the mark, with the progress that covers them

As the next mark lies behind all that was committed meanwhile, the stream catches up between two
chunks by itself. What can't be had at once (a locked table, a transaction that is decoded but not
visible yet, a standby that is behind) is tried again later; the stream goes on meanwhile.

    resting      no table has rows to read        inspecting, when it is due
    inspecting   the published tables are read    reading, or resting
    reading      tables have rows to read         resting; inspecting, when a signal or change comes
"""

import time
import uuid
from collections.abc import Callable
from typing import Final

import structlog

from schemas.errors import SetupError
from schemas.snapshot import SnapshotProgress, SnapshotSettings
from services.bridge import metrics
from services.bridge.events.event import Stamp, size_of
from services.bridge.events.shaping.tables import Shaping
from services.bridge.failpoints import reach
from services.bridge.pgoutput.messages import Relation
from services.bridge.snapshot.chunk_events import ChunkEvents
from services.bridge.snapshot.chunk_source import ChunkSource, SeenChunks
from services.bridge.snapshot.narration import Narration
from services.bridge.snapshot.next_chunk import next_chunk
from services.bridge.snapshot.pace import ChunkSize, RateLimit
from services.bridge.snapshot.pending import AwaitedMark, Inspecting, Reading
from services.bridge.snapshot.progress import (
    Apart,
    ChunkPosition,
    Known,
    Owner,
    SnapshotPlan,
    TableProgress,
    beginning_for,
    goes_on,
    plan,
    progress_event,
    progress_of,
)
from services.bridge.snapshot.readable import (
    refuse_conditions,
    refuse_parked,
    refuse_unfit,
    require_all_read,
    require_readable,
)
from services.bridge.snapshot.reader import Inspection, SnapshotReader
from services.bridge.snapshot.reader_thread import ReaderThread
from services.bridge.snapshot.row_events import RowEvents
from services.bridge.snapshot.row_reader import NotNow
from services.bridge.snapshot.signals import Signals
from services.bridge.snapshot.standby import Standby
from services.bridge.snapshot.tables import Chunk
from services.bridge.snapshot.visibility import PublishedXids
from services.bridge.transactions.assembler import EventBatch
from services.waiter import Waiter

logger = structlog.get_logger(__name__)

_AGAIN_S: Final = 0.5
_AGAIN_LATER_S: Final = 5.0
_NEW_TABLES_S: Final = 30.0


class Snapshotter:
    """One session's. `take` gets every batch; `waiter`: of a stream that stands still."""

    def __init__(
        self,
        settings: SnapshotSettings,
        reader: SnapshotReader,
        standby: Standby | None,
        row_events: RowEvents,
        found: Known,
        shaping: Shaping,
        owner: Owner,
        prefix: str,
        signals: Signals,
        *,
        parked: Callable[[Relation], str],
        bytes_max: int,
        take: Callable[[EventBatch], None],
        waiter: Waiter,
        durable_lsn: Callable[[], int],
    ) -> None:
        """`parked`: returns why a table has no topic, or ""."""
        self._parked = parked
        self._failed: dict[str, SetupError] = {}
        """Tables that could not be read; they are tried again in the next session, or if asked."""
        self._settings = settings
        self._reader = reader
        self._thread = ReaderThread(waiter)
        self._standby = standby
        self._source = ChunkSource(
            reader,
            standby,
            self._thread,
            standby_wait_s=settings.standby_wait_ms / 1000,
            hold_s=settings.hold_ms / 1000,
            workers=settings.workers,
        )
        self._events = ChunkEvents(row_events)
        own = [one for one in found.progress if one.slot == owner.slot]
        self._found = {(one.schema_, one.table): one for one in own}
        self._last = own[-1] if own else None
        """The last progress that Kafka has, of any table."""
        self._signals = signals
        self._signal_mark: AwaitedMark | None = None
        self._signals_due = 0.0
        read = settings.reads_without_key
        self._beginning = beginning_for(owner, found.beginnings) if read else None
        self._shaping = shaping
        self._owner = owner
        self._prefix = prefix
        self._bytes_max = bytes_max
        self._take = take
        self._size = ChunkSize(settings.chunk_rows_max, settings.hold_ms / 1000)
        self._rate = RateLimit(settings.rows_per_second_max)
        self.narration = Narration(durable_lsn)
        self._inspecting: Inspecting | None = None
        self._reading: Reading | None = None
        self._planned = False
        self._ended: SnapshotPlan | None = None
        """The plan of which no rows are left to read."""
        self._due = 0.0

    @property
    def over(self) -> bool:
        """Whether no rows are left to read, and nothing else is wanted (`initial_only`)."""
        return self._settings.mode == "initial_only" and self._ended is not None

    def require_all_read(self) -> None:
        """Raise SettingsError where it is over, but tables could not be read."""
        if self._ended is not None:
            require_all_read(self._ended)

    def close(self) -> None:
        """End the connections and what runs on them."""
        readers = [one for one in (self._reader, self._standby) if one is not None]
        for reader in readers:
            reader.interrupt()
        self._thread.close()
        for reader in readers:
            reader.close()
        self._signals.close()

    def perform(self, now: float) -> None:
        """Begin what is due at `now` (time.monotonic); does not block. Raises SlotbridgeError."""
        self._perform_signals(now)
        self.narration.log_durable()
        try:
            self._perform_due(now)
        except NotNow as reason:
            self._due = now + _AGAIN_LATER_S
            if self._reading is not None:
                self._reading.awaited = None
            self.narration.stalls(reason)

    def _perform_signals(self, now: float) -> None:
        """Give records of the signal topic a place in the stream."""
        mark = self._signal_mark
        if mark is not None and mark.written is not None and mark.written.done():
            try:
                mark.written.result()
            except NotNow as reason:
                self._signal_mark, self._signals_due = None, now + _AGAIN_LATER_S
                self.narration.waits(reason)
        elif self._signals.poll(now) and mark is None and now >= self._signals_due:
            token = uuid.uuid4().hex
            self._signal_mark = AwaitedMark(token, self._thread.submit(self._reader.mark, token))
            reach("signal marked")

    def _perform_due(self, now: float) -> None:
        """Do what is due: take an inspection's result, begin one, or mark a chunk."""
        if self._inspecting is not None:
            if self._inspecting.inspection.done():
                inspecting, self._inspecting = self._inspecting, None
                self._learn(inspecting.inspection.result(), inspecting.published, now)
            return
        reading = self._reading
        if reading is not None and reading.awaited is not None:
            written = reading.awaited.written
            if written is not None and written.done():
                written.result()
        elif now < self._due:
            return
        elif reading is None:
            published = PublishedXids()  # before the xid that is taken now
            sight = self._beginning and self._beginning.sight
            inspection = self._thread.submit(self._reader.inspect, sight)
            self._inspecting = Inspecting(published, inspection)
        else:
            token = uuid.uuid4().hex
            reading.awaited = AwaitedMark(token, self._source.mark(token, reading.plan.next))
            reach("chunk marked")

    def emit(self, batch: EventBatch) -> None:
        """Hand a batch on; where it is a mark that was awaited, with a chunk of rows."""
        if not batch.mark:
            self._note(batch)
            asked = self._signals.of_rows(batch)
            if asked is not None:
                batch = asked
                self._failed.clear()
                self._plan_anew()
        elif self._signal_mark is not None and batch.mark == self._signal_mark.token:
            batch = self._with_records(batch)
        else:
            batch = self._at_mark(batch)
        self._take(batch)
        if batch.mark and batch.events:
            reach("chunk handed")
        elif batch.mark and batch.staging:
            reach("signal taken")

    def _with_records(self, batch: EventBatch) -> EventBatch:
        """Return the batch with what records of the signal topic ask: this is their place."""
        self._signal_mark = None
        if batch.stamp is None or batch.position.seq:
            return batch
        before = len(self._signals.requests)
        batch = self._signals.of_records(batch, batch.stamp)
        if len(self._signals.requests) > before:
            self._failed.clear()
            self._plan_anew()
        return batch

    def _note(self, batch: EventBatch) -> None:
        """Note the transactions that are published with `batch`."""
        collecting = self._inspecting or self._reading
        if collecting is not None:
            collecting.published.add(one.stamp.xid for one in batch.ended)
            if batch.stamp is not None:
                collecting.published.add([batch.stamp.xid])

    def _plan_anew(self) -> None:
        """Forget the plan: the next mark lies behind whatever has changed it."""
        self._reading = None
        self._planned, self._ended = False, None
        self._due = 0.0

    def _learn(self, seen: Inspection, published: PublishedXids, now: float) -> None:
        """Take the published tables as they are now."""
        published.floor = seen.xid
        asked = self._signals.requests
        known = (self._found.values(), self._settings, self._shaping, self._owner, asked)
        apart = self._beginning and Apart(self._beginning, seen.places, seen.unpublished)
        found = plan(seen.shapes, *known, apart)
        found.deny(seen.denied, keyless=self._settings.conninfo is not None)
        refuse_parked(found, self._parked)
        refuse_conditions(found)
        refuse_unfit(found, self._shaping)
        for name in self._failed.keys() & found.tables.keys():
            found.refuse(name, self._failed[name].message, self._failed[name].hint)
        found.begun = goes_on(found, self._last)
        if not (self._found or asked):
            require_readable(found)
        self.narration.planned(found, again=self._planned, standby=self._standby is not None)
        self._planned, self._ended = True, None
        if found.next is None and self._is_published(found):
            self._rest(found, now)
        else:
            self._reading = Reading(found, published, seen.rows_estimates)

    def _rest(self, found: SnapshotPlan, now: float) -> None:
        self._ended = None if found.waiting else found
        self._reading, self._due = None, now + _NEW_TABLES_S

    def _at_mark(self, batch: EventBatch) -> EventBatch:
        """Return the batch with the next chunk of rows, or as it is where none can be had now."""
        reading, stamp = self._reading, batch.stamp
        if reading is None or reading.awaited is None or batch.mark != reading.awaited.token:
            return batch
        reading.awaited = None
        if time.monotonic() < self._rate.due:
            self._due = self._rate.due
            return batch
        table = reading.plan.next
        if stamp is None or batch.position.seq:
            return batch
        if table is None:
            self._rest(reading.plan, time.monotonic())
            return self._published_again(batch, reading.plan)
        began = time.monotonic()
        try:
            filled, count, waited_s = self._fill(batch, stamp, reading)
        except NotNow as reason:
            self._postpone(table, reason)
            return batch
        except SetupError as error:
            if error.subject != table.shape.name:
                raise
            self._failed[table.shape.name] = error
            self._plan_anew()
            return batch
        finally:
            took_s = time.monotonic() - began
            metrics.SNAPSHOT_HOLD_SECONDS.observe(took_s)
        if not self._events.described:  # describing tables takes longer than reading small ones
            self._size.learn(count, took_s - waited_s)
        self._rate.learn(count, began)
        if reading.plan.next is None:
            self._rest(reading.plan, time.monotonic())
        return filled

    def _is_published(self, found: SnapshotPlan) -> bool:
        """Tell whether Kafka knows how many tables wait, and which are refused, as of now."""
        last = self._last
        return last is None or (last.waiting, last.refused) == (found.waiting, found.refused)

    def _published_again(self, batch: EventBatch, found: SnapshotPlan) -> EventBatch:
        """Return the batch with the last progress, and the tables that wait or are refused now."""
        if self._last is None:
            return batch
        done = self._last.model_copy(update={"waiting": found.waiting, "refused": found.refused})
        self._note_progress(done)
        event = progress_event(self._prefix, done)
        size = batch.bytes + size_of([event])
        return batch._replace(staging=[*batch.staging, event], bytes=size)

    def _note_progress(self, done: SnapshotProgress) -> None:
        self._found[done.schema_, done.table] = self._last = done

    def _fill(
        self, batch: EventBatch, stamp: Stamp, reading: Reading
    ) -> tuple[EventBatch, int, float]:
        """Return the batch with the next chunk, or with those of several tables.

        And how many rows were looked at, and how long was waited for what is not the chunks'.
        """
        limits = self._rate.bound(self._size.rows), self._bytes_max
        estimates = reading.rows_estimates
        wanted = next_chunk(reading.plan, (), estimates, limits[0])
        assert wanted is not None
        seen = self._source.take(batch.mark, wanted, reading.published, *limits)
        reading.awaited = AwaitedMark(seen.next_mark.token)
        following = next_chunk(reading.plan, seen.chunks, estimates, limits[0])
        if following is not None and not self._rate.limits:
            self._source.read_ahead(seen.next_mark.token, following, *limits)
        self._events.begin(stamp, seen.sight, seen.next_mark.end_lsn)
        looked_at, progress = 0, []
        for one, chunk in seen.chunks:
            size, certain = self._events.rows(reading.plan, one, chunk)
            if certain:
                one.bytes += size
                one.rows_estimate = estimates.get(one.shape.name, -1)
                done = self._advanced(reading.plan, one, chunk, seen, stamp)
                progress.append(progress_event(self._prefix, done))
                looked_at += chunk.looked_at
                self.narration.chunk(reading.plan, one, estimates, batch.position.end_lsn)
        events, size = [*self._events.whole(), *progress], self._events.bytes + size_of(progress)
        if events:
            self._owner = self._owner._replace(end_lsn=batch.position.end_lsn)
            batch = batch._replace(events=events, bytes=size)
        return batch, looked_at, seen.waited_s

    def _advanced(
        self,
        found: SnapshotPlan,
        table: TableProgress,
        chunk: Chunk,
        seen: SeenChunks,
        stamp: Stamp,
    ) -> SnapshotProgress:
        """Note that the chunk is in the stream; return the table's progress."""
        count = chunk.row_count
        table.rows += count
        found.begun = found.begun or count > 0
        table.chunks += 1
        table.last, table.done = chunk.last or table.last, chunk.ends
        position = ChunkPosition(
            stamp.commit_lsn, max(0, self._events.count - 1), seen.next_mark.end_lsn
        )
        now_ms = time.time_ns() // 1_000_000
        table.began_ms = table.began_ms or now_ms
        done = progress_of(
            self._owner, table, position, now_ms, found.waiting, seen.read_from, found.refused
        )
        self._note_progress(done)
        metrics.SNAPSHOT_CHUNKS.inc()
        return done

    def _postpone(self, table: TableProgress, reason: NotNow) -> None:
        if reason.changed:
            self._plan_anew()
        if reason.slow:
            self._size.shrink()
        self._due = time.monotonic() + (_AGAIN_LATER_S if reason.slow else _AGAIN_S)
        self.narration.postponed(table, reason)
