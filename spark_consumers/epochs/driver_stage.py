"""The tables' parts of an epoch that this process applies itself (apply/), and why others do not.

Files are written first; `adopt` prepares, for all tables in one call to Java, the commits that name
them. What does not go this way is left to Spark (epochs/stage).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import structlog
from pyspark.sql import SparkSession

from schemas.tables import TablesSettings
from spark_consumers.apply.look import Look
from spark_consumers.apply.writer import DriverWriter, Prepared, Written
from spark_consumers.epochs.choice import by_spark
from spark_consumers.epochs.epoch_events import EpochEvents
from spark_consumers.epochs.table_writer import Work
from spark_consumers.epochs.threads import at_once
from spark_consumers.events.unsuited import Unsuited
from spark_consumers.failures import FOREIGN
from spark_consumers.iceberg import catalog
from spark_consumers.iceberg.indexed_delete import Indexes
from spark_consumers.iceberg.staging import Adopted
from spark_consumers.iceberg.table_note import PROPERTY, TableNote, note_of
from spark_consumers.iceberg.tables import State, is_large, merge_mode, sealed_of, state_from

log = structlog.get_logger()
_ATTEMPTS = 10
"""To prepare a commit while other programs change the table's properties and tags."""


class Sealing(NamedTuple):
    """The changes of a table's commit beside its rows."""

    values: Mapping[str, str]
    unset: Collection[str]
    note_after: Callable[[TableNote], TableNote]


