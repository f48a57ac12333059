"""The data files of an Iceberg table and their deletion vectors, through Spark's Java.

Files are read and written through the table's FileIO, wherever they are.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from schemas.errors import naming
from spark_consumers.java import table_files as program
from spark_consumers.key_index.deletion_vectors import vector_of
from spark_consumers.key_index.file_changes import Description

SNAPSHOTS_MAX = 50
"""Up to SNAPSHOTS_MAX snapshots are followed one by one; more make the index anew."""
_VECTORS_KEPT = 1_000
_LOCAL = ("/", "file:")


class UnknownFilesError(Exception):
    """A table has files that the index does not understand: it says which."""


@dataclass(slots=True)
class Files:
    """A table's data files by path, and the deletion vectors of those that have one."""

    data: dict[str, Description] = field(default_factory=dict)
    vectors: dict[str, Description] = field(default_factory=dict)

    def rows(self) -> int:
        """Count the rows that are not deleted, in time that grows with the number of files."""
        found, deleted = self.data.values(), self.vectors.values()
        return sum(int(f["record-count"]) for f in found) - sum(
            int(f["record-count"]) for f in deleted
        )


def listed(table: Any, snapshot: int) -> Files:
    """List the files of a snapshot."""
    found, files = Files(), json.loads(program(table).listed(table, snapshot))
    for data in files["data"]:
        _add_data(found, data)
    for delete in files["deletes"]:
        found.vectors[_require_vector(delete)["referenced-data-file"]] = delete
    return found


def advance_files(table: Any, files: Files, before: int, snapshot: int) -> list[str] | None:
    """Change `files` from those of the snapshot `before` to those of a later one.

    Return the paths of the data files that have come, the oldest first; None, with `files` as they
    were, where that snapshot does not descend from `before`, or is too many snapshots away.
    """
    changes = program(table).changes(table, before, snapshot, SNAPSHOTS_MAX)
    if changes is None:
        return None
    added: dict[str, None] = {}
    for one in json.loads(changes):
        for data in one["added"]:
            added[_add_data(files, data)] = None
        for data in one["removed"]:
            path = data["file-path"]
            files.data.pop(path, None)
            files.vectors.pop(path, None)
            added.pop(path, None)
        for delete in one["removed_deletes"]:
            files.vectors.pop(_require_vector(delete)["referenced-data-file"], None)
        for delete in one["added_deletes"]:
            files.vectors[_require_vector(delete)["referenced-data-file"]] = delete
    return list(added)


def vector(table: Any, delete: Description) -> BitMap64:
    """Read a deletion vector."""
    with opened(table, delete["file-path"]) as file:
        file.seek(delete["content-offset"])
        return vector_of(file.read(delete["content-size-in-bytes"]))


class Vectors:
    """Deletion vectors that were read or written lately."""

    def __init__(self) -> None:
        self._known: dict[str, BitMap64] = {}

    def of(self, table: Any, delete: Description) -> BitMap64:
        """Return a deletion vector; raise UnknownFilesError where it can't be read."""
        name = _vector_name(delete)
        if name not in self._known:
            with readable(delete["file-path"]):
                self.keep(delete, vector(table, delete))
        return self._known[name]

    def keep(self, delete: Description, vector: BitMap64) -> None:
        """Remember a deletion vector."""
        if len(self._known) >= _VECTORS_KEPT:
            del self._known[next(iter(self._known))]
        self._known[_vector_name(delete)] = vector


def _vector_name(delete: Description) -> str:
    return f"{delete['file-path']}#{delete['content-offset']}"


def write_file(table: Any, path: str, content: bytes | pa.Buffer) -> None:
    """Write a new file; its folder need not be there (write.object-storage.enabled)."""
    if _is_local(path):
        with naming(_local(path)):
            _local(path).parent.mkdir(parents=True, exist_ok=True)
            with _local(path).open("xb") as file:
                file.write(content)
        return
    stream = table.io().newOutputFile(path).create()
    try:
        stream.write(bytes(content))
    finally:
        stream.close()


def read_columns(table: Any, path: str, field_ids: list[int]) -> Iterator[list[pa.Array]]:
    """Read the columns with the given ids of a data file, row group by row group, in order."""
    with opened(table, path) as file, pq.ParquetFile(file) as parquet:
        by_id = {
            int((one.metadata or {}).get(b"PARQUET:field_id", -1)): place
            for place, one in enumerate(parquet.schema_arrow)
        }
        if not set(field_ids) <= set(by_id):
            raise UnknownFilesError(f"{path} lacks a column of the key")
        names = [parquet.schema_arrow.names[by_id[number]] for number in field_ids]
        for group in range(parquet.num_row_groups):
            rows = parquet.read_row_group(group, columns=names, use_threads=False)
            yield [rows.column(name).combine_chunks() for name in names]


def opened(table: Any, path: str) -> io.BufferedIOBase | io.RawIOBase:
    """Open a file for reading."""
    if _is_local(path):
        return _local(path).open("rb")
    return _JavaFile(table.io().newInputFile(path))


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Raise UnknownFilesError for a file whose content is not what it should be."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UnknownFilesError(f"{path} can't be read: {error}") from error


class _JavaFile(io.RawIOBase):
    """A file behind Iceberg's FileIO, read by ranges."""

    def __init__(self, file: Any) -> None:
        self._length, self._stream, self._at = int(file.getLength()), file.newStream(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes from the present place on; the rest if it is negative."""
        wanted = self._length - self._at if size < 0 else min(size, self._length - self._at)
        if wanted <= 0:
            return b""
        self._stream.seek(self._at)
        found = bytes(self._stream.readNBytes(wanted))
        self._at += len(found)
        return found

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _add_data(files: Files, data: Description) -> str:
    path: str = data["file-path"]
    if data["file-format"].upper() != "PARQUET":
        raise UnknownFilesError(f"{path} is not a Parquet file")
    files.data[path] = data
    return path


def _require_vector(delete: Description) -> Description:
    if "content-offset" not in delete:  # only a deletion vector has one
        raise UnknownFilesError(f"{delete['file-path']} deletes rows, and is not a deletion vector")
    return delete


def _is_local(path: str) -> bool:
    return path.startswith(_LOCAL)


def _local(path: str) -> Path:
    return Path("/" + path.removeprefix("file:").lstrip("/"))
