"""A small drill: the driver killed at random moments, one failover, every row compared."""

import random
from pathlib import Path

import pytest

from services.testbed.java import find_java_home
from tests.conftest import NewPair
from tests.promises.tables.drill import drill
from tests.providers.interface import Broker


@pytest.mark.long
def test_killed_under_load_and_failed_over_all_rows_are_equal(
    new_pair: NewPair, kafka: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(find_java_home()))
    seed = random.randrange(10_000)
    totals = drill(
        *(new_pair(), kafka, tmp_path),
        kills=1,
        seed=seed,
        pause_s=1.0,
        within_s=6.0,
        trigger_interval_ms=8_000,
    )
    assert not totals.different, totals
    assert totals.looks and not totals.torn, totals
    assert (totals.kills, totals.failovers) == (1, 1)
    assert totals.tables >= 10
