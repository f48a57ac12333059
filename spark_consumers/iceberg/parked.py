"""The note on a table that stays where it is while the others go on.

    slotbridge.parked   {epoch, commit_lsn, at_lsn, at_ms, reason, remedy}

The note stands in the Iceberg table's properties from before the first epoch that the table lacks
until the commit that brings it to the others again: whoever joins tables can tell from it. The
record of epochs has the same (epochs/ledger).
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from schemas.errors import (
    BadInput,
    ExitCode,
    OperatorNeeded,
    SettingsError,
    SetupError,
    SlotbridgeError,
)
from schemas.lsn import format_lsn
from spark_consumers.kafka.small_topic_tail import MadeAgainError

_REASON_MAX: Final = 300
_OF_ONE_TABLE: Final = (
    *(ExitCode.SETTINGS, ExitCode.SERVER_SETTING, ExitCode.WITNESSES_DISAGREE),
    *(ExitCode.UNDECODABLE, ExitCode.RECORD_REFUSED),
)


@dataclass(frozen=True, slots=True)
class Parked:
    """Why a table is parked, and where.

    `epoch`, `commit_lsn`: the last epoch that the table has, -1 for none. `at_lsn`: where the
    refused event, or the refused epoch's last transaction, commits. `at_ms`: since when it is
    parked (ms since 1970); it tells one parking from a later one.
    """

    epoch: int
    commit_lsn: int
    at_lsn: int
    at_ms: int
    reason: str
    remedy: str

    def text(self) -> str:
        """Return the note as JSON."""
        return json.dumps(asdict(self))

    def described(self) -> dict[str, str]:
        """Return what an operator needs to know of the table."""
        has, at = lsn_text(self.commit_lsn), format_lsn(max(self.at_lsn, 0))
        return {"has": has, "refused_at": at, "reason": self.reason, "remedy": self.remedy}


def lsn_text(commit_lsn: int) -> str:
    """Return how far a table is: the LSN of its last epoch, "nothing" for a negative one."""
    return "nothing" if commit_lsn < 0 else format_lsn(commit_lsn)


def late_described(commit_lsn: int) -> dict[str, str]:
    """Return what is to be known of a table that lacks what the others have until the next epoch.

    `commit_lsn`: of the last epoch that it has, -1 for none.
    """
    return {
        "has": lsn_text(commit_lsn),
        "reason": "the table was dropped, or left out of tables.tables, and lacks what others have",
        "remedy": "wait for the next epoch, which the source's next transactions make",
    }


def parked_from(document: dict[str, Any]) -> Parked:
    """Return the note that `Parked.text` has written, read as JSON."""
    return Parked(**{name: document[name] for name in Parked.__dataclass_fields__})


def parked_by(
    error: SlotbridgeError, epoch: int, commit_lsn: int, cut_lsn: int, at_ms: int
) -> Parked:
    """Return the note on a table that an error has parked. Pure."""
    where = f" ({error.subject})" if error.subject else ""
    at_lsn = cut_lsn if error.lsn is None else error.lsn
    reason = f"{error.message}{where}"[:_REASON_MAX]
    return Parked(epoch, commit_lsn, at_lsn, at_ms, reason, error.hint)


def concerns_one_table(error: SlotbridgeError) -> bool:
    """Tell whether an error that came of one table's part of an epoch leaves the others whole.

    A passing error, a full disk, a missing privilege or a topic of all tables that was made again
    would meet the other tables, too.
    """
    if isinstance(error, MadeAgainError):
        return False
    kinds = (BadInput, OperatorNeeded, SettingsError, SetupError)
    return isinstance(error, kinds) and error.exit_code in _OF_ONE_TABLE
