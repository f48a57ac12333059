"""The tables of a repair: rows by their topics, rows in the database, and their differences."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from schemas.errors import BadInput, ExitCode, Retryable
from schemas.progress import ProgressPosition
from schemas.recovery import TableRepair
from services.bridge.events.event import Event
from services.bridge.events.shaping.tables import Shaping
from services.bridge.repair.baseline import Baseline
from services.bridge.repair.diagnosis import OPERATION
from services.bridge.repair.encoding import Encoding
from services.bridge.repair.fold import Fold
from services.bridge.repair.repair_events import RepairEvents
from services.bridge.repair.row_store import RowStore
from services.bridge.repair.scope import Scope
from services.bridge.sink.topics import Topics
from services.bridge.snapshot.progress import (
    ChunkPosition,
    Owner,
    TableProgress,
    progress_event,
    progress_of,
)
from services.bridge.snapshot.tables import TableShape

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class Compared:
    """A compared table, its rows on disk, and the result. `whole`: Kafka has its first events."""

    shape: TableShape
    store: RowStore
    whole: bool = True
    rows: int = 0
    counts: dict[str, int] = field(default_factory=lambda: {"c": 0, "u": 0, "d": 0})


class ComparedTables:
    """The tables of one run. `files`: where their rows are kept, up to the number of each."""

    def __init__(
        self,
        topics: Topics,
        shaping: Shaping,
        encoding: Encoding,
        baseline: Baseline,
        files: Path,
    ) -> None:
        self._topics = topics
        self._shaping = shaping
        self._encoding = encoding
        self._baseline = baseline
        self._files = files
        self._tables: dict[str, Compared] = {}

    def close(self) -> None:
        """Remove the files of all tables."""
        for table in self._tables.values():
            table.store.close()

    def fold(self, scope: Scope) -> int:
        """Fold each table's topic; return a position that is beyond all of their events."""
        known_lsn, encoder = 0, self._encoding.at(0, self._baseline.now_xmin() - 1)
        for number, shape in enumerate(scope.compared):
            topic = encoder.topic(shape.relation)
            if not topic:
                raise BadInput(
                    "the table is parked, as its topic is another's: nothing of it is in Kafka",
                    operation=OPERATION,
                    subject=f"table {shape.name}",
                    hint="rename it, or leave it out: --without schema.table",
                    exit_code=ExitCode.RECORD_REFUSED,
                )
            file = self._files.with_name(f"{self._files.name}-{number}.recover")
            table = self._tables[shape.name] = Compared(shape, RowStore(file))
            name = shape.relation.schema, shape.relation.table
            fold = Fold(
                self._topics,
                table.store,
                encoder.placeholders(shape.relation),
                shared=self._shaping.naming.table(*name).routed,
            )
            table.whole = fold.read(topic, *name)
            known_lsn = max(known_lsn, fold.commit_lsn + 1)
            logger.info(
                "read the topic of a table",
                table=shape.name,
                events=fold.events,
                number=number + 1,
                tables=len(scope.compared),
                whole=table.whole,
            )
        return known_lsn

    def compare(self, scope: Scope, to_compare: Scope) -> None:
        """Read the tables of `to_compare`, as they are at the baseline, and keep the differences.

        Raise Retryable where they are not those of `scope`, whose topics were folded.
        """
        if [shape.name for shape in to_compare.compared] != [
            shape.name for shape in scope.compared
        ]:
            raise Retryable(
                "tables joined or left the publication while their topics were read",
                operation=OPERATION,
                subject="the publication",
                hint="run `slotbridge recover` again",
                exit_code=ExitCode.SERVER_UNREACHABLE,
            )
        encoder = self._encoding.at(self._baseline.commit_lsn, self._baseline.xmin - 1)
        for shape in to_compare.compared:
            table = self._tables[shape.name]
            table.shape = shape
            self._read(table, encoder)
            waiter = self._topics.waiter
            table.counts = table.store.compare(waiter, whole=table.whole)
            if table.store.deletes_other_keys():  # of columns by which no row can be deleted now
                table.whole = False
                table.counts = table.store.compare(waiter, whole=False)
            logger.info(
                "compared a table", table=shape.name, rows=table.rows, **_named(table.counts)
            )

    def _read(self, table: Compared, encoder: RepairEvents) -> None:
        """Read a table's rows as of the baseline into its store. Raise BadInput for equal keys."""
        relation = table.shape.relation
        for rows in self._baseline.rows(table.shape):
            self._topics.waiter.turn()
            encoded = encoder.encoded(relation, rows, self._baseline.lsn)
            table.rows += len(encoded)
            if table.store.take_rows((key or b"", row) for key, row in encoded) or any(
                key is None for key, _ in encoded
            ):
                raise BadInput(
                    "two rows have the same message key, or a row has none",
                    operation=OPERATION,
                    subject=f"table {table.shape.name}",
                    lsn=self._baseline.lsn,
                    hint="correct shaping.keys, or leave the table out: --without schema.table",
                    exit_code=ExitCode.RECORD_REFUSED,
                )

    def results(self) -> dict[str, TableRepair]:
        """Return table -> result, for the RecoveryRecord."""
        return {
            name: TableRepair(rows=one.rows, emptied=not one.whole, **_named(one.counts))
            for name, one in self._tables.items()
        }

    def events(self, part: ProgressPosition | None) -> Iterator[Event]:
        """Yield BEGIN, schema events, differences and END.

        `part`: Kafka has a part of the transaction that it names, whose END comes first.
        """
        lsn, seq = self._baseline.commit_lsn, 0
        encoder = self._encoding.at(lsn, self._baseline.xmin - 1)
        if part is not None:
            yield from encoder.end_of(part)
        yield from encoder.boundary("BEGIN")
        for table in self._tables.values():
            relation = table.shape.relation
            encoder.topic(relation)
            yield from encoder.take_shapes()
            if not table.whole:
                yield from encoder.emptied(relation, lsn, seq)
                seq += 1
            for found in table.store.differences():
                yield from encoder.change(relation, found, lsn, seq)
                seq += 1
        yield from encoder.boundary("END")

    def snapshots_done(
        self, slot: str, timeline: int, history: Mapping[int, int], now_ms: int
    ) -> Iterator[Event]:
        """Yield, for a later snapshot, that all rows of each table are in Kafka."""
        owner = Owner(slot, timeline, self._baseline.lsn, history)
        position = ChunkPosition(self._baseline.commit_lsn, 0, self._baseline.lsn)
        for table in self._tables.values():
            progress = TableProgress(table.shape, rows=table.rows, chunks=1, done=True)
            done = progress_of(owner, progress, position, now_ms, waiting=0)
            yield progress_event(self._topics.prefix, done)


def _named(counts: dict[str, int]) -> dict[str, int]:
    return {"created": counts["c"], "updated": counts["u"], "deleted": counts["d"]}
