"""The last epoch at a start, as its record and the tables tell it. Pure, but for a line of the log.

A table that is ahead of the record has a part of an epoch that was begun and not recorded: it has a
later commit LSN, or a later epoch at the same one (an epoch without transactions, which makes a
rebuilt table the table).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import structlog

from schemas.errors import OperatorNeeded
from schemas.lsn import format_lsn
from spark_consumers.epochs.ledger import EpochRecord
from spark_consumers.iceberg.table_note import NEVER
from spark_consumers.iceberg.tables import State

log = structlog.get_logger()


class LastEpoch(NamedTuple):
    """The last epoch, and the commit LSN of one that was begun after it, None without one."""

    record: EpochRecord
    begun_lsn: int | None


def with_epoch(states: Mapping[str, State], record: EpochRecord | None) -> dict[str, State]:
    """Return the states of tables with epochs that have brought them nothing."""
    found = dict(states)
    for name, place in record.tables.items() if record else ():
        state = found.get(name)
        same = state and place.uuid == state.uuid and state.note.parked is None
        if record and state and same and not is_ahead(state, record):
            found[name] = state.at(record.epoch, record.commit_lsn)
    return found


def is_ahead(state: State, record: EpochRecord) -> bool:
    """Tell whether a table has an epoch after the recorded one, by number or by commit LSN.

    The number alone is not enough: where the catalog commits tables one by one, an overtaken writer
    may have committed to some of them an epoch of the same number that ends later.
    """
    epoch, commit_lsn = state.sealed
    return epoch > record.epoch or commit_lsn > record.commit_lsn


def next_number(states: Iterable[State], record: EpochRecord, redo_lsn: int | None = None) -> int:
    """Return the number of the epoch after `record`, which no table has yet.

    `redo_lsn`: the epoch ends there and is made again, so that tables may have its number, if all
    of them are at this commit LSN. Otherwise two writers have given the number to two epochs. A
    record may be older than the tables, as those of sums that the settings left out for a while.
    """
    sealed = [state.sealed for state in states]
    last = max((epoch for epoch, _ in sealed), default=0)
    begun = {commit_lsn for epoch, commit_lsn in sealed if epoch == last} == {redo_lsn}
    return max(record.epoch + 1, last if begun else last + 1)


def late(states: Mapping[str, State], others: Iterable[str], commit_lsn: int) -> dict[str, int]:
    """Return the tables that are behind an epoch's commit LSN, and how far each is.

    `others`: source tables that are to be there, too. Somebody has dropped those that are not, or
    they were left out of the settings and put back: the next epoch brings them what they lack.
    """
    found = dict.fromkeys(others, NEVER) | {n: state.commit_lsn for n, state in states.items()}
    return {name: lsn for name, lsn in found.items() if lsn < commit_lsn}


def require_transactions(topic: str, commit_lsn: int, *, judged: bool) -> None:
    """Raise OperatorNeeded for an unfinished epoch whose transactions Kafka does not have.

    Without a record of epochs nobody knows whether there is one: the last epoch may have brought
    some tables nothing. If Kafka has no transaction up to there, either (not `judged`), the log
    says so, and the next transactions are an epoch for which all tables are read again.
    """
    if judged:
        raise OperatorNeeded(
            "Kafka lacks transactions that a table has already taken",
            operation="go on with an epoch",
            subject=topic,
            lsn=commit_lsn,
            hint="their retention was too short: drop the table `_epochs`, start, and audit the "
            "tables (docs/guides/tables.md). If it is dropped already, the topics were made anew "
            "or have lost their last records: restore them, or fill new tables under another "
            "tables.namespace",
        )
    log.warning(
        "not judged: whether the last epoch is in all tables, as Kafka does not have its "
        "transactions; the next one reads all tables again",
        topic=topic,
        commit_lsn=format_lsn(commit_lsn),
    )


def last_epoch(states: Mapping[str, State], record: EpochRecord | None) -> LastEpoch:
    """Return the last epoch; without a record the tables tell it. `states`: as of `with_epoch`."""
    others = [state for state in states.values() if state.note.parked is None]
    positions = [state.commit_lsn for state in others]
    begun = max(positions, default=NEVER)
    if record is None:
        done = min(positions, default=NEVER)
        epoch = max((state.sealed[0] for state in states.values()), default=0) - (begun > done)
        record = EpochRecord(max(epoch, 0), done, 0, {}, None, {})
        again = False
    else:
        again = any(
            state.epoch > record.epoch and state.commit_lsn == record.commit_lsn for state in others
        )
    if begun <= record.commit_lsn and not again:
        return LastEpoch(record, None)
    log.info(
        "an unfinished epoch is continued",
        next_epoch=next_number(states.values(), record, begun),
        commit_lsn=format_lsn(max(begun, 0)),
    )
    return LastEpoch(record, begun)
