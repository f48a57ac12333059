"""The pauses between sessions."""

from hypothesis import given
from hypothesis import strategies as st

from services.bridge.progress.agreement import Position
from services.bridge.runner import PAUSE_MAX_S, PAUSE_MIN_S, Backoff


def test_pauses_double_up_to_a_cap_while_nothing_is_reached() -> None:
    backoff = Backoff(jitter=lambda _low, high: high)
    stuck = [backoff.pause_s(Position(1, 2, 0)) for _ in range(12)]
    assert stuck[:4] == [PAUSE_MIN_S * 2**n for n in range(4)]
    assert stuck[-1] == PAUSE_MAX_S == max(stuck)


def test_progress_makes_the_next_pause_short_again() -> None:
    backoff = Backoff(jitter=lambda _low, high: high)
    for _ in range(5):
        backoff.pause_s(Position(1, 2, 0))
    assert backoff.pause_s(Position(1, 2, 7)) == PAUSE_MIN_S
    assert backoff.pause_s(Position(1, 2, 0)) > PAUSE_MIN_S, "less than before is no progress"
    assert backoff.pause_s(Position(3, 4, 0)) == PAUSE_MIN_S


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))))
def test_pauses_differ_within_bounds(reached: list[tuple[int, int, int]]) -> None:
    backoff = Backoff()
    for position in reached:
        assert PAUSE_MIN_S / 2 <= backoff.pause_s(Position(*position)) <= PAUSE_MAX_S
