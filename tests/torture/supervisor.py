"""Keeps a bridge running, as a supervisor would: restarts it, unless it asks for an operator."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from services.bridge.failpoints import VARIABLE

_RETRY = range(10, 20)
_RESTART_PAUSE_S = 0.1


@dataclass
class Ends:
    """How the bridge has ended so far: by which failpoint, by our SIGKILL, with which code."""

    failpoints: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    codes: Counter[int] = field(default_factory=Counter)

    @property
    def sigkills(self) -> int:
        """All of them."""
        return self.killed + self.failpoints.total()


class Supervised:
    """A bridge of one configuration file; a thread starts it again and again until `stop`."""

    def __init__(self, config: Path, log: Path) -> None:
        self._config = config
        self._log = log
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._armed = ""
        self._ours = False
        self._stopping = threading.Event()
        self._ended = threading.Condition(self._lock)
        self.ends = Ends()
        self.operator_needed: int | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self, failpoint: str = "") -> None:
        """From now on there is a bridge, the first one with `failpoint`."""
        self._armed = failpoint
        self._thread.start()

    def kill(self) -> None:
        """SIGKILL the present one."""
        with self._lock:
            if self._process is not None:
                self._ours = True
                self._process.kill()

    def arm(self, failpoint: str) -> None:
        """Give the next process `failpoint` and make way for it."""
        with self._lock:
            self._armed = failpoint
        self.kill()

    def freeze(self, seconds: float) -> None:
        """SIGSTOP for a while."""
        with self._lock:
            process = self._process
        if process is not None:
            process.send_signal(signal.SIGSTOP)
            self._stopping.wait(seconds)
            process.send_signal(signal.SIGCONT)

    def await_end(self, count: int, timeout_s: float) -> bool:
        """Whether `count` processes have ended by SIGKILL, within `timeout_s`."""
        with self._ended:
            return self._ended.wait_for(lambda: self.ends.sigkills >= count, timeout_s)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; returns the exit code of the last process."""
        self._stopping.set()
        with self._lock:
            process = self._process
        assert process is not None
        process.terminate()
        code = process.wait(timeout_s)
        self._thread.join(timeout_s)
        return code

    def _run(self) -> None:
        while not self._stopping.is_set() and self.operator_needed is None:
            with self._log.open("ab") as log, self._lock:
                failpoint, self._armed = self._armed, ""
                self._ours = False
                process = self._process = subprocess.Popen(
                    [Path(sys.executable).parent / "slotbridge", "run", "--config", self._config],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, VARIABLE: failpoint},
                )
            code = process.wait()
            with self._ended:
                self._note(code, failpoint)
                self._ended.notify_all()
            self._stopping.wait(_RESTART_PAUSE_S)

    def _note(self, code: int, failpoint: str) -> None:
        if code == -signal.SIGKILL and self._ours:
            self.ends.killed += 1
        elif code == -signal.SIGKILL:
            self.ends.failpoints[failpoint.partition(":")[0]] += 1
        else:
            self.ends.codes[code] += 1
            if code not in _RETRY and code != 0:
                self.operator_needed = code
