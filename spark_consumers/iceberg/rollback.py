"""Tells a table that somebody has rolled back: its properties still have the epoch, its rows not.

    main   … -> epoch 7 (tag lsn_…) -> epoch 8 (tag) -> compaction     properties: epoch 8
           … -> epoch 7                                                rolled back
           … -> epoch 7 -> somebody's rows                             so is this

A rollback changes the branch `main` and nothing else. Sequence numbers grow along a branch, so a
snapshot that comes before an epoch's and does not lead to it tells the rollback. Where snapshots
between were expired, nothing is judged.
"""

from collections.abc import Mapping
from typing import Any

from schemas.errors import OperatorNeeded
from spark_consumers.iceberg import catalog


def rolled_back(table: Any, found: Mapping[str, str]) -> bool:
    """Tell whether a table's rows lack the last epoch of its properties, `found`."""
    if not found.keys() >= {catalog.EPOCH, catalog.COMMIT_LSN}:
        return False
    last = _snapshots_of(table, found)
    if not last:  # the epoch has only set properties, or its snapshot was expired
        return False
    since, snapshot = min(last.values()), table.currentSnapshot()
    while snapshot is not None and snapshot.sequenceNumber() >= since:
        if snapshot.snapshotId() in last:
            return False
        parent = snapshot.parentId()
        snapshot = None if parent is None else table.snapshot(parent)
        if snapshot is None:
            return parent is None
    return True


def _snapshots_of(table: Any, found: Mapping[str, str]) -> dict[int, int]:
    """Return the snapshots (id -> sequence number) of the last epoch that the properties tell.

    The commit of an epoch tags its last one. Without the tag the summaries tell; a writer that was
    overtaken may have left others of the same epoch. {} if none is known.
    """
    tag = catalog.ref_snapshot(table, catalog.tag_name(int(found[catalog.COMMIT_LSN])))
    if tag is not None:
        return {tag: int(table.snapshot(tag).sequenceNumber())}
    return {
        int(snapshot["snapshot-id"]): int(snapshot.get("sequence-number", 0))
        for snapshot in catalog.metadata(table).get("snapshots", ())
        if snapshot["summary"].get(catalog.EPOCH) == found[catalog.EPOCH]
        and catalog.REBUILD not in snapshot["summary"]
    }


def comes_from(table: Any, snapshot_id: int) -> bool:
    """Tell whether a table's rows come from a snapshot: its present one, or one that led to it."""
    snapshot = table.currentSnapshot()
    while snapshot is not None and int(snapshot.snapshotId()) != snapshot_id:
        parent = snapshot.parentId()
        snapshot = None if parent is None else table.snapshot(parent)
    return snapshot is not None


def restored(tagged: int | None, recorded: int | None) -> bool:
    """Tell whether a table is not the one that the record of epochs names. Pure.

    `tagged`: the snapshot of the last epoch that the table's properties tell; `recorded`: that of
    the last epoch that brought it something, as the record has it. Both are the same, unless the
    catalog has got the table's metadata of another time.
    """
    return None not in (tagged, recorded) and tagged != recorded


def refused(identifier: str, *, whole: bool = False, parks: bool = True) -> OperatorNeeded:
    """Return the error of a table that was rolled back; `whole`: its properties, too.

    `parks`: the table is parked (tables.on_refused_table); else nothing runs that makes it anew.
    """
    name = identifier.replace("`", "")
    first = "" if parks else "set tables.on_refused_table: park and start `slottables run`; then "
    first += "`slottables rebuild --table` makes it anew from Kafka; "
    if whole:
        return OperatorNeeded(
            "the Iceberg table was restored: it is not at the epoch that _epochs has of it",
            operation="go on with a table",
            subject=name,
            hint=f"{first}`slottables unpark --table` reads from there what it lacks, which nobody "
            "has counted",
        )
    return OperatorNeeded(
        "the Iceberg table was rolled back: it lacks rows of an epoch that its properties tell",
        operation="go on with a table",
        subject=name,
        hint=f"{first}or roll it forward with `CALL system.set_current_snapshot`, to the snapshot "
        "of its last tag lsn_…, and `slottables unpark --table`",
    )
