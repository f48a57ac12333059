"""Parks a table that is refused, so that the others go on without it.

park     the note is written into the Iceberg table's properties; nothing of the epoch is
held     epoch after epoch, the record lists the table as parked, with its own last epoch, and
         counts the events that it lacks
return   an operator asks for it (`slottables unpark` or `rebuild`, or by dropping the table): the
         next epoch reads what the table lacks (of one that was dropped: all), counts what came
         since it was parked, and brings it with its own events in one commit, which removes the
         note; or the table is refused and parked again. A rebuild (epochs/rebuilds) first brings
         what there was before
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import structlog
from pyspark.sql import SparkSession

from schemas.errors import BadInput, OperatorNeeded, SlotbridgeError
from schemas.naming import schema_and_table
from schemas.tables import TablesSettings
from spark_consumers.epochs.event_reader import Wanted
from spark_consumers.epochs.last_epoch import is_ahead
from spark_consumers.epochs.ledger import EpochRecord, Ledger, ParkedTable, Place
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog, commits, rollback, sums
from spark_consumers.iceberg.parked import Parked, concerns_one_table, parked_by
from spark_consumers.iceberg.tables import NEVER, OpenTable, State, Tables, parked_note, sealed_of
from spark_consumers.kafka.transactions import Cut
from spark_consumers.liveness import tick

log = structlog.get_logger()


class Parking:
    """The parked tables of one runner."""

    def __init__(
        self,
        spark: SparkSession,
        settings: TablesSettings,
        tables: Tables,
        ledger: Ledger,
        states: dict[str, State],
    ) -> None:
        """`states` is updated: a table that is parked keeps the state that it has."""
        self._spark = spark
        self._parks = settings.on_refused_table == "park"
        self._sums = {sums.source_of(name): found.source for name, found in settings.sums.items()}
        given = settings.sums.items()
        self._definitions = {sums.source_of(name): sums.definition(found) for name, found in given}
        self._tables = tables
        self._ledger = ledger
        self._states = states
        self._record: EpochRecord | None = None
        self._cut_lsn = NEVER
        self._returning: set[str] = set()
        self._parking = threading.Lock()
        self.tables: dict[str, ParkedTable] = {}
        """The parked tables, those that are to return included."""
        self.refused: dict[str, str] = {}
        """The tables that were parked since the last epoch, with the reason."""
        self.damaged: set[str] = set()
        """Tables of sums that the next epoch computes anew, even one without transactions."""
        self.rebuilding: set[str] = set()
        """The tables that can't return yet, as their rebuild goes on."""
        self.accepted: dict[str, int] = {}
        """Tables that are to return -> up to which commit LSN they may lack their dead letters."""
        self.seconds: dict[str, float] = {}
        """How long the tables' parts of the epoch have taken so far."""

    def recall(self, record: EpochRecord, follows: Callable[[str], bool]) -> None:
        """Take over what the record and the tables themselves tell."""
        for name, known in record.parked.items():
            state = self._states.get(name)
            if state is None and follows(name):
                self.tables[name] = known
                if known.place is not None:  # somebody has dropped it, so that it is made anew
                    self._returning.add(name)
            elif state is not None and state.parked is not None:
                self.tables[name] = known._replace(parked=state.parked)
        for name, state in self._states.items():
            if state.parked is not None and name not in self.tables:
                counted = state.commit_lsn == record.commit_lsn and not _from_tables(record)
                events = 0 if counted else None
                place = record.tables.get(name)
                self.tables[name] = ParkedTable(state.parked, place, events, state.commit_lsn)
        for name, found in self.tables.items():
            log.warning("a table is parked", table=name, **found.parked.described())
        for name, state in self._states.items():
            if state.noted and state.parked is None:
                log.warning(
                    "removed a note that the table is parked: it has later epochs", table=name
                )
                self._note(state.identifier, state, None)
        self.look()

    def refuse_rolled_back(self, record: EpochRecord) -> None:
        """Park the tables that somebody has rolled back since their last epoch, at a start.

        Tables of sums are `damaged` then: they are computed anew, as those whose settings changed.
        """
        self.begin(record, record.commit_lsn, self._states)
        there = {n: s for n, s in self._states.items() if n not in self.tables}
        wrong = {n: s for n, s in there.items() if s.rolled_back or self._is_restored(s, record)}
        for name, state in wrong.items():
            if not sums.is_sums(name):
                self._refuse_wrong(name, state)
        for name in sorted(filter(sums.is_sums, there)):
            had, kept = there[name].definition, there[name].commit_lsn >= record.commit_lsn
            if self._sums[name] not in self._states.keys() - self.tables.keys():
                continue
            if name in wrong or had != self._definitions[name] or not kept:
                self.damaged.add(name)
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

    def _refuse_wrong(self, name: str, state: State) -> None:
        """Park a table that was rolled back or restored; nobody counts what the latter lacks."""
        if state.rolled_back:
            self.refuse(name, rollback.refused(state.identifier, parks=self._parks))
            return
        self._states[name] = state.at(*state.sealed)
        self.refuse(name, rollback.refused(state.identifier, whole=True, parks=self._parks))
        place = Place(state.identifier, state.tagged, state.uuid)
        self.tables[name] = self.tables[name]._replace(place=place, events=None)

    def begin(self, record: EpochRecord, cut_lsn: int, states: dict[str, State]) -> None:
        """Begin an epoch up to `cut_lsn` after `record`, or a part of a rebuild beside it."""
        self._record, self._cut_lsn, self._states = record, cut_lsn, states
        self.seconds = {}

    def held(self, name: str) -> bool:
        """Tell whether the epoch is to leave a table alone."""
        return name in self.tables and (not self.returns(name) or name in self.rebuilding)

    def returns(self, name: str) -> bool:
        """Tell whether a table is to be with the others: it is, or an operator wants it to be."""
        return name not in self.tables or name in self._returning

    def wanted(self, name: str, table: OpenTable, record: EpochRecord, events: int) -> Wanted:
        """Return what is to be read of a table's topic, and how many events are to be there.

        `record`: of the last epoch; `events`: as the transactions after it count them. A table
        that returns must have all that was counted while it was parked, whether it goes on or is
        made anew: Kafka may have lost some of it. The last epoch does not list tables that are
        new, left out by the settings, or parked: it has not read their topics.
        """
        has = None if table.commit_lsn == record.commit_lsn else table.commit_lsn
        anew, found = table.commit_lsn == NEVER, self.tables.get(name)
        unread = table.commit_lsn < record.commit_lsn and name not in record.tables
        if found is not None and found.events is None:
            log.warning("not judged: whether Kafka has all that a parked table lacks", table=name)
        if found is None or found.events is None:
            return Wanted(name, events, has, needs_first=anew, unread=unread)
        after = found.counted_after
        resumes, events = table.commit_lsn == after, events + found.events
        unread = unread and not resumes
        return Wanted(name, events, table.commit_lsn, after, resumes, anew, unread)

    def uncounted(self) -> set[str]:
        """Return the tables that are to return and may lack events, as nobody has counted them."""
        waiting = self._returning - self.rebuilding
        return {name for name in waiting if self.tables[name].events is None}

    def positions(self) -> dict[str, int]:
        """Return the commit LSN after which each parked table's events are counted."""
        return {name: found.counted_after for name, found in self.tables.items()}

    def look(self) -> None:
        """See which parked tables an operator wants to return, or no more."""
        asked = {
            name: request
            for name, request in self._ledger.unparked(self._spark).items()
            if name in self.tables and request.at_ms == self.tables[name].parked.at_ms
        }
        self.accepted = {name: request.accepted_lsn for name, request in asked.items()}
        dropped = {name for name in self._returning if name not in self._states}
        returning = dropped | asked.keys()
        returning |= {n for n, source in self._sums.items() if source in returning} & set(
            self.tables
        )
        for name in sorted(returning - self._returning):
            log.info("a parked table is to return", table=name)
        for name in sorted(self._returning - returning):
            log.info("a parked table is to stay parked", table=name)
        self._returning = returning

    @contextmanager
    def judging(self, name: str) -> Iterator[None]:
        """Park a table if its part of the epoch fails by its own fault, and go on.

        With tables.on_refused_table: stop, and where the failure may be anybody's, it is raised.
        """
        began = time.monotonic()
        try:
            yield
        except (*FOREIGN, SlotbridgeError) as error:
            failure = self.fault(error)
            if not self._parks or failure is None:
                raise
            with self._parking:
                self._park(name, failure)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            tick()

    @staticmethod
    def fault(error: Exception) -> SlotbridgeError | None:
        """Return the error of one table's part that `error` is, None where it may be anybody's."""
        failure = translated(error, "apply an epoch")
        foreign = failure is not error and not isinstance(failure, BadInput)
        return None if foreign or not concerns_one_table(failure) else failure

    def refuse(self, name: str, error: SlotbridgeError) -> None:
        """Park a table because of `error`, or raise that."""
        with self.judging(name):
            raise error

    def drop_refused(self, opened: dict[str, OpenTable]) -> None:
        """Take the tables out that the epoch has parked."""
        for name in self.refused:
            opened.pop(name, None)

    def seal(self, cut: Cut, adopted: Collection[str]) -> dict[str, ParkedTable]:
        """Return the tables that are parked after an epoch which the `adopted` ones have."""
        self.damaged = set()
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
        state, before = self._states.get(name), self.tables.get(name)
        has = (NEVER, NEVER) if state is None else (state.epoch, state.commit_lsn)
        note = parked_by(error, *has, self._cut_lsn, int(time.time() * 1000))
        place = before.place if before else None
        if place is None and state is not None and self._record is not None:
            place = self._record.tables.get(name)
        done = NEVER if self._record is None else self._record.commit_lsn
        events = before.events if before else self._counted(has[1], done)
        after = before.counted_after if before else max(done, has[1])
        identifier = state.identifier if state else self._tables.identifier(*schema_and_table(name))
        if self._spark.catalog.tableExists(identifier):
            found = catalog.properties(catalog.load(self._spark, identifier))
            if found.get(catalog.SOURCE) == name:
                self._note(identifier, state, note)
                changed = self._tables.state(self._spark, identifier)
                if changed is not None:
                    rebuild = changed.rebuild or (state is not None and state.rebuild)
                    self._states[name] = replace(changed, rebuild=rebuild)
        self.tables[name] = ParkedTable(note, place, events, after)
        self.refused[name] = note.reason
        self._returning -= {name, *(n for n, source in self._sums.items() if source == name)}
        log.error(
            "a table is refused and parked: the others go on without it",
            table=name,
            **self.tables[name].parked.described(),
        )

    def _counted(self, commit_lsn: int, done: int) -> int | None:
        """Return how many events were counted that a table lacks, None if nobody knows that.

        The table is parked only now, at `commit_lsn`; `done` is the group's.
        """
        anew = self._record is None or _from_tables(self._record)
        return None if commit_lsn != NEVER and (commit_lsn < done or anew) else 0

    def _note(self, identifier: str, state: State | None, note: Parked | None) -> None:
        """Write a note into a table, or remove it. Raise Retryable (LOCKED) if another was there.

        Another writer, that is: the table has another epoch than `state`, or another valid note.
        """
        known, expected = sealed_of(state), state.parked if state else None

        def make(table: Any, transaction: Any) -> None:
            if parked_note(catalog.properties(table), known) != expected:
                raise catalog.overtaken(identifier)
            if note is None:
                transaction.updateProperties().remove(catalog.PARKED).commit()
            else:
                catalog.set_property(transaction, catalog.PARKED, note.text())

        commits.change(self._spark, identifier, known, make)


def _from_tables(record: EpochRecord) -> bool:
    """Tell whether the tables alone tell this epoch, as there is no record of epochs."""
    return record.transaction_offset is None


def require_none_parked(tables: Mapping[str, ParkedTable]) -> None:
    """Raise OperatorNeeded where tables are parked: they do not have what the others have."""
    for name, found in sorted(tables.items()):
        note = found.parked
        others = f", and {len(tables) - 1} more" if len(tables) > 1 else ""
        unpark = f"; then `slottables unpark --table {name}`"
        raise OperatorNeeded(
            f"the table is parked{others}: {note.reason}",
            operation="bring tables up to date",
            subject=name,
            lsn=note.at_lsn,
            hint=note.remedy + ("" if "slottables unpark" in note.remedy else unpark),
        )
