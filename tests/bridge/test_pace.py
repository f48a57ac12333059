"""Many messages are read in larger pieces; few are read at once."""

from hypothesis import given
from hypothesis import strategies as st

from services.bridge.postgres.pace import (
    BEHIND_AFTER_REST_MESSAGES,
    BEHIND_MESSAGES,
    MANY_PER_S,
    REST_S,
    WINDOW_S,
    Pace,
)

STEPS = st.lists(st.floats(1e-5, 0.5), min_size=1, max_size=50)


@given(steps=STEPS, share=st.floats(0, 0.99))
def test_few_are_read_at_once(steps: list[float], share: float) -> None:
    pace, now = Pace(), 1000.0
    for step in steps:
        assert pace.rest_s(now) == 0.0
        messages = int(MANY_PER_S * share * step)
        assert pace.behind(messages) == (messages >= BEHIND_MESSAGES)
        now += step


@given(steps=STEPS, times=st.floats(1.2, 50))
def test_many_are_rested_for_and_no_longer_than_they_come(steps: list[float], times: float) -> None:
    pace, now = Pace(), 1000.0
    pace.rest_s(now)
    for step in (*steps, 2 * WINDOW_S):
        pace.behind(int(MANY_PER_S * times * step) + 1)
        now += step
        rest_s = pace.rest_s(now)
    assert rest_s == REST_S
    now += 2 * WINDOW_S
    assert pace.rest_s(now) == 0.0


def test_after_a_rest_more_have_gathered() -> None:
    pace = Pace()
    pace.rest_s(1000.0)
    assert pace.behind(int(MANY_PER_S * 3 * WINDOW_S))
    assert pace.rest_s(1000.0 + 2 * WINDOW_S) == REST_S
    assert not pace.behind(BEHIND_AFTER_REST_MESSAGES - 1)
    assert pace.behind(BEHIND_AFTER_REST_MESSAGES)
