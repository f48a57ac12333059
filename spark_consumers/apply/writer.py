"""Brings epochs into tables without Spark: files first, which nobody sees, then one commit a table.

    look       the tables as the catalog has them
    write      the files of a table's part of an epoch (apply), named by nothing yet
    prepare    one RowDelta for each table, its properties and its tag: to be published with those
               of all tables (epochs/publication), and prepared again where somebody was faster
    follow     the key index takes in what was published

Files that a kill leaves behind are named by no snapshot: `slottables maintain` removes them by
their age, as those of any writer. Nothing is removed here: a commit whose answer was lost may be
there.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from pyspark.sql import SparkSession

from spark_consumers.apply.apply import FileTarget, apply
from spark_consumers.apply.data_file import columns_of
from spark_consumers.apply.events import RowEvent
from spark_consumers.apply.look import Look
from spark_consumers.apply.merging import Small, chosen, rows_of
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.failures import FOREIGN
from spark_consumers.iceberg import catalog, rollback, table_files
from spark_consumers.iceberg.commits import change_refs
from spark_consumers.iceberg.indexed_delete import Indexes, located
from spark_consumers.iceberg.layout import Layout
from spark_consumers.iceberg.staging import BRANCH
from spark_consumers.iceberg.table_files import UnknownFilesError
from spark_consumers.iceberg.table_index import KeyIndex
from spark_consumers.java import java_class
from spark_consumers.java import table_files as program
from spark_consumers.key_index.file_changes import Applied, Located
from spark_consumers.key_index.keys import Keys


class Written(NamedTuple):
    """A table's part of an epoch in its files: what is left is one commit."""

    identifier: str
    look: Look
    applied: Applied
    keys: KeyIndex | None


class Prepared(NamedTuple):
    """A commit that waits to be published.

    `transaction`: None where the table has the epoch already. `snapshot`: the table's then, None
    for a table without rows. `properties`: those that it had before.
    """

    transaction: Any
    snapshot: int | None
    properties: Mapping[str, str]


