"""How far a consumer is: after which transaction, and where to read on in each partition. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import SettingsError

Partition = tuple[str, int]
"""(topic, number)."""


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    commit_lsn: int
    offsets: dict[str, dict[int, int]]


class Position(NamedTuple):
    """The position after the transaction at `commit_lsn`; `offsets`: partition -> next to read.

    A partition without an offset is read from its beginning.
    """

    commit_lsn: int = -1
    offsets: Mapping[Partition, int] = {}

    def text(self) -> str:
        """Return the position as JSON, to be stored together with what was applied."""
        offsets: dict[str, dict[int, int]] = {}
        for (topic, number), offset in sorted(self.offsets.items()):
            offsets.setdefault(topic, {})[number] = offset
        return _Stored(commit_lsn=self.commit_lsn, offsets=offsets).model_dump_json()

    @classmethod
    def parse(cls, text: str | None) -> "Position":
        """Parse the output of `text`, None for the beginning. Raise SettingsError for others."""
        if text is None:
            return cls()
        try:
            stored = _Stored.model_validate_json(text)
        except ValidationError as error:
            raise SettingsError(
                "the stored position is not one of slotbridge.consumer",
                operation="read the position",
                hint="store Position.text(); None begins anew",
            ) from error
        offsets = {
            (topic, number): offset
            for topic, numbers in stored.offsets.items()
            for number, offset in numbers.items()
        }
        return cls(stored.commit_lsn, offsets)
