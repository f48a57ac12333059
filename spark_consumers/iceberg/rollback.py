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

from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.table_note import UntrustedRowsError


def rolled_back(table: Any, properties: Mapping[str, str]) -> bool:
    """Tell whether a table's rows lack the last epoch that its `properties` name."""
    if not properties.keys() >= {catalog.EPOCH, catalog.COMMIT_LSN}:
        return False
    last = _snapshots_of(table, properties)
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


def _snapshots_of(table: Any, properties: Mapping[str, str]) -> dict[int, int]:
    """Return the snapshots (id -> sequence number) of the last epoch that the properties tell.

    The commit of an epoch tags its last one. Without the tag the summaries tell; a writer that was
    overtaken may have left others of the same epoch. {} if none is known.
    """
    tag = catalog.ref_snapshot(table, catalog.tag_name(int(properties[catalog.COMMIT_LSN])))
    if tag is not None:
        return {tag: int(table.snapshot(tag).sequenceNumber())}
    return {
        int(snapshot["snapshot-id"]): int(snapshot.get("sequence-number", 0))
        for snapshot in catalog.metadata(table).get("snapshots", ())
        if snapshot["summary"].get(catalog.EPOCH) == properties[catalog.EPOCH]
        and catalog.REBUILD not in snapshot["summary"]
    }


def comes_from(table: Any, snapshot_id: int) -> bool:
    """Tell whether a snapshot is the table's present one or one of its ancestors."""
    snapshot = table.currentSnapshot()
    while snapshot is not None and int(snapshot.snapshotId()) != snapshot_id:
        parent = snapshot.parentId()
        snapshot = None if parent is None else table.snapshot(parent)
    return snapshot is not None


def restored(tagged: int | None, recorded: int | None) -> bool:
    """Tell whether a table was restored: its last epoch is not the one of the record. Pure.

    `tagged`: the snapshot of the last epoch in the table's properties; `recorded`: the snapshot of
    the table's last epoch in the record. They differ only if the catalog was given the table's
    metadata of another time.
    """
    return None not in (tagged, recorded) and tagged != recorded


def refused(identifier: str) -> UntrustedRowsError:
    """Return the error of a table that was rolled back, or restored with its properties."""
    return UntrustedRowsError(
        "the Iceberg table was rolled back or restored: its rows are not those of its last epoch",
        operation="go on with a table",
        subject=identifier.replace("`", ""),
        hint="`slottables rebuild --table` makes it anew from Kafka",
    )