class DriverWriter:
    """Writes epochs of one writer's tables."""

    def __init__(self, spark: SparkSession, indexes: Indexes) -> None:
        self._spark, self._indexes = spark, indexes
        self._tables: dict[str, Any] = {}
        self._left: dict[str, int | None] = {}
        """The snapshot in which this writer has left a table."""
        self._of_other_columns: set[str] = set()
        """Small files that stay as they are."""

    def look(self, identifiers: Iterable[str]) -> dict[str, Look]:
        """Look at tables; those that can't be loaded are left out: Spark's way says why."""
        found: dict[str, Look] = {}
        left = set(identifiers)
        for _ in range(2):  # a table may have been made anew since
            known = java_class(self._spark._jsparkSession, "java.util.TreeMap")()
            for identifier in left:
                with contextlib.suppress(*FOREIGN):
                    if identifier not in self._tables:
                        self._tables[identifier] = catalog.load(self._spark, identifier)
                    known.put(identifier, self._tables[identifier])
            answer = json.loads(program(known).looks(known, BRANCH))
            found |= {name: _look(one) for name, one in answer.items() if one is not None}
            left -= found.keys()
            if not left:
                break
            for identifier in left & self._tables.keys():
                del self._tables[identifier]
        return found

    def write(
        self,
        layout: Layout,
        identifier: str,
        look: Look,
        known: tuple[int, int],
        events: Iterable[RowEvent],
    ) -> Written:
        """Write the files of a table's part of an epoch after `known` (epoch, commit LSN).

        Raise Unsuited where Spark is to do it, Retryable (LOCKED) where the table has another
        epoch, OperatorNeeded where it was rolled back behind its last one.
        """
        if catalog.reached(look.properties) != known:
            raise catalog.overtaken(identifier)
        java = self._tables[identifier]
        ours = identifier in self._left and self._left[identifier] == look.snapshot
        if not ours and rollback.rolled_back(java, look.properties):
            raise rollback.refused(identifier)
        if look.branches:  # what a kill has left of Spark's way
            change_refs(java, partial(_remove, look.branches))
            look = self.look([identifier])[identifier]
        index = None if layout.shape.keyless else self._index(layout, look)

        def locate(keys: Keys) -> Mapping[str, Located]:
            if index is None or look.snapshot is None:
                return {}
            return located(java, index, keys)

        columns = columns_of(look.schema)
        table = FileTarget(columns, look.properties, look.spec, look.data_path, look.vector_path)
        try:
            small = self._small(index, java, look, table, layout)
            applied = apply(layout, table, events, locate, small)
        except UnknownFilesError as error:
            raise Unsuited(f"the key index: {error}") from error
        for path, content in applied.files.items():
            table_files.write_file(java, path, content)
        return Written(identifier, look, applied, index)

    def _small(
        self, index: KeyIndex | None, java: Any, look: Look, table: FileTarget, layout: Layout
    ) -> list[Small]:
        """Return the files that are to go into the new one, where the table's files are known."""
        if index is None or look.snapshot is None:
            return []
        index.bring_to(java, look.snapshot)
        found = []
        files = [file for path, file in index.files() if path not in self._of_other_columns]
        for file in chosen(files):
            path = file["file-path"]
            with table_files.readable(path), table_files.opened(java, path) as opened:
                rows = rows_of(opened.read(), table.columns, layout.names)
            if rows is None:
                self._of_other_columns.add(path)
            else:
                found.append(Small(file, rows, *index.vector(java, path)))
        return found

    def _index(self, layout: Layout, look: Look) -> KeyIndex:
        columns = columns_of(look.schema)
        if any(field.name not in columns for field in layout.key):
            raise Unsuited("the table lacks a column of its key")
        return self._indexes.of_key(look.uuid, [columns[field.name].id for field in layout.key])

    def prepare(
        self, written: Mapping[str, Written], documents: Mapping[str, dict[str, Any]]
    ) -> dict[str, Prepared | None]:
        """Prepare the commits of tables, by key; None for one that is not as it was written for.

        `documents`: what each commit sets, beside its files.
        """
        tables = java_class(self._spark._jsparkSession, "java.util.TreeMap")()
        transactions = java_class(self._spark._jsparkSession, "java.util.TreeMap")()
        given = {}
        for key, one in written.items():
            tables.put(key, self._tables[one.identifier])
            given[key] = one.applied.document() | documents[key] | {"metadata": one.look.metadata}
        answer = json.loads(program(tables).prepare(tables, json.dumps(given), transactions))
        return {
            key: None
            if one is None
            else Prepared(transactions.get(key), one.get("snapshot"), written[key].look.properties)
            for key, one in answer.items()
        }

    def anew(self, written: Written, last: int | None, epoch: str) -> Written | None:
        """Return what is to be prepared again after somebody else's commit; None: it is there.

        `last`: the snapshot of the commit that was prepared last. Raise Retryable (LOCKED) where
        the table has other rows, or another epoch.
        """
        look = self.look([written.identifier]).get(written.identifier)
        if look is None:
            raise catalog.overtaken(written.identifier)
        if look.properties.get(catalog.EPOCH) == epoch and look.snapshot == last:
            return None
        same = catalog.reached(look.properties) == catalog.reached(written.look.properties)
        if not same or look.snapshot != written.look.snapshot or look.uuid != written.look.uuid:
            raise catalog.overtaken(written.identifier)
        return written._replace(look=look)

    def follow(self, written: Written, snapshot: int | None) -> None:
        """Take in a commit that is published: `snapshot` is the table's now."""
        self._left[written.identifier] = snapshot
        if written.keys is not None and snapshot is not None:
            written.keys.follow_own(written.look.snapshot, snapshot, written.applied)


def _remove(branches: Iterable[str], manage: Any) -> None:
    for name in branches:
        manage.removeBranch(name)


def _look(answer: dict[str, Any]) -> Look:
    schema = json.loads(answer.pop("schema"))
    branches, snapshot = tuple(answer.pop("branches")), answer.pop("snapshot", None)
    return Look(**answer, schema=schema, branches=branches, snapshot=snapshot)
