"""Schemas of Kafka Connect, as its JsonConverter writes them, with Debezium's names. Pure.

A schema is a document like {"type": "int32", "optional": true, "name": "io.debezium.time.Date"}; a
field of a struct has its name as `field` besides. Names, versions and parameters are those that
Debezium 3.7 writes (tests/promises/bridge/values/test_debezium_schemas.py compares them).
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from schemas.events import UNAVAILABLE, UNAVAILABLE_BASE64
from schemas.large_values import LargeValueSettings

Schema = Mapping[str, Any]
SEMANTIC: Final = "io.debezium.data"
TIME: Final = "io.debezium.time"
LARGE_VALUES: Final = "__slotbridge.large_values"
"""Parameter of a column's schema: `claim_check` or `truncate`."""
ENUM: Final = f"{SEMANTIC}.Enum"
LOGICAL: Final = "org.apache.kafka.connect.data"
"""Namespace of the types that Kafka Connect itself knows."""
DECIMAL: Final = f"{LOGICAL}.Decimal"
_DOCS: Final = {
    f"{SEMANTIC}.VariableScaleDecimal": "Variable scaled decimal",
    f"{SEMANTIC}.SparseDoubleVector": "Sparse double vector",
    f"{SEMANTIC}.geometry.Point": "Geometry (POINT)",
    f"{SEMANTIC}.geometry.Line": "Geometry (LINE)",
    f"{SEMANTIC}.geometry.Circle": "Geometry (CIRCLE)",
    f"{SEMANTIC}.geometry.Geometry": "Geometry",
    f"{SEMANTIC}.geometry.Geography": "Geography",
}


def plain(
    kind: str,
    name: str = "",
    *,
    version: int = 1,
    parameters: Mapping[str, str] | None = None,
    optional: bool = True,
) -> Schema:
    """Return the schema of a primitive; `name` is the meaning that readers know it by."""
    schema: dict[str, Any] = {"type": kind, "optional": optional}
    if name:
        schema |= {"name": name, "version": version}
    if parameters:
        schema["parameters"] = dict(parameters)
    return schema


def array(items: Schema, name: str = "", *, optional: bool = True) -> Schema:
    """Return the schema of an array."""
    schema: dict[str, Any] = {"type": "array", "items": items, "optional": optional}
    return schema | ({"name": name, "version": 1} if name else {})


def mapping(keys: Schema, values: Schema, *, optional: bool = True) -> Schema:
    """Return the schema of a map."""
    return {"type": "map", "keys": keys, "values": values, "optional": optional}


def struct(
    name: str, fields: Mapping[str, Schema], *, version: int = 0, optional: bool = True
) -> Schema:
    """Return the schema of a struct; `version` 0: it has none."""
    schema: dict[str, Any] = {
        "type": "struct",
        "fields": [{**field, "field": place} for place, field in fields.items()],
        "optional": optional,
        "name": name,
    }
    schema |= {"version": version} if version else {}
    return schema | ({"doc": _DOCS[name]} if name in _DOCS else {})


def needed(schema: Schema) -> Schema:
    """Return `schema` for what is never null."""
    return {**schema, "optional": False}


def without_labels(schema: Schema) -> Schema:
    """Return `schema` without an enum's labels, so that a new label leaves a key's schema as is."""
    kept = {name: value for name, value in schema.items() if name != "parameters"}
    if schema["type"] == "array":
        return {**schema, "items": without_labels(schema["items"])}
    return kept if schema.get("name") == ENUM else schema


def with_large_values(schema: Schema, settings: LargeValueSettings) -> Schema:
    """Return `schema` with a parameter that says what becomes of large values."""
    what = "claim_check" if settings.truncate_bytes is None else "truncate"
    return {**schema, "parameters": {**schema.get("parameters", {}), LARGE_VALUES: what}}


def decimal(scale: int, precision: int = 0) -> Schema:
    """Return the schema of an unscaled number with `scale`; `precision` 0: it is not known."""
    parameters = {"scale": str(scale)}
    if precision:
        parameters["connect.decimal.precision"] = str(precision)
    return plain("bytes", DECIMAL, parameters=parameters)


