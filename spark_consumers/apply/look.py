"""An Iceberg table as its catalog has it, for the writer that is to commit to it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Look:
    """An Iceberg table as its catalog has it now (TableFiles.look)."""

    uuid: str
    metadata: str
    format: int
    spec: int
    partitioned: bool
    sorted: bool
    schema: Mapping[str, Any]
    properties: Mapping[str, str]
    summary: Mapping[str, str]
    snapshot: int | None
    branches: tuple[str, ...]
    data_path: str
    vector_path: str

    @property
    def rows(self) -> int:
        """The rows in its data files, deleted ones among them."""
        return int(self.summary.get("total-records", 0))
