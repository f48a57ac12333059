"""Where the servers of tests keep their data: in memory, where there is enough.

A cluster is a thousand small files: on a disk's file system, making and deleting it is work of the
kernel for the most part.
"""

import os
import shutil
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES: Final = 8 * 2**30


def roomy_memory() -> Path | None:
    """A file system in memory with room for one worker's servers; None: tempfile's own choice."""
    if not os.access(_MEMORY, os.W_OK | os.X_OK) or not os.path.ismount(_MEMORY):
        return None
    free = min(shutil.disk_usage(_MEMORY).free, _available_bytes())
    return _MEMORY if free >= _ROOM_BYTES else None


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
