"""Names that Avro and Protobuf allow for those of tables and columns. Pure.

What they do not allow becomes `_`, as with Debezium's adjustment mode `avro`.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from schemas.errors import BadInput, ExitCode
from services.bridge.events.formats import connect
from services.bridge.events.formats.connect import Schema

_FORBIDDEN: Final = re.compile(r"[^A-Za-z0-9_]|^(?=[0-9])")


class Named(NamedTuple):
    """A field of a struct, with the name that its column has."""

    column: str
    schema: Schema


def adjusted(text: str) -> str:
    """Return a qualified name as an allowed one; parts between dots are names of their own."""
    return ".".join(map(adjusted_column, text.split(".")))


def adjusted_column(text: str) -> str:
    """Return a column's name as an allowed one."""
    return _FORBIDDEN.sub("_", text) or "_"


def adjusted_fields(schema: Schema, language: str) -> Mapping[str, Named]:
    """Return the fields of a struct by allowed name. Raise BadInput where two have the same."""
    found: dict[str, Named] = {}
    for column, field in connect.fields(schema):
        name = adjusted_column(column)
        if name in found:
            raise BadInput(
                f"the columns {found[name].column} and {column} have the same name in {language}: "
                f"{name}",
                operation="describe a table",
                subject=schema["name"],
                hint="rename one of them, or leave it out (shaping.columns)",
                exit_code=ExitCode.UNDECODABLE,
            )
        found[name] = Named(column, field)
    return found
