"""The whole product, as the README's first command runs it, with a shorter load."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ExitCode


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that an unprivileged PostgreSQL can reach."""
    path = Path(tempfile.mkdtemp(prefix="slotbridge-demo-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def demo(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    program = Path(sys.executable).parent / "slotbridge"
    done = subprocess.run(
        [program, "demo", "--folder", folder / "bed", "--seconds", "5", *options],
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return done.returncode, json.loads(lines[0]), done.stderr


def test_a_killed_primary_loses_nothing_and_repeats_nothing(folder: Path) -> None:
    code, figures, shown = demo(folder)
    assert code == ExitCode.OK, shown
    assert figures["transactions"] >= figures["acknowledged"] > 0
    assert figures["kafka_events"] > 100_000
    assert (figures["lost"], figures["duplicated"]) == (0, 0)
    assert figures["tables_equal"] is True
    assert figures["subscriber_equal"] is True
    assert 0 < figures["failover_seconds"] < 60


def test_a_planted_loss_and_a_planted_duplicate_make_it_fail(folder: Path) -> None:
    code, figures, shown = demo(folder, "--plant", "loss", "--plant", "duplicate")
    assert code == ExitCode.ANSWER_IS_NO, shown
    assert figures["lost"] > 0
    assert figures["duplicated"] == 1
