"""Maintenance of tables: compacts files, expires snapshots, removes orphan files.

A compaction that meets an epoch of the same table leaves it alone or makes it begin again; neither
loses anything. What is tagged stays readable. Written anew are small files, where there are enough
of them, and files of which DELETED_RATIO is deleted; a file with some deleted rows stays: else each
round would write whole tables anew.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import structlog
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from schemas.errors import SetupError
from schemas.tables import TablesSettings
from spark_consumers.iceberg import catalog, commits, holds
from spark_consumers.iceberg.retention import Retention, kept
from spark_consumers.iceberg.table_note import NEVER
from spark_consumers.iceberg.tables import State
from spark_consumers.liveness import tick

log = structlog.get_logger()
_TARGET_BYTES = 128 * 2**20
DELETED_RATIO = 0.3
"""The part of a file's rows that are deleted before it is written anew without them."""


@dataclass(frozen=True, slots=True)
class Maintained:
    """The maintenance of one table: data files before and after, snapshots left, files removed."""

    table: str
    files_before: int
    files_after: int
    snapshots: int
    orphans: int


class Recorded(NamedTuple):
    """The commit LSNs of the recorded epochs, and the snapshots of a table that they name."""

    commit_lsns: frozenset[int]
    snapshots: frozenset[int]


NOTHING: Final = Recorded(frozenset(), frozenset())


def maintain(
    spark: SparkSession,
    settings: TablesSettings,
    state: State,
    *,
    orphans: bool,
    recorded: Recorded = NOTHING,
    compacted: Callable[[State, int], None] | None = None,
) -> Maintained:
    """Compact a table where it has become many files, forget old epochs, remove lost files.

    `recorded`: where it names no epoch, all tags stay.
    `compacted` is called with the table and its snapshot before older snapshots are removed.
    """
    table = catalog.load(spark, state.identifier)
    work = _compacted(spark, settings, table, state.source, state.identifier)
    snapshot = catalog.snapshot_id(table)
    if compacted is not None and snapshot is not None:
        compacted(state, snapshot)
    tick()
    now_ms = int(time.time() * 1000)
    metadata = catalog.metadata(table)
    refs = {name: int(ref["snapshot-id"]) for name, ref in metadata["refs"].items()}
    times_ms = {s["snapshot-id"]: int(s["timestamp-ms"]) for s in metadata.get("snapshots", ())}
    retention, most = Retention.of(settings), settings.epochs_kept
    commits.forget(table, forgotten(refs, times_ms, recorded, retention, most, now_ms))
    tick()
    return _cleaned(spark, settings, work, now_ms, orphans=orphans)


def maintain_without_epochs(
    spark: SparkSession, settings: TablesSettings, name: str, identifier: str, *, orphans: bool
) -> Maintained:
    """Maintain a table that is only appended to, as `maintain` does; epochs name none of it.

    `name`: what the result calls it.
    """
    table = catalog.load(spark, identifier)
    work, now_ms = _compacted(spark, settings, table, name, identifier), int(time.time() * 1000)
    return _cleaned(spark, settings, work, now_ms, orphans=orphans)


class _Compacted(NamedTuple):
    """A table that was compacted, `name` in the result, and how many files it had before.

    `failed`: how many of the files could not be compacted.
    """

    table: Any
    name: str
    identifier: str
    files_before: int
    failed: int


def _compacted(
    spark: SparkSession, settings: TablesSettings, table: Any, name: str, identifier: str
) -> _Compacted:
    """Compact a table if it has many files."""
    before, failed = _files(spark, identifier), 0
    if before >= settings.compact_files_min:
        failed = _compact(spark, table, settings)
        table.refresh()
    return _Compacted(table, name, identifier, before, failed)


def _cleaned(
    spark: SparkSession,
    settings: TablesSettings,
    work: _Compacted,
    now_ms: int,
    *,
    orphans: bool,
) -> Maintained:
    """Expire old snapshots of a table and remove its orphans; return what was done.

    Raise SlotbridgeError, after all that, where files could not be compacted.
    """
    table, name, identifier, before, failed = work
    # Readers also have snapshots without a tag: that of a compaction, which no epoch names.
    found = expired(catalog.metadata(table), now_ms - settings.epochs_kept_all_ms)
    catalog.expire(table, keep=1, older_than_ms=found.older_than_ms, younger=found.others)
    tick()
    removed = _remove_orphans(spark, table, settings.orphans_older_ms) if orphans else 0
    table.refresh()
    snapshots = sum(1 for _ in table.snapshots())
    done = Maintained(name, before, _files(spark, identifier), snapshots, removed)
    log.info("table maintained", table=done.table, files=done.files_after, snapshots=done.snapshots)
    if failed:
        raise SetupError(
            f"{failed} files could not be compacted",
            operation="maintain tables",
            subject=name,
            hint="the table stays as it is, and files pile up: Spark's own log on stderr says why",
        )
    return done


