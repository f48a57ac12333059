"""A short run of the rig: a fixed seed, all kinds of faults that it draws, nothing found.

Longer ones: `make torture SEED=… MINUTES=…`; the totals so far are in docs/DELIVERY.md.
"""

from pathlib import Path

import pytest

from services.local.bed import Bed
from tests.torture.faults import schedule
from tests.torture.rig import Rig, kept


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [7])
def test_nothing_lost_nothing_twice(local_bed: Bed, tmp_path: Path, seed: int) -> None:
    local_bed.start("kafka")
    with local_bed.new_pair() as (pair, _subscriber):
        report = Rig(local_bed, tmp_path, seed).run((pair.primary, pair.standby), 45)
    kept(tmp_path, report)
    assert not report.findings, report.as_json()
    assert report.transactions > 20
    assert report.sigkills >= 3


def test_a_seed_is_a_schedule() -> None:
    first, again = schedule(3), schedule(3)
    assert [next(first) for _ in range(50)] == [next(again) for _ in range(50)]
    names = {next(first).name for _ in range(1000)}
    assert {"kill", "failpoint", "failover", "broker killed", "primary restarted"} <= names
