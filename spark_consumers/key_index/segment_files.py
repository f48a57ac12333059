"""Files of segments: written once, and mapped into memory, one file for each part."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spark_consumers.key_index.keys import Keys
from spark_consumers.key_index.segments import Segment

_NUMBERS, _PLACES, _ENDS, _BODY = "numbers", "places", "ends", "body"
_SUFFIX = ".npy"
_VERSION = 2


@cache
def form() -> str:
    """Return the form of the files, and since when this machine runs.

    Segments are not forced to the disk: what a machine that went down has left is not believed.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{_VERSION} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}"


def write_segment(stem: Path, segment: Segment) -> None:
    """Write a segment to files whose names begin with `stem`."""
    numbers, texts = segment.keys
    parts: dict[str, np.ndarray[Any, Any]] = {_NUMBERS: numbers, _PLACES: segment.places}
    if texts is not None:
        whole = pa.concat_arrays([texts, texts[:0]])
        _, ends, body = whole.buffers()
        first = np.frombuffer(ends, np.int64)[whole.offset : whole.offset + len(whole) + 1]
        size = int(first[-1])
        parts[_ENDS] = first
        parts[_BODY] = np.frombuffer(body, np.uint8)[:size] if size else np.empty(0, "u1")
    for name, part in parts.items():
        np.save(_path(stem, name), part)


def read(stem: Path, *, texts: bool) -> Segment:
    """Map the files of a segment into memory; `texts`: its keys have bytes beside their numbers.

    Raise OSError, EOFError or ValueError where the files are not what was written.
    """
    numbers, places = _mapped(stem, _NUMBERS), _mapped(stem, _PLACES)
    count = len(places)
    whole = len(numbers) == count
    found = None
    if texts:
        ends, body = _mapped(stem, _ENDS), _mapped(stem, _BODY)
        whole = whole and len(ends) == count + 1 and ends[-1] == len(body)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(body)]
        found = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, buffers)
    if not whole:
        raise ValueError(f"the files of {stem} are not of one segment")
    return Segment(Keys(numbers, found), places)


def remove_others(folder: Path, names: set[str]) -> None:
    """Remove the files of all other segments of a folder; who has them mapped keeps them."""
    for path in folder.glob(f"*{_SUFFIX}"):
        if path.name.rsplit("-", 1)[0] not in names:
            path.unlink(missing_ok=True)


def _path(stem: Path, name: str) -> Path:
    return Path(f"{stem}-{name}{_SUFFIX}")


def _mapped(stem: Path, name: str) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.load(_path(stem, name), mmap_mode="r")
    return found
