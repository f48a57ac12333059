"""A session's work goes on while something waits, and ends the wait by what it raises."""

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.waiter import Waiter


class Stopped(Exception):
    """The session's work ends the wait."""


def stop() -> None:
    raise Stopped


def test_a_future_is_awaited_while_work_goes_on() -> None:
    done: Future[int] = Future()
    waiter = Waiter()
    turns = []

    def work() -> None:
        turns.append(1)
        if len(turns) == 3:
            done.set_result(7)

    waiter.work = work
    waiter.wait([done, done], 0.001)
    assert done.result() == 7 and len(turns) == 3
    waiter.wait([done], 60)
    waiter.wait([], 60)
    assert len(turns) == 3, "what is done is not waited for"


@given(st.lists(st.integers(), max_size=20), st.integers(1, 7))
def test_items_come_through_with_work_in_between(items: list[int], count: int) -> None:
    passed: list[int] = []
    turns: list[int] = []
    each = Waiter(lambda: turns.append(len(passed))).each(items, count)
    passed.extend(each)
    assert passed == items
    assert turns == [*range(0, len(items), count), len(items)]


@pytest.mark.parametrize(
    "wait",
    [
        Waiter(stop).turn,
        lambda: Waiter(stop).pause(60),
        lambda: Waiter(stop).wait([Future()], 0.001),
        lambda: next(Waiter(stop).each([1], 1)),
    ],
)
def test_what_the_work_raises_ends_the_wait(wait: object) -> None:
    assert callable(wait)
    with pytest.raises(Stopped):
        wait()


def test_without_work_a_wait_is_only_a_wait() -> None:
    waiter = Waiter()
    waiter.turn()
    waiter.pause(0)
    assert [*waiter.each("ab", 1)] == ["a", "b"]
