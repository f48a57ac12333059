"""Takes all tables of a group from one commit LSN to a later one, so that a kill changes nothing.

    1. cut     whole transactions after the last epoch (kafka/transactions)
    2. read    their events, all that their ENDs count (epochs/reading)
    3. write   each table in one commit; its snapshot carries epoch and LSN (epochs/writing)
    4. seal    every table is tagged with the LSN, in one commit each
    5. record  the epoch is written down in one commit: now it is done (epochs/ledger)

After a kill the tables tell how far it came: one that has a later LSN than the ledger gives the LSN
of the cut, which is then made again; tables that have it are left alone.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import structlog
from pyspark.sql import DataFrame, SparkSession

from schemas.errors import ExitCode, OperatorNeeded
from schemas.lsn import format_lsn
from schemas.naming import Naming
from schemas.settings import Settings, require
from spark_consumers.epochs import writing
from spark_consumers.epochs.ledger import EpochRecord, Ledger
from spark_consumers.epochs.parts import Part
from spark_consumers.epochs.quarantine import Bad, Quarantine, without
from spark_consumers.epochs.reading import EventReader, Taken, Wanted
from spark_consumers.epochs.report import EpochReport, TableReport
from spark_consumers.epochs.threads import at_once
from spark_consumers.events import changes
from spark_consumers.events.shape import Shape
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog, sums
from spark_consumers.iceberg.layout import layout_of
from spark_consumers.iceberg.maintenance import maintain
from spark_consumers.iceberg.tables import (
    NEVER,
    OpenTable,
    State,
    Tables,
    is_large,
    merge_mode,
)
from spark_consumers.kafka.divergence import Divergences
from spark_consumers.kafka.reader import Topics
from spark_consumers.kafka.shapes import DeadLetters, ShapeLog
from spark_consumers.kafka.transactions import Cut, TransactionLog

log = structlog.get_logger()
_REDO_DEADLINE_S = 60.0


class Follower:
    """Brings one epoch after another into the tables of a namespace, as their only writer."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        """Read from the tables how far they are."""
        self._spark = spark
        self._settings = require(settings.tables, "tables")
        kafka = require(settings.kafka, "kafka")
        self._naming = Naming(kafka.topic_prefix, settings.shaping)
        self._tables = Tables(kafka, self._settings)
        self._tables.make_namespace(spark)
        self._ledger = Ledger(self._tables.namespace, self._settings.epochs_kept)
        topics = Topics(kafka)
        whole = self._settings.on_bad_event == "quarantine"
        self._reader = EventReader(spark, kafka, topics, whole=whole)
        self._shapes = ShapeLog(kafka, topics, self._naming, self._follows)
        self._divergences = Divergences(kafka, topics)
        self._dead = DeadLetters(kafka, topics, self._follows)
        self._states = {
            name: state
            for name, state in self._tables.states(spark).items()
            if (name.removeprefix(sums.SOURCE_MARK) in self._settings.sums)
            or (not sums.is_sums(name) and self._follows(name))
        }
        self._quarantine = Quarantine(spark, self._tables.namespace)
        self._sums: dict[str, str] = {}
        self._record, self._redo_lsn = self._found()
        self._log = TransactionLog(
            kafka,
            topics,
            self._follows,
            self._record.transaction_offset,
            self._record.commit_lsn,
        )

    @property
    def record(self) -> EpochRecord:
        """The last epoch."""
        return self._record

    @property
    def states(self) -> dict[str, State]:
        """What each table has, by source table."""
        return self._states

    def waiting(self) -> tuple[int, int]:
        """When the first transaction that waits committed (ms since 1970), and how many bytes of
        WAL the last one is ahead of the tables; zeros when none waits."""
        since_ms, lsn = self._log.waiting()
        return since_ms, max(0, lsn - max(self._record.commit_lsn, 0)) if since_ms else 0

    def maintain(self) -> None:
        """Compact the tables and forget old epochs; between two epochs. A table where this fails
        stays as it is, and the epochs go on."""
        for state in self._states.values():
            try:
                maintain(self._spark, self._settings, state, orphans=False)
            except FOREIGN as error:
                failure = translated(error, "maintain tables")
                log.warning("a table was not maintained", table=state.source, error=str(failure))

    def close(self) -> None:
        """Leave the broker."""
        for part in (self._log, self._shapes, self._dead, self._divergences):
            part.close()

    def step(self) -> EpochReport | None:
        """Bring the next epoch; None while there is no transaction for it.

        Raises BadInput naming the record that is refused, SetupError for a change of shape that is
        not taken over, OperatorNeeded for a dead letter or where Kafka lacks events.
        """
        started = time.monotonic()
        cut = self._cut()
        if cut is None:
            return None
        epoch = self._record.epoch + 1
        lacking = self._lacking(cut)
        opened = self._open(cut)
        self._mark_lacking(cut, opened, lacking)
        taken = self._read(cut, opened, lacking)
        try:
            quarantined = self._write(epoch, cut, opened, taken)
        finally:
            taken.events.unpersist()
        self._seal(epoch, cut, opened, taken)
        self._log.done(cut)
        self._redo_lsn = None
        return EpochReport(
            epoch,
            cut.commit_lsn,
            cut.transactions,
            time.monotonic() - started,
            max((p.ts_us_max // 1000 for p in taken.parts.values()), default=cut.ts_ms),
            {name: _report(taken.parts.get(self._topic(name))) for name in cut.counts},
            sum(lacking.values()),
            quarantined,
        )

    def _found(self) -> tuple[EpochRecord, int | None]:
        """The last epoch that is done, and the LSN of one that was begun after it."""
        record = self._ledger.last(self._spark)
        positions = [s.commit_lsn for s in self._states.values() if not s.rebuild]
        if record is None:
            done = min(positions, default=NEVER)
            epoch = max((s.epoch for s in self._states.values()), default=0)
            epoch -= max(positions, default=NEVER) > done  # one was begun
            record = EpochRecord(max(epoch, 0), done, 0, {}, None, {})
        begun = max(positions, default=NEVER)
        if begun <= record.commit_lsn:
            return record, None
        log.info("an epoch was begun", next_epoch=record.epoch + 1, commit_lsn=format_lsn(begun))
        return record, begun

    def _cut(self) -> Cut | None:
        if self._redo_lsn is not None:
            cut: Cut | None = self._log.upto(self._redo_lsn, _REDO_DEADLINE_S)
        elif not self._log.read():
            return None
        else:
            self._shapes.read()
            change = self._shapes.first_change(self._record.commit_lsn)
            cut = self._log.cut(self._settings.offsets_per_trigger_max, change)
        if cut is None:
            return None
        self._divergences.require_none()
        self._shapes.read()  # what has come with the last transactions
        change = self._shapes.first_change(self._record.commit_lsn)
        if self._redo_lsn is None and change is not None and change <= cut.commit_lsn:
            return self._log.cut(self._settings.offsets_per_trigger_max, change)
        return cut

    def _lacking(self, cut: Cut) -> dict[str, int]:
        """Table -> how many of its events Kafka has refused; raises by `on_dead_letter`."""
        found: dict[str, int] = {}
        for letter in self._dead.between(self._record.commit_lsn, cut.commit_lsn):
            if self._settings.on_dead_letter == "stop":
                raise OperatorNeeded(
                    f"Kafka has refused an event of {letter.table} ({letter.reason}), with seq "
                    f"{letter.position.seq}: its table would lack it",
                    operation="read dead letters",
                    subject=self._dead.topic,
                    lsn=letter.position.commit_lsn,
                    hint="tables.on_dead_letter: report goes on without it; repair the row from "
                    "the dead letter, or rebuild the table",
                    exit_code=ExitCode.RECORD_REFUSED,
                )
            found[letter.table] = found.get(letter.table, 0) + 1
        for table, count in found.items():
            log.warning("the table lacks events that Kafka has refused", table=table, count=count)
        return found

    def _open(self, cut: Cut) -> dict[str, OpenTable]:
        """The tables that the epoch brings something, by source table."""
        found = {}
        for name in {*cut.counts, *self._behind()}:
            shapes = list(self._shapes.upto(name, cut.commit_lsn))
            if not shapes:
                raise OperatorNeeded(
                    f"{self._shapes.topic} does not know the table",
                    operation="read table shapes",
                    subject=name,
                    lsn=cut.commit_lsn,
                    hint="topic_prefix must be the bridge's own; the schema topic must be kept",
                )
            state = self._states.get(name)
            if state is not None and not state.rebuild and state.commit_lsn >= cut.commit_lsn:
                continue
            found[name] = self._tables.open(self._spark, shapes, state)
        return found

    def _mark_lacking(
        self, cut: Cut, opened: dict[str, OpenTable], without: Collection[str]
    ) -> None:
        """Write down, before anything else is, which tables lack an event: those in `without`, and
        of those that are made from Kafka's first event on all that may.

        Such a table may have a row that the source deleted, so that no epoch of inserts is
        appended to it unseen: each is merged by key. It stays so until the table is made anew.
        """
        anew = {n for n, t in opened.items() if t.commit_lsn == NEVER and self._dead.may_lack(n)}
        for name in {*without, *anew}:
            table, state = opened.get(name), self._states.get(name)
            if (table and table.lacks) or (state and state.lacks):
                continue
            if table is not None:
                opened[name] = replace(table, lacks=True)
            if state is not None:
                self._states[name] = replace(state, lacks=True)
            identifier = table.identifier if table else state.identifier if state else None
            if identifier is not None:
                found = catalog.load(self._spark, identifier)
                catalog.set_property(found, catalog.LACKS, str(cut.commit_lsn))

    def _behind(self) -> Iterable[str]:
        """Tables that lack what the others have, whether or not the epoch brings them something:
        to be made anew, dropped by somebody, or not followed until now."""
        done = self._record.commit_lsn
        lost = {*self._record.tables, *self._shapes.known_at(done)} - set(self._states)
        late = {n for n, s in self._states.items() if s.rebuild or s.commit_lsn < done}
        return {n for n in lost | late if not sums.is_sums(n) and self._follows(n)}

    def _read(self, cut: Cut, opened: dict[str, OpenTable], lacking: dict[str, int]) -> Taken:
        known = self._record.commit_lsn
        wanted = {
            self._topic(name): Wanted(
                name,
                cut.counts.get(name, 0) - lacking.get(name, 0),
                None if table.commit_lsn == known else table.commit_lsn,
            )
            for name, table in opened.items()
        }
        return self._reader.read(cut, known, wanted, self._record.offsets, _require_first)

    def _write(self, epoch: int, cut: Cut, opened: dict[str, OpenTable], taken: Taken) -> int:
        """Write all tables; returns how many events were put aside."""
        for option, value in ((catalog.EPOCH, epoch), (catalog.COMMIT_LSN, cut.commit_lsn)):
            self._spark.conf.set(catalog.SUMMARY_OPTION + option, str(value))
        work = []
        for name, table in opened.items():
            part = taken.parts.get(self._topic(name), Part(self._topic(name)))
            if self._settings.on_bad_event == "stop":
                part.require_events()
            part.require_fits(table.layout.shape, keyed=table.layout.kind != "changelog")
            work.append(writing.Work(table, part, self._shapes_in_use(table, cut)))
        bad: Bad = {}
        if self._settings.on_bad_event == "quarantine":
            parts = [(item.part, item.shapes) for item in work]
            bad = self._quarantine.put_aside(epoch, taken.events, parts)
            names = [item.table.layout.shape.name for item in work if item.part.topic in bad]
            self._mark_lacking(cut, opened, names)
            work = [replace(x, table=opened[x.table.layout.shape.name]) for x in work]

        def own(topic: str) -> DataFrame:
            return without(changes.own_events(taken.events, topic), bad.get(topic, ()))

        at_once(lambda item: writing.write(item, own(item.part.topic)), work)
        self._add_up(epoch, cut, {item.table.layout.shape.name: item for item in work}, own)
        return sum(map(len, bad.values()))

    def _add_up(
        self,
        epoch: int,
        cut: Cut,
        work: dict[str, writing.Work],
        own: Callable[[str], DataFrame],
    ) -> None:
        """Bring the epoch into the tables of sums."""
        for name, settings in self._settings.sums.items():
            item, state = work.get(settings.source), self._states.get(settings.source)
            if item is not None:
                layout, source = item.table.layout, item.table.identifier
            elif state is not None and state.shape and state.commit_lsn == cut.commit_lsn:
                # The source had the epoch already when it was begun again: the sums may not.
                layout, source = layout_of(self._settings, state.shape), state.identifier
            else:
                continue
            identifier = catalog.identifier(self._tables.namespace, name)
            table = sums.make(self._spark, identifier, name, settings, layout)
            self._sums[sums.source_of(name)] = identifier
            if catalog.reached(table)[0] >= epoch:
                continue
            known = self._states.get(sums.source_of(name))
            behind = known is None or known.commit_lsn < self._record.commit_lsn
            if item is None or behind or writing.begins_anew(item) or item.part.unavailable:
                sums.recompute(self._spark, identifier, source, settings)
            else:
                _, before = self._record.tables.get(settings.source, ("", None))
                folded = writing.folded(item, own(item.part.topic))
                sums.add(identifier, settings, layout, folded, source, before)

    def _shapes_in_use(self, table: OpenTable, cut: Cut) -> list[Shape]:
        """The shapes that the epoch's events of a table were written with."""
        shapes = list(self._shapes.upto(table.layout.shape.name, cut.commit_lsn))
        first = 0
        for place, shape in enumerate(shapes):
            if shape.since.commit_lsn <= table.commit_lsn:
                first = place
        return shapes[first:]

    def _seal(self, epoch: int, cut: Cut, opened: dict[str, OpenTable], taken: Taken) -> None:
        tag = catalog.tag_name(cut.commit_lsn)
        places_of = {name: state.identifier for name, state in self._states.items()}
        places_of |= {name: table.identifier for name, table in opened.items()} | self._sums
        sealed: dict[str, State] = {}
        places: dict[str, tuple[str, int | None]] = {}

        def seal(name: str) -> None:
            state = self._states.get(name)
            identifier = places_of[name]
            table = catalog.load(self._spark, identifier)
            values = {catalog.EPOCH: str(epoch), catalog.COMMIT_LSN: str(cut.commit_lsn)}
            again = catalog.REBUILD in catalog.properties(table)
            unset = [catalog.REPLACED] if name in opened else []
            if name in opened and opened[name].rebuild:
                unset, again = [*unset, catalog.REBUILD], False
            kept = self._settings.epochs_kept
            large = is_large(table)
            snapshot = catalog.seal(table, values | merge_mode(large=large), tag, kept, unset)
            shape = opened[name].layout.shape if name in opened else state.shape if state else None
            sealed[name] = State(
                *(name, identifier, epoch, cut.commit_lsn, again, None, shape, str(table.uuid())),
                *(large, (name in opened and opened[name].lacks) or bool(state and state.lacks)),
            )
            places[name] = (identifier, snapshot)

        at_once(seal, sorted(places_of))
        record = EpochRecord(
            epoch,
            cut.commit_lsn,
            cut.ts_ms,
            self._record.offsets | taken.offsets,
            cut.offset,
            dict(sorted(places.items())),
        )
        self._ledger.write(self._spark, record)
        self._record, self._states = record, sealed

    def _follows(self, name: str) -> bool:
        tables = self._settings.tables
        return name in tables if tables else self._naming.publishes(*name.split(".", 1))

    def _topic(self, name: str) -> str:
        return self._naming.table(*name.split(".", 1)).name


def _require_first(table: str, offset: int) -> None:
    """Raise OperatorNeeded where Kafka no longer has a topic's first events."""
    if offset > 0:
        raise OperatorNeeded(
            "Kafka no longer has the table's first events",
            operation="make a table from Kafka",
            subject=table,
            hint="keep topics for as long as tables may have to be made anew, or leave the table "
            "out of tables.tables",
        )


def _report(part: Part | None) -> TableReport:
    if part is None:
        return TableReport(0, 0, 0, 0)
    return TableReport(part.rows, part.events, part.late + part.duplicates, part.lsn_max)