STRING: Final = plain("string")
BYTES: Final = plain("bytes")
_TEXT: Final = plain("string", optional=False)
_LONG: Final = plain("int64", optional=False)
_ADDED: Final = {**_LONG, "default": 0}
"""Of a field that Debezium lacks: by the default, Avro's readers of our schema read its events."""
_DOUBLE: Final = plain("double", optional=False)
_SRID: Final = plain("int32")
JSON: Final = plain("string", f"{SEMANTIC}.Json")
VARIABLE_SCALE: Final = struct(
    f"{SEMANTIC}.VariableScaleDecimal",
    {"scale": plain("int32", optional=False), "value": needed(BYTES)},
    version=1,
)
POINT: Final = struct(
    f"{SEMANTIC}.geometry.Point",
    {"x": _DOUBLE, "y": _DOUBLE, "wkb": BYTES, "srid": _SRID},
    version=1,
)
LINE: Final = struct(
    f"{SEMANTIC}.geometry.Line", {"a": _DOUBLE, "b": _DOUBLE, "c": _DOUBLE}, version=1
)
CIRCLE: Final = struct(
    f"{SEMANTIC}.geometry.Circle", {"center": needed(POINT), "radius": _DOUBLE}, version=1
)
SHAPE: Final = struct(
    f"{SEMANTIC}.geometry.Geometry",
    {"wkb": needed(BYTES), "srid": _SRID, "extensions": mapping(_TEXT, _TEXT)},
    version=2,
)
SPARSE_VECTOR: Final = struct(
    f"{SEMANTIC}.SparseDoubleVector",
    {
        "dimensions": plain("int16", optional=False),
        "vector": mapping(plain("int16", optional=False), _DOUBLE, optional=False),
    },
    version=1,
)
_NATIVE: Final = SHAPE["name"], SHAPE["version"]
HSTORE_MAP: Final = mapping(_TEXT, STRING)
SNAPSHOT: Final = {
    **plain(
        "string",
        f"{SEMANTIC}.Enum",
        parameters={
            "allowed": "true,first,first_in_data_collection,last_in_data_collection,last,false,"
            "incremental"
        },
    ),
    "default": "false",
}
SOURCE: Final = struct(
    "io.debezium.connector.postgresql.Source",
    {
        "version": _TEXT,
        "connector": _TEXT,
        "name": _TEXT,
        "ts_ms": _LONG,
        "snapshot": SNAPSHOT,
        "db": _TEXT,
        "sequence": STRING,
        "ts_us": plain("int64"),
        "ts_ns": plain("int64"),
        "schema": _TEXT,
        "table": _TEXT,
        "txId": plain("int64"),
        "lsn": plain("int64"),
        "xmin": plain("int64"),
        "commit_lsn": _ADDED,
        "seq": _ADDED,
        "timeline": _ADDED,
    },
    version=1,
    optional=False,
)
"""Debezium's fields but for origin and origin_lsn, and ours behind them. Fields are only added at
the end: recovery.event_positions reads the binary form of any release by this order."""
_TRANSACTION: Final = struct(
    "event.block",
    {"id": _TEXT, "total_order": _LONG, "data_collection_order": _LONG},
    version=1,
)


FIRST_FIELDS: Final = struct("First", {"op": _TEXT, "source": SOURCE}, optional=False)
"""The fields that the values of all tables begin with."""


def key(name: str, columns: Mapping[str, Schema]) -> Schema:
    """Return the schema of a table's keys."""
    return struct(f"{name}.Key", _with_one_geometry(columns), optional=False)


def envelope(name: str, columns: Mapping[str, Schema]) -> Schema:
    """Return the schema of a table's values; `op` and `source` come first, as in any table's."""
    row = struct(f"{name}.Value", _with_one_geometry(columns))
    return struct(
        f"{name}.Envelope",
        {
            **dict(fields(FIRST_FIELDS)),
            "before": row,
            "after": row,
            "transaction": _TRANSACTION,
            **dict.fromkeys(("ts_ms", "ts_us", "ts_ns"), plain("int64")),
        },
        version=2,
        optional=False,
    )


def flat(name: str, fields: Mapping[str, Schema], columns: Mapping[str, Schema]) -> Schema:
    """Return the schema of a table's values that are rows with `fields` of the event."""
    return struct(f"{name}.Value", {**fields, **_with_one_geometry(columns)}, optional=False)


def fields(schema: Schema) -> Iterable[tuple[str, Schema]]:
    """Yield the fields of a struct by name."""
    for field in schema["fields"]:
        yield field["field"], field


def placeholder(schema: Schema) -> Any:
    """Return the document that stands for an unchanged value which the WAL lacks.

    It fits `schema`: the text or its bytes, an array of numbers its characters, as in Debezium; a
    map has the text as key and value, or the characters by their positions.
    Numbers and booleans themselves are never stored apart, so that the WAL has them.
    """
    kind = schema["type"]
    if kind == "string":
        return UNAVAILABLE
    if kind == "bytes":
        return UNAVAILABLE_BASE64
    if kind == "array":
        if schema["items"]["type"] == "boolean":
            return [bit == "1" for byte in UNAVAILABLE.encode() for bit in f"{byte:08b}"]
        return list(UNAVAILABLE.encode())
    if kind == "map" and schema["keys"]["type"] == "string":
        return {UNAVAILABLE: UNAVAILABLE}
    if kind == "map":
        return [*enumerate(UNAVAILABLE.encode())]
    if kind == "struct":
        return {name: placeholder(field) for name, field in fields(schema)}
    return None if schema["optional"] else 0


def _with_one_geometry(columns: Mapping[str, Schema]) -> Mapping[str, Schema]:
    """Return `columns`, PostGIS geometries with the schema of native ones where a table has both.

    They have one name. Avro and Protobuf have one definition of a name, and that of native ones is
    the other with a further optional field.
    """
    innermost = map(_innermost, columns.values())
    if not any((one.get("name"), one.get("version")) == _NATIVE for one in innermost):
        return columns
    return {name: _with_shape(column) for name, column in columns.items()}


def _innermost(schema: Schema) -> Schema:
    return _innermost(schema["items"]) if schema["type"] == "array" else schema


def _with_shape(schema: Schema) -> Schema:
    if schema["type"] == "array":
        return {**schema, "items": _with_shape(schema["items"])}
    is_geometry = schema.get("name") == SHAPE["name"]
    return {**SHAPE, "optional": schema["optional"]} if is_geometry else schema
