"""A server that stands still, wholly or only its postmaster, and goes on later."""

import contextlib
import signal
from collections.abc import Iterator

import psutil

from services.testbed.postgres import PostgresServer


def postmaster_of(server: PostgresServer) -> psutil.Process:
    """The server's first process."""
    return psutil.Process(int((server.data / "postmaster.pid").read_text().split()[0]))


@contextlib.contextmanager
def frozen(server: PostgresServer, *, wholly: bool) -> Iterator[None]:
    """Stop the postmaster (`wholly`: and every process of it) until the end of the block."""
    postmaster = postmaster_of(server)
    processes = [postmaster, *(postmaster.children() if wholly else [])]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
