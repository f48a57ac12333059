"""Deletes rows of a large table by position, found by the index of its keys.

What this costs follows the number of changes and of the data files that they touch, not the size
of the table. The deletion vectors of those files are written anew, with what they had, and come to
the epoch's branch in one commit.
"""

import contextlib
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import structlog
from pyroaring import BitMap64
from pyspark.sql import DataFrame, SparkSession

from spark_consumers.iceberg import catalog, table_files
from spark_consumers.iceberg.layout import Layout
from spark_consumers.iceberg.staging import Adopted
from spark_consumers.iceberg.table_files import UnknownFilesError
from spark_consumers.iceberg.table_index import KeyIndex
from spark_consumers.iceberg.tables import State
from spark_consumers.java import java_class
from spark_consumers.key_index.deletion_vectors import puffin
from spark_consumers.key_index.keys import Keys, is_indexable, keys_of

log = structlog.get_logger()
KEYS_MAX = 1_000_000
"""Keys of one epoch that come to the driver; rows of more are found by a scan of the table."""


class Target(NamedTuple):
    """Where an epoch goes: a table as its writer knows it, a branch, what its summaries tell."""

    identifier: str
    snapshot: int | None
    branch: str
    summary: Mapping[str, str]


class Indexes:
    """The key indexes of one writer's tables, in a folder of this machine."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark, self._folder = spark, folder
        self._known: dict[str, KeyIndex] = {}
        self._refused: dict[str, str] = {}

    def delete(self, target: Target, layout: Layout, changes: DataFrame, *, events: int) -> bool:
        """Delete the rows that changes are of; False where the index does not cover that.

        Nothing has been done then.
        """
        kinds = [field.type.simpleString() for field in layout.key]
        if target.snapshot is None or events > KEYS_MAX or not is_indexable(kinds):
            return False
        table = catalog.load(self._spark, target.identifier)
        if int(table.operations().current().formatVersion()) < 3:
            return False
        try:
            index = self._of(table, layout)
            index.bring_to(table, target.snapshot)
            names = [f"c{field.source_index}" for field in layout.key]
            found: pa.Table = changes.select(*names).toArrow()
            if found.num_rows:
                keys = keys_of([found.column(name).combine_chunks() for name in names])
                delete_rows(table, index, keys, target)
        except UnknownFilesError as error:
            name, reason = layout.shape.name, str(error)
            if self._refused.get(name) != reason:
                log.warning("rows are found by a scan of the table", table=name, reason=reason)
            self._refused[name] = reason
            return False
        self._refused.pop(layout.shape.name, None)
        return True

    def advance(self, adopted: Adopted) -> None:
        """Bring a table's index, where it is known, to the snapshot that an epoch has made.

        Done at once, while all snapshots in between are there: maintenance removes them.
        """
        state, snapshot, _ = adopted
        index = self._known.get(state.uuid)
        if index is not None and index.known and snapshot is not None:
            index.advance(catalog.load(self._spark, state.identifier), snapshot)

    def keep(self, state: State, layout: Layout, snapshot: int) -> None:
        """Bring a table's index, also one of an earlier run, to the last snapshot, and save it.

        Called before maintenance removes the snapshots before that one.
        """
        if (self._folder / state.uuid).is_dir():
            table = catalog.load(self._spark, state.identifier)
            with contextlib.suppress(UnknownFilesError):
                self._of(table, layout).advance(table, snapshot, save=True)

    def let_go(self, kept: Collection[str]) -> None:
        """Let other programs have the indexes of tables that are not `kept`, by UUID."""
        for identity in self._known.keys() - kept:
            self._known.pop(identity).close()

    def close(self) -> None:
        """Write down the indexes, and let another program have them."""
        for index in self._known.values():
            index.close()

    def _of(self, table: Any, layout: Layout) -> KeyIndex:
        """Return the index of a table by the key that it has now."""
        identity, schema = str(table.uuid()), table.schema()
        fields = [schema.findField(field.name) for field in layout.key]
        if None in fields:
            raise UnknownFilesError("the table lacks a column of its key")
        key = [int(field.fieldId()) for field in fields]
        index = self._known.get(identity)
        if index is None or index.key != key:  # another source table may have come under its name
            if index is not None:
                index.close()
            index = self._known[identity] = KeyIndex(self._folder, identity, key)
        return index


def delete_rows(table: Any, index: KeyIndex, keys: Keys, target: Target) -> int:
    """Delete the rows of keys in one commit to the branch; return how many were there."""
    vectors: dict[str, BitMap64] = {}
    replaced = []
    rows = 0
    for path, positions in index.find(keys).items():
        old, file = index.vector(table, path)
        new = old | BitMap64(positions.astype("uint64"))
        if len(new) > len(old):
            rows += len(new) - len(old)
            vectors[path] = new
            replaced += [] if file is None else [file]
    if not vectors:
        return 0
    content, blobs = puffin(vectors)
    name = f"{uuid.uuid4()}-deletes.puffin"
    location = str(table.locationProvider().newDataLocation(name))
    table_files.write_file(table, location, content)
    delta = table.newRowDelta().toBranch(target.branch).validateFromSnapshot(target.snapshot)
    builders = _Builders(table, location, len(content))
    for path, blob in blobs.items():
        builder = builders.of(index.file(path))
        builder.withReferencedDataFile(path).withContentOffset(blob.offset)
        builder.withContentSizeInBytes(blob.length).withRecordCount(blob.rows)
        delta.addDeletes(builder.build())
        index.keep_vector(f"{location}#{blob.offset}", vectors[path])
    for file in replaced:
        delta.removeDeletes(file)
    for key, value in target.summary.items():
        delta.set(key, value)
    delta.commit()
    return rows


class _Builders:
    """Makes Java's deletion vectors of one file; each call to Java counts, as there are many."""

    def __init__(self, table: Any, location: str, size: int) -> None:
        self._table, self._location, self._size = table, location, size
        self._known: dict[int, tuple[Any, bool]] = {}

    def of(self, data: Any) -> Any:
        """Return the builder of a data file's vector, without what differs from file to file."""
        number = int(data.specId())
        if number not in self._known:
            spec = self._table.specs().get(number)
            builder = java_class(self._table, "org.apache.iceberg.FileMetadata").deleteFileBuilder(
                spec
            )
            builder.ofPositionDeletes().withFormat("puffin").withPath(self._location)
            builder.withFileSizeInBytes(self._size)
            self._known[number] = builder, bool(spec.isPartitioned())
        builder, partitioned = self._known[number]
        if partitioned:
            builder.withPartition(data.partition())
        return builder
