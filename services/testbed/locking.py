"""One owner at a time: an advisory lock on a file, released by the kernel when its holder dies."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import ExitCode, Retryable

_RETRY_INTERVAL_S = 0.1


@contextlib.contextmanager
def locked(path: Path, *, purpose: str, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if missing) inside the block.

    Waits up to `timeout_s` seconds for another holder. Raise Retryable (exit code DEADLINE) that
    names `purpose` and the holder's process id when it is still held then. Child processes do not
    inherit the lock. Source: flock(2).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(descriptor, path, purpose, time.monotonic() + timeout_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, purpose: str, deadline: float) -> None:
    """Lock a file. Raise Retryable, which names the holder, at the deadline."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                raise Retryable(
                    f"process {holder or 'unknown'} holds {path}",
                    operation=purpose,
                    hint="wait for that process or stop it, or choose another folder",
                    exit_code=ExitCode.DEADLINE,
                ) from error
            time.sleep(_RETRY_INTERVAL_S)
        else:
            return
