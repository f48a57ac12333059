"""Folders of this machine, one for each table, that one program at a time has.

The lock is a file beside the folder. It is removed only by the program that has it.
"""

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from uuid import UUID

_LOCK = ".lock"


def take(folder: Path) -> int | None:
    """Lock a folder, which need not be there; return the lock, None where another program has it.

    Closing the lock, or the end of the program, lets others have the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        lock = os.open(f"{folder}{_LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # or a file system without locks
            os.close(lock)
            if isinstance(error, BlockingIOError):
                return None
            raise
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)  # it was removed before it was ours: another program may lock a new one


def remove_others(parent: Path, kept: Collection[str]) -> Iterator[Path]:
    """Remove the folders of tables that are not `kept`, by UUID, and that no program has.

    Yield each folder that was removed.
    """
    names = {path.name.removesuffix(_LOCK) for path in parent.glob("*")}
    for name in sorted(names.difference(kept)):
        if _is_uuid(name) and _remove(parent / name):
            yield parent / name


def _remove(folder: Path) -> bool:
    """Remove a folder and its lock; tell whether the folder was there and now is not."""
    there = folder.exists()
    try:
        lock = take(folder)
        if lock is None:
            return False
        try:
            if there:
                shutil.rmtree(folder)
            Path(f"{folder}{_LOCK}").unlink()
        finally:
            os.close(lock)
    except OSError:
        return False
    return there


def _is_uuid(name: str) -> bool:
    try:
        return str(UUID(name)) == name
    except ValueError:
        return False
