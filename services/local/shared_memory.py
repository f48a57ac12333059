"""What a PostgreSQL server leaves in the kernel when it is killed: a System V segment.

Its next start on the same data removes it; where the data are deleted instead, it would stay until
the machine starts anew, and a machine has room for some thousands (kernel.shmmni).
Sources: src/backend/port/sysv_shmem.c; src/include/utils/pidfile.h (line 7: key and id).
"""

import ctypes
from pathlib import Path
from typing import Final

_LINE: Final = 6
_IPC_RMID: Final = 0


def release(data: Path) -> None:
    """Remove the segment of a server that has been killed, if it left one. It must be gone."""
    try:
        lines = (data / "postmaster.pid").read_text(encoding="utf-8").split("\n")
        _key, segment = map(int, lines[_LINE].split())
    except (OSError, IndexError, ValueError):
        return  # it ended in order, or had not got that far
    ctypes.CDLL(None).shmctl(segment, _IPC_RMID, None)
