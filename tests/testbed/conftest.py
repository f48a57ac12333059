"""A place for beds of a test's own."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that PostgreSQL's user can reach, as pytest's own are not for root."""
    path = Path(tempfile.mkdtemp(prefix="slotbridge-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
