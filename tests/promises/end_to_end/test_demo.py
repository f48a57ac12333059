"""The whole product, as the README's first command runs it, with a shorter load."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import ExitCode
from tests.providers.waiting import patient

pytestmark = pytest.mark.usefixtures("servers")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that an unprivileged PostgreSQL can reach."""
    path = Path(tempfile.mkdtemp(prefix="slotbridge-demo-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_nothing_is_lost_or_repeated_and_what_is_planted_is_found(folder: Path) -> None:
    """One run compares twice: as it is, then with a loss and a duplicate planted in Kafka."""
    program = Path(sys.executable).parent / "slotbridge"
    options = ["--folder", str(folder / "bed"), "--seconds", "5"]
    done = subprocess.run(
        [program, "demo", *options, "--plant", "loss", "--plant", "duplicate"],
        capture_output=True,
        text=True,
        timeout=patient(600),
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1, done.stderr
    planted = json.loads(lines[0])
    assert done.returncode == ExitCode.CHECK_FAILED, done.stderr
    assert not planted["ok"]
    assert planted["lost"] > 0
    assert planted["duplicated"] == 1
    assert planted["failover_seconds"] > 0
    figures = planted["before_plant"]
    assert figures["ok"], done.stderr
    assert figures["transactions"] >= figures["acknowledged"] > 0
    assert figures["kafka_events"] > 100_000
    assert (figures["lost"], figures["duplicated"]) == (0, 0)
    assert figures["tables_equal"] is True
    assert figures["subscriber_equal"] is True
