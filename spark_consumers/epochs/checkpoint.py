"""The checkpoint of the streaming query, which is taken only where it agrees with the tables.

    metadata       {"id": …}: whose checkpoint it is
    sources/0/0    where the query's first micro-batch began
    offsets/<n>    where micro-batch n ends; written before the batch is worked on
    commits/<n>    micro-batch n is done

The tables and their ledger say where to go on. A checkpoint that says anything else is removed: the
query then begins at the ledger's offset with a new one. So a checkpoint that was lost, or is of
before or after what the tables have, loses nothing and repeats nothing.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import structlog
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

log = structlog.get_logger()
_METADATA = "metadata"
_FIRST = "sources/0/0"


class Progress(NamedTuple):
    """Where a streaming query would go on.

    `start`: the offset at which the query's next micro-batch begins. `planned`: the offset at which
    that micro-batch ends, if the checkpoint has it already.
    """

    start: int
    planned: int | None = None

    def agrees(self, offset: int) -> bool:
        """Tell whether the checkpoint fits tables that go on at `offset`, which the ledger names.

        It fits if the tables have all records before `start`, and none after the planned
        micro-batch.
        """
        return self.start == offset or (
            self.planned is not None and self.start <= offset <= self.planned
        )


def progress(
    offsets: Mapping[int, str], commits: Collection[int], first: str | None, topic: str
) -> Progress | None:
    """Return where a query with these checkpoint files would go on, None if that is unknown.

    `first`: the text of sources/0/0. Pure.
    """
    last, done = max(offsets, default=-1), max(commits, default=-1)
    if done not in (last, last - 1):
        return None
    start = _offset(first if done < 0 else offsets.get(done), topic)
    if start is None or done == last:
        return start if start is None else Progress(start)
    planned = _offset(offsets[last], topic)
    return None if planned is None or planned < start else Progress(start, planned)


def _offset(text: str | None, topic: str) -> int | None:
    """Return the offset that a file of the checkpoint names, None if it names none of this topic.

    The file's last line is {topic: {partition: offset}}.
    """
    try:
        found = json.loads((text or "").strip().splitlines()[-1])
        ((name, partitions),) = found.items()
        ((number, offset),) = partitions.items()
    except (ValueError, IndexError, AttributeError):
        return None
    return offset if (name, number) == (topic, "0") and isinstance(offset, int) else None


class Checkpoint:
    """The folder or URI of one query's checkpoint, by the file system that Spark uses for it."""

    def __init__(self, spark: SparkSession, location: str, topic: str) -> None:
        self.location = location
        self._topic = topic
        jvm: Any = spark._jvm
        self._paths = jvm.org.apache.hadoop.fs.Path
        self._text = jvm.org.apache.commons.io.IOUtils.toString
        self._files = self._path("").getFileSystem(spark._jsc.hadoopConfiguration())

    def progress(self) -> Progress | None:
        """Return where a query on this checkpoint would go on, None if that is unknown."""
        if self.query() is None:
            return None
        commits = self._numbers("commits")
        numbers = sorted(self._numbers("offsets"))[-2:]
        offsets = {number: self._read(f"offsets/{number}") or "" for number in numbers}
        return progress(offsets, commits, self._read(_FIRST), self._topic)

    def end(self, batch: int) -> int | None:
        """Return the offset where a micro-batch ends, None if the checkpoint does not have it."""
        return _offset(self._read(f"offsets/{batch}"), self._topic)

    def query(self) -> str | None:
        """Return the id of the query that wrote the checkpoint, None if it can't be read."""
        try:
            return str(json.loads(self._read(_METADATA) or "{}")["id"])
        except (ValueError, KeyError, TypeError):
            return None

    def exists(self) -> bool:
        """Tell whether the checkpoint's folder exists."""
        return bool(self._files.exists(self._path("")))

    def remove(self) -> None:
        """Remove the checkpoint. The remainder after a kill agrees with no state of the tables."""
        self._files.delete(self._path(_METADATA), False)
        self._files.delete(self._path(""), True)

    def _read(self, name: str) -> str | None:
        """Return the text of a file in the checkpoint, None if it can't be read."""
        try:
            stream = self._files.open(self._path(name))
            try:
                # Spark 2.1 reads a byte 0 at the beginning of sources/0/0.
                return str(self._text(stream, "UTF-8")).lstrip("\0")
            finally:
                stream.close()
        except Py4JError:
            return None

    def _numbers(self, folder: str) -> set[int]:
        """Return the numbers by which files in a folder of the checkpoint are named."""
        if not self._files.exists(self._path(folder)):
            return set()
        names = (
            str(file.getPath().getName()) for file in self._files.listStatus(self._path(folder))
        )
        return {int(name) for name in names if name.isdigit()}

    def _path(self, name: str) -> Any:
        return self._paths(f"{self.location}/{name}" if name else self.location)
