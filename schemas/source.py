"""The settings of the section `source`: the PostgreSQL pair, slot and publication."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

_SLOT_NAME = r"^[a-z0-9_]{1,40}$"


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
    """Tables (`schema.table`) of a publication that the bridge creates; empty: all tables."""
    origin: Literal["any", "none"] = "any"
    """`none`: leave out transactions that logical replication brought from another server."""
    two_phase: bool = False
    """Decode at PREPARE, publish at COMMIT PREPARED (PostgreSQL 18). A slot stays two-phase."""
    connect_timeout_s: int = Field(5, ge=2, le=300)
    """Seconds to wait until a host answers."""

    @field_validator("tables")
    @classmethod
    def _qualified(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        for table in tables:
            if table.count(".") != 1 or not all(table.split(".")):
                raise ValueError(f"{table!r} is not of the form schema.table")
        return tables

    @model_validator(mode="after")
    def _decided_where_prepared(self) -> "SourceSettings":
        """Refuse `two_phase` with `origin: none`.

        The server filters a PREPARE, and later its COMMIT or ROLLBACK, each by the origin of the
        session that ran it: a prepared transaction could arrive without its decision.
        """
        if self.two_phase and self.origin == "none":
            raise ValueError("two_phase and origin: none can't go together")
        return self
