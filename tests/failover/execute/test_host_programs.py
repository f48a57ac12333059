"""Programs that the failover manager runs on nodes' machines."""

import signal
import subprocess
from typing import Any

import pytest

from services.failover.execute.host_programs import run_command


def test_a_program_that_a_signal_met_while_it_was_started_is_ended_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    command = ("sleep", "600")
    # A shell that starts the tests in the background has SIGINT ignored, and so has Python then.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_command(command, operation="rejoin", subject="a", deadline_s=600, ends_with_us=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert started[0].returncode == -signal.SIGKILL
