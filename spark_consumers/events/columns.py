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

Pure: writes expressions of Spark SQL, touches no data. A value that does not fit its type is never
NULL: `typed` gives NULL for it, and its caller makes an error of a NULL that was none in the event.
"""

from dataclasses import dataclass

from pyspark.sql import types as T

from schemas.events import UNAVAILABLE, UNAVAILABLE_BASE64
from schemas.infinities import INFINITY_MICROSECONDS, NEGATIVE_INFINITY_MICROSECONDS
from spark_consumers.sql import literal, literals

DECIMAL_DIGITS_MAX = 38
_VECTORS = ("vector", "halfvec")
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
        """The column's type in Spark, which is also its type in Iceberg."""
        if self.type == "numeric":
            return _decimal(self.typmod)
        return _SIMPLE.get(self.type, T.StringType())

    @property
    def may_be_unavailable(self) -> bool:
        """Whether PostgreSQL may store it out of line, so that an UPDATE may leave it out."""
        return not self.key and self.type not in _FIXED_WIDTH

    @property
    def unavailable_forms(self) -> tuple[str, ...]:
        """The texts that stand for an unchanged out-of-line value of this type.

        No other text does: the form of another type is a user's value here. The schema event does
        not name the base type of a domain, so a type of the user's own (`schema.name`) may have any
        form.
        """
        name = self.type.rpartition(".")[2]
        plain, encoded = UNAVAILABLE, UNAVAILABLE_BASE64
        lists = (f'["{plain}"]', f'["{encoded}"]')
        if name in _VECTORS:
            return lists[:1]
        if "." in self.type:
            return lists if name.startswith("_") else (plain, encoded, *lists)
        if name.startswith("_"):
            return lists[1:] if name == "_bytea" else lists[:1]
        return (encoded,) if name == "bytea" else (plain,)


def typed(raw: str, column: ColumnShape) -> str:
    """Read `raw` (a JSON form as text) as `column.data_type`; NULL when it does not fit."""
    kind = column.data_type
    if isinstance(kind, T.StringType):
        return raw
    read = f"try_cast({raw} AS {kind.simpleString()})"
    if isinstance(kind, T.DecimalType):
        exact = literal(rf"^-?[0-9]+(\.[0-9]{{0,{kind.scale}}}0*)?$")
        return f"CASE WHEN {raw} RLIKE {exact} THEN {read} END"
    if isinstance(kind, T.DateType):
        return f"date_from_unix_date(try_cast({raw} AS int))"
    if isinstance(kind, T.TimestampNTZType):
        return f"CAST(timestamp_micros(try_cast({raw} AS bigint)) AS timestamp_ntz)"
    if isinstance(kind, T.TimestampType):
        return (
            f"CASE {raw} WHEN 'infinity' THEN timestamp_micros({INFINITY_MICROSECONDS}L)"
            f" WHEN '-infinity' THEN timestamp_micros({NEGATIVE_INFINITY_MICROSECONDS}L)"
            f" ELSE {read} END"
        )
    if isinstance(kind, T.BinaryType):
        return f"try_to_binary({raw}, 'base64')"
    return read


def available(raw: str, column: ColumnShape) -> str:
    """Return SQL that is false where `raw` is the placeholder of an unchanged TOASTed value.

    Where the bridge names the column in `placeholder_values`, that text is its value.
    """
    if not column.may_be_unavailable:
        return "true"
    named = f"coalesce(array_contains(placeholder_values, {literal(column.name)}), false)"
    return f"({raw} IS NULL OR {raw} NOT IN ({literals(column.unavailable_forms)}) OR {named})"


def mentions_unavailable(value: str) -> str:
    """Return SQL that tells whether an event may hold the placeholder as a whole JSON string.

    A user's text that only contains the placeholder does not count; one that equals it does, and
    `available` tells.
    """
    plain, encoded = (literal(f'"{form}"') for form in (UNAVAILABLE, UNAVAILABLE_BASE64))
    return f"(contains({value}, {plain}) OR contains({value}, {encoded}))"


def _decimal(typmod: int) -> T.DataType:
    """Return a numeric's type: typmod - 4 is precision << 16 | 11 bits of scale (numeric.c)."""
    if typmod < 4:
        return T.StringType()
    precision = (typmod - 4) >> 16 & 0xFFFF
    scale = ((typmod - 4) & 0x7FF ^ 0x400) - 0x400
    precision = max(precision - min(scale, 0), scale)
    if precision > DECIMAL_DIGITS_MAX:
        return T.StringType()
    return T.DecimalType(precision, max(scale, 0))
