"""One round of each case; `python -m tests.promises.bridge.evidence` runs many."""

import random

import pytest

from tests.promises.bridge.evidence import cases, lone_witness, point_in_time
from tests.promises.bridge.evidence.ground import Compared, Ground


def assert_nothing_lost_or_twice(seen: Compared) -> None:
    assert (seen.lost, seen.twice, seen.phantoms) == (0, 0, 0), seen
    assert seen.rows > 0


class Chosen(random.Random):
    """Says whether a restored server overtakes Kafka's record."""

    overtakes = False

    def random(self) -> float:
        return 0.0 if self.overtakes else 0.9


@pytest.mark.parametrize("overtakes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_volume_that_is_set_back(ground: Ground, overtakes: bool) -> None:
    ground.rng = Chosen()
    ground.rng.overtakes = overtakes
    how, seen = cases.restore(ground)
    assert ("overtaken" in how) is overtakes
    assert_nothing_lost_or_twice(seen)


@pytest.mark.long
def test_a_volume_that_is_set_back_and_overtaken_between_two_heartbeats(ground: Ground) -> None:
    assert_nothing_lost_or_twice(cases.soon(ground)[1])


@pytest.mark.long
def test_a_volume_that_is_set_back_overtaken_and_promoted(ground: Ground) -> None:
    assert_nothing_lost_or_twice(cases.soon_and_promoted(ground)[1])


@pytest.mark.long
def test_a_primary_that_crashes_is_not_refused(ground: Ground) -> None:
    assert_nothing_lost_or_twice(cases.crash(ground)[1])


@pytest.mark.long
def test_two_promotions_to_the_same_timeline(ground: Ground) -> None:
    assert_nothing_lost_or_twice(cases.promotion(ground)[1])


@pytest.mark.long
def test_two_promotions_to_the_same_timeline_that_its_history_alone_tells(ground: Ground) -> None:
    assert_nothing_lost_or_twice(lone_witness.same_number(ground)[1])


@pytest.mark.long
def test_another_database_that_its_identifier_alone_tells(ground: Ground) -> None:
    assert_nothing_lost_or_twice(lone_witness.foreign(ground)[1])


@pytest.mark.long
@pytest.mark.parametrize("how", point_in_time.KINDS)
def test_a_server_that_was_restored_to_a_point_in_time(ground: Ground, how: cases.Case) -> None:
    assert_nothing_lost_or_twice(how(ground)[1])


@pytest.mark.long
def test_a_stale_bridge_leaves_the_healthy_one_alone(ground: Ground) -> None:
    assert_nothing_lost_or_twice(cases.stale(ground)[1])


@pytest.mark.long
@pytest.mark.parametrize(
    "how", [cases._switched, cases._made_again, cases._made_again_while_it_runs]
)
def test_another_publication(ground: Ground, how: cases.Case) -> None:
    assert_nothing_lost_or_twice(how(ground)[1])
