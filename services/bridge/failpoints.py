"""Named points where a test ends or stops the process, to test the recovery from there.

`SLOTBRIDGE_FAILPOINT=name:n` ends it by SIGKILL at the n-th passage; `name:n:stop` stops it by
SIGSTOP. Unset, a passage costs one comparison. Not for production.
"""

import os
import signal
from typing import Final

from schemas.errors import SettingsError

VARIABLE: Final = "SLOTBRIDGE_FAILPOINT"
FAILPOINTS: Final = (
    "divergence sent",  # an accepted one is in the open Kafka transaction
    "owned",  # the origin is ours, Kafka knows nothing yet
    "topics ready",  # our own topics are there
    "shown",  # the server is that of the visible records, nothing is fenced
    "fenced",  # init_transactions has returned
    "noted",  # a note tells which partitions hang and are ended next, as committed
    "settling",  # what ends a hanging transaction, or repeats it, is in Kafka, undecided
    "settled",  # what hung is ended as committed, its note is still there
    "agreed",  # the witnesses have been compared
    "slot created",  # at the very first start, without a progress record
    "first record",  # with one, and the origin not moved
    "staging loaded",  # undecided prepared transactions are in the spool
    "started",  # START_REPLICATION has been answered
    "resumed inside",  # a transaction of which Kafka has a part
    "topic made",  # a new topic is there, nothing in it
    "sent",  # a batch is in the open Kafka transaction
    "part sent",  # the batch is a part of a large transaction
    "between parts",  # Kafka has committed it, the next one was not made
    "skipped",  # the batch lacks events that Kafka has already
    "staged",  # records of a prepared transaction are in the open Kafka transaction
    "decided",  # its events and the removal of its staging are
    "claim stored",  # a large value is in the object storage, Kafka has nothing that refers to it
    "claims stored",  # all large values of a Kafka transaction are, which is not committed
    "before kafka commit",
    "committing",  # while another thread waits for Kafka
    "after kafka commit",  # the slot and the origin know nothing of it
    "before feedback",
    "after feedback",
    "before origin",
    "after origin",
    "origin while open",  # the same, and Kafka has not committed all that is published
    "spooled",  # a piece of a streamed transaction is on disk
    "breathing",  # in the middle of the replay or staging of a long transaction
    "stopping",  # SIGTERM has come, nothing was finished yet
    "closing",  # a session ends, in whatever way
)
OF_A_SNAPSHOT: Final = (
    "chunk marked",  # the message that says where a chunk belongs is in the WAL
    "chunk begun",  # the stream is there, and the database snapshot of the chunk is taken
    "chunk read",  # its rows are read, Kafka has nothing of them
    "chunk secured",  # the standbys have what it was read from
    "chunk handed",  # it is in the open Kafka transaction, or waits for the next one
)
OF_A_SIGNAL: Final = (
    "signal marked",  # the message that says where records of the signal topic are taken is written
    "signal taken",  # what they ask, and the position behind them, is in the open Kafka transaction
)
OF_A_RECOVERY: Final = (
    "recover fenced",  # no other bridge can write any more, nothing else has happened
    "recover dropping",  # the topics are read, the slot is about to be dropped
    "recover slot made",  # anew, and nothing is compared
    "recover sent",  # the differences are in the open Kafka transaction
    "recover committed",  # Kafka has it all, the origin knows nothing of it
)
OF_A_PUBLICATION: Final = (
    "rows noted",  # it is changed, the signal topic has no signal for the rows that are asked for
    "rows asked for",  # the signal topic has it, the publication's comment still has the note
)
_ALL: Final = FAILPOINTS + OF_A_SNAPSHOT + OF_A_SIGNAL + OF_A_RECOVERY + OF_A_PUBLICATION


class _Armed:
    """The one failpoint of this process; an empty name is never reached."""

    def __init__(self) -> None:
        self.name = ""
        self.passages_left = 0
        self.action = signal.SIGKILL


_armed = _Armed()


def arm(further: tuple[str, ...] = ()) -> None:
    """Read the environment. Raise SettingsError for a failpoint not listed here or in `further`."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    name, _, rest = text.partition(":")
    number, _, action = rest.partition(":")
    known = _ALL + further
    if name not in known or not number.isdigit() or action not in ("", "stop"):
        raise SettingsError(
            f"{VARIABLE}={text!r} is not a failpoint",
            operation="read settings",
            hint=f"unset it; known failpoints: {', '.join(known)}",
        )
    _armed.name = name
    _armed.passages_left = int(number)
    _armed.action = signal.SIGSTOP if action else signal.SIGKILL


def reach(name: str) -> None:
    """End or stop the process if `name` is the armed failpoint and its passages are used up."""
    if name != _armed.name:
        return
    _armed.passages_left -= 1
    if _armed.passages_left == 0:
        os.kill(os.getpid(), _armed.action)
