"""Commands in processes of their own that need not load Python and the libraries first.

multiprocessing's fork server has loaded them; each process is forked from it, so that it starts in
some milliseconds instead of a second of CPU. Whatever Python reads at its own start, or a module
when it is loaded, is as it was when the server started: such a test starts the program itself.
"""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["services.adoption.command"])


class Loaded:
    """`slotbridge ARGUMENTS` with output appended to `log`; as subprocess.Popen."""

    def __init__(self, arguments: list[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self._arguments = arguments
        log.touch()
        self._process = _CONTEXT.Process(
            target=_run, args=(arguments, log, dict(environment)), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._arguments, timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """As os.kill, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    from services.adoption.command import app

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    app(arguments)
