"""Flags tables that lack events of an epoch: left out, lost, or counted by nobody.

Each such table is incomplete from the epoch on (iceberg/table_note), which the commit says that
brings it the epoch. An event that was left out may have been a delete: the table has a row then
that the source has not, so that rows which come to be inserted are merged by their keys.

    left out   Kafka has refused it (a dead letter), or the quarantine has it
    lost       counted, and Kafka did not have it when the table was parked
    uncounted  reading begins at the first transaction that Kafka has, where no record of epochs
               tells which one is next; others may have come before. Or the settings left the table
               out for some epochs, whose transactions were read without it
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import structlog

from schemas.errors import ExitCode, OperatorNeeded
from schemas.tables import TablesSettings
from spark_consumers.epochs.event_count import Counts
from spark_consumers.epochs.parking import Parking
from spark_consumers.epochs.topic_summary import TopicSummary
from spark_consumers.iceberg.table_note import NEVER, Incomplete, RebuildNote, TakenOverError
from spark_consumers.iceberg.tables import OpenTable
from spark_consumers.kafka.shapes import DeadLetters
from spark_consumers.kafka.transactions import Cut

log = structlog.get_logger()
_LOST_BEGINNING = "Kafka did not have its first events any more"
_MAY_LACK = "Kafka has refused some of its events, or may have"
Lacks = dict[str, Incomplete]
"""Source table -> what it lacks from an epoch on."""


def flagged(table: OpenTable, lacks: Incomplete | None) -> OpenTable:
    """Return a table that lacks more than before; the first reason stays, but for a worse one."""
    known = table.incomplete
    if lacks is None or (known is not None and (known.of_kafka or not lacks.of_kafka)):
        return table
    since_lsn = lacks.since_lsn if known is None else known.since_lsn
    log.warning("a table is incomplete from now on", table=table.layout.shape.name, why=lacks.why)
    return replace(table, incomplete=replace(lacks, since_lsn=since_lsn))


def flag(opened: dict[str, OpenTable], lacks: Lacks) -> None:
    """Flag those of the tables `opened` that lack something."""
    for name in sorted(lacks.keys() & opened.keys()):
        opened[name] = flagged(opened[name], lacks[name])


def refused_by_kafka(
    letters: DeadLetters,
    after_lsn: int,
    cut: Cut,
    parking: Parking,
    had: Mapping[str, int],
    settings: TablesSettings,
) -> Counter[str]:
    """Count the events in the cut that Kafka has refused and that tables do without, by table.

    `after_lsn`: the commit LSN that the group has; `had`: those of the tables, which may be later.
    Parked tables have positions of their own. Those that the epoch leaves alone are left out, but
    their dead letters are kept for their return. Each other table is refused, unless
    tables.on_bad_event is quarantine, or an operator knows of its dead letters.
    """
    others = {n: lsn for n, lsn in had.items() if lsn > after_lsn} | parking.positions()
    counts: Counter[str] = Counter()
    for letter in letters.between(min([after_lsn, *others.values()]), cut.commit_lsn):
        name, at_lsn = letter.table, letter.position.commit_lsn
        if at_lsn <= others.get(name, after_lsn) or parking.held(name):
            continue
        request = parking.request(name) if name in parking.tables else None
        accepted_lsn = NEVER if request is None else request.accepted_lsn
        if settings.on_bad_event == "quarantine" or at_lsn <= accepted_lsn:
            counts[name] += 1
            continue
        error = OperatorNeeded(
            f"Kafka has refused an event of {name} ({letter.reason}), with seq "
            f"{letter.position.seq}: its table would lack it",
            operation="read dead letters",
            subject=letters.topic,
            lsn=at_lsn,
            hint=f"`slottables rebuild --table {name}` brings the table back without the event, "
            f"and marks it as incomplete. Once Kafka takes such rows, `slotbridge snapshot start "
            f"{name}` sends them",
            exit_code=ExitCode.RECORD_REFUSED,
        )
        parking.refuse(name, error)
        del counts[name]
    for name, count in counts.items():
        log.warning("the table lacks events that Kafka has refused", table=name, count=count)
    return counts


def flag_all(
    cut: Cut,
    counts: Counts,
    opened: dict[str, OpenTable],
    summaries: Mapping[str, TopicSummary],
    without: Mapping[str, int],
    letters: DeadLetters,
    parking: Parking,
) -> None:
    """Flag the tables of an epoch to which it does not bring all that there is.

    `summaries`: of their topics, by table; `without`: how many events tables do without.
    """
    flag(opened, lost(cut, counts.counted, summaries, opened, parking))
    flag(opened, uncounted(cut, counts, opened, parking))
    flag(opened, left_out(cut.commit_lsn, without, letters, opened.values()))


def left_out(
    commit_lsn: int, without: Mapping[str, int], letters: DeadLetters, opened: Iterable[OpenTable]
) -> Lacks:
    """Return the tables of an epoch that lack events which Kafka has refused.

    `without`: how many of the epoch; tables that are made from Kafka's first event on may lack
    earlier ones.
    """
    lacks = {
        name: Incomplete(commit_lsn, f"Kafka has refused {count} of its events")
        for name, count in without.items()
        if count
    }
    for table in opened:
        if table.commit_lsn == NEVER and letters.may_lack(table.layout.shape.name):
            lacks.setdefault(table.layout.shape.name, Incomplete(commit_lsn, _MAY_LACK))
    return lacks


def lost(
    cut: Cut,
    counts: Mapping[str, int],
    summaries: Mapping[str, TopicSummary],
    opened: Mapping[str, OpenTable],
    parking: Parking,
) -> Lacks:
    """Return the tables that return without events which Kafka did not have when they were parked.

    `counts`: how many events of the cut each table is to get; `summaries`: of their topics.
    """
    lacks = {}
    for name in opened.keys() & parking.tables.keys():
        parked = parking.tables[name]
        if opened[name].commit_lsn == NEVER and parked.parked.lost_beginning:
            lacks[name] = Incomplete(cut.commit_lsn, _LOST_BEGINNING, of_kafka=True)
        seen_lsn = max(opened[name].seen_lsn, summaries[name].seen_lsn)
        if parked.parked.taken_over_lsn > seen_lsn:
            why = "its name went to a table whose rows were published before"
            lacks[name] = Incomplete(cut.commit_lsn, why, of_kafka=True)
        if parked.events is not None and parked.parked.missing:
            counted = parked.events + counts[name]
            missing = counted - summaries[name].counted(parked.counted_after)
            missing -= summaries[name].refused_count  # these are in the quarantine
            if missing > 0:
                why = f"Kafka lacks {missing} of its events"
                lacks[name] = Incomplete(cut.commit_lsn, why, of_kafka=True)
    return lacks


def require_own_rows(
    name: str, taken_over: tuple[int, str] | None, seen_lsn: int, parking: Parking
) -> None:
    """Raise TakenOverError for a name that went to a table whose rows its topic does not bring.

    `taken_over`: where that was, and which table it is; `seen_lsn`: how far rows of a snapshot tell
    of the table. One that an operator wants back goes on if it was parked for it, or has such rows.
    """
    if taken_over is None:
        return
    lsn, which = taken_over
    parked = parking.tables.get(name)
    if parked and lsn <= max(parked.parked.taken_over_lsn, seen_lsn):
        return
    raise TakenOverError(
        f"{name} is the table {which}",
        operation="go on with a table",
        subject=name,
        lsn=lsn,
        hint=f"`slotbridge snapshot start {name}` sends all rows; once it is done, `slottables "
        f"rebuild --table {name}` brings the table back with them",
        exit_code=ExitCode.RECORD_REFUSED,
    )


def uncounted(
    cut: Cut,
    counts: Counts,
    opened: Mapping[str, OpenTable],
    parking: Parking,
) -> Lacks:
    """Return the tables that an epoch brings events, but may lack some of them.

    Of tables that are made from Kafka's first event on nothing is said: what their topics have is
    there.
    """
    read = {n: t for n, t in opened.items() if t.commit_lsn != NEVER and not t.rebuilt}
    names = {n for n in read.keys() & parking.tables.keys() if parking.tables[n].events is None}
    known = parking.tables.keys() | {n for n in read if counts.after_lsn <= read[n].commit_lsn}
    names |= read.keys() - known
    names |= {name for name, table in read.items() if table.commit_lsn < counts.oldest_lsn}
    why = "nobody has counted the events that it lacked, so that Kafka may have lost some"
    return {name: Incomplete(cut.commit_lsn, why, of_kafka=True) for name in sorted(names)}


def of_part(
    note: RebuildNote, upto_lsn: int, bad: Collection[object], *, refused: bool
) -> Incomplete | None:
    """Return what a part of a rebuild leaves out of the table, None where it leaves out nothing.

    `note`: how far the rebuild was; `bad`: events of the part that are in the quarantine;
    `refused`: Kafka has refused events of the table, or may have.
    """
    begins = note.commit_lsn == NEVER
    if begins and note.lost_beginning:
        return Incomplete(upto_lsn, _LOST_BEGINNING, of_kafka=True)
    if bad:
        return Incomplete(upto_lsn, f"{len(bad)} of its events are in _quarantine")
    return Incomplete(upto_lsn, _MAY_LACK) if begins and refused else None
