"""An empty cluster that initdb makes once, and copies of it, each a cluster of its own.

A copy is quick. Its system identifier is made anew, as initdb does it, so that
servers of one bed tell each other apart. PostgreSQL's own tests copy a template, too, with one
identifier for all (src/test/perl/PostgreSQL/Test/Cluster.pm, INITDB_TEMPLATE).

    global/pg_control           identifier in the first 8 bytes; CRC-32C of all before it at the end
                                (src/include/catalog/pg_control.h)
    pg_wal/…01                  the first page's long header has it at byte 24
                                (src/include/access/xlog_internal.h)
"""

import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_CASTAGNOLI: Final = 0x82F63B78
_IN_WAL_PAGE: Final = 24
_IDENTIFIER: Final = struct.Struct("=Q")
_CHECKSUM: Final = struct.Struct("=I")


class Template:
    """`data` is its folder; `make` fills it, when the first copy is asked for."""

    def __init__(self, data: Path, make: Callable[[], None]) -> None:
        self._data = data
        self._make = make
        self._last = 0
        self._lock = threading.Lock()

    def copy_to(self, data: Path) -> None:
        """Fill the empty folder `data`. Raise what `make` raises, and OSError."""
        with self._lock:
            if not self._data.exists():
                try:
                    self._make()
                except BaseException:
                    shutil.rmtree(self._data, ignore_errors=True)
                    raise
            self._last = identifier = new_identifier(time.time_ns(), os.getpid(), self._last)
        copied = subprocess.run(
            ["cp", "-a", f"{self._data}/.", str(data)], capture_output=True, text=True, check=False
        )
        if copied.returncode != 0:
            raise OSError(copied.stderr.strip())
        _renew_identifier(data, identifier)


def _renew_identifier(data: Path, identifier: int) -> None:
    """Give a new system identifier to a cluster that has never run."""
    control = data / "global" / "pg_control"
    (segment,) = (data / "pg_wal").glob("0*")
    content = control.read_bytes()
    renewed = with_identifier(content, identifier)
    _write(control, 0, renewed)
    with segment.open("rb") as file:
        file.seek(_IN_WAL_PAGE)
        found = file.read(_IDENTIFIER.size)
    if found != content[: _IDENTIFIER.size]:
        raise OSError(f"{segment}: no system identifier where PostgreSQL 17 and 18 have it")
    _write(segment, _IN_WAL_PAGE, renewed[: _IDENTIFIER.size])


def new_identifier(now_ns: int, pid: int, last: int) -> int:
    """Make a system identifier above `last`: seconds, microseconds, 12 bits of the process.

    BootStrapXLOG makes it in this form.
    """
    seconds, rest_ns = divmod(now_ns, 10**9)
    return max(seconds << 32 | (rest_ns // 1000) << 12 | pid & 0xFFF, last + 1)


def with_identifier(content: bytes, identifier: int) -> bytes:
    """Return the content of pg_control with another identifier, and the checksum of that."""
    at = _checksum_at(content)
    changed = _IDENTIFIER.pack(identifier) + content[_IDENTIFIER.size : at]
    return changed + _CHECKSUM.pack(crc32c(changed)) + content[at + _CHECKSUM.size :]


def _checksum_at(content: bytes) -> int:
    """Return the offset of the checksum of all bytes before it."""
    last = len(content.rstrip(b"\0"))  # in or right after it: the search begins there
    for at in reversed(range(_IDENTIFIER.size, last + 1, _CHECKSUM.size)):
        if _CHECKSUM.pack(crc32c(content[:at])) == content[at : at + _CHECKSUM.size]:
            return at
    raise OSError("pg_control has no valid checksum")


def crc32c(content: bytes) -> int:
    """Compute CRC-32C (Castagnoli) bit by bit: a few hundred bytes, once for each cluster."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _write(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
