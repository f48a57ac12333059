"""The settings of the section `registry`: the schema registry that has the schemas of records."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

SubjectNaming = Literal["topic", "record", "topic_record"]


class RegistrySettings(BaseModel):
    """A schema registry with Confluent's API, for formats with schemas (docs/guides/formats.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern=r"^https?://[^\s@,]+$")
    """URL of the registry, such as https://registry:8081, with the path of its API if it has one
    (http://apicurio:8080/apis/ccompat/v7)."""
    username: str = Field("", pattern=r"^[^:]*$")
    """User name for basic authentication; empty: no authentication."""
    password: SecretStr = SecretStr("")
    """Password of the user; keep it in the environment (SLOTBRIDGE_REGISTRY__PASSWORD)."""
    ca_file: Path | None = None
    """CA certificates that verify the registry's certificate (PEM); unset: those of Python's
    package certifi."""
    subject_naming: SubjectNaming = "topic"
    """Subject of a schema: `topic`: `<topic>-key` and `<topic>-value`; `record`: the record's name;
    `topic_record`: `<topic>-<record>`, which tables that share a topic need."""
    deadline_ms: int = Field(10_000, ge=1_000, le=60_000)
    """How long a session waits for the registry when a table has a new shape. After that the
    session ends, and the next one waits until the registry answers again. A task of `slottables`
    waits as long for a schema; after that `run` ends with exit code 17."""

    @model_validator(mode="after")
    def _whole(self) -> "RegistrySettings":
        if self.password.get_secret_value() and not self.username:
            raise ValueError("password needs a username")
        return self
