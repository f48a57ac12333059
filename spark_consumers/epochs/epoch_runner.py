"""Takes all tables of a group from one commit LSN to a later one, so that a kill changes nothing.

    0. take    records of the transaction topic, as the streaming query hands them (epochs/stream)
    1. cut     whole transactions after the last epoch (kafka/transactions)
    2. read    their events, all that their ENDs count (epochs/event_reader)
    3. write   into a branch of each table, which nobody reads (epochs/stage)
    4. seal    its tables become their branches (epochs/stage, iceberg/staging), and the epoch is
               recorded (epochs/ledger), in one transaction of the catalog (epochs/publication)
    5. follow  the key indexes, which readers do not wait for (epochs/stage)

Where the catalog commits one table after the other, the tables tell after a kill how far it came:
one that has a later LSN than the record gives the LSN of the cut, which is then made again
(epochs/last_epoch); tables that have it are left alone. A table that an epoch brings nothing is not
touched: the record says that it has the epoch all the same. A table that is refused in 2 or 3 is
parked (epochs/parking). Rebuilds are between epochs (epochs/rebuilds).
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

import structlog
from pyspark.sql import DataFrame, SparkSession

from schemas.naming import Naming, schema_and_table
from schemas.settings import Settings, require
from spark_consumers.epochs import incomplete_tables, last_epoch, quiet
from spark_consumers.epochs.event_count import Counts
from spark_consumers.epochs.event_reader import EventReader, Taken, require_first
from spark_consumers.epochs.ledger import EpochRecord, Ledger
from spark_consumers.epochs.next_record import next_record
from spark_consumers.epochs.parking import Parking
from spark_consumers.epochs.publication import TableCommit, commits_of, publish
from spark_consumers.epochs.rebuilds import Rebuilds, Topics
from spark_consumers.epochs.report import EpochReport, table_reports
from spark_consumers.epochs.small_topics import SmallTopics
from spark_consumers.epochs.stage import Stage
from spark_consumers.epochs.table_writer import Work
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.epochs.upkeep import maintain_all
from spark_consumers.events.shape import in_use
from spark_consumers.iceberg import catalog, sums
from spark_consumers.iceberg.staging import Adopted
from spark_consumers.iceberg.table_note import NEVER
from spark_consumers.iceberg.tables import OpenTable, State, Tables
from spark_consumers.kafka.few_records import RecordReader
from spark_consumers.kafka.reader import PATIENCE_S, TopicOffsets
from spark_consumers.kafka.transaction_topic import TransactionTopic
from spark_consumers.kafka.transactions import Cut, Transactions
from spark_consumers.liveness import tick

log = structlog.get_logger()
_ATTEMPTS = 10
"""To publish an epoch: other programs change its tables' properties and their tags meanwhile."""


