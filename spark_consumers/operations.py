"""The commands of an operator on existing tables, besides `slottables run`."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import structlog
from pyspark.sql import SparkSession

from schemas.errors import SettingsError, SlotbridgeError
from schemas.lsn import format_lsn
from schemas.naming import Naming, schema_and_table
from schemas.settings import Settings, require
from spark_consumers.epochs.ledger import (
    EpochRecord,
    Ledger,
    Place,
    epoch_of,
    require_snapshot,
)
from spark_consumers.epochs.upkeep import maintain_all
from spark_consumers.failures import FOREIGN, translated
from spark_consumers.iceberg import catalog, commits, staging, sums
from spark_consumers.iceberg.maintenance import Maintained
from spark_consumers.iceberg.table_note import NEVER, TableNote
from spark_consumers.iceberg.tables import State, Tables

log = structlog.get_logger()


class Operator:
    """Works on the tables of one namespace; what it changes, `run` takes in."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark = spark
        self._settings = require(settings.tables, "tables")
        kafka = require(settings.kafka, "kafka")
        self._tables = Tables(kafka, self._settings)
        self._naming = Naming(kafka.topic_prefix, settings.shaping)

    def rebuild(self, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """Ask `run` for tables (`schema.table`): parked ones back, others made anew.

        Yield each with whether it is made anew. A table that Iceberg can't load any more is taken
        out of the catalog first. Raise SettingsError, and ask for none, where a table is missing,
        is of sums, is not followed by `run`, or is being rebuilt. A table that returns may lack
        what Kafka has refused up to the last epoch.
        """
        states = self._tables.states(self._spark)
        ledger = Ledger(self._tables.namespace, self._settings)
        record = ledger.last(self._spark)
        known_lsn = record.commit_lsn if record else NEVER
        lost = self._tables.unreadable_of(filter(self._follows, names))
        chosen = {name: self._to_rebuild(name, states) for name in names if name not in lost}
        for name in lost:
            table_name = catalog.table_name(*schema_and_table(name))
            catalog.forget(self._spark, self._tables.namespace, table_name)
            ledger.ask(self._spark, f"rebuild at {time.time()}")
            yield name, True
        for name, state in chosen.items():
            request = uuid.uuid4().hex
            anew = state.note.ask(request, known_lsn).made_anew
            if anew:
                staging.warn_emptied(name, state.kept)
            change_of = partial(_requested, request, known_lsn)
            commits.change_note(self._spark, state.identifier, None, change_of)
            ledger.ask(self._spark, f"rebuild at {time.time()}")
            yield name, anew

    def _to_rebuild(self, name: str, states: Mapping[str, State]) -> State:
        """Return the state of a table that `run` can rebuild; raise SettingsError for another."""
        state = states.get(name)
        if state is None:
            known = sorted(n for n in states if self._follows(n))
            problem = f"there is no Iceberg table of {name}"
            hint = "`slottables run` makes a followed table that is not there when it starts; "
            hint += f"tables: {', '.join(known) or 'none'}"
        elif sums.is_sums(name):
            problem = f"{name} is a table of sums"
            hint = "`slottables run` computes it anew with each rebuild of its source table"
        elif not self._follows(name):
            problem = f"`slottables run` does not follow {name}"
            hint = "tables.tables and shaping say which tables it follows"
        elif state.note.rebuild is not None:
            problem = f"{name} is being rebuilt already"
            hint = (
                "`slottables status` shows how far it is; `slottables run` must be running. "
                "`slottables rebuild --cancel` ends it"
            )
        else:
            return state
        raise SettingsError(problem, operation="rebuild", subject=self._tables.namespace, hint=hint)

    def _follows(self, name: str) -> bool:
        return not sums.is_sums(name) and self._settings.follows(name, self._naming)

    def cancel_rebuild(self, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """End the rebuilds of tables: (table, whether it is parked) of each.

        The table stays as it is, and goes on with the epochs; a parked one stays parked. Raise
        SettingsError for one that is not being rebuilt; the others' rebuilds go on then. What `run`
        has under way for it comes to nothing.
        """
        states = self._tables.states(self._spark)
        ledger = Ledger(self._tables.namespace, self._settings)
        asked = {name: self._to_cancel(name, states) for name in names}
        for name, state in asked.items():
            staging.cancel(self._spark, state.identifier)
            ledger.ask(self._spark, f"rebuild cancelled at {time.time()}")
            yield name, state.note.parked is not None

    def _to_cancel(self, name: str, states: Mapping[str, State]) -> State:
        """Return the table's state. Raise SettingsError unless it is being rebuilt."""
        state = states.get(name)
        if state is None or state.note.rebuild is None:
            rebuilt = sorted(known for known, found in states.items() if found.note.rebuild)
            raise SettingsError(
                f"{name} is not being rebuilt",
                operation="cancel a rebuild",
                subject=self._tables.namespace,
                hint=f"tables that are being rebuilt: {', '.join(rebuilt) or 'none'}",
            )
        return state

    def maintain(self) -> Iterator[Maintained]:
        """Maintain all tables, one after the other; go on to the next where one fails.

        Raise the first failure, which names its table, at the end.
        """
        failures = []
        ledger = Ledger(self._tables.namespace, self._settings)
        states = self._tables.states(self._spark).values()
        for done in maintain_all(self._spark, self._settings, ledger, states, orphans=True):
            if isinstance(done, SlotbridgeError):
                failures.append(done)
            else:
                yield done
        if failures:
            raise failures[0]

    def tag(self, commit_lsn: int) -> Iterator[tuple[str, str]]:
        """Tag all tables as of the last epoch up to an LSN: (Iceberg table, tag) of each.

        An epoch tags the tables that it brings something; the others get this tag at the snapshot
        that they have had since, and parked tables get none. Raise SettingsError for an LSN of
        before the epochs that are kept, OperatorNeeded for a table that has lost that snapshot.
        """
        ledger = Ledger(self._tables.namespace, self._settings)
        record = epoch_of(ledger.all(self._spark), commit_lsn)
        name = catalog.tag_name(record.commit_lsn)
        for source, found in record.parked.items():
            log.warning("a parked table gets no tag", table=source, **found.parked.described())
        try:
            for place in record.tables.values():
                if place.snapshot is not None:
                    self._tag(record, place, name)
                    yield place.identifier, name
        except FOREIGN as error:
            raise translated(error, "tag tables") from error

    def _tag(self, record: EpochRecord, place: Place, name: str) -> None:
        """Tag the snapshot that a table has as of the epoch, unless the tag exists."""
        _, _, table_name = place.identifier.rpartition(".")
        table = catalog.load(
            self._spark, catalog.identifier(self._tables.namespace, table_name.strip("`"))
        )
        snapshot = require_snapshot(
            table,
            place,
            operation="tag tables",
            subject=place.identifier,
            commit_lsn=record.commit_lsn,
        )
        if name not in catalog.ref_names(table):
            commits.change_refs(table, lambda manage: manage.createTag(name, snapshot))

    def epochs(self) -> Iterator[dict[str, object]]:
        """Yield the epochs that are kept, the oldest first."""
        ledger = Ledger(self._tables.namespace, self._settings)
        for record in ledger.all(self._spark):
            yield {
                "epoch": record.epoch,
                "commit_lsn": format_lsn(record.commit_lsn),
                "tag": catalog.tag_name(record.commit_lsn),
                "commit_ts_ms": record.commit_ts_ms,
                "tables": {
                    name: {"table": place.identifier, "snapshot": place.snapshot}
                    for name, place in record.tables.items()
                },
                "parked": {name: found.parked.described() for name, found in record.parked.items()},
            }


def _requested(request: str, known_lsn: int, note: TableNote) -> TableNote:
    """Return the note of a table, as it is by now, with a request for it."""
    return note.ask(request, known_lsn)
