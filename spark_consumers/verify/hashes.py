"""SQL that gives a row the same hash at the source and in its Iceberg table. Pure.

    text      each value as `verify.forms` has it; the bits of a float
    row       length:text of each value, `~` for NULL
    bucket    16 bits of the MD5 of the values that `buckets_of` chooses, as many of them as there
              are buckets: of the key, without one of all columns, as far as their text is the same
    hash      60 bits of the MD5 of all values; a bucket has their sum and their number

Equal hashes mean equal rows. Different ones do not mean different rows: the JSON of an array may be
written in two ways. So rows of buckets that differ are compared by value (`verify.comparison`).
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from psycopg import sql
from pyspark.sql import types as T

from spark_consumers.events.columns import ColumnShape
from spark_consumers.verify.forms import Layer, is_output, value_sql

BUCKETS_MIN: Final = 64
BUCKETS_MAX: Final = 65_536
_BUCKET_DIGITS: Final = 4
_HASH_DIGITS: Final = 15
_FLOATS: Final[dict[str, LiteralString]] = {
    "float4": "('x' || encode(float4send({name}), 'hex'))::bit(32)::int::text",
    "float8": "('x' || encode(float8send({name}), 'hex'))::bit(64)::bigint::text",
}
_NOT_A_NUMBER: Final[LiteralString] = "CASE WHEN {name} = 'NaN' THEN {canonical} ELSE {bits} END"
_NAN_BITS: Final = {"float4": "2143289344", "float8": "9221120237041090560"}
"""Java's only NaN; PostgreSQL keeps others as they came."""


def bucket_count(pages: int) -> int:
    """Return the number of buckets of a table: about one page's rows in each."""
    return min(BUCKETS_MAX, max(BUCKETS_MIN, 1 << max(0, pages - 1).bit_length()))


class Buckets(NamedTuple):
    """How many buckets a table has, and the places of the columns that choose a row's bucket.

    `alike`: a row has the same bucket at the source and in the table.
    """

    number: int
    places: tuple[int, ...]
    alike: bool


def buckets_of(pages: int, layers: Sequence[Sequence[Layer]], key: Sequence[int]) -> Buckets:
    """Return the buckets of a table; `key`: places in `layers`, none for a table without a key."""
    places = tuple(key) or tuple(range(len(layers)))
    alike = tuple(place for place in places if is_output(layers[place]))
    return Buckets(bucket_count(pages), alike or places, bool(alike))


def source_texts(
    columns: Sequence[ColumnShape], layers: Sequence[Sequence[Layer]]
) -> list[sql.Composed]:
    """Return PostgreSQL's SQL of the text of each column; NULL stays NULL."""
    return [_source_text(*pair) for pair in zip(columns, layers, strict=True)]


def _source_text(column: ColumnShape, kinds: Sequence[Layer]) -> sql.Composed:
    """Return SQL of a column's text as both sides hash it; of floats, by bits."""
    if column.type not in _FLOATS:
        return sql.SQL("({})::text").format(value_sql(column.name, kinds))
    name = sql.Identifier(column.name)
    return sql.SQL(_NOT_A_NUMBER).format(
        name=name,
        canonical=sql.Literal(_NAN_BITS[column.type]),
        bits=sql.SQL(_FLOATS[column.type]).format(name=name),
    )


def source_query(
    table: sql.Composable,
    columns: Sequence[ColumnShape],
    layers: Sequence[Sequence[Layer]],
    key: Sequence[int],
    buckets: int,
) -> sql.Composed:
    """Return PostgreSQL's SQL of the buckets of `table`, its name and a condition.

    Rows: bucket, number of rows, sum of hashes. `key`: places in `columns`; none: all of them.
    """
    names = [sql.Identifier(f"c{number}") for number in range(len(columns))]
    texts = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(*pair)
        for pair in zip(source_texts(columns, layers), names, strict=True)
    )
    identity = [names[place] for place in key] or names
    # OFFSET 0 keeps a text from being made anew at each place that names it.
    return sql.SQL(
        "SELECT b, count(*), sum(h) FROM (SELECT {} AS b, {} AS h FROM"
        " (SELECT {} FROM {} OFFSET 0) t) r GROUP BY b"
    ).format(source_bucket(identity, buckets), source_hash(names), texts, table)


def source_bucket(key: Sequence[sql.Composable], buckets: int) -> sql.Composed:
    """Return PostgreSQL's SQL of a row's bucket, by the texts of its key."""
    return sql.SQL("(('x' || left(md5({}), {}))::bit(16)::int & {})").format(
        _source_row(key), sql.Literal(_BUCKET_DIGITS), sql.Literal(buckets - 1)
    )


def source_hash(texts: Sequence[sql.Composable]) -> sql.Composed:
    """Return PostgreSQL's SQL of a row's hash, a bigint, by the texts of its columns."""
    return sql.SQL("('x' || left(md5({}), {}))::bit(60)::bigint").format(
        _source_row(texts), sql.Literal(_HASH_DIGITS)
    )


def _source_row(texts: Sequence[sql.Composable]) -> sql.Composed:
    parts = (
        sql.SQL("coalesce(length({text}) || ':' || {text}, '~')").format(text=text)
        for text in texts
    )
    return sql.SQL("convert_to({}, 'UTF8')").format(sql.SQL(" || ").join(parts))


def table_text(name: str, kind: T.DataType) -> str:
    """Return Spark's SQL of the text of a column (`name` quoted); NULL stays NULL."""
    match kind:
        case T.StringType():
            return name
        case T.BinaryType():
            return f"lower(hex({name}))"
        case T.DateType():
            return f"CAST(unix_date({name}) AS string)"
        case T.TimestampType():
            return f"CAST(unix_micros({name}) AS string)"
        case T.TimestampNTZType():
            return f"CAST(unix_micros(CAST({name} AS timestamp)) AS string)"
        case T.FloatType():
            bits = f"reflect('java.lang.Float', 'floatToIntBits', {name})"
            return f"CASE WHEN {name} IS NOT NULL THEN {bits} END"
        case T.DoubleType():
            bits = f"reflect('java.lang.Double', 'doubleToLongBits', {name})"
            return f"CASE WHEN {name} IS NOT NULL THEN {bits} END"
        case T.DecimalType() if kind.scale == 0:
            return f"CAST(CAST({name} AS decimal(38, 0)) AS string)"
    return f"CAST({name} AS string)"


def table_bucket(key: Sequence[str], buckets: int) -> str:
    """Return Spark's SQL of a row's bucket, by the texts of its key."""
    number = f"CAST(conv(left(md5({_table_row(key)}), {_BUCKET_DIGITS}), 16, 10) AS int)"
    return f"({number} & {buckets - 1})"


def table_hash(texts: Sequence[str]) -> str:
    """Return Spark's SQL of a row's hash, a decimal, by the texts of its columns."""
    return f"CAST(conv(left(md5({_table_row(texts)}), {_HASH_DIGITS}), 16, 10) AS decimal(20, 0))"


def _table_row(texts: Sequence[str]) -> str:
    parts = (f"coalesce(length({text}) || ':' || {text}, '~')" for text in texts)
    return " || ".join(parts)
