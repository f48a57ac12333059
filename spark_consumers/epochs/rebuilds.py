"""Rebuilds tables beside the epochs: part after part on a branch, which an epoch makes the table.

begin   the table gets a branch, which nobody reads, and a note of how far it is
part    the next events of the topic, at most PART_EVENTS, go to the branch, in one commit with the
        note; one part between two epochs, so that the other tables do not wait for the rebuild
ready   the branch has the last epoch: the next one is written to it, and makes it the table in its
        one commit (iceberg/staging). It may be an epoch without transactions.

The table itself goes on with the others, or stays parked, until then. A kill leaves branch and
note, and the rebuild goes on from both. A topic that is not in the order of its LSNs (the bridge
has published lost events again) is read once more, in one part.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import structlog
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from schemas.errors import SlotbridgeError
from schemas.tables import TablesSettings
from spark_consumers.epochs import incomplete_tables, snapshot_rows
from spark_consumers.epochs.event_reader import EventReader, raised
from spark_consumers.epochs.ledger import EpochRecord
from spark_consumers.epochs.parking import Parking, own_fault
from spark_consumers.epochs.quarantine import Quarantine, without
from spark_consumers.epochs.rebuild_topic import RebuildTopic
from spark_consumers.epochs.table_writer import Work, write_table
from spark_consumers.epochs.topic_summary import TopicSummary, summarize
from spark_consumers.events import changes, parts
from spark_consumers.events.shape import CommitPosition, Shape, in_use
from spark_consumers.failures import FOREIGN
from spark_consumers.iceberg import catalog, staging
from spark_consumers.iceberg.rebuild_parts import (
    part_end,
    part_offsets,
    part_records,
    replaced_since,
)
from spark_consumers.iceberg.table_note import NEVER, RebuildNote, lsn_text, note_of
from spark_consumers.iceberg.tables import OpenTable, State, Tables, is_large
from spark_consumers.kafka.reader import Offsets, TopicOffsets
from spark_consumers.kafka.shapes import DeadLetters, ShapeLog
from spark_consumers.liveness import tick

log = structlog.get_logger()
PART_EVENTS = 50_000
"""The records of a rebuild's first parts, while more are left than an epoch may have."""
_WIDER = 4
"""A part without a whole transaction is read again with _WIDER times as many records."""


class Topics(NamedTuple):
    """The readers of Kafka that a rebuild shares with the epochs."""

    offsets: TopicOffsets
    events: EventReader
    shapes: ShapeLog
    dead: DeadLetters
    name: Callable[[str], str]
    """Source table -> its topic."""


class _Part(NamedTuple):
    """The records of a part.

    `persisted`: what Spark keeps of them until its `unpersist`; `events`: the same, told where the
    part ends; `upto_lsn`: what the branch will have; `ended`: they reach the end of the topic.
    """

    events: DataFrame
    persisted: DataFrame
    ends: dict[int, int]
    upto_lsn: int
    ended: bool


