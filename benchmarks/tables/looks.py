"""Looks at Iceberg tables from outside: what a catalog points to, and how far a table has come.

All is read from the catalog's SQLite file, metadata files and manifests, none of it from a
contender, so that each is measured alike.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.race.process_metrics import usage
from benchmarks.tables.catalog_file import pointers
from services.testbed import procfs

_INTERVAL_S = 0.02
_METER_INTERVAL_S = 1.0


class Look(NamedTuple):
    """Unix time, and the metadata file of each table then."""

    at: float
    places: dict[str, Path]


class Looks:
    """Asks the catalog all the time, and keeps every state with its time.

    Metadata files are linked into `folder`, so that they outlive their tables' upkeep.
    """

    def __init__(self, database: Path, namespace: str, folder: Path) -> None:
        self._database, self._namespace, self._folder = database, namespace, folder
        folder.mkdir()
        self.looks: list[Look] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Looks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last: dict[str, Path] = {}
        while not self._stop.wait(_INTERVAL_S):
            found, at = pointers(self._database, self._namespace), time.time()
            if found != last:
                with contextlib.suppress(FileNotFoundError):  # removed since: the next look
                    kept = {name: self._kept(place) for name, place in found.items()}
                    self.looks.append(Look(at, kept))
                    last = found

    def _kept(self, place: Path) -> Path:
        copy = self._folder / place.name
        with contextlib.suppress(FileExistsError):
            os.link(place, copy)
        return copy


class Growth:
    """The greatest value of an integer column that a table has had, from its files' statistics."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._known: set[int] = set()
        from pyiceberg.io.pyarrow import PyArrowFileIO

        self._io = PyArrowFileIO()
        self._value: int | None = None

    def as_of(self, place: Path) -> int | None:
        """The value as of a metadata file; files in the order of their commits."""
        document = json.loads(place.read_bytes())
        snapshots = {one["snapshot-id"]: one for one in document.get("snapshots", ())}
        current = document.get("current-snapshot-id")
        while current in snapshots and current not in self._known:
            self._known.add(current)
            found = self._greatest(snapshots[current], _field(document, self._column))
            self._value = max((v for v in (found, self._value) if v is not None), default=None)
            current = snapshots[current].get("parent-snapshot-id")
        return self._value

    def _greatest(self, snapshot: dict[str, Any], field: int) -> int | None:
        from pyiceberg.manifest import ManifestContent, read_manifest_list

        found = []
        for manifest in read_manifest_list(self._io.new_input(snapshot["manifest-list"])):
            own = manifest.added_snapshot_id == snapshot["snapshot-id"]
            if own and manifest.content == ManifestContent.DATA:
                for entry in manifest.fetch_manifest_entry(self._io):
                    bound = (entry.data_file.upper_bounds or {}).get(field)
                    if bound is not None:
                        found.append(int.from_bytes(bound, "little", signed=True))
        return max(found, default=None)


def _field(document: dict[str, Any], column: str) -> int:
    current = document["current-schema-id"]
    (schema,) = (one for one in document["schemas"] if one["schema-id"] == current)
    (field,) = (one["id"] for one in schema["fields"] if one["name"] == column)
    return int(field)


def rows_of(place: Path) -> int:
    """The rows in a table's data files, deleted ones included."""
    return _totals(place, "records")["records"]


def files_of(place: Path) -> dict[str, int]:
    """The data files, delete files and equality deletes that a reader of the table reads."""
    return _totals(place, "data-files", "delete-files", "equality-deletes")


def _totals(place: Path, *names: str) -> dict[str, int]:
    """What the summary of the present snapshot says, 0 each without one."""
    document = json.loads(place.read_bytes())
    current = document.get("current-snapshot-id")
    snapshots = {one["snapshot-id"]: one["summary"] for one in document.get("snapshots", ())}
    summary = snapshots.get(current, {})
    return {name: int(summary.get(f"total-{name}", 0)) for name in names}


class Meter:
    """Processor seconds and the peak of resident memory, summed over sessions of processes."""

    def __init__(self, sessions: Callable[[], Sequence[int]]) -> None:
        self._sessions = sessions
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self.peak_mib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Meter":
        self._look()
        self._first = dict(self._last)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    @property
    def cpu_s(self) -> float:
        """Used since this object was entered, also by processes that have ended."""
        return sum(s - self._first.get(pid, 0.0) for pid, s in self._last.items())

    def _run(self) -> None:
        while not self._stop.wait(_METER_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        resident = 0.0
        for session in self._sessions():
            for pid in procfs.members_of_session(session):
                found = usage(pid)
                if found is not None:
                    self._last[pid] = found.cpu_s
                    resident += found.resident_mib
        self.peak_mib = max(self.peak_mib, resident)
