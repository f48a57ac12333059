"""Processes as Linux shows them in /proc: who is who, and who is gone.

A process is identified by (pid, start time): a pid alone is used again. Source: proc(5).
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for certain: `start_time` is in clock ticks since boot `boot_id`."""

    pid: int
    start_time: int
    boot_id: str


def identify(pid: int) -> ProcessId | None:
    """Return the identity of the running process `pid`, None when there is none or a zombie."""
    fields = _stat(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return ProcessId(pid, int(fields[19]), boot_id())


def is_running(process: ProcessId) -> bool:
    """Tell whether exactly this process runs, not a later one with its pid."""
    return identify(process.pid) == process


def boot_id() -> str:
    """Return the kernel's random identifier of this boot."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def session_of(pid: int) -> int | None:
    """Return the session id of `pid`, None when it is gone."""
    fields = _stat(pid)
    return None if fields is None else int(fields[3])


def working_in(folder: Path, *, program: str) -> list[int]:
    """Return the pids of `program` whose working directory is exactly `folder`.

    Every process of a PostgreSQL server works in its data folder.
    """
    wanted = folder.resolve()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            process = _PROC / str(pid)
            if (process / "cwd").readlink() == wanted and identify(pid):
                runs = (process / "exe").readlink().name.removesuffix(" (deleted)")
                if runs == program:
                    found.append(pid)
    return found


def environment_has(pid: int, entry: str) -> bool:
    """Tell whether `pid` was started with the environment entry `NAME=value`."""
    try:
        content = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return os.fsencode(entry) in content.split(b"\0")


def members_of_session(session: int) -> list[int]:
    """Return the pids of all running processes of a session."""
    return [pid for pid in _pids() if session_of(pid) == session and identify(pid)]


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal; a process that has already gone is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """Poll `condition` until it holds or `timeout_s` seconds passed; return whether it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def _pids() -> Iterator[int]:
    for entry in os.listdir(_PROC):  # noqa: PTH208 - a thousand Path objects a poll otherwise
        if entry.isdigit():
            yield int(entry)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from `state` (the third) on."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
