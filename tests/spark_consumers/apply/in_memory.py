"""A table in memory that takes commits as Iceberg does, and whose readers see what readers see."""

import io
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from schemas.tables import TableRule
from spark_consumers.apply.apply import FileTarget
from spark_consumers.apply.data_file import IcebergColumn
from spark_consumers.apply.merging import Small, rows_of
from spark_consumers.events.columns import ColumnShape
from spark_consumers.events.shape import Shape
from spark_consumers.iceberg.layout import Layout
from spark_consumers.kafka.few_records import Record
from spark_consumers.key_index.deletion_vectors import vector_of
from spark_consumers.key_index.file_changes import Applied, Located
from spark_consumers.key_index.keys import Keys, keys_of

ICEBERG = {
    "int4": "int",
    "int8": "long",
    "text": "string",
    "date": "date",
    "numeric": "decimal(6, 2)",
}
TYPMOD = {"numeric": (6 << 16 | 2) + 4}


def layout(columns: Mapping[str, str], key: tuple[str, ...]) -> Layout:
    """A current-state table of columns (name -> PostgreSQL type)."""
    shapes = (ColumnShape(n, t, TYPMOD.get(t, -1), n in key) for n, t in columns.items())
    return Layout(Shape("public", "t", tuple(shapes), key), TableRule())


def columns_of(of: Layout) -> dict[str, IcebergColumn]:
    """Its columns in Iceberg."""
    kinds = [ICEBERG[of.shape.columns[field.source_index].type] for field in of.fields]
    named = [*zip((f.name for f in of.fields), kinds, strict=True)]
    named += [("_commit_lsn", "long"), ("_seq", "long")]
    return {name: IcebergColumn(number, kind) for number, (name, kind) in enumerate(named, 1)}


def record(
    op: str, row: Mapping[str, Any] | None, lsn: int, seq: int, key: tuple[str, ...], **at: int
) -> Record:
    """An event as the bridge writes it."""
    source = {
        "schema": "public",
        "table": "t",
        "lsn": lsn,
        "ts_us": 1,
        "commit_lsn": lsn,
        "seq": seq,
    }
    old = None if row is None or op != "d" else {n: v if n in key else None for n, v in row.items()}
    value = {"before": old, "after": row if op != "d" else None, "source": source, "op": op}
    keyed = None if row is None else {name: row[name] for name in key}
    return Record(
        "p.public.t",
        at.get("partition", 0),
        at.get("offset", 0),
        json.dumps(keyed).encode() if key else None,
        json.dumps(value, ensure_ascii=False).encode(),
    )


class Files:
    """The files of a table, as its last commit left them."""

    def __init__(self, of: Layout) -> None:
        self.layout = of
        self.contents: dict[str, bytes] = {}
        self.data: dict[str, dict[str, Any]] = {}
        self.vectors: dict[str, dict[str, Any]] = {}
        self._names = 0

    def table(self) -> FileTarget:
        """What files are written by; their names are new each time."""
        self._names += 1
        names = f"{self._names}.parquet", f"{self._names}.puffin"
        return FileTarget(columns_of(self.layout), {}, 0, *names)

    def commit(self, applied: Applied) -> None:
        """Take a commit, if it is one that Iceberg takes and that is right."""
        self.contents |= {path: bytes(content) for path, content in applied.files.items()}
        for gone in applied.removed_deletes:
            assert self.vectors.pop(gone["referenced-data-file"]) == gone
        for file in applied.removed_data:
            assert self.data.pop(file["file-path"]) == file
            assert file["file-path"] not in self.vectors
        for file in applied.added:
            assert file["file-size-in-bytes"] == len(self.contents[file["file-path"]])
            self.data[file["file-path"]] = file
        for delete in applied.deletes:
            path = delete["referenced-data-file"]
            assert path in self.data and path not in self.vectors  # one vector a file
            self.vectors[path] = delete
            assert delete["record-count"] == len(self._deleted(path))

    def rows(self) -> list[dict[str, Any]]:
        """All rows, as a reader gets them: files, less what their vectors delete."""
        return [row for path in self.data for _, row in self._live(path)]

    def small(self, count: int) -> list[Small]:
        """Some of its files, with their rows."""
        found = []
        for path, file in list(self.data.items())[:count]:
            names = self.layout.names
            rows = rows_of(self.contents[path], columns_of(self.layout), names)
            assert rows is not None
            found.append(Small(file, rows, self._deleted(path), self.vectors.get(path)))
        return found

    def locate(self, keys: Keys) -> dict[str, Located]:
        """The rows of keys by a look at all files; also rows that are deleted, as an index may."""
        wanted = set(zip(keys.numbers.tolist(), _texts(keys), strict=True))
        found = {}
        for path, file in self.data.items():
            table = pq.read_table(io.BytesIO(self.contents[path]))
            names = [field.name for field in self.layout.key]
            own = keys_of([table[name].combine_chunks() for name in names])
            there = zip(own.numbers.tolist(), _texts(own), strict=True)
            positions = BitMap64([place for place, key in enumerate(there) if key in wanted])
            if positions:
                vector = self.vectors.get(path)
                found[path] = Located(positions, file, self._deleted(path), vector)
        return found

    def _live(self, path: str) -> list[tuple[int, dict[str, Any]]]:
        rows = pq.read_table(io.BytesIO(self.contents[path])).to_pylist()
        deleted = self._deleted(path)
        return [(place, row) for place, row in enumerate(rows) if place not in deleted]

    def _deleted(self, path: str) -> BitMap64:
        vector = self.vectors.get(path)
        if vector is None:
            return BitMap64()
        first, size = vector["content-offset"], vector["content-size-in-bytes"]
        return vector_of(self.contents[vector["file-path"]][first : first + size])


def _texts(keys: Keys) -> list[Any]:
    return [None] * len(keys.numbers) if keys.texts is None else keys.texts.to_pylist()


def table_of(rows: pa.Table) -> list[dict[str, Any]]:
    """Its rows."""
    return list(rows.to_pylist())
