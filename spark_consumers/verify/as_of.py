"""Compares tables with what Kafka's events make of them up to an epoch's LSN, while all goes on.

Unlike `comparison`, which needs a source at rest. Compared are the tables' snapshots of one epoch
and all events of the topics up to its LSN, folded in one go instead of epoch by epoch.
"""

import sys
from collections.abc import Collection
from itertools import pairwise

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from schemas.errors import ExitCode, OperatorNeeded
from schemas.naming import Naming, schema_and_table
from schemas.settings import Settings, require
from spark_consumers.epochs.event_reader import EventReader, Taken
from spark_consumers.epochs.ledger import EpochRecord, Ledger, epoch_of, require_snapshot
from spark_consumers.epochs.missing_events import Wanted
from spark_consumers.epochs.small_topics import expect_noted_ids
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.events import changes
from spark_consumers.events.shape import CommitPosition, Shape
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.holds import held
from spark_consumers.iceberg.layout import rule_of
from spark_consumers.iceberg.rules import layout_as_of
from spark_consumers.iceberg.sums import is_sums
from spark_consumers.iceberg.table_note import NEVER
from spark_consumers.iceberg.tables import State, Tables
from spark_consumers.kafka.reader import TopicOffsets
from spark_consumers.kafka.shapes import ShapeLog
from spark_consumers.kafka.transactions import Cut
from spark_consumers.sql import quoted
from spark_consumers.verify.comparison import CHANGELOG, TableComparison, compared, not_compared


def verify_as_of(
    spark: SparkSession,
    settings: Settings,
    commit_lsn: int,
    *,
    tables: Collection[str] = (),
    examples_max: int = 0,
) -> list[TableComparison]:
    """Compare all tables (or `tables`) as of the last epoch up to `commit_lsn`.

    Raise OperatorNeeded where a table lacks that epoch's tag or Kafka the first events,
    SettingsError for an LSN of before the epochs that are kept. Parked tables are not judged, nor
    are `tables` that are changelogs or not there.
    """
    try:
        return _Witness(spark, settings).compare(commit_lsn, tables, examples_max)
    except FOREIGN as error:
        raise translated(error, "compare tables") from error


