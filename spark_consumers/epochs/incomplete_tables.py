"""Events that the tables lack for good, and the consequences.

An event that Kafka has refused, or that the quarantine has, may have been a delete. Its table then
has a row that the source has not, so that no epoch of inserts may be appended to it unseen: each is
merged by key. A property says so, written down before anything of the epoch is; it stays until the
table is dropped and made anew.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import structlog
from pyspark.sql import SparkSession

from schemas.errors import ExitCode, OperatorNeeded
from spark_consumers.epochs.parking import Parking
from spark_consumers.iceberg import catalog, commits
from spark_consumers.iceberg.tables import NEVER, OpenTable, State, sealed_of
from spark_consumers.kafka.shapes import DeadLetters
from spark_consumers.kafka.transactions import Cut
from spark_consumers.liveness import tick

log = structlog.get_logger()


def refused(
    letters: DeadLetters,
    after_lsn: int,
    cut: Cut,
    parking: Parking,
    had: Mapping[str, int],
    *,
    stop: bool,
) -> dict[str, int]:
    """Count the events in the cut that Kafka has refused, by table.

    `after_lsn`: the commit LSN that the group has; `had`: those of the tables, which may be later.
    That from which a parked one is counted is another. Tables that
    the epoch leaves alone are left out, but their dead letters are kept for their return. With
    `stop`, each other table is refused, unless an operator has accepted its dead letters.
    """
    others = {n: lsn for n, lsn in had.items() if lsn > after_lsn} | parking.positions()
    found: Counter[str] = Counter()
    for letter in letters.between(min([after_lsn, *others.values()]), cut.commit_lsn):
        name, at_lsn = letter.table, letter.position.commit_lsn
        if at_lsn <= others.get(name, after_lsn) or parking.held(name):
            continue
        if not stop or at_lsn <= parking.accepted.get(name, NEVER):
            found[name] += 1
            continue
        error = OperatorNeeded(
            f"Kafka has refused an event of {name} ({letter.reason}), with seq "
            f"{letter.position.seq}: its table would lack it",
            operation="read dead letters",
            subject=letters.topic,
            lsn=at_lsn,
            hint=f"`slottables unpark --table {name} --accept-dead-letters` brings a parked table "
            "back without the event; with tables.on_refused_table: stop, set tables.on_dead_letter "
            f"to report. Once Kafka takes such rows, `slotbridge snapshot start {name}` sends them",
            exit_code=ExitCode.RECORD_REFUSED,
        )
        parking.refuse(name, error)
        del found[name]
    for name, count in found.items():
        log.warning("the table lacks events that Kafka has refused", table=name, count=count)
    return found


def made_anew(letters: DeadLetters, opened: dict[str, OpenTable]) -> set[str]:
    """Return the tables made from Kafka's first event on that may lack one of its events."""
    return {n for n, t in opened.items() if t.commit_lsn == NEVER and letters.may_lack(n)}


def mark(
    spark: SparkSession,
    commit_lsn: int,
    names: Iterable[str],
    opened: dict[str, OpenTable],
    states: dict[str, State],
) -> None:
    """Note of tables that they lack an event: in Iceberg, in `opened` and in `states`.

    Raise Retryable (LOCKED) where another writer has brought one of them an epoch.
    """
    for name in names:
        table, state = opened.get(name), states.get(name)
        if (table and table.lacks) or (state and state.lacks):
            continue
        if table is not None:
            opened[name] = replace(table, lacks=True)
        if state is not None:
            states[name] = replace(state, lacks=True)
        identifier = table.identifier if table else state.identifier if state else None
        if identifier is not None:
            values = {catalog.LACKS: str(commit_lsn)}
            commits.set_known(spark, identifier, sealed_of(state), values)
            tick()
