"""What a process and its threads have used, from /proc: CPU seconds, most memory resident."""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_STATE, _USER, _SYSTEM = 0, 11, 12
_REST_S, _REST_MAX_S, _REST_SHARE = 0.5, 5.0, 0.3


class Usage(NamedTuple):
    """`cpu_s`: user and system; `resident_mib`, `peak_mib`: VmRSS, VmHWM; 0 once it has ended."""

    cpu_s: float
    resident_mib: float
    peak_mib: float
    running: bool


def usage(pid: int) -> Usage | None:
    """None when nothing has this pid; one that has ended unwaited-for still tells its CPU."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = _fields(folder)
        status = (folder / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    mib = {
        name: int(rest.split()[0]) / 1024
        for name, _, rest in (line.partition(":") for line in status.splitlines())
        if name in ("VmRSS", "VmHWM")
    }
    resident, peak = mib.get("VmRSS", 0.0), mib.get("VmHWM", 0.0)
    return Usage(_cpu_s(fields), resident, peak, fields[_STATE] not in "ZX")


def thread_usage(pid: int) -> dict[str, float]:
    """CPU seconds of each thread that the process has now."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            found[folder.name] = _cpu_s(_fields(folder))
    return found


def _fields(folder: Path) -> list[str]:
    """What follows the name in `stat`."""
    text = (folder / "stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(")")[2].split()


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS


class ProcessMetrics:
    """Follows one process: what it has used since this object was made, and its peak.

    `threads`: each of its threads, too. A look then opens a file for each.
    """

    def __init__(self, pid: int, *, threads: bool = False) -> None:
        self._pid = pid
        self._threads = threads
        found = usage(pid)
        self._first_s = self._last_s = 0.0 if found is None else found.cpu_s
        self._first_of_threads = thread_usage(pid) if threads else {}
        self._last_of_threads: dict[str, float] = {}
        self.peak_mib = 0.0
        self.running = True

    @property
    def cpu_s(self) -> float:
        """CPU seconds up to the last look."""
        return self._last_s - self._first_s

    @property
    def busiest_thread_s(self) -> float:
        """CPU seconds of the thread that has used most, up to the last look."""
        first = self._first_of_threads
        used = [at - first.get(name, 0.0) for name, at in self._last_of_threads.items()]
        return max(used, default=0.0)

    def look(self) -> None:
        """To be called often enough that the last look tells the end."""
        found = usage(self._pid)
        if found is None:
            self.running = False
            return
        self.running = found.running
        self._last_s = found.cpu_s
        if self._threads:
            self._last_of_threads |= thread_usage(self._pid)
        self.peak_mib = max(self.peak_mib, found.peak_mib)


def await_rest(pid: int) -> None:
    """Return when the process does next to nothing; at the latest after a while."""
    deadline = time.monotonic() + _REST_MAX_S
    while time.monotonic() < deadline:
        process = ProcessMetrics(pid)
        time.sleep(_REST_S)
        process.look()
        if process.cpu_s < _REST_S * _REST_SHARE:
            return
