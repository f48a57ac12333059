"""Writes an epoch into the branches of its tables, and prepares the commits that make it theirs.

Nothing of an epoch is to be seen before all its tables are written: one that is refused leaves the
others where it is itself. Then each has it by one commit (iceberg/staging.py).
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import structlog
from pyspark.sql import DataFrame, SparkSession

from schemas.errors import SlotbridgeError
from schemas.tables import TablesSettings
from spark_consumers.epochs import incomplete_tables, snapshot_rows, table_writer
from spark_consumers.epochs.driver_stage import DriverStage, Sealing
from spark_consumers.epochs.epoch_events import EpochEvents
from spark_consumers.epochs.ledger import EpochRecord
from spark_consumers.epochs.quarantine import Bad, Quarantine, without
from spark_consumers.epochs.table_writer import Way, Work
from spark_consumers.epochs.threads import at_once
from spark_consumers.events import changes
from spark_consumers.iceberg import catalog, rollback, sums
from spark_consumers.iceberg.delete_insert import Deletes
from spark_consumers.iceberg.indexed_delete import Indexes, Target
from spark_consumers.iceberg.layout import Layout, layout_of
from spark_consumers.iceberg.staging import Adopted, Base, Staging
from spark_consumers.iceberg.table_note import Incomplete
from spark_consumers.iceberg.tables import State, sealed_of
from spark_consumers.kafka.transactions import Cut
from spark_consumers.key_index import folders
from spark_consumers.liveness import tick, under_way
from spark_consumers.session import local_folder

log = structlog.get_logger()
Judging = Callable[[str], AbstractContextManager[None]]
INDEXES = "_indexes"
"""The folder on this machine that has the key indexes, by namespace and by table."""


class Stage:
    """One epoch after the other, each in the branches of this writer."""

    def __init__(self, spark: SparkSession, settings: TablesSettings, namespace: str) -> None:
        self._spark = spark
        self._settings = settings
        self._namespace = namespace
        self._staging = Staging(spark)
        self._quarantine = Quarantine(spark, namespace)
        self._bases: dict[str, Base] = {}
        self._work: dict[str, Work] = {}
        self._folder = local_folder(settings) / INDEXES / namespace
        self._indexes = Indexes(spark, self._folder)
        self._driver = DriverStage(spark, settings, self._indexes)
        self.ways: dict[str, Way] = {}
        """How the last epoch came into each table."""

    def close(self) -> None:
        """Release the locks that this writer has on this machine."""
        self._indexes.close()

    def keep_index(self, state: State, snapshot: int) -> None:
        """Bring a table's index to its last snapshot before those in between are removed."""
        if state.shape is not None and state.rule is not None:
            self._indexes.keep(state, Layout(state.shape, state.rule), snapshot)

    def retain_indexes(self, states: Iterable[State]) -> None:
        """Remove the key indexes of tables that are gone or not followed.

        One that another program has stays.
        """
        kept = {state.uuid for state in states}
        self._indexes.let_go(kept)
        for folder in folders.remove_others(self._folder, kept):
            log.info("removed the key index of a table that is not indexed now", folder=str(folder))

    def write(
        self,
        epoch: int,
        cut: Cut,
        work: list[Work],
        events: EpochEvents,
        states: dict[str, State],
        before: EpochRecord,
        judging: Judging,
    ) -> int:
        """Write all tables' parts of the epoch; return how many events were quarantined.

        `states` is updated: it tells which rows of snapshots the tables have. What a table's part
        raises is left to `judging(table)`: if it passes the error over, the others are written.
        """
        values = {catalog.EPOCH: str(epoch), catalog.COMMIT_LSN: str(cut.commit_lsn)}
        left, bad = self._driver.write(work, events, states, judging), Bad()
        if left and self._settings.on_bad_event == "quarantine":
            bad, left = self._put_aside(epoch, events.frame, left, judging)
        work = [*left, *(item for item in work if item.name in self._driver.written)]
        opened = {item.name: item.table for item in work}
        incomplete_tables.flag(opened, _quarantined(cut, work, bad))
        seen = {item.name: item.summary.seen_lsn for item in work}
        snapshot_rows.raise_bounds(seen, opened, states)
        self._work = {item.name: replace(item, table=opened[item.name]) for item in work}
        self._bases = {}
        self.ways = dict.fromkeys(self._driver.written, "driver")
        under_way.events_read, under_way.tables = under_way.events, len(self._work)

        def own(topic: str) -> DataFrame:
            return without(changes.own_events(events.frame, topic), bad.get(topic, ()))

        def stage(item: Work) -> None:
            state = states.get(item.name)
            known, table = sealed_of(state), item.table
            rebuilt = table.commit_lsn if table.rebuilt else None
            base = self._staging.begin(table.identifier, known, rebuilt=rebuilt)
            filled = base.snapshot is not None and table_writer.fill(self._spark, item)
            by_index = None if filled else self._deletes(item, base, values)
            way = table_writer.write_table(item, own(item.summary.topic), by_index)
            self._bases[item.name] = self._staging.written(base)
            self.ways[item.name] = way

        def judged(item: Work) -> None:
            with judging(item.name):
                stage(item)
            under_way.tables_written = len(self.written)

        self._driver.prepare(self._seals(values), catalog.tag_name(cut.commit_lsn), judging)
        if left or self._settings.sums:
            for option, value in values.items():
                self._spark.conf.set(catalog.SUMMARY_OPTION + option, value)
            with self._staging.writing():
                at_once(judged, [self._work[item.name] for item in left])
            self._add_up(epoch, cut, own, states, before)
        self._work = {name: item for name, item in self._work.items() if name in self.written}
        return sum(map(len, bad.values()))

    def _put_aside(
        self, epoch: int, events: DataFrame, work: list[Work], judging: Judging
    ) -> tuple[Bad, list[Work]]:
        """Put bad events aside; return where they are, and the work that is left."""
        left = {item.summary.topic: item for item in work}

        def refuse(topic: str, error: SlotbridgeError) -> None:
            with judging(left[topic].name):
                raise error
            del left[topic]

        summaries = [(item.summary, item.shapes) for item in work]
        bad = self._quarantine.put_aside(epoch, events, summaries, refuse)
        return bad, list(left.values())

    def _deletes(self, work: Work, base: Base, values: dict[str, str]) -> Deletes | None:
        """Return what deletes a table's changed rows by the index of its keys, if it has one."""
        if not self._settings.key_index or work.table.rebuilt:
            return None
        summary = values | {catalog.WRITER: self._staging.name}
        target = Target(base.identifier, base.snapshot, self._staging.name, summary)
        events = work.summary.events
        return partial(self._indexes.delete, target, work.table.layout, events=events)

    @property
    def written(self) -> Collection[str]:
        """The tables that have the epoch in their branches, those of sums among them."""
        return self._bases.keys() | self._driver.written

    @property
    def why(self) -> Mapping[str, str]:
        """Why Spark has written the parts of tables."""
        return self._driver.why

    def adopt(self, epoch: int, cut: Cut) -> dict[str, Adopted]:
        """Prepare, for each table that was written, the commit that gives it the epoch and its tag.

        Raise Retryable (LOCKED) where somebody else has changed one of them meanwhile.
        """
        tag = catalog.tag_name(cut.commit_lsn)
        values = {catalog.EPOCH: str(epoch), catalog.COMMIT_LSN: str(cut.commit_lsn)}
        adopted: dict[str, Adopted] = {}

        def adopt(name: str) -> None:
            item = self._work.get(name)
            drops = item.table.drops if item else ()
            seal = self._sealing(name, values)
            given = seal.values, tag, seal.unset, seal.note_after, drops
            adopted[name] = self._staging.adopt(self._bases[name], *given)

        at_once(adopt, sorted(self._bases))
        return adopted | self._driver.adopt(self._seals(values), tag)

    def _seals(self, values: Mapping[str, str]) -> dict[str, Sealing]:
        return {name: self._sealing(name, values) for name in self._driver.written}

    def _sealing(self, name: str, values: Mapping[str, str]) -> Sealing:
        """Return what the commit of a table's epoch changes beside its rows."""
        item = self._work.get(name)
        unset = [catalog.REPLACED, catalog.FILLS, catalog.DROPS] if item else []
        lacks = item.table.incomplete if item else None
        rebuilt = item is not None and item.table.rebuilt
        drops = item.table.drops if item else ()
        own = {**values, **self._definition(name)}
        own |= snapshot_rows.bound(item.table) if item else {}
        if item and drops:
            left = [column for column in item.table.layout.kept if column not in drops]
            own[catalog.KEPT] = json.dumps(left)
        return Sealing(own, unset, lambda note: note.brought(lacks, rebuilt=rebuilt))

    def _definition(self, name: str) -> dict[str, str]:
        """Return the property of a table of sums that tells by which settings it is computed."""
        found = self._settings.sums.get(name.removeprefix(sums.SOURCE_MARK))
        return {catalog.SUMS: sums.definition(found)} if found and sums.is_sums(name) else {}

    def follow(self, adopted: Mapping[str, Adopted]) -> None:
        """Do what comes after an epoch that is published, whose readers need not wait for this.

        Key indexes come to its snapshots; one that a kill leaves behind follows later.
        """
        for name, item in sorted(self._work.items()):
            if item.table.rebuilt:
                log.info("a rebuild is done", table=name)
        self._driver.follow(adopted)
        at_once(
            self._indexes.advance,
            [each for name, each in adopted.items() if name not in self._driver.written],
        )

    def _add_up(
        self,
        epoch: int,
        cut: Cut,
        own: Callable[[str], DataFrame],
        states: dict[str, State],
        before: EpochRecord,
    ) -> None:
        """Bring the epoch into the tables of sums."""
        for name, settings in self._settings.sums.items():
            item, state = self._work.get(settings.source), states.get(settings.source)
            known = states.get(sums.source_of(name))
            tick()
            if item is not None:
                layout, source = item.table.layout, self._staging.branch(self._bases[item.name])
            elif state and state.shape and _lags(known, state, epoch, cut, before):
                layout, source = layout_of(self._settings, state.shape), state.identifier
            else:
                continue
            identifier = catalog.identifier(self._namespace, name)
            table = sums.make(self._spark, identifier, name, settings, layout)
            if catalog.reached(catalog.properties(table))[0] >= epoch:
                continue
            base = self._staging.begin(identifier, sealed_of(known), explicit=True)
            branch = self._staging.branch(self._staging.written(base))
            behind = known is None or known.rolled_back or known.commit_lsn != before.commit_lsn
            # A table that is made anew, or comes back, has no rows of the epoch before.
            behind = behind or (item is not None and item.table.commit_lsn != before.commit_lsn)
            behind = behind or settings.source not in before.tables
            behind = behind or rollback.rolled_back(table, catalog.properties(table))
            if item is None or behind or not table_writer.adds_up(item):
                sums.recompute(self._spark, branch, source, settings)
            else:
                place = before.tables.get(settings.source)
                folded = table_writer.folded(item, own(item.summary.topic))
                snapshot = place.snapshot if place else None
                sums.add(branch, settings, layout, folded, item.table.identifier, snapshot)
            self._bases[sums.source_of(name)] = self._staging.written(base)


def _lags(known: State | None, source: State, epoch: int, cut: Cut, before: EpochRecord) -> bool:
    """Tell whether sums are to be computed from a table that an epoch brings nothing. Pure.

    `known`: the state of the sums. `before`: the record of the last epoch. The rows of a parked
    table may not be those of its epoch: its sums are parked with it.
    """
    if source.note.parked is not None:
        return False
    if known is not None and known.rolled_back:
        return source.commit_lsn in (before.commit_lsn, cut.commit_lsn)
    # The source had the epoch already when it was begun again: the sums may not.
    again = bool(cut.transactions) or source.sealed[0] == epoch
    return source.commit_lsn == cut.commit_lsn and again


def _quarantined(cut: Cut, work: Iterable[Work], bad: Bad) -> incomplete_tables.Lacks:
    """Return the tables of which events are in the quarantine."""
    found = {item.name: len(bad.get(item.summary.topic, ())) for item in work}
    return {
        name: Incomplete(cut.commit_lsn, f"{count} of its events are in _quarantine")
        for name, count in found.items()
        if count
    }
