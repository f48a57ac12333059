"""Parks a table that is refused, so that the others go on without it.

park     the note on the table says so (iceberg/table_note); nothing of the epoch is
held     epoch after epoch, the record lists the table as parked, with its own last epoch, and
         counts the events that it lacks
return   an operator asks for it (`slottables rebuild`, or drops the table and restarts `run`): the
         next epoch reads what the table lacks (of one that was dropped: all), counts what came
         since it was parked, and brings it with its own events in one commit, which removes the
         note; or the table is refused and parked again. If its rows are not to be trusted, a
         rebuild (epochs/rebuilds) first brings what was there before
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import structlog
from pyspark.sql import SparkSession

from schemas.errors import (
    BadInput,
    ExitCode,
    OperatorNeeded,
    SettingsError,
    SetupError,
    SlotbridgeError,
)
from schemas.naming import schema_and_table
from schemas.tables import TablesSettings
from spark_consumers.epochs.last_epoch import is_ahead
from spark_consumers.epochs.ledger import EpochRecord, ParkedTable
from spark_consumers.epochs.missing_events import Wanted
from spark_consumers.failures import FOREIGN, cause_of, translated
from spark_consumers.iceberg import catalog, rollback, staging, sums
from spark_consumers.iceberg.table_note import NEVER, RebuildNote, TableFailedError, parked_by
from spark_consumers.iceberg.tables import OpenTable, State, Tables, sealed_of
from spark_consumers.kafka.small_topic_tail import MadeAgainError
from spark_consumers.kafka.transactions import Cut
from spark_consumers.liveness import tick

log = structlog.get_logger()
_OF_ONE_TABLE: Final = (
    *(ExitCode.SETTINGS, ExitCode.SERVER_SETTING, ExitCode.WITNESSES_DISAGREE),
    *(ExitCode.UNDECODABLE, ExitCode.RECORD_REFUSED),
)


class Parking:
    """The parked tables of one runner."""

    def __init__(
        self,
        spark: SparkSession,
        settings: TablesSettings,
        tables: Tables,
        states: dict[str, State],
    ) -> None:
        """`states` is updated: a table that is parked keeps the state that it has."""
        self._spark = spark
        given = settings.sums.items()
        self._sums = {sums.source_of(name): found.source for name, found in given}
        self._definitions = {sums.source_of(name): sums.definition(found) for name, found in given}
        self._tables = tables
        self._states = states
        self._record: EpochRecord | None = None
        self._cut_lsn = NEVER
        self._returning: set[str] = set()
        self._parking = threading.Lock()
        self._unreadable: dict[str, str] = {}
        self._failures: dict[str, TableFailedError] = {}
        self.tables: dict[str, ParkedTable] = {}
        """The parked tables, those that are to return included."""
        self.refused: dict[str, str] = {}
        """The tables that were parked since the last epoch, with the reason."""
        self.sums_anew: set[str] = set()
        """Tables of sums that the next epoch computes anew, even one without transactions."""
        self.rebuilding: set[str] = set()
        """The tables that can't return yet, as their rebuild goes on."""
        self.seconds: dict[str, float] = {}
        """How long the tables' parts of the epoch have taken so far."""

    def recall(self, record: EpochRecord, follows: Callable[[str], bool]) -> None:
        """Take over what the record and the tables themselves tell.

        A parked table that is not there is made by the next epoch: it was dropped, or never made.
        """
        for name, known in record.parked.items():
            state = self._states.get(name)
            if state is None and follows(name):
                self.tables[name] = known
                self._returning.add(name)
            elif state is not None and state.note.parked is not None:
                self.tables[name] = known._replace(parked=state.note.parked)
        for name, state in self._states.items():
            parked = state.note.parked
            if parked is not None and name not in self.tables:
                counted = state.commit_lsn == record.commit_lsn and not _from_tables(record)
                events = 0 if counted else None
                place = record.tables.get(name)
                self.tables[name] = ParkedTable(parked, place, events, state.commit_lsn)
        for name, found in self.tables.items():
            log.warning("a table is parked", table=name, **found.parked.described())
        self.look(self._states)

    def refuse_unreadable(self, record: EpochRecord, follows: Callable[[str], bool]) -> None:
        """Park the tables that Iceberg could not load at a start, until they are dropped."""
        self.begin(record, record.commit_lsn, self._states)
        places = {n: p.identifier for n, p in record.tables.items()}
        places |= {n: p.place.identifier for n, p in record.parked.items() if p.place}
        for name, place in places.items():
            error = self._tables.unreadable.get(place)
            if error is not None and follows(name) and not sums.is_sums(name):
                self._unreadable[name] = place
                self._park(name, failed(error, name))

    def refuse_rolled_back(self, record: EpochRecord) -> None:
        """Park the tables that somebody has rolled back since their last epoch, at a start.

        Tables of sums are computed anew then, as those whose settings changed.
        """
        self.begin(record, record.commit_lsn, self._states)
        there = {n: s for n, s in self._states.items() if n not in self.tables}
        wrong = {n: s for n, s in there.items() if s.rolled_back or self._is_restored(s, record)}
        for name, state in wrong.items():
            if not sums.is_sums(name):
                self.refuse(name, rollback.refused(state.identifier))
        for name in sorted(filter(sums.is_sums, there)):
            had, kept = there[name].definition, there[name].commit_lsn >= record.commit_lsn
            if self._sums[name] not in self._states.keys() - self.tables.keys():
                continue
            if name in wrong or had != self._definitions[name] or not kept:
                self.sums_anew.add(name)
                self._states[name] = replace(there[name], rolled_back=True)
                why = "its settings were others" if had else "its settings are unknown"
                why = why if kept else "it lacks epochs in which the settings left it out"
                why = "it was rolled back" if name in wrong else why
                log.warning("a table of sums is computed anew", table=name, why=why)

    def _is_restored(self, state: State, record: EpochRecord) -> bool:
        """Tell whether a table is of another time than the record. One that is ahead is not judged.

        A record may name a compaction, which has no tag: it leads to the table's rows then. That
        the table knows the snapshot is not enough: an epoch's is on its branch at first.
        """
        place = record.tables.get(state.source)
        if place is None or place.uuid != state.uuid or is_ahead(state, record):
            return False
        if place.snapshot is None or not rollback.restored(state.tagged, place.snapshot):
            return False
        return not rollback.comes_from(catalog.load(self._spark, state.identifier), place.snapshot)

    def begin(self, record: EpochRecord, cut_lsn: int, states: dict[str, State]) -> None:
        """Begin an epoch up to `cut_lsn` after `record`, or a part of a rebuild beside it."""
        self._record, self._cut_lsn, self._states = record, cut_lsn, states
        self.seconds = {}

    @property
    def returning(self) -> set[str]:
        """The tables that the next epoch brings to the others."""
        return {name for name in self._returning if not sums.is_sums(name)} - self.rebuilding

    @property
    def is_due(self) -> bool:
        """Whether the next epoch has work with parked tables or sums, even without transactions."""
        return bool(self.refused or self.sums_anew or self.returning)

    def held(self, name: str) -> bool:
        """Tell whether the epoch is to leave a table alone."""
        return name in self.tables and (not self.returns(name) or name in self.rebuilding)

    def returns(self, name: str) -> bool:
        """Tell whether a table is to be with the others: it is, or an operator wants it to be."""
        return name not in self.tables or name in self._returning

    def request(self, name: str) -> RebuildNote | None:
        """Return the request of an operator for a table, None without one."""
        state = self._states.get(name)
        return None if state is None else state.note.rebuild

    def wanted(self, name: str, table: OpenTable, record: EpochRecord, events: int) -> Wanted:
        """Return what is to be read of a table's topic, and how many events are to be there.

        `record`: of the last epoch; `events`: as the transactions after it count them. A table
        that returns must have all that was counted while it was parked, whether it goes on or is
        made anew, but for what Kafka did not have then. The last epoch does not list tables that
        are new, left out by the settings, or parked: it has not read their topics.
        """
        has = None if table.commit_lsn == record.commit_lsn else table.commit_lsn
        found = self.tables.get(name)
        first = table.commit_lsn == NEVER and not (found and found.parked.lost_beginning)
        unread = table.commit_lsn < record.commit_lsn and name not in record.tables
        if found is None or found.events is None:
            return Wanted(name, events, has, needs_first=first, unread=unread)
        after, missing = found.counted_after, found.parked.missing
        resumes, events = table.commit_lsn == after, events + found.events - missing
        unread = unread and not resumes
        return Wanted(name, events, table.commit_lsn, after, resumes, first, unread)

    def positions(self) -> dict[str, int]:
        """Return the commit LSN after which each parked table's events are counted."""
        return {name: found.counted_after for name, found in self.tables.items()}

    def look(self, states: Mapping[str, State]) -> None:
        """See which parked tables an operator wants to return, or no more."""
        asked = {n for n in self.tables if n in states and states[n].note.rebuild is not None}
        gone = {n for n, place in self._unreadable.items() if place not in self._tables.unreadable}
        returning = {n for n in self._returning | gone if n not in states} & self.tables.keys()
        returning |= asked
        own = {n for n, source in self._sums.items() if source in returning}
        returning |= own & self.tables.keys()
        for name in sorted(returning - self._returning):
            log.info("a parked table is to return", table=name)
        for name in sorted(self._returning - returning):
            log.info("a parked table is to stay parked", table=name)
        self._returning = returning

    @contextmanager
    def judging(self, name: str) -> Iterator[None]:
        """Park a table if its part of the epoch fails by its own fault, and go on.

        What nobody has foreseen is the table's own fault if no other table fails so (`settle`).
        """
        began = time.monotonic()
        try:
            yield
        except (*FOREIGN, SlotbridgeError) as error:
            failure = own_fault(error, name)
            if failure is None:
                raise
            with self._parking:
                if isinstance(failure, TableFailedError):
                    self._failures[name] = failure
                else:
                    self._park(name, failure)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            tick()

    def settle(self) -> None:
        """Park the tables that have failed; raise SlotbridgeError where several failed alike."""
        failures, self._failures = self._failures, {}
        for name, failure in sorted(failures.items()):
            alike = [other for other, one in failures.items() if one.cause == failure.cause]
            if len(alike) > 1:
                raise SlotbridgeError(
                    failure.message,
                    operation=failure.operation,
                    subject=", ".join(sorted(alike)),
                    hint="Spark's own log on stderr has the details",
                )
            self._park(name, failure)

    def refuse(self, name: str, error: SlotbridgeError) -> None:
        """Park a table because of `error`, or raise one that may be anybody's."""
        with self.judging(name):
            raise error

    def drop_refused(self, opened: dict[str, OpenTable]) -> None:
        """Take the tables out that the epoch has parked."""
        for name in self.refused:
            opened.pop(name, None)

    def seal(self, cut: Cut, adopted: Collection[str]) -> dict[str, ParkedTable]:
        """Return the tables that are parked after an epoch which the `adopted` ones have."""
        self.settle()
        self.sums_anew = set()
        for name in adopted:
            if self.tables.pop(name, None) is not None:
                self._returning.discard(name)
                log.info("a parked table is with the others again", table=name)
        for name, source in self._sums.items():
            if source in self.tables and name in self._states and name not in self.tables:
                error = OperatorNeeded(
                    f"its source {source} is parked", hint="it returns with its source"
                )
                self._park(name, error)
        for name, found in self.tables.items():
            if found.events is not None:
                events = found.events + cut.counts.get(name, 0)
                self.tables[name] = found._replace(events=events)
        return dict(self.tables)

    def _park(self, name: str, error: SlotbridgeError) -> None:
        """Park a table for an error: note it on the table and in the epoch's record, and log it."""
        state, before = self._states.get(name), self.tables.get(name)
        has = (NEVER, NEVER) if state is None else (state.epoch, state.commit_lsn)
        parked = before.parked if before else None
        note = parked_by(error, has, self._cut_lsn, int(time.time() * 1000), parked)
        place = before.place if before else None
        if place is None and self._record is not None:
            place = self._record.tables.get(name)
        done = NEVER if self._record is None else self._record.commit_lsn
        events = before.events if before else self._counted(has[1], done)
        after = before.counted_after if before else max(done, has[1])
        identifier = state.identifier if state else self._tables.identifier(*schema_and_table(name))
        if self._owns(identifier, name):
            expected = state.note.parked if state else None
            staging.park(self._spark, identifier, sealed_of(state), expected, note)
            changed = self._tables.state(self._spark, identifier)
            if changed is not None:
                self._states[name] = changed
        self.tables[name] = ParkedTable(note, place, events, after)
        self.refused[name] = note.reason
        self._returning -= {name, *(n for n, source in self._sums.items() if source == name)}
        log.error(
            "a table is refused and parked: the others go on without it",
            table=name,
            **note.described(),
        )

    def _owns(self, identifier: str, name: str) -> bool:
        """Tell whether there is an Iceberg table of a source table, which can be noted in it."""
        place = identifier.replace("`", "")
        if place in self._tables.unreadable:
            return False
        try:
            if not self._spark.catalog.tableExists(identifier):
                return False
            properties = catalog.properties(catalog.load(self._spark, identifier))
        except FOREIGN as error:
            failure = translated(error, "park a table")
            if failure.exit_code != ExitCode.BUG:
                raise failure from error
            self._tables.unreadable[place], self._unreadable[name] = failure, place
            self._states.pop(name, None)
            return False
        return properties.get(catalog.SOURCE) == name

    def _counted(self, commit_lsn: int, done: int) -> int | None:
        """Return how many events were counted that a table lacks, None if nobody knows that.

        The table is parked only now, at `commit_lsn`; `done` is the group's.
        """
        anew = self._record is None or _from_tables(self._record)
        return None if commit_lsn != NEVER and (commit_lsn < done or anew) else 0


