"""One round of each case; `python -m tests.failover.rounds` plays many."""

from pathlib import Path

import pytest

from services.local.bed import Bed
from tests.failover.conftest import NewTrio
from tests.failover.rounds import CASES, play


@pytest.mark.parametrize("case", CASES)
def test_one_round_leaves_one_primary_and_loses_nothing(
    local_trio: NewTrio, local_bed: Bed, tmp_path: Path, case: str
) -> None:
    assert len(play(case, 1, 7, tmp_path, local_trio(), local_bed)) == 1
