"""The outcome of a drill. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.errors import ExitCode
from services.failover.execute.journal import DONE


@dataclass(frozen=True, slots=True)
class Usable:
    """A slot on the promoted clone: whether it was decoded from, up to a message written there."""

    slot: str
    reason: str = ""
    """Why it is not usable."""
    changes: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, object]:
        """Return the document for `--json`."""
        return {
            "slot": self.slot,
            "usable": not self.reason,
            "reason": self.reason or None,
            "changes": self.changes,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class DrillPart:
    """A part of the drill and how long it took."""

    name: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a whole drill."""

    standby: str
    parts: tuple[DrillPart, ...]
    slots: tuple[Usable, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def lost(self) -> tuple[Usable, ...]:
        """The slots that could not be used."""
        return tuple(slot for slot in self.slots if slot.reason)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command."""
        return ExitCode.CHECK_FAILED if self.lost else ExitCode.OK

    @property
    def text(self) -> str:
        """For the journal: DONE where every slot was usable."""
        return "; ".join(f"{slot.slot}: {slot.reason}" for slot in self.lost) or DONE

    def as_json(self) -> dict[str, object]:
        """Return the document for `--json`."""
        return {
            "standby": self.standby,
            "usable": not self.lost,
            "slots": [slot.as_json() for slot in self.slots],
            "parts": [
                {"part": part.name, "seconds": round(part.seconds, 3), "detail": part.detail}
                for part in self.parts
            ],
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
        }
