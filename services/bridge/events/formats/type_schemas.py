"""The Connect schema of a column, which describes the JSON form that its encoder gives. Pure.

It goes by the same type, type modifier and modes as services.bridge.events.values.encoders. Types
without a schema of their own are strings there, and here.

    numeric(p,s), money, precise   Decimal                bytea, base64     bytes
    numeric, precise               VariableScaleDecimal   bytea, else       string
    json, jsonb, uuid, xml, enum   string with Debezium's name
    date, time, timestamp          Debezium's name of the unit, or the type that Connect knows
"""

from collections.abc import Callable
from typing import Final

from schemas.settings import ValueSettings
from services.bridge.events.formats import connect
from services.bridge.events.formats.connect import SEMANTIC, STRING, TIME, Schema
from services.bridge.events.values.datetimes import in_milliseconds
from services.bridge.events.values.decimals import precision_and_scale
from services.bridge.events.values.encoders import Encoders
from services.bridge.pgoutput.type_names import PgType, built_in

Choose = Callable[[ValueSettings, int], Schema]
_UNBOUNDED_BITS: Final = 2**31 - 1


def column_schema(encoders: Encoders, oid: int, typmod: int) -> Schema:
    """Return the schema of a column of type `oid`; its values may be null."""
    found, typmod = encoders.base(oid, typmod)
    if found is None:
        return STRING
    if found.element_oid:
        return connect.array(column_schema(encoders, found.element_oid, typmod))
    if found.kind == "e":
        labels = {"allowed": ",".join(found.labels)} if found.labels else None
        return connect.plain("string", connect.ENUM, parameters=labels)
    if built_in(found.oid) is not None:
        if found.name == "money":
            return _money(encoders)
        choose = _BUILT_IN.get(found.name)
    else:
        choose = _extension_type(encoders, found)
    return STRING if choose is None else choose(encoders.settings, typmod)


def _extension_type(encoders: Encoders, pg_type: PgType) -> Choose | None:
    if encoders.structured(pg_type):
        return _STRUCTURED.get(pg_type.name)
    if pg_type.name == pg_type.extension == "ltree":
        return _always(connect.plain("string", f"{SEMANTIC}.Ltree"))
    return None


def _money(encoders: Encoders) -> Schema:
    mode = encoders.settings.decimal_handling
    if mode == "precise":
        return connect.decimal(encoders.money_digits)
    return connect.plain("double") if mode == "double" else STRING


def _numeric(settings: ValueSettings, typmod: int) -> Schema:
    """Return the schema of a numeric: string, double, or a decimal of fixed or variable scale."""
    if settings.decimal_handling == "string":
        return STRING
    if settings.decimal_handling == "double":
        return connect.plain("double")
    precision, scale = precision_and_scale(typmod)
    return (
        connect.VARIABLE_SCALE if precision == 0 or scale < 0 else connect.decimal(scale, precision)
    )


def _date(settings: ValueSettings, _typmod: int) -> Schema:
    if settings.time_precision == "isostring":
        return connect.plain("string", f"{TIME}.IsoDate")
    return connect.plain("int32", f"{_namespace(settings)}.Date")


def _time(settings: ValueSettings, typmod: int) -> Schema:
    """Return the schema of a time, by time_precision and the column's own precision."""
    mode = settings.time_precision
    if mode == "isostring":
        return connect.plain("string", f"{TIME}.IsoTime")
    if mode == "connect" or (mode == "adaptive" and in_milliseconds(typmod)):
        return connect.plain("int32", f"{_namespace(settings)}.Time")
    return connect.plain("int64", f"{TIME}.{'Nano' if mode == 'nanoseconds' else 'Micro'}Time")


def _timestamp(settings: ValueSettings, typmod: int) -> Schema:
    """Return the schema of a timestamp without time zone, by both precisions."""
    mode = settings.time_precision
    if mode == "isostring":
        return connect.plain("string", f"{TIME}.IsoTimestamp")
    if mode == "connect" or (mode.startswith("adaptive") and in_milliseconds(typmod)):
        return connect.plain("int64", f"{_namespace(settings)}.Timestamp")
    unit = "Nano" if mode == "nanoseconds" else "Micro"
    return connect.plain("int64", f"{TIME}.{unit}Timestamp")


def _namespace(settings: ValueSettings) -> str:
    return connect.LOGICAL if settings.time_precision == "connect" else TIME


def _interval(settings: ValueSettings, _typmod: int) -> Schema:
    return {
        "text": STRING,
        "string": connect.plain("string", f"{TIME}.Interval"),
        "numeric": connect.plain("int64", f"{TIME}.MicroDuration"),
    }[settings.interval_handling]


def _bits(settings: ValueSettings, typmod: int) -> Schema:
    """Return the schema of bit strings: text, a boolean for bit(1), or bytes with their length."""
    if settings.structures == "text":
        return STRING
    if typmod == 1:
        return connect.plain("boolean")
    length = {"length": str(typmod if typmod > 0 else _UNBOUNDED_BITS)}
    return connect.plain("bytes", f"{SEMANTIC}.Bits", parameters=length)


def _hstore(settings: ValueSettings, _typmod: int) -> Schema:
    return {"text": STRING, "json": connect.JSON, "map": connect.HSTORE_MAP}[
        settings.hstore_handling
    ]


def _always(schema: Schema) -> Choose:
    return lambda _settings, _typmod: schema


def _structure(schema: Schema) -> Choose:
    return lambda settings, _typmod: schema if settings.structures == "json" else STRING


_BUILT_IN: Final[dict[str, Choose]] = {
    "bool": _always(connect.plain("boolean")),
    "int2": _always(connect.plain("int16")),
    "int4": _always(connect.plain("int32")),
    **dict.fromkeys(("int8", "oid"), _always(connect.plain("int64"))),
    "float4": _always(connect.plain("float")),
    "float8": _always(connect.plain("double")),
    "numeric": _numeric,
    **dict.fromkeys(("bit", "varbit"), _bits),
    "bytea": lambda s, _: connect.BYTES if s.binary_handling == "base64" else STRING,
    "date": _date,
    "time": _time,
    "timestamp": _timestamp,
    "timestamptz": _always(connect.plain("string", f"{TIME}.ZonedTimestamp")),
    "timetz": _always(connect.plain("string", f"{TIME}.ZonedTime")),
    "interval": _interval,
    **dict.fromkeys(("json", "jsonb"), _always(connect.JSON)),
    "uuid": _always(connect.plain("string", f"{SEMANTIC}.Uuid")),
    "xml": _always(connect.plain("string", f"{SEMANTIC}.Xml")),
    "tsvector": _always(connect.plain("string", f"{SEMANTIC}.Tsvector")),
    "point": _structure(connect.POINT),
    "line": _structure(connect.LINE),
    "circle": _structure(connect.CIRCLE),
    **dict.fromkeys(("lseg", "path", "box", "polygon"), _structure(connect.SHAPE)),
}
_STRUCTURED: Final[dict[str, Choose]] = {
    "hstore": _hstore,
    "vector": _always(
        connect.array(connect.plain("double", optional=False), f"{SEMANTIC}.DoubleVector")
    ),
    "halfvec": _always(
        connect.array(connect.plain("float", optional=False), f"{SEMANTIC}.FloatVector")
    ),
    "sparsevec": _structure(connect.SPARSE_VECTOR),
    **{
        name: _structure(
            connect.struct(
                f"{SEMANTIC}.geometry.{name.capitalize()}",
                {"wkb": connect.needed(connect.BYTES), "srid": connect.plain("int32")},
                version=1,
            )
        )
        for name in ("geometry", "geography")
    },
}
