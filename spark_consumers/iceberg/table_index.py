"""The key index of one table: which data file and position each key's row has.

It is a cache on this machine, named by the table's UUID and by the snapshot that it is of. The
table is the authority: an index of another snapshot is brought to the wanted one by the keys of
the files that were added since, and made anew from the keys of all files where that is impossible.
A row that was deleted may still be in it: deleting it again changes nothing. An index of many such
rows is made anew. One program at a time has the folder.
"""

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import structlog
from pyroaring import BitMap64

from spark_consumers.failures import FOREIGN
from spark_consumers.iceberg import table_files
from spark_consumers.iceberg.table_files import Files, UnknownFilesError, Vectors
from spark_consumers.key_index import folders, segment_files
from spark_consumers.key_index import segments as search
from spark_consumers.key_index.file_changes import Applied, Description
from spark_consumers.key_index.keys import Keys, joined, keys_of
from spark_consumers.key_index.segments import Segment

log = structlog.get_logger()
SEGMENT_ROWS_MAX = 16_000_000
"""Segments are not merged into one of more rows: what a merge takes of memory is bounded."""
RETRY_S = 600.0
"""After that time it is tried again to make the index of a table where it was impossible."""
SURPLUS_MIN = 100_000
"""An index is made anew beyond twice the table's rows, or data files, and this number of them."""
TROUBLES = (OSError, EOFError, ValueError, pa.ArrowException, *FOREIGN)
"""Errors of a folder that is full, torn or not writable, or of the table's files."""
_UNSAVED_MAX = 8
"""Up to _UNSAVED_MAX changes of the index are not written down: who starts anew follows them."""
_MANIFEST = "manifest.json"


@dataclass(slots=True)
class Known:
    """The state of an index: the table's snapshot, its files, and the number of each path."""

    snapshot: int
    files: Files
    numbers: dict[str, int]


