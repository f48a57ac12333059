"""The note on the state of a table: one JSON document in one property of its Iceberg table. Pure.

    slotbridge.state   {state, parked, rebuild, incomplete}        no property: following, complete

    following    the table has each epoch
    parked       it stays at the epoch that it has, and `parked` says why; the others go on
    rebuilding   an operator has asked for it (`slottables rebuild`): a parked table goes on from
                 its own rows, or, as one that follows does, is made anew beside the epochs

    following --park--> parked --ask--> rebuilding --brought--> following
    following --ask--> rebuilding --park--> parked
    rebuilding --cancel--> parked or following, whichever it was

`incomplete` is a flag beside the state: since when, and why, the table lacks events. The record of
epochs (epochs/ledger) has the parked tables, too.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from schemas.errors import ExitCode, OperatorNeeded, SlotbridgeError
from schemas.lsn import format_lsn
from spark_consumers.events.shape import START, CommitPosition

PROPERTY: Final = "slotbridge.state"
TableState = Literal["following", "parked", "rebuilding"]
NEVER: Final = -1
"""The commit LSN of a table that has nothing."""
_REASON_MAX: Final = 300


class MissingEventsError(OperatorNeeded):
    """Kafka does not have `count` events of a table that its transaction topic counts."""

    count = 0


class LostBeginningError(OperatorNeeded):
    """Kafka does not have the first events of a table any more."""


class TakenOverError(OperatorNeeded):
    """The name of a table went to one whose rows were published under another name."""


class UntrustedRowsError(OperatorNeeded):
    """A table's rows are not those of its last epoch."""


class TableFailedError(OperatorNeeded):
    """Spark or Iceberg has failed with a table in a way that nobody has foreseen.

    `cause`: the same where two tables fail alike, whatever the messages say.
    """

    exit_code = ExitCode.BUG
    cause = ""