class Rebuilds:
    """The rebuilds of one runner."""

    def __init__(
        self,
        spark: SparkSession,
        settings: TablesSettings,
        tables: Tables,
        topics: Topics,
        parking: Parking,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._tables = tables
        self._topics = topics
        self._parking = parking
        self._staging = staging.Staging(spark)
        self._quarantine = Quarantine(spark, tables.namespace)
        self._notes: dict[str, RebuildNote] = {}
        self.ready: dict[str, RebuildNote] = {}
        """The rebuilds that the next epoch can make the tables."""
        self._ratios: dict[str, float] = {}

    def progress(self, states: Mapping[str, State]) -> dict[str, float]:
        """Return the tables that are made anew, each with how much of its topic is read, 0 to 1."""
        asked = {name for name, state in states.items() if state.note.rebuild is not None}
        return {name: self._ratios.get(name, 0.0) for name in asked}

    def active(self, states: Mapping[str, State]) -> list[str]:
        """Return the tables whose rebuild goes on; that of a parked table waits for its return."""
        return sorted(
            name
            for name, state in states.items()
            if state.note.made_anew and self._parking.returns(name)
        )

    def advance(
        self,
        record: EpochRecord | None,
        states: dict[str, State],
        recent: Mapping[str, int],
        *,
        parts: bool,
    ) -> None:
        """Bring one rebuild on by one part, and see which are `ready`.

        `record`: the last epoch; without a record all rebuilds wait. `recent`: how many events it
        has brought each table. `states` is updated. `parts` False: only see which are ready.
        """
        asked = {name for name, state in states.items() if state.note.made_anew}
        self._ratios = {name: r for name, r in self._ratios.items() if name in asked}
        known = asked - self.ready.keys()  # those were made the tables, maybe
        self._notes = {name: note for name, note in self._notes.items() if name in known}
        self.ready = {}
        for name in self.active(states) if record else ():
            try:
                if record is None or states[name].commit_lsn > record.commit_lsn:
                    continue  # the table has the epoch under way already; the rebuild follows
                shapes = self._topics.shapes.upto(name, record.commit_lsn)
                limit, topic = self._limit(name, record), self._topic(name, record)
                note = self._note(name, states[name], shapes, topic)
                if parts and (note is None or note.commit_lsn != limit):
                    parts = False
                    note = note if note and note.commit_lsn < limit else None
                    note = self._part(name, note, record, states, recent.get(name, 0))
                if note is not None and note.commit_lsn == limit:
                    self.ready[name] = note
                tick()
            except (*FOREIGN, SlotbridgeError) as error:
                failure = own_fault(error, name)
                if failure is None:
                    raise
                self._notes.pop(name, None)
                self._parking.refuse(name, failure)
                self._parking.settle()
        made_anew = {name for name, state in states.items() if state.note.made_anew}
        self._parking.rebuilding = made_anew - self.ready.keys()

    def drop_reshaped(self, cut_lsn: int) -> None:
        """Let those begin anew whose tables have another shape at the cut; parked ones wait."""
        for name, note in list(self.ready.items()):
            if any(shape.since > note.shape for shape in self._topics.shapes.upto(name, cut_lsn)):
                del self.ready[name]
                self._parking.rebuilding.add(name)

    def opened(self, name: str, table: OpenTable, shapes: Sequence[Shape]) -> OpenTable:
        """Return a table as an epoch is to write it: one that is ready to the rebuild's branch."""
        note = self.ready.get(name)
        if note is None:
            return table
        of_kafka = table.incomplete if table.incomplete and table.incomplete.of_kafka else None
        return replace(
            table,
            commit_lsn=note.commit_lsn,
            rebuilt=True,
            replaced=replaced_since(shapes, note),
            fills={},
            incomplete=of_kafka or note.incomplete,
        )

    def offsets(self) -> Offsets:
        """Return where the next events of the tables are that are ready."""
        return {self._topics.name(n): dict(note.offsets or {}) for n, note in self.ready.items()}

    def _limit(self, name: str, record: EpochRecord) -> int:
        """Return the commit LSN up to which parts of a rebuild read events.

        Later ones are for the epoch that makes the rebuild the table: of a parked table, all that
        were counted since.
        """
        found = self._parking.tables.get(name)
        counted = found is not None and found.events is not None
        return found.counted_after if found and counted else record.commit_lsn

    def _topic(self, name: str, record: EpochRecord) -> RebuildTopic:
        topic, has = self._topics.name(name), self._limit(name, record) != NEVER
        return RebuildTopic(
            self._topics.offsets, name, topic, record.offsets.get(topic) if has else {}
        )

    def _note(
        self, name: str, state: State, shapes: Sequence[Shape], topic: RebuildTopic
    ) -> RebuildNote | None:
        """Return how far the branch of a rebuild is, None where it is yet to begin.

        With another shape, rows may lack values; another topic has other events at the offsets.
        """
        found = self._notes.get(name)
        if found is None:
            table = catalog.load(self._spark, state.identifier)
            found = note_of(catalog.properties(table)).rebuild
            if found is None or found.offsets is None:
                return None
        if not shapes or found.shape != shapes[-1].since:
            return None
        if found.topic_id != topic.require_shown(found):
            return None
        if name not in self._notes:
            self._notes[name] = found
            log.info("a rebuild goes on", table=name, commit_lsn=lsn_text(found.commit_lsn))
        return found

    def _begin(
        self,
        name: str,
        state: State,
        shape: CommitPosition,
        topic: RebuildTopic,
        *,
        whole: bool = False,
    ) -> RebuildNote:
        """Begin a rebuild: note its start, make its branch. Raise Retryable if overtaken."""
        table = catalog.load_known(self._spark, state.identifier, state.sealed)
        rebuild = note_of(catalog.properties(table)).rebuild
        if rebuild is None:
            raise catalog.overtaken(state.identifier)
        offsets = topic.first() if rebuild.lost_beginning else {}
        note = rebuild.begun(topic.id, shape, offsets, whole)
        staging.begin_side(self._spark, state.identifier, state.sealed, note)
        log.info("a rebuild begins", table=name, whole=whole)
        staging.warn_emptied(name, state.kept)
        return note

    def _part(
        self,
        name: str,
        note: RebuildNote | None,
        record: EpochRecord,
        states: dict[str, State],
        recent: int,
    ) -> RebuildNote:
        """Bring the next part to the branch; return how far it is then."""
        shapes = self._topics.shapes.require(name, record.commit_lsn)
        table = self._open(name, shapes, states)
        done = min([record.commit_lsn, *self._parking.positions().values()])
        self._topics.dead.between(done, record.commit_lsn)
        topic, shape = self._topic(name, record), shapes[-1].since
        if note is None:
            topic.require_shown(None)
            note = self._begin(name, states[name], shape, topic)
        limit = self._limit(name, record)
        if limit == NEVER:  # the table has nothing: the epoch with which it returns reads all
            self._notes[name] = note
            return note
        last = topic.ends(note)
        part = self._read(topic.name, note, last, shapes, limit, recent)
        try:
            summary = summarize(
                changes.summary(part.events).collect(), changes.positions(part.events).collect()
            ).get(topic.name, TopicSummary(topic.name))
            if summary.late and not note.settled and note.commit_lsn != NEVER:
                log.warning("the topic is not in order: the rebuild begins anew", table=name)
                note = self._begin(name, states[name], shape, topic, whole=True)
            else:
                note = self._write(name, table, note, part, summary, shapes, states)
        finally:
            part.persisted.unpersist()
        self._notes[name] = note
        total, read = sum(last.values()), sum((note.offsets or {}).values())
        self._ratios[name] = 1.0 if note.settled or not total else read / total
        log.info(
            "a part of a rebuild is done",
            table=name,
            commit_lsn=lsn_text(note.commit_lsn),
            events=summary.events,
            read=f"{self._ratios[name]:.1%}",
        )
        return note

    def _open(self, name: str, shapes: list[Shape], states: dict[str, State]) -> OpenTable:
        """Open a table with its latest shape; take its state anew if the shape changes."""
        state = states[name]
        table = self._tables.open(self._spark, shapes, state)
        if state.shape is not None and shapes[-1].since > state.shape.since:
            fresh = self._tables.state(self._spark, state.identifier)
            if fresh is not None:
                states[name] = fresh.at(state.epoch, state.commit_lsn)
        return table

    def _read(
        self,
        topic: str,
        note: RebuildNote,
        last: Mapping[int, int],
        shapes: list[Shape],
        limit: int,
        recent: int,
    ) -> _Part:
        """Read the records that come next, and say up to which LSN they hold all events."""
        starts = {n: min(note.start(n), at) for n, at in last.items()}
        left = sum(last.values()) - sum(starts.values())
        most = part_records(sum(starts.values()), recent, PART_EVENTS)
        if note.whole or left <= max(most, self._settings.offsets_per_trigger_max):
            most = left * len(last)  # whichever partition they are in
        whole = self._settings.on_bad_event == "quarantine"
        while True:
            ends = part_offsets(starts, last, most)
            records = self._topics.events.records({topic: starts}, {topic: ends})
            events = changes.events(records, note.commit_lsn, limit, whole=whole)
            events = events.coalesce(self._spark.sparkContext.defaultParallelism)
            events = events.persist(StorageLevel.MEMORY_AND_DISK)
            with ExitStack() as freed:
                freed.callback(events.unpersist)
                tails = {row.partition: row.commit_lsn for row in parts.last_lsns(events).collect()}
                unread = [n for n, at in last.items() if ends[n] < at]
                upto = part_end(tails, unread, shapes[1:], note.commit_lsn, limit)
                if upto > note.commit_lsn or not unread:
                    freed.pop_all()
                    cut = parts.cut_at(events, upto)
                    return _Part(cut, events, ends, upto, not unread)
            most *= _WIDER

    def _write(
        self,
        name: str,
        table: OpenTable,
        note: RebuildNote,
        part: _Part,
        summary: TopicSummary,
        shapes: list[Shape],
        states: dict[str, State],
    ) -> RebuildNote:
        """Write a part to the branch, in one commit with the note that is returned."""
        if self._settings.on_bad_event == "park":
            summary.require_events()
        shape = table.layout.shape
        summary.require_fits(shape, keyed=table.layout.kind != "changelog")
        of_part = [s for s in shapes if s.since.commit_lsn <= part.upto_lsn]
        replaced = replaced_since(of_part, note)
        used = in_use(shapes, note.commit_lsn)
        own = changes.own_events(part.events, summary.topic)
        bad = self._put_aside(part.events, summary, used)
        lacks = note.incomplete or incomplete_tables.of_part(
            note, part.upto_lsn, bad, refused=self._topics.dead.may_lack(name)
        )
        opened = {name: replace(table, incomplete=lacks)}
        snapshot_rows.raise_bounds({name: summary.seen_lsn}, opened, states)
        known = states[name].sealed
        base = self._staging.begin(table.identifier, known, rebuilt=note.commit_lsn)
        begins = note.commit_lsn == NEVER
        if begins or summary.events:
            ours = replace(
                opened[name],
                commit_lsn=note.commit_lsn,
                rebuild=begins,
                replaced=replaced,
                large=not begins and self._is_large(base),
            )
            with self._staging.writing_part():
                write_table(Work(ours, summary, used), without(own, bad))
        # What is no event of a table may be of what comes next, which an epoch counts.
        ends = {row.partition: row.end for row in parts.own_ends(part.events).collect()}
        done = replace(
            note,
            commit_lsn=part.upto_lsn,
            offsets={n: max(note.start(n), ends.get(n, 0)) for n in part.ends},
            replaced=replaced or note.replaced,
            settled=note.settled or part.ended,
            incomplete=lacks,
        )
        tick()
        bound = snapshot_rows.bound(opened[name])
        self._staging.extend(self._staging.written(base), done, bound)
        return done

    def _is_large(self, base: staging.Base) -> bool:
        table = catalog.load(self._spark, base.identifier)
        side = None if base.side is None else table.snapshot(base.side)
        return is_large(catalog.summary_of(side))

    def _put_aside(
        self, events: DataFrame, summary: TopicSummary, shapes: Sequence[Shape]
    ) -> list[tuple[int, int]]:
        """Return where the bad events of a part are, which go to the quarantine."""
        if self._settings.on_bad_event == "park":
            return []
        found = self._quarantine.put_aside(None, events, [(summary, shapes)], raised)
        return found.get(summary.topic, [])
