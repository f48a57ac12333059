"""Free TCP ports on the loopback address."""

import atexit
import random
import socket
from collections import deque
from pathlib import Path

from schemas.errors import ExitCode, SetupError

LOOPBACK = "127.0.0.1"
_LOWEST = 15_000
_ATTEMPTS = 200
_MARKS_MAX = 200
_marks: deque[socket.socket] = deque()
"""Sockets that show other processes which ports this one has chosen last."""
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port nobody listens on, below the range that outgoing connections take.

    So a server that is killed finds its port free when it is restarted: no client socket can have
    taken it in between, and no other test bed has chosen it meanwhile. Raise SetupError
    (PORT_IN_USE) when none is found.
    """
    highest = _lowest_ephemeral() - 1
    chooser = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = chooser.randint(min(_LOWEST, highest - 1000), highest)
        if _mark(port) and is_free(port):
            return port
    raise SetupError(
        f"no free port found between {_LOWEST} and {highest}",
        operation="choose a port",
        hint="stop other servers on this machine",
        exit_code=ExitCode.PORT_IN_USE,
    )


def is_free(port: int) -> bool:
    """Tell whether a server could listen on `port` of the loopback address now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def require_free(port: int, *, server: str) -> None:
    """Raise SetupError (PORT_IN_USE) that names `server` when `port` is taken."""
    if not is_free(port):
        raise SetupError(
            f"port {port} is in use",
            operation=f"start {server}",
            hint="stop the program that listens there (`ss -ltnp` names it), then try again",
            exit_code=ExitCode.PORT_IN_USE,
        )


@atexit.register
def _close_marks() -> None:
    while _marks:
        _marks.pop().close()


def _mark(port: int) -> bool:
    """Mark a port by a name that the kernel forgets with the process; tell whether it was free."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0slotbridge-port-{port}")
    except OSError:
        mark.close()
        return False
    _marks.append(mark)
    if len(_marks) > _MARKS_MAX:
        _marks.popleft().close()
    return True


def _lowest_ephemeral() -> int:
    try:
        lowest = int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
    return lowest if lowest > _LOWEST // 4 else 32_768
