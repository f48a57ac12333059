"""Servers whose data folders are at hand: always embedded ones."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.testbed.bed import Bed
from tests.promises.bridge.evidence.ground import Ground, new_ground
from tests.providers.interface import Broker
from tests.providers.memory import roomy_memory


@pytest.fixture(scope="session")
def own_bed() -> Iterator[Bed]:
    """A bed of which no part is started."""
    folder = Path(tempfile.mkdtemp(prefix="slotbridge-evidence-", dir=roomy_memory()))
    folder.chmod(0o755)
    with Bed(folder, lazy=True) as bed:
        yield bed
    shutil.rmtree(folder)


@pytest.fixture
def ground(own_bed: Bed, kafka: Broker, tmp_path: Path) -> Iterator[Ground]:
    """A ground of this test alone."""
    with new_ground(own_bed, kafka, tmp_path, seed=1) as made:
        yield made