@dataclass(frozen=True, slots=True)
class Parked:
    """Why a table is parked, and where.

    `epoch`, `commit_lsn`: the last epoch that the table has, -1 for none. `at_lsn`: where the
    refused event, or the refused epoch's last transaction, commits. `at_ms`: since when it is
    parked (ms since 1970). `anew`: its rows are not to be trusted, so that a rebuild begins with
    Kafka's first event. What a rebuild then does without: `missing` events that are counted and
    that Kafka did not have; with `lost_beginning`, those before Kafka's first one; rows from before
    `taken_over_lsn`, where the name went to another table, if no snapshot has brought them since.
    """

    epoch: int
    commit_lsn: int
    at_lsn: int
    at_ms: int
    reason: str
    remedy: str
    anew: bool = False
    missing: int = 0
    lost_beginning: bool = False
    taken_over_lsn: int = NEVER

    def described(self) -> dict[str, str]:
        """Return what an operator needs to know of the table."""
        has, at = lsn_text(self.commit_lsn), format_lsn(max(self.at_lsn, 0))
        return {"has": has, "refused_at": at, "reason": self.reason, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A table lacks events since the epoch of `since_lsn`, or may lack some; `why` says which.

    `of_kafka`: Kafka does not have them, so that a rebuild does not bring them, either.
    """

    since_lsn: int
    why: str
    of_kafka: bool = False

    def text(self) -> str:
        """Return it in words."""
        return f"incomplete since {format_lsn(max(self.since_lsn, 0))}: {self.why}"


@dataclass(frozen=True, slots=True)
class RebuildNote:
    """The request of an operator, and how far it is: the branch has all up to `commit_lsn`.

    `request`: its id; `topic_id`: the topic's id, which another topic of its name does not have.
    `anew`: the rows come from Kafka's first event on, by a branch; else the table goes on from its
    own. `accepted_lsn`: the operator knows what Kafka has refused up to there; `lost_beginning`:
    and that Kafka does not have the first events. `shape`: the event since which the source has the
    shape that the branch follows. `offsets`: where the next events are, by partition; None before
    the branch. `replaced`: from this event on the source is another table, and the branch has
    nothing of the former. `settled`: a part has read the topic to its end; what comes then is in
    order. `whole`: the first part reads all of the topic. `incomplete`: what the branch lacks.
    """

    request: str
    anew: bool = True
    accepted_lsn: int = NEVER
    lost_beginning: bool = False
    topic_id: str = ""
    shape: CommitPosition = START
    commit_lsn: int = NEVER
    offsets: Mapping[int, int] | None = None
    replaced: CommitPosition = START
    settled: bool = False
    whole: bool = False
    incomplete: Incomplete | None = None

    def begun(
        self, topic_id: str, shape: CommitPosition, offsets: Mapping[int, int], whole: bool
    ) -> "RebuildNote":
        """Return the note of a branch that has nothing yet, for the same request."""
        same = RebuildNote(self.request, self.anew, self.accepted_lsn, self.lost_beginning)
        return replace(same, topic_id=topic_id, shape=shape, offsets=offsets, whole=whole)

    def start(self, partition: int) -> int:
        """Return the offset of the next event in a partition."""
        return (self.offsets or {}).get(partition, 0)


@dataclass(frozen=True, slots=True)
class TableNote:
    """The state of a table, and whether it is complete."""

    parked: Parked | None = None
    rebuild: RebuildNote | None = None
    incomplete: Incomplete | None = None

    @property
    def state(self) -> TableState:
        """The one of three states that the table is in."""
        if self.rebuild is not None:
            return "rebuilding"
        return "following" if self.parked is None else "parked"

    @property
    def made_anew(self) -> bool:
        """Whether the table is being made anew from Kafka's first event, beside the epochs."""
        return self.rebuild is not None and self.rebuild.anew

    def park(self, parked: Parked) -> "TableNote":
        """Return the note of a table that is refused; a rebuild of it is over."""
        return replace(self, parked=parked, rebuild=None)

    def ask(self, request: str, accepted_lsn: int) -> "TableNote":
        """Return the note of a table that an operator wants back, or made anew.

        `request` tells it from others. `accepted_lsn`: the table may lack what Kafka has
        refused up to this commit LSN, which the operator knows of.
        """
        anew = self.parked is None or self.parked.anew
        lost = self.parked is not None and self.parked.lost_beginning
        return replace(self, rebuild=RebuildNote(request, anew, accepted_lsn, lost))

    def cancel(self) -> "TableNote":
        """Return the note of a table whose rebuild is over without a result."""
        return replace(self, rebuild=None)

    def brought(self, incomplete: Incomplete | None, *, rebuilt: bool) -> "TableNote":
        """Return the note of a table that an epoch has brought up to the others.

        `rebuilt`: with the rows of its rebuild; else one that makes it anew goes on.
        """
        return TableNote(None, self.rebuild if self.made_anew and not rebuilt else None, incomplete)

    def of_epoch(self, epoch: int) -> "TableNote":
        """Return the note of a table that has an epoch.

        A parking before it is not believed: a writer that was overtaken has written it.
        """
        if self.parked is None or self.parked.epoch >= epoch:
            return self
        return replace(self, parked=None, rebuild=self.rebuild if self.made_anew else None)

    def text(self) -> str:
        """Return the note as JSON, "" for a table that follows and is complete."""
        if self == FOLLOWING:
            return ""
        return json.dumps({"state": self.state} | asdict(self))


FOLLOWING: Final = TableNote()
"""The note of a table that has no property."""


def note_of(properties: Mapping[str, str]) -> TableNote:
    """Return the note among the properties of an Iceberg table."""
    text = properties.get(PROPERTY)
    return note_from(json.loads(text)) if text else FOLLOWING


def note_from(document: Mapping[str, Any]) -> TableNote:
    """Return the note that `TableNote.text` has written, read as JSON."""
    parked, rebuild = document["parked"], document["rebuild"]
    return TableNote(
        None if parked is None else Parked(**parked),
        None if rebuild is None else _rebuild_from(rebuild),
        _incomplete_from(document["incomplete"]),
    )


def _incomplete_from(document: Mapping[str, Any] | None) -> Incomplete | None:
    return None if document is None else Incomplete(**document)


def _rebuild_from(document: Mapping[str, Any]) -> RebuildNote:
    offsets = document["offsets"] and {int(n): at for n, at in document["offsets"].items()}
    positions = {name: CommitPosition(*document[name]) for name in ("shape", "replaced")}
    incomplete = _incomplete_from(document["incomplete"])
    return RebuildNote(**{**document, "offsets": offsets, "incomplete": incomplete} | positions)


def parked_by(
    error: SlotbridgeError, has: tuple[int, int], cut_lsn: int, at_ms: int, before: Parked | None
) -> Parked:
    """Return why an error has parked a table that has an epoch with its commit LSN (`has`).

    `before`: why it was parked already. What was not to be trusted then is not now, either; a table
    that fails once more when it goes on from its rows is made anew.
    """
    where = f" ({error.subject})" if error.subject else ""
    again = before is not None and (before.anew or isinstance(error, TableFailedError))
    missing = error.count if isinstance(error, MissingEventsError) else 0
    return Parked(
        *has,
        at_lsn=cut_lsn if error.lsn is None else error.lsn,
        at_ms=at_ms,
        reason=f"{error.message}{where}"[:_REASON_MAX],
        remedy=error.hint,
        anew=again or isinstance(error, UntrustedRowsError),
        missing=missing + (before.missing if before else 0),
        lost_beginning=isinstance(error, LostBeginningError)
        or (before is not None and before.lost_beginning),
        taken_over_lsn=(error.lsn or NEVER)
        if isinstance(error, TakenOverError)
        else (before.taken_over_lsn if before else NEVER),
    )


def lsn_text(commit_lsn: int) -> str:
    """Return how far a table is: the LSN of its last epoch, "nothing" for a negative one."""
    return "nothing" if commit_lsn < 0 else format_lsn(commit_lsn)
