"""Types: the columns of pg_type that encoding needs. Pure.

Built-in types are known by oid (`pg_types`); what the database adds is read
from its catalog by whoever has a connection.
"""

from dataclasses import dataclass
from typing import Final

from services.bridge.pgoutput.pg_types import TYPE_NAMES

SYSTEM_SCHEMA: Final = "pg_catalog"
_BOX: Final = "box"
_OIDS: Final = {name: oid for oid, name in TYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class PgType:
    """A type. `kind`: typtype (b base, c composite, d domain, e enum, m multirange, r range).

    `base_oid` and `typmod`: what a domain is made of. `element_oid`, `delimiter`: what an array
    consists of, and what parts its elements. 0, -1 where there is none.
    `extension`: the name of the extension that the type belongs to, or "". `labels`: an enum's.
    """

    oid: int
    schema: str
    name: str
    kind: str = "b"
    base_oid: int = 0
    typmod: int = -1
    element_oid: int = 0
    delimiter: str = ","
    extension: str = ""
    labels: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        """`schema.name`, bare for a built-in type."""
        return self.name if self.schema == SYSTEM_SCHEMA else f"{self.schema}.{self.name}"


def built_in(oid: int) -> PgType | None:
    """Return the built-in type of `oid`; an array's name is its element's after a `_`."""
    name = TYPE_NAMES.get(oid)
    if name is None:
        return None
    element = _OIDS.get(name[1:], 0) if name.startswith("_") else 0
    delimiter = ";" if name == f"_{_BOX}" else ","
    return PgType(oid, SYSTEM_SCHEMA, name, element_oid=element, delimiter=delimiter)
