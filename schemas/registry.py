"""The settings of the section `registry`: the schema registry that has the schemas of records."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

SubjectNaming = Literal["topic", "record", "topic_record"]


class RegistrySettings(BaseModel):
    """A schema registry with Confluent's API, for formats that need one (docs/FORMATS.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern=r"^https?://[^\s@,]+$")
    """Its address, such as https://registry:8081, or with the path of its API
    (http://apicurio:8080/apis/ccompat/v7)."""
    username: str = Field("", pattern=r"^[^:]*$")
    """Whom it knows us as, by basic authentication; empty: without."""
    password: SecretStr = SecretStr("")
    """Its password; keep it in the environment (SLOTBRIDGE_REGISTRY__PASSWORD)."""
    ca_file: Path | None = None
    """Certificates of the authority that its own is checked by (PEM); unset: those of Python's
    package certifi."""
    subject_naming: SubjectNaming = "topic"
    """The subject of a schema: `<topic>-key` and `<topic>-value`, the record's name, or both
    (`<topic>-<record>`), which tables that share a topic need."""
    deadline_ms: int = Field(10_000, ge=1_000, le=60_000)
    """How long the stream waits for it when a table has a new shape. After that the session ends,
    and the next one waits until it answers again."""

    @model_validator(mode="after")
    def _whole(self) -> "RegistrySettings":
        if self.password.get_secret_value() and not self.username:
            raise ValueError("password needs a username")
        return self
