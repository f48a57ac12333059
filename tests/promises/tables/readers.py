"""Readers of the tables that ask the catalog once for all of them, and look without a tag.

They take the metadata locations of all tables by one SQL statement, and read these files by
themselves: pyiceberg each time, DuckDB in turn. An epoch must be in all tables, or in none.
"""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb

from benchmarks.tables.catalog_file import pointers
from benchmarks.tables.duckdb_reader import duckdb_reader
from tests.providers.waiting import patient

_RECORD = "_epochs"
EPOCH = "slotbridge.epoch"
_GONE = (FileNotFoundError, duckdb.IOException)
"""A metadata file that was removed since: the reader asks again."""


@dataclass
class Seen:
    """The counts of one reader's looks."""

    looks: int = 0
    epochs: int = 0
    """Different epochs that it has seen."""
    torn: int = 0
    """Looks at tables of two epochs."""


class Readers:
    """Look at the tables of a namespace, again and again, in a thread."""

    def __init__(self, database: Path, namespace: str, sums: Mapping[str, str]) -> None:
        """`database`: the SQLite file of the catalog. `sums`: columns, by table, of equal sums."""
        self._database, self._namespace, self._sums = database, namespace, sums
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._epochs: set[int] = set()
        self._failure: Exception | None = None
        self.seen = Seen()

    def __enter__(self) -> "Readers":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End it; raise what a look has failed with."""
        self._stop.set()
        self._thread.join(timeout=patient(120))
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with duckdb_reader() as database:
                while not self._stop.wait(0.002):
                    with contextlib.suppress(*_GONE):
                        self._look(database)
        except Exception as error:
            self._failure = error

    def _look(self, database: duckdb.DuckDBPyConnection) -> None:
        places = pointers(self._database, self._namespace)
        if not {_RECORD, *self._sums} <= places.keys():
            return
        from pyiceberg.table import StaticTable

        tables = {name: StaticTable.from_metadata(str(place)) for name, place in places.items()}
        record = tables[_RECORD].current_snapshot()
        if record is None or record.summary is None:
            return
        epoch = int(record.summary[EPOCH] or -1)
        others = [t.properties.get(EPOCH) for n, t in tables.items() if n[0] != "_"]
        torn = any(int(found) > epoch for found in others if found)
        by_duckdb = bool(self.seen.looks % 2)
        sums = set()
        for name, column in self._sums.items():
            if by_duckdb:
                query = (
                    f"SELECT coalesce(sum({column}), 0)::int FROM iceberg_scan('{places[name]}')"
                )
                sums.add(database.execute(query).fetchall()[0][0])
            else:
                values = tables[name].scan(selected_fields=(column,)).to_arrow()[column]
                sums.add(sum(values.to_pylist()))
        self._epochs.add(epoch)
        self.seen.looks += 1
        self.seen.torn += torn or len(sums) > 1
        self.seen.epochs = len(self._epochs)
