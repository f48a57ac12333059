"""Which small files an epoch puts together with its own, and their rows. Pure.

Each epoch adds a file. Files of about one size are put together as soon as there are FILES_MAX of
them, so that their number grows with the logarithm of the rows that have come; what is larger than
ROWS_MAX is left to maintenance.
"""

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from spark_consumers.apply.data_file import IcebergColumn, arrow_type
from spark_consumers.key_index.file_changes import Description

FILES_MAX: Final = 8
ROWS_MAX: Final = 20_000
BYTES_MAX: Final = 4 * 2**20
_FIELD_ID: Final = b"PARQUET:field_id"


class Small(NamedTuple):
    """A small file: what it is, its rows in the table's columns, and which of them are deleted."""

    file: Description
    rows: pa.Table
    deleted: BitMap64
    vector: Description | None


def chosen(files: Iterable[Description]) -> list[Description]:
    """Return the files that are to be put together; none while there are few of each size."""
    sizes: dict[int, list[Description]] = defaultdict(list)
    for file in files:
        rows, size = file["record-count"], file["file-size-in-bytes"]
        if rows <= ROWS_MAX and size <= BYTES_MAX:
            sizes[rows.bit_length() // 3].append(file)  # a factor of 8 between two sizes
    return next((found for _, found in sorted(sizes.items()) if len(found) >= FILES_MAX), [])


def rows_of(
    content: bytes, columns: Mapping[str, IcebergColumn], names: Sequence[str]
) -> pa.Table | None:
    """Return a file's rows in columns of the table; None where the file has other columns."""
    found = pq.read_table(io.BytesIO(content), use_threads=False)
    by_id = {int((field.metadata or {}).get(_FIELD_ID, -1)): field for field in found.schema}
    wanted = [columns[name] for name in names]
    if len(by_id) != len(wanted) or len(found.schema) != len(wanted):
        return None
    for column in wanted:
        field = by_id.get(column.id)
        if field is None or field.type != arrow_type(column.type):
            return None
    return pa.table({n: found[by_id[columns[n].id].name] for n in names})


def live(small: Small, positions: BitMap64) -> pa.Table:
    """Return the rows of a file that are left once those at `positions` are deleted, too."""
    gone = small.deleted | positions
    kept = [place for place in range(len(small.rows)) if place not in gone]
    return small.rows.take(pa.array(kept, pa.int64()))
