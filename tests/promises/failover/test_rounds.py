"""One power cut after a promotion; `python -m tests.promises.failover.rounds` plays all.

Freezes, a cut-off manager and signals have tests of their own: test_proof.py, test_signals.py.
"""

from pathlib import Path

import pytest

from services.testbed.bed import Bed
from tests.promises.failover.conftest import NewTrio
from tests.promises.failover.rounds.play import play


@pytest.mark.long
def test_a_round_leaves_one_primary_and_loses_nothing(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path
) -> None:
    report = play("power-cut", 1, 7, tmp_path, local_trio(), local_bed)
    assert report["acknowledged"] > 20
    assert report["timelines"] == 2
