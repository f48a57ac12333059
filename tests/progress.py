"""What a long run of the tests says while it goes on: each failure, and each test that took long.

Of a run that is cut short, for example by a time limit, the usual summary never comes.
"""

import time
from typing import Final

import pytest

_LONG_S: Final = 60.0


class Progress:
    """Prints a line for a failed phase of a test, and for a test that took longer than a minute."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a worker, or this process, reports of a test's set-up, call or teardown."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            self._say(f"failed in {report.when}: {report.nodeid}")
        if report.when == "teardown":
            seconds = self._seconds.pop(report.nodeid)
            if seconds > _LONG_S:
                self._say(f"took {seconds:.0f} s: {report.nodeid}")

    def _say(self, text: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
            reporter.ensure_newline()
            reporter.write_line(f"[{minutes}:{seconds:02}] {text}")
