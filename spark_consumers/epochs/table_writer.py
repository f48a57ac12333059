"""Writes one table's part of an epoch, in one commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.events import changes
from spark_consumers.events.shape import CommitPosition, Shape, replacements
from spark_consumers.iceberg import changelog, current, fills, history
from spark_consumers.iceberg.delete_insert import Deletes, delete_and_insert
from spark_consumers.iceberg.evolution import key_changed, other_key
from spark_consumers.iceberg.tables import OpenTable

Way = Literal["driver", "append", "replace", "merge", "index", "scan"]
"""How an epoch came into a table: by this process itself (apply/), or by Spark: rows were only
added, or put in place of all others, or merged by key; or those that changed were deleted by
position, found by the index or by a scan, and added."""


@dataclass(frozen=True, slots=True)
class Work:
    """A table's part of an epoch: its events, and the shapes that they were written with."""

    table: OpenTable
    summary: TopicSummary
    shapes: Sequence[Shape]

    @property
    def name(self) -> str:
        """The source table's name."""
        return self.table.layout.shape.name


def write_table(work: Work, own: DataFrame, by_index: Deletes | None = None) -> Way:
    """Bring the events of a table (`own`) into it, by its kind; return the way that was taken."""
    table, summary, shapes = work.table, work.summary, work.shapes
    kind, keyless = table.layout.kind, table.layout.shape.keyless
    if kind == "changelog":
        return _write_changelog(table, own, summary, shapes)
    _require_one_key(work, own)
    if kind == "history":
        return _write_history(table, own, summary, shapes)
    if keyless:
        return _write_keyless(table, own, summary, shapes)
    return _write_current(table, own, summary, shapes, by_index)


def _require_one_key(work: Work, own: DataFrame) -> None:
    """Raise SetupError where events of the table's rows are by another key than the table's.

    Only a table that is filled from its topic's beginning can have any.
    """
    for former, shape in pairwise(work.shapes):
        if not key_changed(former, shape):
            continue
        beginning = _beginning(work.table, work.summary)
        rows = own if beginning is None else changes.after(own, beginning)
        if not changes.before(rows, shape.since).isEmpty():
            raise other_key(former, shape)


def fill(spark: SparkSession, work: Work) -> bool:
    """Give the table's rows their values in columns that were added; tell whether it was needed."""
    table = work.table
    # A history keeps the versions that a truncate or another source table has ended.
    keeps = table.layout.kind == "history" and not (table.rebuild or table.rebuilt)
    needed = bool(table.fills) and (keeps or not _begins_anew(work))
    if needed:
        fills.fill(spark, table.identifier, table.fills)
    return needed


def adds_up(work: Work) -> bool:
    """Tell whether the rows' sums follow from the epoch's changes and the rows that they change."""
    same_columns = len(work.shapes) == 1 and not work.table.fills
    return same_columns and not _begins_anew(work) and not work.summary.unavailable


def _begins_anew(work: Work) -> bool:
    """Tell whether the rows that the table had before the epoch are replaced."""
    table = work.table
    return table.rebuild or table.rebuilt or _beginning(work.table, work.summary) is not None


def folded(work: Work, own: DataFrame) -> DataFrame:
    """Fold the events of a current-state table into at most one change for each row."""
    if work.table.layout.shape.keyless:
        return changes.distinct_events(changes.parsed(own, work.shapes))
    return changes.row_changes(own, work.shapes, unavailable=work.summary.unavailable)


def _beginning(table: OpenTable, summary: TopicSummary) -> CommitPosition | None:
    """Return the event after which the table's rows begin, None where the present rows stay."""
    before = table.replaced
    replaced = None if before is None else CommitPosition(before.commit_lsn, before.seq - 1)
    return max(filter(None, (summary.last_truncate, replaced)), default=None)


def _write_current(
    table: OpenTable,
    own: DataFrame,
    summary: TopicSummary,
    shapes: Sequence[Shape],
    by_index: Deletes | None,
) -> Way:
    """Write an epoch into a table of rows; return how; see Way."""
    beginning = _beginning(table, summary)
    if beginning is not None:
        own = changes.after(own, beginning)
    folded = changes.row_changes(own, shapes, unavailable=summary.unavailable)
    identifier, layout = table.identifier, table.layout
    if beginning is not None or table.rebuild:
        current.replace(identifier, layout, folded)
        return "replace"
    if not summary.identified_rows and table.appends:
        current.insert(identifier, layout, folded)
        return "append"
    if table.large and not summary.unavailable:
        events = summary.events
        return delete_and_insert(identifier, layout, folded, events=events, by_index=by_index)
    current.merge(identifier, layout, folded, unavailable=summary.unavailable)
    return "merge"


def _write_keyless(
    table: OpenTable, own: DataFrame, summary: TopicSummary, shapes: Sequence[Shape]
) -> Way:
    """Write an epoch into a table without a key, whose rows are only inserted."""
    beginning = _beginning(table, summary)
    if beginning is not None:
        own = changes.after(own, beginning)
    rows = changes.distinct_events(changes.parsed(own, shapes))
    if beginning is not None or table.rebuild:
        current.replace(table.identifier, table.layout, rows)
        return "replace"
    current.insert(table.identifier, table.layout, rows)
    return "append"


def _write_changelog(
    table: OpenTable, own: DataFrame, summary: TopicSummary, shapes: Sequence[Shape]
) -> Way:
    """Append an epoch's events to a changelog, truncates too."""
    rows = changes.distinct_events(changes.parsed(own, shapes, as_events=True))
    rows = changelog.of_rows(table.layout, rows)
    if summary.truncates:
        rows = changelog.with_truncates(table.layout, rows, summary.truncates)
    changelog.append(table.identifier, table.layout, rows, replace=table.rebuild)
    return "replace" if table.rebuild else "append"


def _cuts(
    table: OpenTable, own: DataFrame, summary: TopicSummary, shapes: Sequence[Shape]
) -> set[history.Truncate]:
    """Return a truncate just before each event from which on the source is another table.

    It has the time of that event, or of the next one in the table.
    """
    if table.replaced is None:
        return set()
    cuts = set()
    for lsn, seq in {*replacements(shapes), table.replaced}:
        if (lsn, seq) <= table.replaced:
            place = CommitPosition(lsn, seq - 1)
            first = F.expr("min_by(ts_us, struct(commit_lsn, seq)) AS ts_us")
            ts_us = changes.after(own, place).agg(first).collect()[0].ts_us
            cuts.add((*place, summary.ts_us_max + 1 if ts_us is None else ts_us))
    return cuts


def _write_history(
    table: OpenTable, own: DataFrame, summary: TopicSummary, shapes: Sequence[Shape]
) -> Way:
    """Merge an epoch's versions of rows into a history; truncates end all versions."""
    rows = changes.distinct_events(changes.parsed(own, shapes))
    truncates = summary.truncates | _cuts(table, own, summary, shapes)
    read = bool(summary.seen_lsn)
    if table.rebuild:
        cuts = sorted(truncates)
        history.replace(table.identifier, table.layout, rows, cuts, snapshot_rows=read)
        return "replace"
    history.write_versions(
        table.identifier,
        table.layout,
        rows,
        sorted(truncates),
        unavailable=summary.unavailable,
        snapshot_rows=read,
    )
    return "merge"
