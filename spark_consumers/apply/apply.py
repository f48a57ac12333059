"""Applies an epoch's events to one table: files, and all that one commit is to say of them. Pure.

    apply(layout, table, events, locate, small files) -> Applied

Rows that changed are deleted by position, by deletion vectors that replace those which their files
had, and added anew. A file whose rows are all deleted goes as a whole, and small files go into the
new one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyroaring import BitMap64

from spark_consumers.apply.changes import changes_of, keys_in
from spark_consumers.apply.data_file import IcebergColumn, data_file
from spark_consumers.apply.events import RowEvent
from spark_consumers.apply.merging import Small, live
from spark_consumers.iceberg.layout import Layout
from spark_consumers.key_index.file_changes import Applied, Located, delete
from spark_consumers.key_index.keys import Keys, joined

Locate = Callable[[Keys], Mapping[str, Located]]
"""Keys -> the rows that they have, by data file."""


@dataclass(frozen=True, slots=True)
class FileTarget:
    """How a table's files are written: its columns, its properties, and names of new files."""

    columns: Mapping[str, IcebergColumn]
    properties: Mapping[str, str]
    spec: int
    data_path: str
    vector_path: str


def apply(
    layout: Layout,
    table: FileTarget,
    events: Iterable[RowEvent],
    locate: Locate,
    small: Sequence[Small] = (),
) -> Applied:
    """Apply events of a table, all after what it has; raise Unsuited for what Spark is to judge.

    `small`: files whose rows go into the new one.
    """
    changes = changes_of(events, layout)
    touched = changes.touched
    located = locate(touched) if touched is not None and len(touched.numbers) else {}
    merged = {one.file["file-path"]: one for one in small}
    found = Applied()
    rows, keys = [changes.rows], [] if changes.keys is None else [changes.keys]
    for path, one in merged.items():
        there = live(one, located[path].positions if path in located else BitMap64())
        rows.append(there)
        keys += [] if changes.keys is None else [keys_in(there, layout)]
        found.removed_data.append(one.file)
        found.removed_deletes.extend([] if one.vector is None else [one.vector])
    whole = pa.concat_tables(rows)
    if len(whole):
        file = data_file(whole, table.columns, table.data_path, table.properties)
        found.files[table.data_path] = file.content
        found.added.append(file.description | {"spec-id": table.spec})
    left = {path: one for path, one in located.items() if path not in merged}
    delete(found, left, table.vector_path)
    return replace(found, keys=joined(keys) if keys else None)