class DriverStage:
    """One epoch after the other."""

    def __init__(self, spark: SparkSession, settings: TablesSettings, indexes: Indexes) -> None:
        self._settings = settings
        self._summed = {found.source for found in settings.sums.values()}
        self._writer = DriverWriter(spark, indexes)
        self._written: dict[str, Written] = {}
        self._prepared: dict[str, Prepared | None] = {}
        self._last: dict[str, int | None] = {}
        self._known: dict[str, str] = {}
        self.why: dict[str, str] = {}
        """Why Spark applies the other tables' parts of the last epoch."""

    @property
    def written(self) -> Collection[str]:
        """The tables whose parts of the epoch are written here."""
        return self._written.keys()

    def write(
        self,
        work: Sequence[Work],
        events: EpochEvents,
        states: Mapping[str, State],
        judging: Callable[[str], AbstractContextManager[None]],
    ) -> list[Work]:
        """Write the parts that can be written here; return those that are left to Spark."""
        self._written, self._prepared, self._last, self.why = {}, {}, {}, {}
        looks = {} if events.why else self._writer.look(item.table.identifier for item in work)
        left = []

        def write(item: Work) -> None:
            look = looks.get(item.table.identifier)
            known = sealed_of(states.get(item.name))
            with judging(item.name):
                try:
                    self._written[item.name] = self._write(item, look, known, events)
                except Unsuited as unsuited:
                    self.why[item.name] = str(unsuited)
                    left.append(item)

        at_once(write, work)
        self._log_reasons()
        return left

    def _write(
        self, item: Work, look: Look | None, known: tuple[int, int], events: EpochEvents
    ) -> Written:
        """Write a table's part of the epoch; raise Unsuited where Spark is to do it."""
        if look is None:
            raise Unsuited(events.why or "the table can't be loaded")
        table = item.table
        why = by_spark(
            table,
            item.summary,
            look,
            unread=events.why,
            shapes=len(item.shapes),
            summed=item.name in self._summed,
            indexed=self._settings.key_index,
        )
        if why:
            raise Unsuited(why)
        own = events.own(item.summary.topic)
        return self._writer.write(table.layout, table.identifier, look, known, own)

    def _log_reasons(self) -> None:
        """Log why Spark applies a table's epochs, when that is new."""
        for name, why in self.why.items():
            if self._known.get(name) != why:
                log.info("Spark applies the table's part of the epoch", table=name, why=why)
        for name in self._written:
            if self._known.get(name):
                log.info("the driver applies the table's epochs again", table=name)
        self._known |= {**dict.fromkeys(self._written, ""), **self.why}

    def prepare(
        self,
        seals: Mapping[str, Sealing],
        tag: str,
        judging: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Prepare the commits of the tables for the first time: a table that fails is judged."""
        try:
            self._prepared = self._prepare(self._written, seals, tag)
        except FOREIGN:  # some table's files can't be read: which one is it?
            written, self._written, self._prepared = self._written, {}, {}
            for name, one in written.items():
                with judging(name):
                    self._prepared |= self._prepare({name: one}, seals, tag)
                    self._written[name] = one

    def _prepare(
        self, written: Mapping[str, Written], seals: Mapping[str, Sealing], tag: str
    ) -> dict[str, Prepared | None]:
        documents = {name: _document(one, seals[name], tag) for name, one in written.items()}
        return self._writer.prepare(written, documents) if documents else {}

    def adopt(self, seals: Mapping[str, Sealing], tag: str) -> dict[str, Adopted]:
        """Return the commits of all tables that were written; prepare them anew if asked again.

        Raise Retryable (LOCKED) where somebody else has changed one of them meanwhile.
        """
        adopted: dict[str, Adopted] = {}
        left, first = dict(self._written), self._prepared
        self._prepared = {}
        for _ in range(_ATTEMPTS):
            found, first = first or self._prepare(left, seals, tag), {}
            for name, prepared in found.items():
                if prepared is not None:
                    self._last[name] = prepared.snapshot
                    adopted[name] = _adopted(left.pop(name), prepared, seals[name])
            for name, one in list(left.items()):
                epoch = seals[name].values[catalog.EPOCH]
                anew = self._writer.anew(one, self._last.get(name), epoch)
                if anew is None:
                    done = Prepared(None, self._last.get(name), one.look.properties)
                    adopted[name] = _adopted(left.pop(name), done, seals[name])
                else:
                    left[name] = self._written[name] = anew
            if not left:
                return adopted
        raise catalog.overtaken(next(iter(left.values())).identifier)

    def follow(self, adopted: Mapping[str, Adopted]) -> None:
        """Let the key indexes take in an epoch that is published."""
        for name, written in self._written.items():
            self._writer.follow(written, adopted[name].snapshot)


def _properties(written: Written, seal: Sealing) -> tuple[dict[str, str], list[str]]:
    """Return the properties that a commit sets, and those that it removes."""
    found = written.look.properties
    note = seal.note_after(note_of(found)).text()
    values = {**seal.values, **merge_mode(large=_is_large(written))}
    values |= {PROPERTY: note} if note else {}
    unset = [name for name in (*seal.unset, *(() if note else (PROPERTY,))) if name in found]
    return values, unset


def _document(written: Written, seal: Sealing, tag: str) -> dict[str, Any]:
    values, unset = _properties(written, seal)
    own = {name: seal.values[name] for name in (catalog.EPOCH, catalog.COMMIT_LSN)}
    return {"summary": own, "set": values, "unset": unset, "tag": tag}


def _adopted(written: Written, prepared: Prepared, seal: Sealing) -> Adopted:
    values, unset = _properties(written, seal)
    found = {n: v for n, v in ({**prepared.properties, **values}).items() if n not in unset}
    columns = tuple(field["name"] for field in written.look.schema["fields"])
    own = written.identifier, written.look.uuid, columns, found
    state = state_from(*own, large=_is_large(written))
    return Adopted(state, prepared.snapshot, prepared.transaction)


def _is_large(written: Written) -> bool:
    """Tell whether the table is large once it has the rows that are added."""
    before, added = written.look.summary, written.applied.added
    totals = {
        "total-files-size": sum(file["file-size-in-bytes"] for file in added),
        "total-records": sum(file["record-count"] for file in added),
    }
    return is_large({n: str(count + int(before.get(n, 0))) for n, count in totals.items()})
