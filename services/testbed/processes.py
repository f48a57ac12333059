"""The processes of a test bed: started, recorded, stopped; leftovers of a dead owner ended.

`state.json` in the bed's folder names the owner and lists each process as soon as it runs:

    {"owner": {pid, start_time, boot_id}, "processes": [{name, pid, start_time, boot_id, data}]}

A keeper process watches its owner and, should the owner die of SIGKILL, ends what is recorded;
should the keeper die too, the next start on the folder does it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.errors import ExitCode, SetupError
from services.testbed import procfs
from services.testbed.users import ServerUser

STATE_FILE = "state.json"
MARKER = "SLOTBRIDGE_BED"
"""Environment variable of every process of a bed: the bed's folder."""
_GRACE_S = 10.0
_KILL_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """A process in the state file. `data` is the data folder of a PostgreSQL server, else ""."""

    name: str
    pid: int
    start_time: int
    boot_id: str
    data: str

    @property
    def identity(self) -> procfs.ProcessId:
        """The process itself, as distinct from later ones with its pid."""
        return procfs.ProcessId(self.pid, self.start_time, self.boot_id)


@dataclass(frozen=True, slots=True)
class _Running:
    recorded: Recorded
    process: subprocess.Popen[bytes]
    stop_signal: signal.Signals


class Processes:
    """Starts processes in sessions of their own and stops them, whatever happens to the owner.

    Use as a context manager. Thread-safe. After `stop_all` nothing can be started any more.
    """

    def __init__(self, folder: Path, user: ServerUser) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self._user = user
        self._lock = threading.RLock()
        self._running: dict[int, _Running] = {}
        self._closing = False
        owner = procfs.identify(os.getpid())
        if owner is None:
            raise RuntimeError("/proc does not show this process")
        self._owner = owner
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Processes":
        self.logs.mkdir(exist_ok=True)
        self._write_state()
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "services.testbed.reaper", str(self.folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop_all()
        except BaseException:
            self._dismiss_keeper(b"")  # it ends what we could not
            raise
        self._dismiss_keeper(b"done\n")

    def spawn(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        as_server_user: bool = False,
        data: Path | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> subprocess.Popen[bytes]:
        """Start `argv` with output appended to `logs/NAME.log`, and record it.

        `env` changes our own environment (None: unset). `data` is the data folder of a
        PostgreSQL server, by which its backends are known: they leave the session. Raise
        SetupError when the program is missing or can't be run.
        """
        with self._lock, self.log_path(name).open("ab") as log:
            if self._closing:
                raise SetupError("the test bed is being stopped", operation=f"start {name}")
            switch = as_server_user and self._user.switch
            try:
                process = subprocess.Popen(
                    [os.fspath(part) for part in argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=cwd or self.folder,
                    env=environment({**(env or {}), MARKER: str(self.folder)}),
                    user=self._user.uid if switch else None,
                    group=self._user.gid if switch else None,
                    extra_groups=[] if switch else None,
                    start_new_session=True,
                )
            except OSError as error:
                raise SetupError(
                    f"can't run {argv[0]}: {error.strerror}",
                    operation=f"start {name}",
                    hint="install the package that has it; see the README's requirements",
                    exit_code=ExitCode.PROGRAM_MISSING,
                ) from error
            self._record(name, process, data, stop_signal)
            return process

    def log_path(self, name: str) -> Path:
        """Return the log file of the process `name`."""
        return self.logs / f"{name}.log"

    def stop(self, process: subprocess.Popen[bytes], *, grace_s: float = _GRACE_S) -> int:
        """Ask a process to stop, kill it after `grace_s` seconds, and its descendants.

        Return its status as subprocess has it: negative for the signal that ended it.
        """
        with self._lock:
            running = self._running.get(process.pid)
        if process.poll() is None:
            process.send_signal(running.stop_signal if running else signal.SIGTERM)
            procfs.wait_until(lambda: process.poll() is not None, timeout_s=grace_s)
        if running is not None:
            end(running.recorded, self.folder)
        process.wait(timeout=_KILL_WAIT_S)
        self.forget(process)
        return process.returncode

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Drop a process that has ended from the record."""
        with self._lock:
            self._running.pop(process.pid, None)
            self._write_state()

    def stop_all(self) -> None:
        """Stop every process, the youngest first; then nothing can be started any more."""
        with self._lock:
            self._closing = True
            youngest_first = list(reversed(self._running.values()))
        for running in youngest_first:
            if running.process.poll() is None:
                running.process.send_signal(running.stop_signal)
        for running in youngest_first:
            self.stop(running.process)

    def _record(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        data: Path | None,
        stop_signal: signal.Signals,
    ) -> None:
        """Note a process in the state file, so that a later run can end it."""
        identity = procfs.identify(process.pid)
        if identity is None:
            return  # it has ended already; the caller sees its exit status
        recorded = Recorded(name, **asdict(identity), data="" if data is None else str(data))
        self._running[process.pid] = _Running(recorded, process, stop_signal)
        self._write_state()

    def _write_state(self) -> None:
        state = {
            "owner": asdict(self._owner),
            "processes": [asdict(running.recorded) for running in self._running.values()],
        }
        scratch = self.folder / f".{STATE_FILE}"
        scratch.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        scratch.replace(self.folder / STATE_FILE)

    def _dismiss_keeper(self, word: bytes) -> None:
        """Tell the keeper process `word`, and wait until it has ended."""
        if self._keeper is None or self._keeper.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(word)
            self._keeper.stdin.close()
        self._keeper.wait(timeout=2 * _KILL_WAIT_S)


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return our environment with `changes`; None removes a variable."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def end_leftovers(folder: Path, *, owner_pid: int | None = None) -> list[str]:
    """Kill what a dead owner of `folder` left running; return the names of what was still there.

    Only processes whose pid and start time are those recorded, and their own children, are killed.
    With `owner_pid`, nothing is done when another owner has taken the folder over since.
    """
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        owner = procfs.ProcessId(**state["owner"])
        left = [Recorded(**entry) for entry in state["processes"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    if owner_pid not in (None, owner.pid):
        return []
    return [recorded.name for recorded in left if end(recorded, folder)]


def end(recorded: Recorded, folder: Path) -> bool:
    """Kill a recorded process and its children (SIGKILL); return whether any was running.

    Raise SetupError when one is still there after two minutes (a process in uninterruptible sleep).
    """
    if recorded.boot_id != procfs.boot_id():
        return False
    found = False

    def gone() -> bool:
        nonlocal found
        pids = _family(recorded, folder)
        found = found or bool(pids)
        for pid in pids:
            procfs.signal_process(pid, signal.SIGKILL)
        return not pids

    if not procfs.wait_until(gone, timeout_s=_KILL_WAIT_S):
        raise SetupError(
            f"process {recorded.pid} does not end",
            operation=f"stop {recorded.name}",
            hint="it waits for a device or file system; look at `ps -o stat,wchan -p PID`",
        )
    return found


def _family(recorded: Recorded, folder: Path) -> list[int]:
    """Return the running processes that are certainly the recorded one or descend from it."""
    leader_runs = procfs.is_running(recorded.identity)
    marker = f"{MARKER}={folder}"
    pids = [
        pid
        for pid in procfs.members_of_session(recorded.pid)
        if leader_runs or (pid != recorded.pid and procfs.environment_has(pid, marker))
    ]
    if recorded.data:
        backends = procfs.working_in(Path(recorded.data), program="postgres")
        pids += [pid for pid in backends if pid not in pids]
    return pids
