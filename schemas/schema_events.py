"""The schema topic's keys and values: the shapes of tables, as pydantic models (schemas.events)."""

from typing import Any, Literal

from pydantic import Field

from schemas.events import Contract


class Column(Contract):
    """A column as pgoutput has it; `type` is pg_type.typname, `schema.name` if not built in."""

    name: str
    type: str
    type_oid: int
    typmod: int
    key: bool


class SchemaKey(Contract):
    """The key of a SchemaEvent."""

    schema_: str = Field(alias="schema")
    table: str


class TableName(Contract):
    """A name that a table has or had; both the key and the value of `<prefix>.table_names`.

    The bridge notes the names under which its settings hide something of a table.
    """

    system_identifier: str
    """pg_control_system(): another cluster gives the same oids to other tables."""
    oid: int
    """pg_class.oid."""
    schema_: str = Field(alias="schema")
    table: str


class SchemaEvent(Contract, extra="ignore"):
    """A table as its events from (`commit_lsn`, `seq`) on have it; `before` is null the first time.

    Another `oid` under the same name is another table: what was under that name before is renamed
    or dropped. The same `oid` under another name is the same table, renamed. A column is the same
    as one of another shape if it has its number in pg_attribute. The fields from `attnum_max` on
    are for the bridge, to compare with later. Fields that tell nothing are left out, unknown ones
    are ignored.
    """

    schema_: str = Field(alias="schema")
    table: str
    oid: int
    """pg_class.oid."""
    commit_lsn: int
    seq: int
    """The number of the first event that has this shape, in the transaction of `commit_lsn`."""
    ts_ms: int
    replica_identity: Literal["default", "nothing", "full", "index"]
    before: list[Column] | None
    after: list[Column]
    missing: dict[str, Any] = Field({})
    """Added column -> the JSON form that it has in the rows that were there."""
    unsent: list[str] = Field([])
    """Columns of whose values in the rows that were there no event tells."""
    attnums_before: list[int] = Field([])
    """pg_attribute.attnum of each column of `before`, 0 where it is not certain."""
    attnums: list[int] = Field([])
    """pg_attribute.attnum of each column of `after`, 0 where it is not certain."""
    attnum_max: int = 0
    relfilenode: int = 0
    publication: str = ""
    left_out: list[str] = Field([])
    """Hashes of the names of columns that settings leave out."""
