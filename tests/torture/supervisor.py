"""Keeps a bridge running, as a supervisor would: restarts it, unless it asks for an operator."""

import contextlib
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture.fork_server import ForkServer

_RETRY = range(10, 20)
_RESTART_PAUSE_S = 0.1


@dataclass
class Ends:
    """How the bridge has ended so far: by which failpoint, by our SIGKILL, with which code."""

    failpoints: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    starts: int = 0

    @property
    def sigkills(self) -> int:
        """All of them."""
        return self.killed + self.failpoints.total()


class Supervised:
    """A bridge of one configuration file; a thread starts it again and again until `stop`."""

    def __init__(self, config: Path, log: Path, *, sabotage: str = "") -> None:
        self._config = config
        self._log = log
        self._sabotage = sabotage
        self._fork_server = ForkServer(log.with_suffix(".passages"))
        self._lock = threading.Lock()
        self._pid = 0
        self._armed: deque[tuple[str, bool]] = deque()
        self._ours = False
        self._stopping = threading.Event()
        self._may_run = threading.Event()
        self._may_run.set()
        self._ended = threading.Condition(self._lock)
        self.ends = Ends()
        self.operator_needed: int | None = None
        self.expected: int | None = None
        """An exit code that asks for an operator, after which it is started again all the same."""
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self, *failpoints: str) -> None:
        """From now on there is a bridge; the first ones have a failpoint each."""
        self._armed.extend((failpoint, False) for failpoint in failpoints)
        self._thread.start()

    def kill(self) -> None:
        """SIGKILL the present one."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM the present one; another follows."""
        self._signal(signal.SIGTERM)

    def arm(self, *failpoints: str, ends_first: bool = False) -> None:
        """Give the next processes a failpoint each, and make way for the first.

        `ends_first`: they know where partitions end before they have Kafka commit (fork server).
        """
        with self._lock:
            self._armed.clear()
            self._armed.extend((failpoint, ends_first) for failpoint in failpoints)
        self.kill()

    def disarm(self) -> None:
        """Let the next processes have no failpoint."""
        with self._lock:
            self._armed.clear()

    @property
    def log(self) -> Path:
        """What it writes."""
        return self._log

    @property
    def pid(self) -> int:
        """Of the present bridge; 0 while there is none."""
        return self._pid

    def stopped(self) -> bool:
        """Whether the present one does not run because of SIGSTOP."""
        with self._lock:
            if not self._pid:
                return False
            stat = Path(f"/proc/{self._pid}/stat").read_text(encoding="ascii")
            return stat.rpartition(")")[2].split()[0] == "T"

    def freeze(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def await_end(self, count: int, timeout_s: float) -> bool:
        """Whether `count` processes have ended by SIGKILL, within `timeout_s`."""
        with self._ended:
            return self._ended.wait_for(lambda: self.ends.sigkills >= count, timeout_s)

    def passages(self) -> Counter[str]:
        """How often each failpoint was passed, over all processes."""
        return self._fork_server.passages()

    def stop(self, timeout_s: float = 180.0) -> int:
        """SIGTERM; returns the exit code of the last process."""
        self._armed.clear()
        self._stopping.set()
        before = Counter(self.ends.codes)
        self.terminate()
        self._thread.join(timeout_s)
        alive = self._thread.is_alive()
        self._fork_server.close()
        assert not alive, f"SIGTERM was not heard for {timeout_s:.0f} s"
        return max(self.ends.codes - before, default=0)

    @contextlib.contextmanager
    def paused(self, timeout_s: float = 60.0) -> Iterator[None]:
        """Inside there is no bridge: it is asked to end by SIGTERM, and killed if it stays."""
        with self._lock:
            self._may_run.clear()
        self.terminate()
        with self._ended:
            if not self._ended.wait_for(lambda: not self._pid, timeout_s):
                os.kill(self._pid, signal.SIGKILL)
                self._ended.wait_for(lambda: not self._pid)
        try:
            yield
        finally:
            self._may_run.set()

    def end(self) -> None:
        """SIGKILL, and no other follows."""
        self._stopping.set()
        self.kill()
        if self._thread.ident is not None:
            self._thread.join(60)
        self._fork_server.close()

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._pid:
                self._ours = self._ours or number == signal.SIGKILL
                os.kill(self._pid, number)

    def _run(self) -> None:
        while not self._stopping.is_set() and self.operator_needed is None:
            with self._lock:
                if not self._may_run.is_set():
                    self._ended.wait(_RESTART_PAUSE_S)
                    continue
                failpoint, ends_first = self._armed.popleft() if self._armed else ("", False)
                self._ours = False
                self._pid = self._fork_server.start(
                    *(self._config, self._log, failpoint, self._sabotage), ends_first=ends_first
                )
                self.ends.starts += 1
            code = self._fork_server.await_end()
            with self._ended:
                self._pid = 0
                self._note(code, failpoint)
                self._ended.notify_all()
            self._fork_server.reap()
            self._stopping.wait(_RESTART_PAUSE_S)

    def _note(self, code: int, failpoint: str) -> None:
        if code == -signal.SIGKILL and self._ours:
            self.ends.killed += 1
        elif code == -signal.SIGKILL:
            self.ends.failpoints[failpoint.partition(":")[0]] += 1
        else:
            self.ends.codes[code] += 1
            if code not in _RETRY and code not in (0, -signal.SIGTERM, self.expected):
                self.operator_needed = code
