"""Deletes rows of a large table by position, found by the index of its keys.

What this costs follows the number of changes and of the data files that they touch, not the size
of the table. The deletion vectors of those files are written anew, with what they had, and come to
the epoch's branch in one commit.
"""

import contextlib
import json
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
from spark_consumers.java import table_files as program
from spark_consumers.key_index.file_changes import Applied, Located, delete
from spark_consumers.key_index.keys import Keys, is_indexable, keys_of

log = structlog.get_logger()
KEYS_MAX = 1_000_000
"""Keys of one epoch that come to the driver; rows of more are found by a scan of the table."""
OPEN_MAX = 256
"""Indexes that are open at a time, each with the lock of its folder: those that were used last."""


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
            index = self.of(table, layout)
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
                self.of(table, layout).advance(table, snapshot, save=True)

    def let_go(self, kept: Collection[str]) -> None:
        """Let other programs have the indexes of tables that are not `kept`, by UUID."""
        for identity in self._known.keys() - kept:
            self._known.pop(identity).close()

    def close(self) -> None:
        """Write down the indexes, and let another program have them."""
        for index in self._known.values():
            index.close()

    def of(self, table: Any, layout: Layout) -> KeyIndex:
        """Return the index of a table by the key that it has now."""
        schema = table.schema()
        fields = [schema.findField(field.name) for field in layout.key]
        if None in fields:
            raise UnknownFilesError("the table lacks a column of its key")
        return self.of_key(str(table.uuid()), [int(field.fieldId()) for field in fields])

    def of_key(self, identity: str, key: list[int]) -> KeyIndex:
        """Return the index of a table, by its UUID and the field ids of its key."""
        index = self._known.pop(identity, None)
        if index is None or index.key != key:  # another source table may have come under its name
            if index is not None:
                index.close()
            index = KeyIndex(self._folder, identity, key)
        self._known[identity] = index
        if len(self._known) > OPEN_MAX:
            self._known.pop(next(iter(self._known))).close()
        return index


def delete_rows(table: Any, index: KeyIndex, keys: Keys, target: Target) -> None:
    """Delete the rows of keys in one commit to the branch."""
    found = Applied()
    path = str(table.locationProvider().newDataLocation(f"{uuid.uuid4()}-deletes.puffin"))
    delete(found, located(table, index, keys), path, whole_files=False)
    if not found.deletes:
        return
    for place, content in found.files.items():
        table_files.write_file(table, place, content)
    for one in found.deletes:
        index.keep_vector(one, found.vectors[one["referenced-data-file"]])
    own = {"branch": target.branch, "snapshot": target.snapshot, "summary": target.summary}
    program(table).deleteRows(table, json.dumps(found.document() | own))


def located(table: Any, index: KeyIndex, keys: Keys) -> dict[str, Located]:
    """Return the rows that keys have, by data file."""
    found = {}
    for path, positions in index.find(keys).items():
        deleted, vector = index.vector(table, path)
        rows = BitMap64(positions.astype("uint64"))
        found[path] = Located(rows, index.file(path), deleted, vector)
    return found