class _Witness:
    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark = spark
        kafka = require(settings.kafka, "kafka")
        self._settings = require(settings.tables, "tables")
        self._naming = Naming(kafka.topic_prefix, settings.shaping)
        self._tables = Tables(kafka, self._settings)
        topics = TopicOffsets(kafka)
        self._reader = EventReader(spark, kafka, topics, settings.registry)
        self._shapes = ShapeLog(kafka, topics, self._naming, lambda _: True)
        self._ledger = Ledger(self._tables.namespace, self._settings)

    def compare(
        self, commit_lsn: int, tables: Collection[str], examples_max: int
    ) -> list[TableComparison]:
        """Compare the tables as of an epoch with what Kafka's events up to it amount to."""
        epoch = epoch_of(self._ledger.all(self._spark), commit_lsn)
        states = self._tables.states(self._spark)
        expect_noted_ids(self._shapes.tail, self._ledger, self._spark)
        self._shapes.read()
        wanted = set(tables) or {n for n in {*epoch.tables, *epoch.parked} if not is_sums(n)}
        lost = self._tables.unreadable_of(wanted)
        whys = {name: self._not_judged(epoch, name, states.get(name)) for name in sorted(wanted)}
        whys |= {name: str(error) for name, error in lost.items()}
        judged = {
            name: (states[name], self._snapshot(epoch, states[name]))
            for name, why in whys.items()
            if not why
        }
        with held(self._spark, {state.identifier: snapshot for state, snapshot in judged.values()}):
            return [
                self._compared(epoch, *judged[name], examples_max)
                if name in judged
                else not_compared(name, why)
                for name, why in whys.items()
                if name in judged or why != CHANGELOG or tables
            ]

    def _not_judged(self, epoch: EpochRecord, name: str, state: State | None) -> str:
        """Return why a table can't be compared, "" if it can."""
        if name in epoch.parked:
            found = epoch.parked[name].parked.described()
            return f"it is parked and has {found['has']}: {found['reason']}"
        if state is None:
            return "there is no Iceberg table of it"
        if self._is_changelog(state):
            return CHANGELOG
        shapes = self._shapes.upto(name, epoch.commit_lsn)
        return "" if shapes else f"{self._shapes.topic} does not tell its columns then"

    def _is_changelog(self, state: State) -> bool:
        rule = rule_of(self._settings, *schema_and_table(state.source))
        return state.shape is None or rule.kind == "changelog"

    def _snapshot(self, epoch: EpochRecord, state: State) -> int:
        """Return the table's Iceberg snapshot of the epoch. Raise where it is gone."""
        return require_snapshot(
            catalog.load(self._spark, state.identifier),
            epoch.tables.get(state.source),
            operation="compare tables",
            subject=state.source,
            commit_lsn=epoch.commit_lsn,
        )

    def _compared(
        self, epoch: EpochRecord, state: State, snapshot: int, examples_max: int
    ) -> TableComparison:
        """Compare one table; one that Spark fails with is not judged."""
        try:
            return self._compare(epoch, state, snapshot, examples_max)
        except FOREIGN as error:
            failure = translated(error, "compare tables")
            if failure.exit_code != ExitCode.BUG:
                raise
            return not_compared(state.source, str(failure))

    def _compare(
        self, epoch: EpochRecord, state: State, snapshot: int, examples_max: int
    ) -> TableComparison:
        """Compare one table's rows at the snapshot with its events, folded by key."""
        shapes = list(self._shapes.upto(state.source, epoch.commit_lsn))
        later = self._shapes.upto(state.source, sys.maxsize)[len(shapes) :]
        rows = catalog.as_of(self._spark, state.identifier, snapshot)
        rule = rule_of(self._settings, *schema_and_table(state.source))
        layout = layout_as_of(rule, [shapes[-1], *later], rows.columns)
        holding = "_valid_to IS NULL" if layout.kind == "history" else "true"
        right = rows.where(holding).select(
            *(F.col(quoted(f.name)).alias(f"c{n}") for n, f in enumerate(layout.fields))
        )
        names = [field.name for field in layout.fields]
        key = [] if shapes[-1].keyless else [layout.fields.index(field) for field in layout.key]
        topic = self._naming.table(*schema_and_table(state.source)).name
        wanted = {topic: Wanted(state.source, 0)}
        taken = self._reader.read(Cut(epoch.commit_lsn, 0), NEVER, wanted, {}, _require_first)
        try:
            left = self._as_of_shapes(taken, topic, shapes).select(
                *(F.col(f"c{f.source_index}").alias(f"c{n}") for n, f in enumerate(layout.fields))
            )
            return compared(state.source, state.identifier, left, right, names, key, examples_max)
        finally:
            taken.events.unpersist()

    def _as_of_shapes(self, taken: Taken, topic: str, shapes: list[Shape]) -> DataFrame:
        """Return the rows that Kafka's events leave, in columns c0, c1 and so on."""
        summary = taken.summaries.get(topic, TopicSummary(topic))
        own = changes.own_events(taken.events.frame, topic)
        begins = [summary.last_truncate] if summary.last_truncate else []
        begins += [
            CommitPosition(after.since.commit_lsn, after.since.seq - 1)
            for before, after in pairwise(shapes)
            if before.another_table(after)
        ]
        if begins:
            own = changes.after(own, max(begins))
        if shapes[-1].keyless:
            return changes.distinct_events(changes.parsed(own, shapes))
        folded = changes.row_changes(own, shapes, unavailable=summary.unavailable)
        return folded.where(F.col("op") != "d")


def _require_first(table: str, offset: int) -> None:
    if offset > 0:
        raise OperatorNeeded(
            "Kafka no longer has the first events of the table to compare with",
            operation="compare tables",
            subject=table,
            hint="compare with the source at rest: slottables verify without --as-of",
        )
