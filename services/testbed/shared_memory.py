"""The System V segment that a killed PostgreSQL server leaves in the kernel.

Its next start on the same data removes it; where the data are deleted instead, it would stay until
the machine starts anew, and a machine has room for some thousands (kernel.shmmni).
Sources: src/backend/port/sysv_shmem.c; src/include/utils/pidfile.h (line 7: key and id).
"""

import ctypes
from pathlib import Path
from typing import Final

_KERNELS: Final = Path("/proc/sysvipc/shm")
_LINE: Final = 6
_IPC_RMID: Final = 0


def release(data: Path) -> None:
    """Remove the segment of a server that has been killed, if it left one.

    Only one of that key and id, made by that postmaster, with nobody attached.
    """
    try:
        lines = (data / "postmaster.pid").read_text(encoding="utf-8").split("\n")
        postmaster = int(lines[0])
        key, segment = map(int, lines[_LINE].split())
    except (OSError, IndexError, ValueError):
        return  # it ended in order, or had not got that far
    if (key % 2**32, segment, postmaster) in _abandoned():
        ctypes.CDLL(None).shmctl(segment, _IPC_RMID, None)


def _abandoned() -> set[tuple[int, int, int]]:
    """Return (key, id, maker's pid) of the segments that nobody is attached to."""
    try:
        rows = [line.split() for line in _KERNELS.read_text(encoding="ascii").splitlines()[1:]]
    except OSError:
        return set()
    return {
        (int(key) % 2**32, int(segment), int(maker))
        for key, segment, _permissions, _size, maker, _last, attached, *_ in rows
        if attached == "0"
    }
