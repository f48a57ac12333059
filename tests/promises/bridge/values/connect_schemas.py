"""Any Connect schema of a struct, and documents that fit it."""

import json
from base64 import b64encode
from json.encoder import encode_basestring as quoted
from typing import Any

from hypothesis import strategies as st

from services.bridge.events.formats import connect
from services.bridge.events.formats.names import adjusted_column
from tests.promises.bridge.strategies import names

NUMBERS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}
SPECIAL = ["NaN", "Infinity", "-Infinity"]
texts = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(
    ["", "a" * 63, "a" * 64, "ß" * 64, "x" * 9000, '\0\x1f\x7f\\"/\b\f\n\r\t\u2028😀']
)
longs = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, -1, 63, 64, -64, -65, 2**31])
doubles = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [
        -0.0,
        0.0,
        0,
        5e-324,
        1.7976931348623157e308,
        0.1,
        1e22,
        1e23,
        123456789012345680000,
        2**53 + 1,
    ]
)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


TIMES = [
    ("int32", f"{connect.LOGICAL}.Date"),
    ("int32", f"{connect.LOGICAL}.Time"),
    ("int64", f"{connect.LOGICAL}.Timestamp"),
]


def scalars() -> st.SearchStrategy[connect.Schema]:
    kinds = [*NUMBERS, "boolean", "float", "double", "string", "bytes"]
    return (
        st.builds(
            lambda kind, optional: connect.plain(kind, optional=optional),
            st.sampled_from(kinds),
            st.booleans(),
        )
        | st.builds(
            lambda scale, precision, optional: {
                **connect.decimal(scale, precision),
                "optional": optional,
            },
            st.integers(0, 300),
            st.integers(0, 300),
            st.booleans(),
        )
        | st.builds(
            lambda time, optional: connect.plain(*time, optional=optional),
            st.sampled_from(TIMES),
            st.booleans(),
        )
    )


PAIRS = connect.mapping(
    connect.plain("int16", optional=False), connect.needed(connect.plain("double"))
)
MAPS = [connect.HSTORE_MAP, connect.mapping(*[connect.needed(connect.STRING)] * 2), PAIRS]


@st.composite
def structs(draw: st.DrawFn, depth: int = 1) -> connect.Schema:
    """A struct of fields of all kinds; each struct within has a name of its own."""
    some = draw(st.lists(names, min_size=1, max_size=6, unique_by=adjusted_column))
    fields: dict[str, connect.Schema] = {}
    for number, name in enumerate(some):
        field = draw(scalars() | st.sampled_from(MAPS))
        if draw(st.booleans()) and field["type"] != "map":
            field = connect.array(field, optional=draw(st.booleans()))
        if depth and draw(st.booleans()):
            inner = draw(structs(depth - 1))
            field = {**inner, "name": f"{inner['name']}.n{number}_{depth}", "optional": True}
            field = connect.array(field) if draw(st.booleans()) else field
        fields[name] = field
    version = draw(st.integers(0, 1))
    return connect.struct("b.s", fields, version=version, optional=False)


@st.composite
def schemas(draw: st.DrawFn) -> connect.Schema:
    """A struct without structs of the same name, which stand for the same fields."""
    seen: list[str] = []

    def renamed(schema: Any) -> Any:
        schema = dict(schema)
        if schema["type"] == "array":
            schema["items"] = renamed(schema["items"])
        elif schema["type"] == "struct":
            seen.append("")
            schema["name"] = f"b.struct{len(seen)}"
            schema["fields"] = [renamed(field) for field in schema["fields"]]
        return schema

    found: connect.Schema = renamed(draw(structs()))
    return found


@st.composite
def documents(draw: st.DrawFn, schema: connect.Schema) -> Any:
    """A document that fits a schema, but perhaps for what JSON has no schema for."""
    if schema["optional"] and draw(st.integers(0, 3)) == 0:
        return None
    kind = schema["type"]
    if kind in NUMBERS:
        return draw(st.integers(-(2 ** NUMBERS[kind]), 2 ** NUMBERS[kind] - 1) | st.just(0))
    if kind in ("float", "double"):
        return draw((floats if kind == "float" else doubles) | st.sampled_from(SPECIAL))
    if kind == "bytes":
        return b64encode(draw(st.binary(max_size=200))).decode()
    if kind == "array":
        return draw(st.lists(documents(schema["items"]), max_size=5))
    if kind == "struct":
        fields = draw(st.permutations(list(connect.fields(schema))))
        return {name: draw(documents(field)) for name, field in fields}
    if kind == "map" and schema["keys"]["type"] == "string":
        keys = draw(st.lists(texts, max_size=4, unique=True))
        keys.sort(key=lambda key: (len(key.encode()), key.encode()))  # as hstore has them
        return {key: draw(documents(schema["values"])) for key in keys}
    if kind == "map":
        pair = st.tuples(documents(schema["keys"]), documents(schema["values"]))
        return draw(st.lists(pair, max_size=4))
    return draw(st.booleans() if kind == "boolean" else texts)


def as_text(document: Any, *, ascii_only: bool = False) -> str:
    """A document as the bridge writes it; its texts may have escapes in place of characters."""
    if isinstance(document, dict):
        parts = [f"{quoted(k)}:{as_text(v, ascii_only=ascii_only)}" for k, v in document.items()]
        return "{" + ",".join(parts) + "}"
    if isinstance(document, list | tuple):
        return "[" + ",".join([as_text(item, ascii_only=ascii_only) for item in document]) + "]"
    return json.dumps(document, ensure_ascii=ascii_only)
