"""The commands' output: lines about a wait, and a reader that goes away."""

import os
import subprocess
import sys

import pytest
from rich.text import Text

from schemas.errors import SetupError
from services.failover.cli import output
from services.failover.execute.perform_step import Waits
from services.runtime.process import exit_codes

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
        waits.report_at(100.0 + second, "b is away" if second < 50 else "b is there")
        assert not waits.report_at(100.5 + second, "b is elsewhere")
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


def test_names_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """As that of a subscription, which its owner chooses."""
    name = "s\x1b]0;title\x07\x1b[2J\x9b1m\n"
    with pytest.raises(SystemExit), exit_codes():
        raise SetupError(name, operation="check", hint="none")
    output.on_stdout().print(Text.assemble(("TO DO ", "red"), name), f"plan {name}")
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert "s␛]0;title␇␛[2J\ufffd1m" in text
        assert not {"\x07", "\x1b", "\x9b"} & set(text)
