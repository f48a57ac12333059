"""What `make check` checks, so that CI fails on it too."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."]])
def test_ruff(command: list[str]) -> None:
    run(command)


@pytest.mark.slow
def test_mypy() -> None:
    run(["mypy"])


def run(command: list[str]) -> None:
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
