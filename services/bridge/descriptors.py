"""Reports exhausted file descriptors as such, wherever the failure appears."""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from schemas.errors import ExitCode, Retryable

ERRNOS: Final = (errno.EMFILE, errno.ENFILE)


def no_descriptors(operation: str) -> Retryable:
    """Return the error for a process or machine without a free file descriptor."""
    return Retryable(
        os.strerror(errno.EMFILE),
        operation=operation,
        subject="file descriptors",
        hint="raise LimitNOFILE (ulimit -n); 1024 are enough for a bridge",
        exit_code=ExitCode.NO_DESCRIPTORS,
    )


@contextlib.contextmanager
def descriptors_needed(operation: str) -> Iterator[None]:
    """Raise Retryable (NO_DESCRIPTORS) where there is none left, or the block meets the limit.

    libpq and librdkafka fail without saying that this is why.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
        yield
    except OSError as error:
        if error.errno in ERRNOS:
            raise no_descriptors(operation) from error
        raise
