"""The reason why the bridge can't start, and whether a repair of its topics helps.

nothing of that kind                        nothing to recover
positions disagree (30), divergence (32)    a repair helps: Kafka, the slot or the database was
                                            lost or set back
another database (31)                       only where an operator accepts it: restored from a
                                            dump, or upgraded
names of tables that settings hide are      raised: a repair would publish all rows of a hidden
lost (30), beside whatever else             table that was renamed
an old primary, another slot's topics,      raised as the bridge does: a repair would do harm
a server or broker that does not answer
"""

from typing import NamedTuple

from schemas.acceptance import Acceptance, Everything
from schemas.errors import ExitCode, OperatorNeeded, Retryable, SlotbridgeError
from schemas.progress import ProgressRecord
from services.bridge.progress.errors import NamesLost
from services.bridge.recovery.event_positions import Lost
from services.bridge.recovery.start_check import StartCheck
from services.bridge.recovery.visible_record import read_visible
from services.bridge.sink.topics import Topics

OPERATION = "recover"
_REPAIRED = (ExitCode.WITNESSES_DISAGREE, ExitCode.TIMELINE)


class Diagnosis(NamedTuple):
    """The result of a diagnosis. `reason`: why the bridge does not start, None if it would.

    `record`: the last progress record that Kafka shows.
    """

    reason: SlotbridgeError | None
    record: ProgressRecord | None


class Unjudged:
    """Decides what hangs in Kafka by Kafka alone: whatever is wrong then is repaired after it."""

    accepted: Acceptance = Everything()

    def may_decide(self, _record: ProgressRecord | None) -> None:
        """Accept any record: this server may decide hanging transactions."""

    def lost(self) -> Lost:
        """Return a function that considers no event lost."""
        return lambda _timeline, _commit_lsn: False


def diagnose(check: StartCheck, topics: Topics, slot: str) -> Diagnosis:
    """Compare the witnesses as a start does. Changes nothing.

    Raise SlotbridgeError for what a repair does not help, NamesLost where it could publish what
    settings hide.
    """
    visible = read_visible(topics, slot)
    if visible.others:
        raise OperatorNeeded(
            f"the topics of prefix {topics.prefix} belong to slot {', '.join(visible.others)} too",
            operation=OPERATION,
            subject=f"slot {slot}",
            hint="one prefix is for one slot: correct source.slot or kafka.topic_prefix",
        )
    record = visible.record
    try:
        check.before_fencing()
        if visible.hidden:
            raise Retryable(
                "Kafka has transactions of this slot that have not ended",
                operation=OPERATION,
                subject=f"slot {slot}",
                hint="start the bridge once, which ends them; then run this again if it stops",
                exit_code=ExitCode.KAFKA_UNREACHABLE,
            )
        check.compare(record)
    except OperatorNeeded as error:
        helps = error.exit_code in _REPAIRED or check.accepted.takes(error.token)
        if isinstance(error, NamesLost) or not helps:
            raise
        check.require_names(record)
        return Diagnosis(error, record)
    return Diagnosis(None, record)