class EpochRunner:
    """Brings one epoch after another into the tables of a namespace, as their only writer."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        """Read from the tables how far they are."""
        self._spark = spark
        self._settings = require(settings.tables, "tables")
        kafka = require(settings.kafka, "kafka")
        self._naming = Naming(kafka.topic_prefix, settings.shaping)
        self._tables = Tables(kafka, self._settings)
        self._tables.make_namespace(spark)
        self._ledger = Ledger(self._tables.namespace, self._settings)
        self._topics = topics = TopicOffsets(kafka, patience_s=PATIENCE_S)
        whole = self._settings.on_bad_event == "quarantine"
        self._few = few = RecordReader(kafka)
        self._reader = EventReader(spark, kafka, topics, settings.registry, whole=whole, few=few)
        self.small_topics = SmallTopics(kafka, topics, self._settings, self._naming)
        self._shapes, self._dead = self.small_topics.shapes, self.small_topics.dead
        self._last_request = self._ledger.asked(spark)
        found = self._tables.states(spark, tick).items()
        self._states = {name: state for name, state in found if self.follows(name)}
        self._stage = Stage(spark, self._settings, self._tables.namespace)
        self._stage.retain_indexes(self._states.values())
        self.parking = Parking(spark, self._settings, self._tables, self._states)
        record = self._ledger.last(spark)
        self._unrecorded = record is None
        self.goes_on = any(state.commit_lsn != NEVER for state in self._states.values())
        """Whether tables have read Kafka's topics before this process."""
        self.small_topics.expect_noted(self._ledger, spark, before=self.goes_on)
        self._states |= last_epoch.with_epoch(self._states, record)
        self._record, self._redo_lsn = last_epoch.last_epoch(self._states, record)
        self.parking.recall(self._record, self.follows)
        self.parking.refuse_unreadable(self._record, self.follows)
        self.parking.refuse_rolled_back(self._record)
        read = Topics(topics, self._reader, self._shapes, self._dead, self._topic)
        self.rebuilds = Rebuilds(spark, self._settings, self._tables, read, self.parking)
        self._brought, traced = Counter[str](), settings.tracing.enabled
        self.topic = TransactionTopic(kafka, topics, self.follows, traced=traced, few=few)
        self._topic_id = self._record.transaction_topic_id
        record = self._record
        self._log = Transactions(record.transaction_offset, record.commit_lsn, self._redo_lsn)
        self._recorded_ms, self._current = 0, False
        """Whether shapes and divergences are known as of the transactions that were taken."""

    @property
    def record(self) -> EpochRecord:
        """The record of the last epoch."""
        return self._record

    @property
    def states(self) -> dict[str, State]:
        """The state of each Iceberg table, by source table."""
        return self._states

    @property
    def namespace(self) -> str:
        """The Iceberg namespace of the tables."""
        return self._tables.namespace

    @property
    def offset(self) -> int | None:
        """Where the next records of the transaction topic are to be read; None: at the first."""
        return self._log.offset

    @property
    def redoes(self) -> bool:
        """Whether an epoch that was begun is still to be made again."""
        return self._redo_lsn is not None

    @property
    def works_alone(self) -> bool:
        """Whether `step` works without new transactions. An epoch to be redone comes first."""
        if self._redo_lsn is not None or self._unrecorded:
            return self._redo_lsn == self._record.commit_lsn
        active = bool(self.rebuilds.active(self._states))
        return active or self.parking.is_due or self._quiet() is not None

    def waiting(self) -> tuple[int, int]:
        """Tell since when transactions wait, and how many bytes of WAL the tables are behind.

        The first number is the commit time of the first transaction that waits (ms since 1970), the
        second the distance from the tables to the last one. Both are zero when no transaction
        waits.
        """
        since_ms, lsn = self._log.waiting()
        return since_ms, max(0, lsn - max(self._record.commit_lsn, 0)) if since_ms else 0

    def maintain(self) -> None:
        """Compact the tables and forget old epochs; call it between two epochs.

        A table whose maintenance fails stays as it is, and the epochs go on.
        """
        states, kept = self._states.values(), self._stage.keep_index
        for _ in maintain_all(self._spark, self._settings, self._ledger, states, compacted=kept):
            pass
        self._stage.retain_indexes(self._states.values())

    def close(self) -> None:
        """Close the connections to the broker, and give back the key indexes."""
        self._stage.close()
        self._few.close()
        self.small_topics.close()

    def take(self, records: DataFrame, offset: int) -> None:
        """Take in records of the transaction topic, all from `self.offset` up to `offset`.

        Records that were taken before, and those of transactions that the tables have, change
        nothing. Raise OperatorNeeded where the topic was made again.
        """
        ends = list(self.topic.taken(records, self.offset, offset, self._record.commit_lsn))
        # Ask for the id after the read: so the records are of the known topic, or of no topic.
        before = self.goes_on or self._record.transaction_offset is not None
        self._topic_id = self.topic.require_same(self._topic_id, before=before)
        self._log.take(ends, offset)
        self._current = False

    def brings(self, records: DataFrame) -> bool:
        """Tell whether the tables lack events of a transaction among records of its topic."""
        return any(end.counts for end in self.topic.ends(records, self._record.commit_lsn))

    def require_redone(self) -> None:
        """Raise OperatorNeeded where an epoch was begun whose transactions did not come."""
        if self._redo_lsn is not None:
            gone = self._unrecorded and self._log.begins_after(self._redo_lsn)
            judged = not gone or self.topic.oldest_lsn(self._spark) <= self._redo_lsn
            last_epoch.require_transactions(self.topic.name, self._redo_lsn, judged=judged)

    def step(self) -> EpochReport | None:
        """Apply the next epoch; return None while there is no transaction for one."""
        started = time.monotonic()
        self._advance_rebuilds()
        cut = self._cut()
        if cut is None:
            return None
        epoch = last_epoch.next_number(self._states.values(), self._record, self._redo_lsn)
        self.parking.begin(self._record, cut.commit_lsn, self._states)
        self.rebuilds.drop_reshaped(cut.commit_lsn)
        had = {n: s.commit_lsn for n, s in self._states.items()}
        given = self._log.leave_out(cut, had), self.parking, had, self._settings
        without = incomplete_tables.refused_by_kafka(self._dead, self._record.commit_lsn, *given)
        opened = self._open(cut)
        counted = {name: cut.counts[name] - without.get(name, 0) for name in opened}
        taken = self._read(cut, opened, counted)
        topics = {name: self._topic(name) for name in opened}
        brings = {n: taken.summaries.get(t, TopicSummary(t)) for n, t in topics.items()}
        counts = Counts(self.topic, self._record, self._log.upto_cut(cut), taken.events, counted)
        incomplete_tables.flag_all(cut, counts, opened, brings, without, self._dead, self.parking)
        try:
            work = self._work(cut, opened, brings, counts)
            parts = work, taken.events, self._states, self._record, self.parking.judging
            quarantined = self._stage.write(epoch, cut, *parts)
        finally:
            taken.events.unpersist()
        adopted = self._seal(epoch, cut, taken)
        self._log.done(cut)
        self._redo_lsn = None
        self._brought = cut.counts
        self._stage.follow(adopted)
        names = cut.counts.keys() | (self.rebuilds.ready.keys() & adopted.keys())
        topics = {n: self._topic(n) for n in names - self.parking.tables.keys()}
        reports = table_reports(topics, taken.summaries, self._stage.ways, self._stage.why)
        refused, self.parking.refused = self.parking.refused, {}
        return EpochReport(
            epoch,
            cut.commit_lsn,
            cut.transactions,
            time.monotonic() - started,
            max((p.ts_us_max for p in taken.summaries.values()), default=0) // 1000 or cut.ts_ms,
            reports,
            sum(without.values()),
            quarantined,
            tuple(cut.traces),
            refused,
        )

    def _advance_rebuilds(self) -> None:
        """Bring a rebuild on by one part, and see which the next epoch makes the tables."""
        if not self._unrecorded and self.rebuilds.active(self._states):
            self._read_small_topics()
            self.parking.begin(self._record, self._record.commit_lsn, self._states)
        record, parts = None if self._unrecorded else self._record, self._redo_lsn is None
        self.rebuilds.advance(record, self._states, self._brought, parts=parts)

    def _cut(self) -> Cut | None:
        """Return the next epoch's end; None if it has neither transactions nor tables to return."""
        waiting = self._log.waiting()[1]
        record, done, now_ms = self._record, self._record.commit_lsn, int(time.time() * 1000)
        due = self.rebuilds.ready or (self.parking.is_due and not self._unrecorded)
        if self._redo_lsn == done or (self._redo_lsn is None and due and not waiting):
            self._read_small_topics()
            return Cut(done, record.transaction_offset or 0, now_ms, record.commit_ts_ms)
        if self._redo_lsn is not None:
            if not self._log.reaches(self._redo_lsn):
                return None
            self._read_small_topics()
            cut = self._log.upto(self._redo_lsn)
            if cut is not None:
                return cut
            self.require_redone()
            self._redo_lsn = None
        rest = None if waiting else self._quiet()
        if waiting or rest is not None:
            self._read_small_topics()
        if not waiting:
            return rest
        limits = self._shapes.first_change(done), self._ledger.audits.first_cut(self._spark, done)
        return self._log.cut(self._settings.offsets_per_trigger_max, *limits)

    def _quiet(self) -> Cut | None:
        """Return transactions that bring the tables nothing, once they are to be an epoch."""
        at_ms, now_ms = self._record.commit_ts_ms, int(time.time() * 1000)
        due = self.goes_on if self._unrecorded else quiet.is_due(at_ms, self._recorded_ms, now_ms)
        return self._log.rest() if due else None

    def _read_small_topics(self) -> None:
        """Read shapes and divergences that were written before the transactions taken so far.

        Call it after their ENDs were read: the tables that these count then have partitions and
        shapes.
        """
        if not self._current:
            self._topics.refresh()
            self.small_topics.read()
            self._current = True

    def _open(self, cut: Cut) -> dict[str, OpenTable]:
        """Return the tables to which the epoch brings something, by source table."""
        found: dict[str, OpenTable] = {}
        for name in {*cut.counts, *self._behind(cut)}:
            state = self._states.get(name)
            has = state is not None and state.commit_lsn >= cut.commit_lsn
            comes = name in self.rebuilds.ready or name in self.parking.returning
            if (comes or not has) and not self.parking.held(name):
                with self.parking.judging(name):
                    shapes = self._shapes.require(name, cut.commit_lsn)
                    table = self._tables.open(self._spark, shapes, state)
                    found[name] = self.rebuilds.opened(name, table, shapes)
        return found

    def _behind(self, cut: Cut) -> Iterable[str]:
        """Return the tables that are behind the others, and parked ones that are to return.

        The epoch may bring them something or not. These are tables that a rebuild has filled,
        dropped by somebody, or not followed until now. Without a record of epochs a table tells
        only which epoch reached it last: all tables that are not at the cut are read again.
        """
        done = cut.commit_lsn if self._unrecorded and self.goes_on else self._record.commit_lsn
        expected = {*self._record.tables, *self._shapes.known_at(done)}
        late = last_epoch.late(self._states, expected, done)
        found = late.keys() | self.rebuilds.ready.keys() | self.parking.tables.keys()
        return {n for n in found if not sums.is_sums(n) and self.follows(n)}

    def _read(self, cut: Cut, opened: dict[str, OpenTable], counted: dict[str, int]) -> Taken:
        """Read the cut's events of the opened tables; `without`: the events of each left out."""
        known = self._record.commit_lsn
        wanted = {
            self._topic(name): self.parking.wanted(name, table, self._record, counted[name])
            for name, table in opened.items()
        }
        offsets = self._record.offsets | self.rebuilds.offsets()
        taken = self._reader.read(cut, known, wanted, offsets, require_first, self.parking.refuse)
        self.parking.drop_refused(opened)
        return taken

    def _work(
        self,
        cut: Cut,
        opened: dict[str, OpenTable],
        brings: Mapping[str, TopicSummary],
        counts: Counts,
    ) -> list[Work]:
        """Return what the epoch brings to each table. Raise for events that don't belong to it."""
        work = []
        for name, table in opened.items():
            summary = brings[name]
            with self.parking.judging(name):
                if self._settings.on_bad_event == "park":
                    summary.require_events()
                summary.require_fits(table.layout.shape, keyed=table.layout.kind != "changelog")
                state, seen_lsn = self._states.get(name), max(table.seen_lsn, summary.seen_lsn)
                columns, has_lsn = (state.shape, state.commit_lsn) if state else (None, NEVER)
                taken_over = self._shapes.taken_over(name, columns, has_lsn, cut.commit_lsn)
                incomplete_tables.require_own_rows(name, taken_over, seen_lsn, self.parking)
                if name not in self.parking.tables:
                    counts.require(name, summary)
                shapes = self._shapes.upto(name, cut.commit_lsn)
                work.append(Work(table, summary, in_use(shapes, table.commit_lsn)))
        return work

    def _seal(self, epoch: int, cut: Cut, taken: Taken) -> dict[str, Adopted]:
        """Let the tables that the epoch brings something have it, and record it; return them.

        Raise Retryable (LOCKED) where another writer was faster.
        """
        parked, done = self.parking.seal(cut, self._stage.written), self._record
        behind = {self._topic(name) for name in parked if not sums.is_sums(name)}
        offsets = done.offsets | {t: o for t, o in taken.offsets.items() if t not in behind}
        for _ in range(_ATTEMPTS):
            adopted = self._stage.adopt(epoch, cut)
            states = {
                name: state if name in parked else state.at(epoch, cut.commit_lsn)
                for name, state in self._states.items()
            } | {name: each.state for name, each in adopted.items()}
            given = states, adopted, parked, offsets, self._topic_id
            record = next_record(self._spark, done, epoch, cut, *given)
            prepare = partial(self._ledger.prepare, self._spark, record)
            entered = prepare()
            last = TableCommit(self._ledger.identifier, entered.transaction)
            if publish(self._spark, commits_of(adopted.values()), last, prepare):
                break
        else:
            raise catalog.overtaken(self._ledger.identifier)
        self.small_topics.note(self._ledger, self._spark)
        self._ledger.thin_at_times(self._spark, epoch)
        self._record, self._states, self._unrecorded = record, states, False
        self._recorded_ms = int(time.time() * 1000)
        self._read_notes(entered.asked)
        return adopted

    def look_for_requests(self) -> None:
        """See which tables are to be made anew, and which no more; call it between two epochs."""
        self._read_notes(self._ledger.asked(self._spark))

    def _read_notes(self, last_request: str) -> None:
        """Read the tables' notes again if `last_request` is a new one of an operator."""
        if last_request == self._last_request:
            return
        self._last_request = last_request
        for name, found in self._tables.states(self._spark, tick).items():
            state = self._states.get(name)
            if state is not None:
                self._states[name] = dataclasses.replace(state, note=found.note)
        self.parking.look(self._states)

    def follows(self, name: str) -> bool:
        """Tell whether the settings have a source table, or one of sums, in the tables."""
        if sums.is_sums(name):
            return name.removeprefix(sums.SOURCE_MARK) in self._settings.sums
        return self._settings.follows(name, self._naming)

    def _topic(self, name: str) -> str:
        return self._naming.table(*schema_and_table(name)).name
