"""The settings of the section `source`: the PostgreSQL pair, slot and publication."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from schemas.naming import schema_and_table, table_matches
from schemas.shaping import ColumnName, TablePattern

_SLOT_NAME = r"^[a-z0-9_]{1,40}$"
_IDENTITY = r"^(full|default|nothing|index .{1,63})$"
_ALL = ".*"
Value = TypeVar("Value")
Condition = Annotated[str, Field(min_length=1, max_length=10_000)]
Columns = Annotated[tuple[ColumnName, ...], Field(min_length=1)]
IdentityName = Annotated[str, Field(pattern=_IDENTITY)]


class SourceSettings(BaseModel):
    """The database that changes are read from; `conninfo` may list several hosts (libpq syntax)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    conninfo: SecretStr
    """Connection string of libpq: every host of the pair, and `target_session_attrs=read-write`.
    Keep the password in a file (`passfile=`) or in the environment."""
    slot: str = Field("slotbridge", pattern=_SLOT_NAME)
    """Name of the logical slot. The first start of the bridge creates it, with `failover`."""
    publication: str = Field("slotbridge", min_length=1, max_length=63)
    """Name of the publication. The bridge creates a missing one at its first start, if its role
    may."""
    tables: tuple[str, ...] = ()
    """Tables (`schema.table`) of a publication that the bridge creates, and whole schemas
    (`schema.*`), with tables that are made later; empty: all tables. Only a superuser can publish
    a schema."""
    row_filters: dict[TablePattern, Condition] | None = None
    """Tables to the SQL condition (WHERE) of the rows that the publication sends; the first pattern
    that fits applies. Unset: `slotbridge publication` leaves row filters as they are; {}: none."""
    column_lists: dict[TablePattern, Columns] | None = None
    """Tables to the columns that the publication sends; the first pattern that fits applies. Unset:
    `slotbridge publication` leaves column lists as they are; {}: all columns."""
    replica_identity: dict[TablePattern, IdentityName] = {}
    """Tables to the REPLICA IDENTITY that `slotbridge publication` sets: `full`, `default`,
    `nothing` or `index NAME`; the first pattern that fits applies."""
    origin: Literal["any", "none"] = "any"
    """`none`: leave out transactions that logical replication brought from another server."""
    witness: Literal["origin", "sequence"] = "origin"
    """Where the database notes how far Kafka is: a replication origin, or a sequence
    (`slotbridge.witness_<slot>`), which needs no function `pg_replication_origin_*`."""
    two_phase: bool = False
    """Decode at PREPARE, publish at COMMIT PREPARED (PostgreSQL 18). A slot stays two-phase."""
    connect_timeout_s: int = Field(5, ge=2, le=300)
    """Seconds to wait until a host answers."""

    @field_validator("conninfo")
    @classmethod
    def _names_a_server(cls, conninfo: SecretStr) -> SecretStr:
        if not conninfo.get_secret_value().strip():
            raise ValueError("it is empty; write host=HOST dbname=DATABASE user=ROLE")
        return conninfo

    @field_validator("tables")
    @classmethod
    def _qualified(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse names other than schema.table, and tables of a schema that is listed whole."""
        for table in tables:
            if table.count(".") != 1 or not all(table.split(".")):
                raise ValueError(f"{table!r} is not of the form schema.table")
        schemas = {schema_and_table(table)[0] for table in tables if table.endswith(_ALL)}
        for table in tables:
            schema, name = schema_and_table(table)
            if schema in schemas and name != "*":
                raise ValueError(f"{table!r} is in {schema}{_ALL}, which is listed, too")
        return tables

    @property
    def single_tables(self) -> tuple[tuple[str, str], ...]:
        """The tables of `tables` that are listed by name, as (schema, table)."""
        return tuple(schema_and_table(one) for one in self.tables if not one.endswith(_ALL))

    @property
    def whole_schemas(self) -> tuple[str, ...]:
        """The schemas of `tables` that are listed as `schema.*`."""
        return tuple(one.removesuffix(_ALL) for one in self.tables if one.endswith(_ALL))

    @model_validator(mode="after")
    def _of_listed_tables(self) -> "SourceSettings":
        """Refuse a pattern that fits no table: a filter that filters nothing would show too much.

        Source: CREATE PUBLICATION, which knows filters and lists of single tables alone, and no
        list beside a whole schema.
        """
        if self.column_lists and self.whole_schemas:
            raise ValueError("column_lists can't go with whole schemas (schema.*) in source.tables")
        for name, patterns in (
            ("row_filters", self.row_filters or {}),
            ("column_lists", self.column_lists or {}),
            ("replica_identity", self.replica_identity),
        ):
            for pattern in patterns:
                fits = any(table_matches(pattern, *table) for table in self.single_tables)
                if not fits and (name != "replica_identity" or not self.whole_schemas):
                    raise ValueError(f"{name}: {pattern} fits none of source.tables")
        for pattern, columns in (self.column_lists or {}).items():
            if len({*columns}) < len(columns):
                raise ValueError(f"column_lists: {pattern} names a column twice")
        return self

    @model_validator(mode="after")
    def _decided_where_prepared(self) -> "SourceSettings":
        """Refuse `two_phase` with `origin: none`.

        The server filters a PREPARE, and later its COMMIT or ROLLBACK, each by the origin of the
        session that ran it: a prepared transaction could arrive without its decision.
        """
        if self.two_phase and self.origin == "none":
            raise ValueError("two_phase and origin: none can't go together")
        return self

    @staticmethod
    def of_table(patterns: Mapping[str, Value], table: tuple[str, str]) -> Value | None:
        """Return the value of the first pattern that fits (schema, table), None without one."""
        fitting = (value for pattern, value in patterns.items() if table_matches(pattern, *table))
        return next(fitting, None)
