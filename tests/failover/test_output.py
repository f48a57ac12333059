"""The commands' output: lines about a wait, and a reader that goes away."""

import os
import subprocess
import sys

from services.failover.execute.perform_step import Waits

PRINTS = """
from services.failover.cli import output
console = output.on_stdout()
for number in range(20):
    console.print("a line " * 100)
{last}
"""


def test_a_wait_is_told_when_it_begins_when_it_changes_and_every_10_s() -> None:
    said: list[str] = []
    waits = Waits(said.append, 100.0)
    for second in range(2, 54, 2):
        waits.tell_at(100.0 + second, "b is away" if second < 50 else "b is there")
        assert not waits.tell_at(100.5 + second, "b is elsewhere")
    expected = ["b is away", *(f"b is away (for {s} s)" for s in (12, 22, 32, 42)), "b is there"]
    assert said == expected


def test_a_reader_that_goes_away_changes_neither_the_exit_code_nor_stderr() -> None:
    """As in `slotfailover check | head -1`."""
    for last in ("", "output.print_json({})"):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-c", PRINTS.format(last=last)]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
        os.close(writing)
        assert (done.returncode, done.stderr) == (0, "")
