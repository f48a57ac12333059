"""The files that one commit adds to a table and removes from it, and rows that it deletes. Pure.

A file is described as Iceberg's ContentFileParser reads and writes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
from pyroaring import BitMap64

from spark_consumers.key_index.deletion_vectors import puffin
from spark_consumers.key_index.keys import Keys

Description = dict[str, Any]
"""A file, as ContentFileParser reads and writes it."""


class Located(NamedTuple):
    """Rows of a data file that keys have, and what the file is: deleted rows may be among them.

    `deleted`: its deletion vector, which `vector` describes (None without one).
    """

    positions: BitMap64
    file: Description
    deleted: BitMap64
    vector: Description | None


@dataclass(frozen=True, slots=True)
class Applied:
    """The files of an epoch, by path, and what one commit adds and removes.

    `vectors`: the deletion vectors that data files have afterwards. `keys`: of the new file's rows,
    in their order.
    """

    files: dict[str, bytes | pa.Buffer] = field(default_factory=dict)
    added: list[Description] = field(default_factory=list)
    deletes: list[Description] = field(default_factory=list)
    removed_deletes: list[Description] = field(default_factory=list)
    removed_data: list[Description] = field(default_factory=list)
    vectors: dict[str, BitMap64] = field(default_factory=dict)
    keys: Keys | None = None

    def document(self) -> dict[str, Any]:
        """Return what the commit adds and removes."""
        return {
            "add": self.added,
            "deletes": self.deletes,
            "removed": self.removed_deletes,
            "removed_data": self.removed_data,
        }


def delete(
    found: Applied, located: Mapping[str, Located], path: str, *, whole_files: bool = True
) -> None:
    """Delete rows by vectors in a file named `path`; `whole_files`: files without rows are removed.

    Rows that are deleted already change nothing.
    """
    for name, rows in located.items():
        vector = rows.deleted | rows.positions
        if len(vector) == len(rows.deleted):
            continue
        if rows.vector is not None:
            found.removed_deletes.append(rows.vector)
        if whole_files and len(vector) == rows.file["record-count"]:
            found.removed_data.append(rows.file)
        else:
            found.vectors[name] = vector
    if not found.vectors:
        return
    content, blobs = puffin(found.vectors)
    found.files[path] = content
    for name, blob in blobs.items():
        file = located[name].file
        found.deletes.append(
            {
                "spec-id": file["spec-id"],
                "content": "position-deletes",
                "file-path": path,
                "file-format": "puffin",
                "partition": file["partition"],
                "file-size-in-bytes": len(content),
                "record-count": blob.rows,
                "referenced-data-file": name,
                "content-offset": blob.offset,
                "content-size-in-bytes": blob.length,
            }
        )
