"""Tells a witness sequence that was set back from a server that was. Pure.

A replication origin goes back only with its server. A sequence is an ordinary object: setval and
pg_restore set it back alone.

    the WAL has the commit of the record, which lies
    behind the sequence's move                          the sequence alone was set back
    the WAL ends before, or has another commit          the server was set back (Diverged)
    anything else                                       either may be; nobody guesses
"""

from schemas.lsn import format_lsn
from schemas.progress import ProgressRecord
from services.bridge.progress.errors import COMPARE, RECOVER, SequenceSetBack
from services.postgres.witness_sequences import SCHEMA, sequence_name


def sequence_set_back(
    record: ProgressRecord, slot: str, found_lsn: int, *, alone: bool
) -> SequenceSetBack:
    """Return the error of a sequence at `found_lsn`; `alone`: the server was not set back."""
    message = (
        f"the witness sequence is at {format_lsn(found_lsn)}, by Kafka's record it was at "
        f"{format_lsn(record.witness.lsn)}"
    )
    remedy = _setting(record, slot)
    if alone:
        message += ": it was set back (setval, pg_restore), the server was not"
        hint = f"put the sequence back: {remedy}"
    else:
        message += (
            ": either it was set back alone (setval, pg_restore), or the server was, as by a "
            "restored volume; the WAL does not tell which"
        )
        hint = (
            f"if the server's data were not restored, put the sequence back: {remedy}; if they "
            f"were, or if you are not sure, {RECOVER}"
        )
    return SequenceSetBack(
        message, operation=COMPARE, subject=f"slot {slot}", lsn=record.position.end_lsn, hint=hint
    )


def restoring(record: ProgressRecord, slot: str) -> str:
    """Return the SQL that makes the record's witness again, origin or sequence, where it was."""
    if record.witness.kind == "origin":
        return (
            f"SELECT pg_replication_origin_create('slotbridge_{slot}'), "
            f"pg_replication_origin_advance('slotbridge_{slot}', "
            f"'{format_lsn(record.witness.lsn)}')"
        )
    return (
        f"CREATE SEQUENCE IF NOT EXISTS {SCHEMA}.{sequence_name(slot)}; {_setting(record, slot)}; "
        "GRANT SELECT, UPDATE on it to the bridge's role"
    )


def _setting(record: ProgressRecord, slot: str) -> str:
    return f"SELECT setval('{SCHEMA}.{sequence_name(slot)}', {record.witness.lsn})"
