"""Keys of rows as numbers that are searched, with the keys' own bytes where a number is not enough.

A key of one integer column is its own number. Any other key has a hash of 64 bits, and its bytes
beside it: two keys are the same where their bytes are. Pure.
"""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Numbers = np.ndarray[Any, np.dtype[np.int64]]
_HASHED_ROWS = 50_000
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Keys(NamedTuple):
    """Keys in a given order: their numbers, and their bytes (None: the number is the key)."""

    numbers: Numbers
    texts: pa.LargeBinaryArray | None = None

    def take(self, places: Numbers) -> "Keys":
        """Return the keys at the given places."""
        texts = None if self.texts is None else self.texts.take(pa.array(places))
        return Keys(self.numbers[places], texts)


def is_indexable(kinds: list[str]) -> bool:
    """Tell whether keys of columns of these Spark types (simpleString) can be indexed."""
    return bool(kinds) and all(kind in ("int", "bigint", "date", "string") for kind in kinds)


def keys_of(columns: list[pa.Array]) -> Keys:
    """Return the keys of rows from the columns of their keys; raise ValueError for a NULL."""
    if any(column.null_count for column in columns):
        raise ValueError("a key's column has NULL")
    if len(columns) == 1 and not _is_text(columns[0]):
        return Keys(_integers(columns[0]))
    texts = _joined(columns)
    return Keys(hashed(texts), texts)


def joined(parts: list[Keys]) -> Keys:
    """Put keys of one table one after the other."""
    numbers = np.concatenate([part.numbers for part in parts])
    if parts[0].texts is None:
        return Keys(numbers)
    return Keys(numbers, pa.concat_arrays([part.texts for part in parts]))


def hashed(texts: pa.LargeBinaryArray) -> Numbers:
    """Return a number for each text: a polynomial of its bytes, mixed with its length."""
    found = np.empty(len(texts), np.int64)
    for first in range(0, len(texts), _HASHED_ROWS):
        part = texts[first : first + _HASHED_ROWS]
        found[first : first + len(part)] = _hashed(part)
    return found


def _hashed(texts: pa.LargeBinaryArray) -> Numbers:
    """Return a 64-bit hash of each text, vectorized: a polynomial, mixed as in splitmix64."""
    _, ends_buffer, body_buffer = texts.buffers()
    ends = np.frombuffer(ends_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    lengths = np.diff(ends)
    total = np.zeros(len(texts), np.uint64)
    filled = np.flatnonzero(lengths)
    if len(filled):
        body = np.frombuffer(body_buffer, np.uint8)[ends[0] : ends[-1]]
        starts = ends[:-1] - ends[0]
        inside = np.arange(len(body)) - np.repeat(starts, lengths)
        powers = np.full(int(lengths.max()), _MULTIPLIER).cumprod(dtype=np.uint64)
        parts = (body.astype(np.uint64) + np.uint64(1)) * powers[inside]
        total[filled] = np.add.reduceat(parts, starts[filled])
    total ^= lengths.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = (total ^ (total >> np.uint64(shift))) * np.uint64(factor)
    return (total ^ (total >> np.uint64(31))).view(np.int64)


def _joined(columns: list[pa.Array]) -> pa.LargeBinaryArray:
    """Return one text for each row that no row of other values has."""
    if len(columns) == 1:
        return columns[0].cast(pa.large_binary())
    parts: list[pa.Array] = []
    for column in columns:
        if _is_text(column):
            text = column.cast(pa.large_binary())
            parts += [_fixed(np.asarray(pc.binary_length(text)).astype(np.int64)), text]
        else:
            parts.append(_fixed(_integers(column)))
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))


def _integers(column: pa.Array) -> Numbers:
    if pa.types.is_date(column.type):
        column = column.cast(pa.int32())
    return np.asarray(column.cast(pa.int64()))


def _fixed(numbers: Numbers) -> pa.LargeBinaryArray:
    ends = np.arange(0, 8 * len(numbers) + 1, 8, dtype=np.int64)
    body = np.ascontiguousarray(numbers.astype(">i8"))
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(numbers), [None, pa.py_buffer(ends), pa.py_buffer(body)]
    )


def _is_text(column: pa.Array) -> bool:
    kind = column.type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
