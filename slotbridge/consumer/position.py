"""How far a consumer is: after which transaction, and where to read on in each partition. Pure."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import SettingsError
from schemas.lsn import format_lsn, parse_lsn

OPERATION = "read transactions"
"""What errors of the reader say was being done."""
Partition = tuple[str, int]
"""(topic, number)."""


_Lsn = Annotated[int, Field(ge=-1, lt=2**64, strict=True)]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    commit_lsn: _Lsn
    offsets: dict[str, dict[int, int]]
    began: tuple[_Lsn, _Lsn] | None = None


class Position(NamedTuple):
    """The position after the transaction at `commit_lsn`; `offsets`: partition -> next to read.

    A partition without an offset is read from its beginning, without what was committed up to
    `commit_lsn`: the caller has that. `began`: the caller has had all up to the first LSN when the
    copy began, and got all from the second on (-1: nothing yet). Between the two, Kafka must not
    have any event.
    """

    commit_lsn: int = -1
    offsets: Mapping[Partition, int] = {}
    began: tuple[int, int] | None = None

    def text(self) -> str:
        """Return the position as JSON, to be stored together with what was applied."""
        offsets: dict[str, dict[int, int]] = {}
        for (topic, number), offset in sorted(self.offsets.items()):
            offsets.setdefault(topic, {})[number] = offset
        stored = _Stored(commit_lsn=self.commit_lsn, offsets=offsets, began=self.began)
        return stored.model_dump_json(exclude_none=True)

    @classmethod
    def after(cls, lsn: str | int) -> "Position":
        """Return the position of a caller who has all that was committed up to `lsn` otherwise.

        Raise SettingsError for text that is not an LSN such as 0/1A2B3C.
        """
        return cls(lsn_of(lsn))

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
        return cls(stored.commit_lsn, offsets, stored.began)


def lsn_of(lsn: str | int) -> int:
    """Return an LSN as a number. Raise SettingsError for text such as PostgreSQL does not print."""
    try:
        return parse_lsn(format_lsn(lsn) if isinstance(lsn, int) else lsn)
    except ValueError as error:
        raise SettingsError(
            f"{lsn!r} is not an LSN",
            operation="read the position",
            hint="give it as PostgreSQL prints it, such as 0/1A2B3C",
        ) from error