def own_fault(error: Exception, name: str) -> SlotbridgeError | None:
    """Return the error of a table's part of an epoch that `error` is, None if it may be anybody's.

    A passing error, a full disk, a missing privilege or a topic of all tables that was made again
    would meet the other tables, too.
    """
    if isinstance(error, MadeAgainError):
        return None
    failure = translated(error, "apply an epoch")
    if isinstance(failure, TableFailedError):
        return failure
    if failure.exit_code == ExitCode.BUG:
        return failed(failure, name, cause_of(error))
    kinds = (BadInput, OperatorNeeded, SettingsError, SetupError)
    own = isinstance(failure, kinds) and failure.exit_code in _OF_ONE_TABLE
    foreign = failure is not error and not isinstance(failure, BadInput)
    return failure if own and not foreign else None


def failed(error: SlotbridgeError, name: str, cause: str = "") -> TableFailedError:
    """Return the error of a table with which Spark or Iceberg has failed by a cause."""
    failure = TableFailedError(
        error.message,
        operation=error.operation,
        subject=error.subject,
        lsn=error.lsn,
        hint=f"Spark's own log has the details. `slottables rebuild --table {name}` goes on from "
        "the table's rows; if it is parked again, the next one makes it anew from Kafka",
    )
    failure.cause = cause
    return failure


def _from_tables(record: EpochRecord) -> bool:
    """Tell whether the tables alone tell this epoch, as there is no record of epochs."""
    return record.transaction_offset is None


def require_none_parked(tables: Mapping[str, ParkedTable]) -> None:
    """Raise OperatorNeeded where tables are parked: they do not have what the others have."""
    for name, found in sorted(tables.items()):
        note = found.parked
        others = f", and {len(tables) - 1} more" if len(tables) > 1 else ""
        rebuild = f"; then `slottables rebuild --table {name}`"
        whole = any(way in note.remedy for way in ("slottables rebuild", "drop the Iceberg table"))
        raise OperatorNeeded(
            f"the table is parked{others}: {note.reason}",
            operation="bring tables up to date",
            subject=name,
            lsn=note.at_lsn,
            hint=note.remedy + ("" if whole else rebuild),
        )