class KeyIndex:
    """One table's index; `key`: the field ids of the key's columns."""

    def __init__(self, folder: Path, table_uuid: str, key: list[int]) -> None:
        self._folder = folder / table_uuid
        self._lock: int | None = None
        self._refused, self._refused_until = "", 0.0
        self.key = key
        self._known: Known | None = None
        self._paths: list[str] = []
        self._segments: list[tuple[str, Segment]] = []
        self._vectors = Vectors()
        self._unsaved = 0
        self._rows_max = 0

    def bring_to(self, table: Any, snapshot: int) -> None:
        """Make the index that of a snapshot; raise UnknownFilesError where it can't be."""
        if time.monotonic() < self._refused_until:
            raise UnknownFilesError(self._refused)
        with self._giving_up():
            self._take_folder()
            try:
                if self._known is None:
                    self._load(table)
                whole = self._known is not None and self._follow(table, snapshot)
                whole = whole and not self._is_too_large()
            except TROUBLES as error:
                self._lose(error)
                whole = False
            if not whole:
                self._build(table, snapshot)

    @property
    def known(self) -> bool:
        """Whether the index is of some snapshot of the table."""
        return self._known is not None

    def advance(self, table: Any, snapshot: int, *, save: bool = False) -> None:
        """Follow the table without making the index anew.

        Called while the snapshots in between are there. `save`: the snapshots before this one are
        about to be removed, so that what is written down must be of this one.
        """
        with self._following():
            if self._known is None:
                self._take_folder()
                self._load(table)
            if self._known is None or not self._follow(table, snapshot):
                self._forget()
            elif save:
                self._save()

    def follow_own(self, before: int | None, snapshot: int, applied: Applied) -> None:
        """Follow a commit of this program's own on the snapshot `before`: its rows are known."""
        known = self._known
        if known is not None and known.snapshot == before:
            with self._following():
                self._take_in(known, snapshot, applied)

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        """Lose the index where its folder fails: it is made anew when it is needed."""
        with contextlib.suppress(UnknownFilesError), self._giving_up():
            try:
                yield
            except TROUBLES as error:
                self._lose(error)

    def _take_in(self, known: Known, snapshot: int, applied: Applied) -> None:
        """Take the files and the rows of a commit into the index."""
        files = known.files
        for data in applied.removed_data:
            files.data.pop(data["file-path"], None)
            files.vectors.pop(data["file-path"], None)
        for delete in applied.deletes:
            path = delete["referenced-data-file"]
            files.vectors[path] = delete
            self.keep_vector(delete, applied.vectors[path])
        for data in applied.added:
            assert applied.keys is not None
            path, number = data["file-path"], len(self._paths)
            files.data[path], known.numbers[path] = data, number
            self._paths.append(path)
            positions = np.arange(len(applied.keys.numbers), dtype=np.int64)
            self._insert(Segment.of(applied.keys, search.places_in(number, positions)))
            self._merge()
        known.snapshot = snapshot
        self._save_at_times()

    def close(self) -> None:
        """Write down the index, and let another program have the folder."""
        with contextlib.suppress(UnknownFilesError), self._giving_up():
            if self._known is not None:
                self._save()
        self._forget()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def find(self, keys: Keys) -> dict[str, np.ndarray[Any, Any]]:
        """Return the positions of the keys' rows by data file."""
        live = self._live()
        places = search.find(keys, [segment for _, segment in self._segments], live)
        places = np.sort(places[places != search.NOWHERE])
        if not len(places):
            return {}
        files, firsts = np.unique(search.files_of(places), return_index=True)
        positions = np.split(search.positions_of(places), firsts[1:])
        return {self._paths[number]: p for number, p in zip(files, positions, strict=True)}

    def file(self, path: str) -> Description:
        """Return a data file of the snapshot."""
        return self._state.files.data[path]

    def files(self) -> Iterable[tuple[str, Description]]:
        """Return the data files of the snapshot, with their paths."""
        return self._state.files.data.items()

    def vector(self, table: Any, path: str) -> tuple[BitMap64, Description | None]:
        """Return the deletion vector of a data file, and its description (None without one)."""
        delete = self._state.files.vectors.get(path)
        if delete is None:
            return BitMap64(), None
        return self._vectors.of(table, delete), delete

    def keep_vector(self, delete: Description, vector: BitMap64) -> None:
        """Remember a deletion vector that was just written."""
        self._vectors.keep(delete, vector)

    @property
    def _state(self) -> Known:
        if self._known is None:
            raise UnknownFilesError("the key index of the table is not open")
        return self._known

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Remove an index that can't be kept. Raise UnknownFilesError with the cause until RETRY_S.

        An index that another program has is left alone.
        """
        try:
            yield
        except BaseException as error:
            self._forget()
            if not isinstance(error, (UnknownFilesError, *TROUBLES)):
                raise
            reason = str(error)
            if not isinstance(error, UnknownFilesError):
                reason = f"the key index can't be kept in {self._folder}: {error}"
            if self._lock is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._refused, self._refused_until = reason, time.monotonic() + RETRY_S
            raise UnknownFilesError(reason) from error

    def _lose(self, error: Exception) -> None:
        """Know nothing of the table, as its folder was removed, or its disk is full."""
        log.warning("the key index was lost", folder=str(self._folder), error=str(error))
        self._forget()

    def _take_folder(self) -> None:
        """Raise UnknownFilesError where another program has it."""
        if self._lock is not None:
            return
        self._lock = folders.take(self._folder)
        if self._lock is None:
            raise UnknownFilesError("another program has the table's key index")

    def _live(self) -> search.Booleans:
        numbers = self._state.numbers
        live = np.zeros(len(self._paths), bool)
        live[[numbers[path] for path in self._state.files.data]] = True
        return live

    def _follow(self, table: Any, snapshot: int) -> bool:
        """Bring the index to a later snapshot; whether it is one."""
        known = self._state
        if known.snapshot == snapshot:
            return True
        added = table_files.advance_files(table, known.files, known.snapshot, snapshot)
        if added is None:
            return False
        known.snapshot = snapshot
        if added:
            self._add(table, added)
            self._merge()
        self._save_at_times()
        return True

    def _is_too_large(self) -> bool:
        """Tell whether most rows or data files of the index are no longer the table's."""
        files = self._state.files
        if len(self._paths) > 2 * len(files.data) + SURPLUS_MIN:
            return True
        if self._rows() > self._rows_max:
            self._bound_rows()
        return self._rows() > self._rows_max

    def _bound_rows(self) -> None:
        self._rows_max = 2 * self._state.files.rows() + SURPLUS_MIN

    def _rows(self) -> int:
        return sum(len(segment.places) for _, segment in self._segments)

    def _build(self, table: Any, snapshot: int) -> None:
        """Make the index from the keys of all files."""
        self._forget()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._known = Known(snapshot, table_files.listed(table, snapshot), {})
        self._add(table, list(self._known.files.data))
        self._bound_rows()
        self._save()
        name = str(table.name())
        log.info("the key index was made from the table", table=name, rows=self._rows())

    def _add(self, table: Any, paths: list[str]) -> None:
        """Read the keys of data files into new segments. Raise UnknownFilesError."""
        first = len(self._paths)
        if first + len(paths) > search.FILES_MAX:
            raise UnknownFilesError("the table has had too many files")
        self._paths += paths
        self._state.numbers |= {path: first + place for place, path in enumerate(paths)}
        parts: list[tuple[Keys, Any]] = []
        rows = 0
        for place, path in enumerate(paths):
            found = self._read(table, path, first + place)
            if parts and rows + len(found[1]) > SEGMENT_ROWS_MAX:
                self._put(table, parts)
                parts, rows = [], 0
            parts.append(found)
            rows += len(found[1])
        if parts:
            self._put(table, parts)

    def _read(self, table: Any, path: str, number: int) -> tuple[Keys, Any]:
        """Return the keys of a data file's rows that are not deleted, and their places."""
        with table_files.readable(path):
            groups = [keys_of(group) for group in table_files.read_columns(table, path, self.key)]
        if not groups:
            raise UnknownFilesError(f"{path} has no rows")
        keys = joined(groups)
        positions = np.arange(len(keys.numbers), dtype=np.int64)
        vector, _ = self.vector(table, path)
        if len(vector):
            alive = np.ones(len(positions), bool)
            alive[np.fromiter(vector, np.int64, len(vector))] = False
            positions = positions[alive]
            keys = keys.take(positions)
        return keys, search.places_in(number, positions)

    def _put(self, table: Any, parts: list[tuple[Keys, Any]]) -> None:
        """Take rows as the newest segment; raise UnknownFilesError where a key has another row.

        Whoever else writes to the table may have added it: the older row would be out of sight.
        """
        keys = joined([part for part, _ in parts])
        segment = Segment.of(keys, np.concatenate([places for _, places in parts]))
        if segment.has_twice():
            raise UnknownFilesError("a key has more than one row")
        for path, positions in self.find(keys).items():
            deleted, _ = self.vector(table, path)
            if not BitMap64(positions.astype("uint64")) <= deleted:
                raise UnknownFilesError(f"a key has more than one row, one of them in {path}")
        self._insert(segment)

    def _insert(self, segment: Segment) -> None:
        """Write a segment, and take it as the newest one."""
        name = uuid.uuid4().hex
        segment_files.write_segment(self._folder / name, segment)
        texts = segment.keys.texts is not None
        self._segments.insert(0, (name, segment_files.read(self._folder / name, texts=texts)))

    def _merge(self) -> None:
        """Merge the newest segments while they are not much smaller than the next one."""
        count, rows = 1, len(self._segments[0][1].places)
        while count < len(self._segments):
            following = len(self._segments[count][1].places)
            if 2 * rows < following or rows + following > SEGMENT_ROWS_MAX:
                break
            count, rows = count + 1, rows + following
        if count == 1:
            return
        old = [segment for _, segment in self._segments[:count]]
        live = self._live() if count == len(self._segments) else None
        del self._segments[:count]
        self._insert(search.merged(old, live))

    def _load(self, table: Any) -> None:
        """Take what the folder has; an index that is damaged or of another form is none."""
        try:
            found = json.loads((self._folder / _MANIFEST).read_text(encoding="utf-8"))
            if (found["form"], found["key"]) != (segment_files.form(), self.key):
                return
            texts = bool(found["texts"])
            read = [
                (name, segment_files.read(self._folder / name, texts=texts))
                for name in found["segments"]
            ]
            snapshot, numbers = int(found["snapshot"]), dict(found["numbers"])
            paths = [""] * int(found["files"])
            for path, number in numbers.items():
                paths[number] = path
        except (*TROUBLES, KeyError, IndexError, TypeError):
            return
        if table.snapshot(snapshot) is None:
            return
        files = table_files.listed(table, snapshot)
        if not set(files.data) <= set(numbers):
            return
        self._known, self._paths, self._segments = Known(snapshot, files, numbers), paths, read
        self._bound_rows()

    def _save_at_times(self) -> None:
        self._unsaved += 1
        if self._unsaved > _UNSAVED_MAX:
            self._save()

    def _save(self) -> None:
        """Write down what the index is of, and remove segments that are no longer its own."""
        names = [name for name, _ in self._segments]
        document = {
            "form": segment_files.form(),
            "key": self.key,
            "snapshot": self._state.snapshot,
            "files": len(self._paths),
            "numbers": {path: self._state.numbers[path] for path in self._state.files.data},
            "segments": names,
            "texts": any(segment.keys.texts is not None for _, segment in self._segments),
        }
        fresh = self._folder / f"{_MANIFEST}.new"
        fresh.write_text(json.dumps(document), encoding="utf-8")
        fresh.replace(self._folder / _MANIFEST)
        segment_files.remove_others(self._folder, set(names))
        self._unsaved = 0

    def _forget(self) -> None:
        self._known, self._paths, self._segments = None, [], []
        self._vectors = Vectors()
