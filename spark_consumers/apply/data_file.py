"""Rows -> a Parquet file, and its description as Iceberg's ContentFileParser reads it. Pure.

Statistics: counts of values and NULLs for each column, and bounds but for floating point (whose
NaN and -0 have rules of their own) and bytes. Bounds of texts have 16 characters, as Iceberg's.
See the Iceberg specification, "Data File Fields" and "Appendix D: Single-value serialization".
"""

import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_consumers.events.unsuited import Unsuited
from spark_consumers.key_index.file_changes import Description

_BOUND_CHARACTERS: Final = 16
_SURROGATES: Final = range(0xD800, 0xE000)
_LAST_CHARACTER: Final = 0x10FFFF
_CODECS: Final = {"zstd": "zstd", "snappy": "snappy", "gzip": "gzip", "uncompressed": "none"}
_CODEC: Final = "write.parquet.compression-codec"
FORMAT: Final = "write.format.default"
_TYPES: Final = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "binary": pa.binary(),
    "string": pa.string(),
}


class IcebergColumn(NamedTuple):
    """A column of an Iceberg table: its number, and its type as the specification writes it."""

    id: int
    type: str


class DataFile(NamedTuple):
    """A file to be written, and its description."""

    content: pa.Buffer
    description: Description


def columns_of(schema: Mapping[str, Any]) -> dict[str, IcebergColumn]:
    """Return the columns of a schema, as SchemaParser writes it, by name."""
    return {
        field["name"]: IcebergColumn(field["id"], str(field["type"])) for field in schema["fields"]
    }


def data_file(
    rows: pa.Table, columns: Mapping[str, IcebergColumn], path: str, properties: Mapping[str, str]
) -> DataFile:
    """Write rows; raise Unsuited where the table has other columns, or files of another form."""
    codec = _CODECS.get(properties.get(_CODEC, "zstd").lower())
    if codec is None or properties.get(FORMAT, "parquet").lower() != "parquet":
        raise Unsuited("files of another form")
    fields = []
    for field in rows.schema:
        known = columns.get(field.name)
        if known is None or arrow_type(known.type) != field.type:
            raise Unsuited("a column of another type")
        number = {"PARQUET:field_id": str(known.id)}
        fields.append(pa.field(field.name, field.type, metadata=number))
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows.cast(pa.schema(fields)),
        sink,
        compression=codec,
        use_dictionary=False,
        store_schema=False,
        store_decimal_as_integer=True,
    )
    content = sink.getvalue()
    return DataFile(content, _description(rows, columns, path, content.size))


def arrow_type(kind: str) -> pa.DataType | None:
    """Return the Arrow type of a column of an Iceberg type; None for one that is not written."""
    if kind.startswith("decimal("):
        precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
        return pa.decimal128(int(precision), int(scale))
    return _TYPES.get(kind)


def _description(
    rows: pa.Table, columns: Mapping[str, IcebergColumn], path: str, size: int
) -> Description:
    """Describe a file with these rows, as ContentFileParser reads it."""
    numbers = [columns[name].id for name in rows.column_names]
    found: Description = {
        "spec-id": 0,
        "content": "data",
        "file-path": path,
        "file-format": "parquet",
        "partition": [],
        "file-size-in-bytes": size,
        "record-count": len(rows),
        "split-offsets": [4],
        "value-counts": {"keys": numbers, "values": [len(rows)] * len(numbers)},
        "null-value-counts": {
            "keys": numbers,
            "values": [rows[name].null_count for name in rows.column_names],
        },
    }
    lows, highs = {}, {}
    for name in rows.column_names:
        low, high = bounds(rows[name])
        if low is not None:
            lows[columns[name].id] = low.hex().upper()
        if high is not None:
            highs[columns[name].id] = high.hex().upper()
    for title, ends in (("lower-bounds", lows), ("upper-bounds", highs)):
        found[title] = {"keys": list(ends), "values": list(ends.values())}
    return found


def bounds(values: pa.ChunkedArray | pa.Array) -> tuple[bytes | None, bytes | None]:
    """Return a column's bounds; None where there is none."""
    kind = values.type
    if pa.types.is_string(kind):
        found = pc.min_max(values.cast(pa.binary()))  # bytes are in the order of the characters
        low, high = found["min"].as_py(), found["max"].as_py()
        if low is None:
            return None, None
        return low.decode()[:_BOUND_CHARACTERS].encode(), _raised(high.decode())
    if pa.types.is_date(kind):
        return _ends(values.cast(pa.int32()), "<i")
    if pa.types.is_timestamp(kind):
        return _ends(values.cast(pa.int64()), "<q")
    if pa.types.is_int32(kind) or pa.types.is_int64(kind):
        return _ends(values, "<i" if pa.types.is_int32(kind) else "<q")
    if pa.types.is_decimal(kind):
        ends = pc.min_max(values)
        low, high = (_unscaled(ends[n].as_py(), kind.scale) for n in ("min", "max"))
        return low, high
    return None, None


def _ends(values: pa.ChunkedArray | pa.Array, form: str) -> tuple[bytes | None, bytes | None]:
    found = pc.min_max(values)
    ends = (found[name].as_py() for name in ("min", "max"))
    low, high = (None if end is None else struct.pack(form, end) for end in ends)
    return low, high


def _unscaled(value: Any, scale: int) -> bytes | None:
    """Return the unscaled value of a decimal, big-endian, in as few bytes as hold it."""
    if value is None:
        return None
    sign, digits, exponent = value.as_tuple()
    number = int("".join(map(str, digits)) or "0") * 10 ** (exponent + scale)
    number = -number if sign else number
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return bytes(number.to_bytes(size, "big", signed=True))


def _raised(text: str) -> bytes | None:
    """Return a bound that no text which begins like this one exceeds; None where none is."""
    if len(text) <= _BOUND_CHARACTERS:
        return text.encode()
    for at in reversed(range(_BOUND_CHARACTERS)):
        following = ord(text[at]) + 1
        if following in _SURROGATES:
            following = _SURROGATES.stop
        if following <= _LAST_CHARACTER:
            return (text[:at] + chr(following)).encode()
    return None
