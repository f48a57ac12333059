"""Reads a cursor in parts of a bounded size, whatever the size of a row."""

import sys
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from psycopg import pq

from services.bridge.pgoutput.messages import Row

FETCH_BYTES: Final = 2**20
_ROWS_FIRST: Final = 16
_ROWS_MAX: Final = 5_000


class RowsPart(NamedTuple):
    """Rows as the server has printed them, their bytes, and whether the cursor has none after."""

    rows: list[Row]
    bytes: int
    ends: bool


def parts(
    fetch: Callable[[int], pq.abc.PGresult],
    rows_max: int = sys.maxsize,
    bytes_each: int = FETCH_BYTES,
) -> Iterator[RowsPart]:
    """Yield the next rows, up to `rows_max`, about `bytes_each` at once: each part by `fetch`."""
    count, left = _ROWS_FIRST, rows_max
    while left > 0:
        count = min(count, left)
        result = fetch(count)
        columns = range(result.nfields)
        rows: list[Row] = [
            [result.get_value(number, column) for column in columns]
            for number in range(result.ntuples)
        ]
        size = sum([len(value) for row in rows for value in row if isinstance(value, bytes)])
        yield RowsPart(rows, size, len(rows) < count)
        if len(rows) < count:
            return
        left -= count
        count = max(1, min(_ROWS_MAX, 4 * count, bytes_each * count // max(1, size)))
