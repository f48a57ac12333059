"""What the key index and deletion vectors cost by the size of a table, measured on files.

`python -m benchmarks.tables.index_scale --rows 10000000,100000000` prints a JSON line for each
size: bytes of the index, seconds to make it, to find the changed keys of an epoch, and to read, add
to and write the deletion vectors of the files that they are in. No Spark, no Kafka. The keys are
integers in the order of the files, or spread over all segments as hashes are; the changed ones are
random. A data file has `--file-rows` rows.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pyroaring import BitMap64

from spark_consumers.key_index.deletion_vectors import blob, puffin, vector_of
from spark_consumers.key_index.keys import Keys
from spark_consumers.key_index.segment_files import read, write_segment
from spark_consumers.key_index.segments import Segment, files_of, find, places_in, positions_of

REPEATS = 5
_PART_ROWS = 10_000_000


def mixed(numbers: Any) -> Any:
    """Return numbers that are spread as the hashes of other keys than integers are."""
    spread = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (spread ^ (spread >> np.uint64(31))).view(np.int64)


def filled(folder: Path, rows: int, file_rows: int, *, hashed: bool) -> list[Path]:
    """Write a table's index, in segments of up to ten million keys; return their names."""
    stems = []
    for first in range(0, rows, _PART_ROWS):
        numbers = np.arange(first, min(rows, first + _PART_ROWS), dtype=np.int64)
        places = np.concatenate(
            [
                places_in(file, np.arange(min(file_rows, rows - file * file_rows)))
                for file in range(first // file_rows, -(-(first + len(numbers)) // file_rows))
            ]
        )
        stems.append(folder / str(first))
        segment = Segment(Keys(numbers), places)
        write_segment(stems[-1], Segment.of(Keys(mixed(numbers)), places) if hashed else segment)
    return stems


def sorted_s(rows: int, random: np.random.Generator) -> float:
    """Return the seconds to sort as many keys that come in random order."""
    numbers = random.permutation(rows).astype(np.int64)
    started = time.monotonic()
    Segment.of(Keys(numbers), numbers)
    return time.monotonic() - started


def median_ms(work: Callable[[], Any]) -> float:
    """Return the median time of a few runs."""
    spent = []
    for _ in range(REPEATS):
        started = time.monotonic()
        work()
        spent.append((time.monotonic() - started) * 1000)
    return round(statistics.median(spent), 1)


def vectors(places: Any, old: dict[int, bytes]) -> tuple[int, int]:
    """Bring deleted rows into the vectors of their files; return files touched, bytes written."""
    merged = {}
    for file in np.unique(files_of(places)):
        positions = positions_of(places[files_of(places) == file])
        vector = vector_of(old[int(file)]) if int(file) in old else BitMap64()
        merged[f"file-{file}"] = vector | BitMap64(positions.tolist())
    body, _ = puffin(merged)
    return len(merged), len(body)


def measure(
    rows: int, file_rows: int, changes: int, deleted: float, *, hashed: bool
) -> dict[str, Any]:
    """Return the figures of a table; `deleted`: the part of its rows that is deleted already."""
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="slotbridge-index-") as name:
        folder = Path(name)
        started = time.monotonic()
        stems = filled(folder, rows, file_rows, hashed=hashed)
        written_s = time.monotonic() - started
        size = sum(path.stat().st_size for path in folder.iterdir())
        segments = [read(stem, texts=False) for stem in stems]
        live = np.ones(-(-rows // file_rows), bool)
        wanted = [random.integers(0, rows, changes) for _ in range(REPEATS + 1)]
        wanted = [mixed(numbers) if hashed else numbers for numbers in wanted]
        asked = iter(wanted)
        find_ms = median_ms(lambda: find(Keys(next(asked)), segments, live))
        places = find(Keys(wanted[0]), segments, live)
        had = random.choice(file_rows, int(file_rows * deleted), replace=False)
        old = dict.fromkeys(range(len(live)), blob(BitMap64(had.tolist())))
        files, written = vectors(places, old)
        return {
            "rows": rows,
            "files": len(live),
            "keys": "hashed" if hashed else "sequential",
            "changes": changes,
            "index_bytes": size,
            "segments": len(stems),
            "write_index_s": round(written_s, 1),
            "sort_a_segment_s": round(sorted_s(min(rows, _PART_ROWS), random), 1),
            "find_ms": find_ms,
            "files_touched": files,
            "vectors_ms": median_ms(lambda: vectors(places, old)),
            "vector_bytes_written": written,
        }


def main() -> None:
    """Measure each size with each number of changes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1000000,10000000,100000000")
    parser.add_argument("--changes", default="300,10000")
    parser.add_argument("--file-rows", type=int, default=1_000_000)
    parser.add_argument("--deleted", type=float, default=0.01)
    options = parser.parse_args()
    for rows in map(int, options.rows.split(",")):
        for changes in map(int, options.changes.split(",")):
            for hashed in (False, True):
                given = rows, options.file_rows, changes, options.deleted
                sys.stdout.write(json.dumps(measure(*given, hashed=hashed)) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
