"""SQL that gives a source value in the form in which it is compared. Pure.

    date                    days since 1970
    time, timestamp(tz)     microseconds
    bytea                   hex
    arrays, domains, vector JSON, as the bridge writes them
    everything else         text, what its type's output function gives, as pgoutput does

Values are text, so that nothing is rounded; JSON is nested in the line as it is.
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from psycopg import sql

from schemas.infinities import (
    DATE_INFINITY_DAYS,
    DATE_NEGATIVE_INFINITY_DAYS,
    INFINITY_MICROSECONDS,
    NEGATIVE_INFINITY_MICROSECONDS,
)

_DIMENSIONS_MAX: Final = 6
_FRACTION_DIGITS: Final = 6


class Layer(NamedTuple):
    """A type, by pg_type.typname. An array's or a domain's next layer is what it consists of."""

    type: str
    domain: bool = False
    array: bool = False
    typmod: int = -1


def is_output(layers: Sequence[Layer]) -> bool:
    """Tell whether a type's values are compared as text; the JSON of others is written anew."""
    return len(layers) == 1 and layers[0].type not in _JSON_ITSELF


def value_sql(column: str, layers: Sequence[Layer]) -> sql.Composed:
    """Return SQL of the value of `column`, whose type consists of `layers`; NULL stays NULL."""
    name = sql.Identifier(column)
    if not is_output(layers):
        return sql.SQL("({})::json").format(_json(name, layers, 0))
    if layers[0].type in _TEXTS:
        return sql.SQL(_TEXTS[layers[0].type]).format(name=name)
    return sql.SQL(_OUTPUT).format(name=name)


def _json(name: sql.Composable, layers: Sequence[Layer], depth: int) -> sql.Composed:
    """Return SQL for the JSON text of a value."""
    first, *rest = layers
    if first.domain:
        return _json(name, rest, depth)
    if first.array:
        return _array(name, rest, depth)
    form = _JSON.get(first.type)
    if form is not None:
        return sql.SQL(form).format(name=name)
    if first.type == "timestamptz":
        return _instant(name, first.typmod)
    return sql.SQL("to_json({})::text").format(
        sql.SQL(_TEXTS.get(first.type, _OUTPUT)).format(name=name)
    )


def _array(name: sql.Composable, element: Sequence[Layer], depth: int) -> sql.Composed:
    """Return SQL of the elements in storage order, with a bracket where a dimension begins or ends.

    Dimension d begins at every element whose number is a multiple of the elements of one d-th part.
    """
    each, number = (sql.Identifier(f"{part}{depth}") for part in ("e", "n"))
    begins: list[sql.Composable] = []
    ends: list[sql.Composable] = []
    for dimension in range(1, _DIMENSIONS_MAX + 1):
        part = sql.SQL(" * ").join(
            sql.SQL("coalesce(array_length({}, {}), 1)").format(name, sql.Literal(inner))
            for inner in range(dimension, _DIMENSIONS_MAX + 1)
        )
        for places, place in ((begins, sql.SQL("{} - 1").format(number)), (ends, number)):
            places.append(
                sql.SQL("({} <= array_ndims({}) AND ({}) % ({}) = 0)::int").format(
                    sql.Literal(dimension), name, place, part
                )
            )
    return sql.SQL(
        "CASE cardinality({name}) WHEN 0 THEN '[]' ELSE (SELECT string_agg("
        "repeat('[', {begins}) || coalesce({element}, 'null') || repeat(']', {ends}),"
        # In the list of columns, unlike after FROM, unnest leaves a composite value whole.
        " ',' ORDER BY {number}) FROM (SELECT unnest({name}) AS {each},"
        " generate_series(1, cardinality({name})) AS {number}) AS u) END"
    ).format(
        name=name,
        begins=sql.SQL(" + ").join(begins),
        ends=sql.SQL(" + ").join(ends),
        element=_json(each, element, depth + 1),
        each=each,
        number=number,
    )


def _instant(name: sql.Composable, typmod: int) -> sql.Composed:
    """Return SQL of ISO 8601 in UTC with as many digits of a second as the type has."""
    digits = _FRACTION_DIGITS if typmod < 0 else typmod
    return sql.SQL(
        "CASE WHEN NOT isfinite({name}) THEN to_json({name}::text)::text ELSE to_json("
        "CASE WHEN extract(year FROM {name}) > 9999 THEN '+'"
        " WHEN extract(year FROM {name}) < -1 THEN '-' ELSE '' END"
        " || lpad(abs(extract(year FROM {name}) + (extract(year FROM {name}) < 0)::int)::text,"
        " greatest(4, length(abs(extract(year FROM {name}))::text)), '0')"
        " || rtrim(left(to_char({name}, '-MM-DD\"T\"HH24:MI:SS.US'), {length}), '.') || 'Z'"
        ")::text END"
    ).format(name=name, length=sql.Literal(len("-MM-DDTHH:MM:SS.") + digits))


_OUTPUT: Final[LiteralString] = (
    # A cast to text would drop the blanks of a bpchar; format() calls the output function.
    # A composite value that has a NULL is neither NULL nor NOT NULL.
    "CASE WHEN {name} IS DISTINCT FROM NULL THEN format('%s', {name}) END"
)
_MICROSECONDS: Final[LiteralString] = "(extract(epoch FROM {name}) * 1000000)::bigint::text"
_INSTANT: Final = (
    "CASE {name}::text"
    f" WHEN 'infinity' THEN '{INFINITY_MICROSECONDS}'"
    f" WHEN '-infinity' THEN '{NEGATIVE_INFINITY_MICROSECONDS}'"
    f" ELSE {_MICROSECONDS} END"
)
_TEXTS: Final = {
    "bool": "{name}::text",
    "date": (
        "CASE {name}::text"
        f" WHEN 'infinity' THEN '{DATE_INFINITY_DAYS}'"
        f" WHEN '-infinity' THEN '{DATE_NEGATIVE_INFINITY_DAYS}'"
        " ELSE ({name} - DATE '1970-01-01')::text END"
    ),
    "time": _MICROSECONDS,
    "timestamp": _INSTANT,
    "timestamptz": _INSTANT,
    "timetz": (
        "CASE {name}::text WHEN '24:00:00+00' THEN '24:00:00Z'"
        " ELSE regexp_replace(({name} AT TIME ZONE 'UTC')::text, '\\+00$', 'Z') END"
    ),
    "bytea": "encode({name}, 'hex')",
    "money": "{name}::numeric::text",
}
_JSON_ITSELF: Final = frozenset(("vector", "halfvec"))
_FLOAT: Final = (
    "CASE WHEN {name}::text ~ '[Ny]' THEN to_json({name}::text)::text ELSE {name}::text END"
)
_JSON: Final = {
    **{kind: _TEXTS[kind] for kind in ("bool", "date", "time", "timestamp")},
    **dict.fromkeys(("int2", "int4", "int8", "oid", *_JSON_ITSELF), "{name}::text"),
    **dict.fromkeys(("float4", "float8"), _FLOAT),
    "bytea": "to_json(translate(encode({name}, 'base64'), E'\\n', ''))::text",
}
"""Forms that are JSON text; what is not here or in `_json` is a string of its text."""
