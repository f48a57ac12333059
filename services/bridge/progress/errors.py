"""Errors of a start whose witnesses disagree. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from schemas.acceptance import Kind, Token
from schemas.errors import ExitCode, OperatorNeeded, SetupError
from schemas.events import TransactionEvent
from schemas.lsn import format_lsn

COMPARE = "compare witnesses"
RECOVER = "run `slotbridge recover`, or start over with a new slot and topic prefix"
"""The remedy if positions disagree (docs/guides/recovery.md)."""
RECOVER_ANYWAY = RECOVER.replace("recover`", "recover --force`")
"""The remedy if positions agree, and yet the bridge can't go on."""
START_OVER = "start over with a new slot and topic prefix"


def disagreement(message: str, slot: str, lsn: int | None, hint: str) -> OperatorNeeded:
    """Return the error (WITNESSES_DISAGREE) of a start whose witnesses can't all be right."""
    return OperatorNeeded(message, operation=COMPARE, subject=f"slot {slot}", lsn=lsn, hint=hint)


def publication_gone(publication: str, *, made_again: bool = False) -> SetupError:
    """Return the error of a publication that is missing, or that is not the one of the events.

    `made_again`: a publication of that name exists, but it was created since.
    """
    what, hint = "is gone: changes committed without it", "create the publication again"
    if made_again:
        what = "was dropped and made again: changes committed in between"
        hint = "start the bridge again: its error then has the token that accepts this"
    return SetupError(
        f"the publication {what} are not sent",
        operation="check the publication",
        subject=f"publication {publication}",
        hint=f"{hint}; compare the tables with Kafka for changes of that time",
    )


class SelectionChanged(OperatorNeeded):
    """The settings, or somebody on the server, chose other changes to publish than before."""


class SequenceSetBack(OperatorNeeded):
    """The witness sequence is behind what Kafka's record notes: an operator has to say why.

    Neither snapshot.mode when_needed nor a token may decide that.
    """


class NamesLost(OperatorNeeded):
    """Kafka has lost noted names under which settings hide something of tables.

    A repair publishes all rows of all tables, also those of a hidden table that was renamed.
    """

    HINT: Final = (
        "see that no table of which the settings hide something was renamed or moved to another "
        "schema: nothing else tells the bridge (docs/guides/shaping.md, Renamed tables)"
    )


class OtherStorage(OperatorNeeded):
    """The object storage is not the one with the large values to which events refer.

    `marker`: the URI of the object that tells its id; `noted`: the id in Kafka's record, or UNKNOWN
    where none is noted; `found`: the storage's own id, None without one.
    """

    UNKNOWN: Final = "unknown"

    def __init__(self, marker: str, noted: str, found: str | None) -> None:
        actual = f"it has the id {found}" if found else "it has no id"
        other = f"Kafka's progress record notes {noted}"
        gone = "is gone for good, or was copied without this object"
        if noted == self.UNKNOWN:
            actual = "it has neither an id nor a large value"
            other = (
                "no progress record in Kafka notes an id (the bridge could not read the id, or the "
                "record is lost)"
            )
            gone = "is gone for good, or there never was one"
        super().__init__(
            "this is not known to be the object storage with the large values to which events "
            f"refer: {actual}, and {other}",
            operation=COMPARE,
            subject=marker,
            hint="mount the share again, or name the storage in claim_check.uri; if that storage "
            f"{gone}, or if events are to refer to a new claim_check.uri from now on (then nothing "
            "is lost: earlier events find their objects under the former URI), accept it "
            "(docs/guides/large-values.md)",
            token=Token(Kind.OTHER_STORAGE, marker, noted),
        )


DECIDED_BY_OPERATORS = (SelectionChanged, SequenceSetBack, NamesLost, OtherStorage)
"""Disagreements that no repair may end by itself (snapshot.mode: when_needed)."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """Transactions beyond a switch point. `listed`: ENDs of the first, or BEGIN if partial.

    `count`: how many there are. Transactions without events are not among them.
    """

    listed: Sequence[TransactionEvent]
    count: int


class Diverged(OperatorNeeded):
    """Kafka has what the server never had: changes of `timeline` in [switch_lsn, reached_lsn).

    `switch_lsn` is None where it is not known since when: nobody can accept that. `seen` says what
    tells so, as the end of a sentence about this server. `system`: the server's identifier.
    """

    exit_code = ExitCode.TIMELINE

    def __init__(
        self,
        slot: str,
        system: str,
        timeline: int,
        server_timeline: int,
        switch_lsn: int | None,
        reached_lsn: int,
        seen: str = "",
        transactions: str = "",
        beyond: Beyond | None = None,
    ) -> None:
        self.beyond = beyond
        self.slot = slot
        self.system = system
        self.timeline = timeline
        self.server_timeline = server_timeline
        self.switch_lsn = switch_lsn
        self.reached_lsn = reached_lsn
        self.seen = seen
        left, token = "never was on it", None
        if switch_lsn is not None:
            left, reached = f"left it at {format_lsn(switch_lsn)}", format_lsn(reached_lsn)
            bound = f"{timeline}-{server_timeline}@{format_lsn(switch_lsn)}-{reached}"
            token = Token(Kind.DIVERGENCE, f"{slot}@{system}", bound)
        super().__init__(
            f"Kafka has changes of timeline {timeline} up to {format_lsn(reached_lsn)}; this "
            f"server (timeline {server_timeline}) {seen or left}, so it never had the changes "
            "in between" + (f", {transactions}" if transactions else ""),
            operation=COMPARE,
            subject=f"slot {slot}",
            lsn=reached_lsn,
            hint="events after the switch point are in Kafka but not in the database: take them "
            "back by `slotbridge recover` (to prevent it, set synchronized_standby_slots on the "
            "primary, and stop the bridge before a volume is restored)",
            token=token,
        )

    def naming(self, transactions: str, beyond: Beyond) -> "Diverged":
        """Return the same error, which also tells `transactions`, those of `beyond`."""
        return Diverged(
            self.slot,
            self.system,
            self.timeline,
            self.server_timeline,
            self.switch_lsn,
            self.reached_lsn,
            self.seen,
            transactions,
            beyond,
        )