def forgotten(
    refs: Mapping[str, int],
    times_ms: Mapping[int, int],
    recorded: Recorded,
    retention: Retention,
    most: int,
    now_ms: int,
) -> list[str]:
    """Return the tags to remove among a table's references (name -> snapshot). Pure.

    A tag stays if a recorded epoch names it, by LSN or snapshot, or if it is later than all of
    them. Of the others stay those that `retention` keeps by the time of their snapshots
    (`times_ms`), and `most` of them. Holds go when their time is over.
    """
    tags = catalog.own_tags_of(refs)
    last = max(recorded.commit_lsns, default=NEVER)
    others = [
        tag
        for tag in tags
        if (lsn := catalog.tag_lsn(tag)) <= last
        and lsn not in recorded.commit_lsns
        and refs[tag] not in recorded.snapshots
    ]
    places = kept([times_ms[refs[tag]] for tag in tags], now_ms, retention)
    young = {tags[place] for place in places}
    stay = set([tag for tag in others if tag in young][-most:])
    gone = [tag for tag in others if tag not in stay]
    return [*gone, *holds.expired(refs, now_ms)]


class Expiry(NamedTuple):
    """The snapshots that go: those from before `older_than_ms` (ms since 1970), and `others`."""

    older_than_ms: int
    others: list[int]


def expired(metadata: Mapping[str, Any], cutoff_ms: int) -> Expiry:
    """Return which snapshots of a table go. Pure.

    `metadata`: the table's, as Iceberg's specification has it. A reader may have opened a snapshot
    for as long as it was the table's current one: a snapshot that was replaced after the cutoff
    stays, however old it is. A snapshot that never was current, such as a cancelled rebuild's, goes
    if it is from before the cutoff and no reference names it. The result's `others` are those of
    them that are younger than a snapshot that stays.
    """
    log = metadata.get("snapshot-log", ())
    ends_ms = [*(int(entry["timestamp-ms"]) for entry in log[1:]), cutoff_ms + 1]
    had = {e["snapshot-id"] for e, end_ms in zip(log, ends_ms, strict=False) if end_ms > cutoff_ms}
    times_ms = {s["snapshot-id"]: int(s["timestamp-ms"]) for s in metadata.get("snapshots", ())}
    older_than_ms = min([cutoff_ms, *(at for n, at in times_ms.items() if n in had)])
    stay = had | {ref["snapshot-id"] for ref in metadata.get("refs", {}).values()}
    young = [n for n, at in times_ms.items() if older_than_ms <= at < cutoff_ms]
    return Expiry(older_than_ms, [n for n in young if n not in stay])


def _files(spark: SparkSession, identifier: str) -> int:
    """Count a table's data files and delete files."""
    found = spark.table(f"{identifier}.files").agg(F.count("*").alias("files")).first()
    return 0 if found is None else int(found.files)


def _compact(spark: SparkSession, table: Any, settings: TablesSettings) -> int:
    """Put small files together; return how many files could not be read or written anew."""
    action = _actions(spark).rewriteDataFiles(table)
    action = action.option("min-input-files", str(settings.compact_files_min))
    action = action.option("delete-ratio-threshold", str(DELETED_RATIO))
    action = action.option("remove-dangling-deletes", "true")
    action = action.option("target-file-size-bytes", str(_TARGET_BYTES))
    # What meets an epoch is left as it was; the other groups of files are committed.
    action = action.option("partial-progress.enabled", "true")
    if table.sortOrder().isSorted():
        action = action.sort()
    return int(action.execute().failedDataFilesCount())


def _remove_orphans(spark: SparkSession, table: Any, older_ms: int) -> int:
    """Remove files that no snapshot names and that are old enough; return how many."""
    action = _actions(spark).deleteOrphanFiles(table)
    action = action.olderThan(int(time.time() * 1000) - older_ms)
    if not str(table.location()).startswith(("/", "file:", "hdfs:")):
        # Spark has no Hadoop file system for object storage: the table's FileIO lists it.
        action = action.usePrefixListing(True)
    return sum(1 for _ in action.execute().orphanFileLocations())


def _actions(spark: SparkSession) -> Any:
    jvm: Any = spark.sparkContext._jvm
    return jvm.org.apache.iceberg.spark.actions.SparkActions.get(spark._jsparkSession)
