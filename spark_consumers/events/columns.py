"""A table's columns: PostgreSQL type -> JSON form -> Spark and Iceberg type.

    PostgreSQL            JSON form in an event             Spark and Iceberg
    bool                  true, false                       boolean
    int2, int4            number                            int
    int8, oid             number                            bigint
    float4, float8        number, "NaN", "±Infinity"        float, double
    numeric(p,s), p<=38   "123.45"                          decimal(p,s)
    other numeric, money  "123.45", "NaN"                   string
    date                  days since 1970                   date
    timestamp             µs since 1970                     timestamp_ntz
    timestamptz           "2026-01-31T12:00:00.500000Z"     timestamp
    time                  µs since midnight                 bigint
    bytea                 base64                            binary
    arrays, vector        JSON array                        string: the array's JSON
    domains               their base type's                 string: the form's text
    everything else       PostgreSQL's text                 string

Pure: builds column expressions, touches no data. A value that does not fit its type is never NULL:
`typed` gives NULL for it, and its caller turns a NULL that was none in the event into an error.
"""

import base64
from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from schemas.events import (
    INFINITY_MICROSECONDS,
    NEGATIVE_INFINITY_MICROSECONDS,
    UNAVAILABLE,
)

DECIMAL_DIGITS_MAX = 38
_UNAVAILABLE_BYTES = base64.b64encode(UNAVAILABLE.encode()).decode()
_UNAVAILABLE_FORMS = (
    *(UNAVAILABLE, _UNAVAILABLE_BYTES),
    *(f'["{UNAVAILABLE}"]', f'["{_UNAVAILABLE_BYTES}"]'),
)
_SIMPLE: dict[str, T.DataType] = {
    "bool": T.BooleanType(),
    "int2": T.IntegerType(),
    "int4": T.IntegerType(),
    "int8": T.LongType(),
    "oid": T.LongType(),
    "float4": T.FloatType(),
    "float8": T.DoubleType(),
    "date": T.DateType(),
    "time": T.LongType(),
    "timestamp": T.TimestampNTZType(),
    "timestamptz": T.TimestampType(),
    "bytea": T.BinaryType(),
}
_FIXED_WIDTH = frozenset(_SIMPLE) - {"bytea"} | {"uuid", "money", "interval", "timetz", "pg_lsn"}


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """One column: `type` is pg_type.typname, `typmod` PostgreSQL's type modifier, -1 for none."""

    name: str
    type: str
    typmod: int
    key: bool

    @property
    def data_type(self) -> T.DataType:
        """Its type in Spark, which is also its type in Iceberg."""
        if self.type == "numeric":
            return _decimal(self.typmod)
        return _SIMPLE.get(self.type, T.StringType())

    @property
    def may_be_unavailable(self) -> bool:
        """Whether PostgreSQL may store it out of line, so that an UPDATE may leave it out."""
        return not self.key and self.type not in _FIXED_WIDTH


def typed(raw: Column, column: ColumnShape) -> Column:
    """Read `raw` (a JSON form as text) as `column.data_type`; NULL when it does not fit."""
    kind = column.data_type
    if isinstance(kind, T.StringType):
        return raw
    if isinstance(kind, T.DecimalType):
        exact = raw.rlike(rf"^-?[0-9]+(\.[0-9]{{0,{kind.scale}}}0*)?$")
        return F.when(exact, raw.try_cast(kind))
    if isinstance(kind, T.DateType):
        return F.date_from_unix_date(raw.try_cast("int"))
    if isinstance(kind, T.TimestampNTZType):
        return F.timestamp_micros(raw.try_cast("bigint")).cast("timestamp_ntz")
    if isinstance(kind, T.TimestampType):
        return (
            F.when(raw == "infinity", F.timestamp_micros(F.lit(INFINITY_MICROSECONDS)))
            .when(raw == "-infinity", F.timestamp_micros(F.lit(NEGATIVE_INFINITY_MICROSECONDS)))
            .otherwise(raw.try_cast(kind))
        )
    if isinstance(kind, T.BinaryType):
        return F.try_to_binary(raw, F.lit("base64"))
    return raw.try_cast(kind)


def available(raw: Column, column: ColumnShape) -> Column:
    """False where `raw` is the placeholder of a TOASTed value that the UPDATE left unchanged."""
    if not column.may_be_unavailable:
        return F.lit(True)
    return raw.isNull() | ~raw.isin(*_UNAVAILABLE_FORMS)


def mentions_unavailable(value: Column) -> Column:
    """Whether an event's text may hold the placeholder (it may also be a user's own text)."""
    plain, encoded = (F.lit(form) for form in _UNAVAILABLE_FORMS[:2])
    return value.contains(plain) | value.contains(encoded)


def _decimal(typmod: int) -> T.DataType:
    """numeric's type: typmod - 4 is precision << 16 | scale in 11 signed bits (numeric.c)."""
    if typmod < 4:
        return T.StringType()
    precision = (typmod - 4) >> 16 & 0xFFFF
    scale = ((typmod - 4) & 0x7FF ^ 0x400) - 0x400
    precision = max(precision - min(scale, 0), scale)
    if precision > DECIMAL_DIGITS_MAX:
        return T.StringType()
    return T.DecimalType(precision, max(scale, 0))
