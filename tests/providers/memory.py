"""Where the servers of tests keep their data: in memory, where there is enough.

A cluster is a thousand small files: on a disk's file system, making and deleting it is work of the
kernel for the most part. What a killed run has left there takes memory until it is deleted.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Final

from schemas.errors import SlotbridgeError
from services.testbed.bed import Bed

_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES: Final = 8 * 2**30
_YOUNG_S: Final = 60.0
"""How old a folder may be whose owner has not locked it yet."""


def roomy_memory() -> Path | None:
    """A file system in memory with room for one worker's servers; None: tempfile's own choice."""
    if not os.access(_MEMORY, os.W_OK | os.X_OK) or not os.path.ismount(_MEMORY):
        return None
    free = min(shutil.disk_usage(_MEMORY).free, _available_bytes())
    return _MEMORY if free >= _ROOM_BYTES else None


def delete_left_behind(parent: Path = _MEMORY) -> list[Path]:
    """Delete the test beds in `parent` whose owner was killed; return their folders.

    Those of other users stay, and those that are locked: their owner lives. Call this once in a
    run, before its workers start.
    """
    deleted = []
    for lock in parent.glob("slotbridge-*/lock"):
        try:
            status = lock.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG_S:
                continue
            with Bed(lock.parent, lazy=True):  # ends its processes
                pass
        except (SlotbridgeError, FileNotFoundError):
            continue  # its owner lives, or has just deleted it; else a later run tries again
        shutil.rmtree(lock.parent, ignore_errors=True)
        deleted.append(lock.parent)
    return deleted


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
