"""Which epochs stay readable, by their age."""

import hypothesis
from hypothesis import strategies as st

from spark_consumers.epochs.retention import HOUR_MS, MINUTE_MS, Retention, kept
from spark_consumers.iceberg.catalog import tag_name
from spark_consumers.iceberg.maintenance import ReadableSnapshots, forgotten

DAY_MS = 24 * HOUR_MS
DEFAULT = Retention(15 * MINUTE_MS, DAY_MS, 30 * DAY_MS)
START_MS = 1_800_000_000_123
STEPS = st.lists(
    st.integers(0, 90_000) | st.integers(0, 3 * HOUR_MS) | st.integers(0, 10 * DAY_MS), max_size=60
)
AGES = st.integers(0, 40 * DAY_MS)
RETENTIONS = st.just(DEFAULT) | st.builds(Retention, *(st.integers(0, 40 * DAY_MS),) * 3)


def times(steps: list[int]) -> list[int]:
    """When epochs came: each some time after the one before."""
    found, now_ms = [], START_MS
    for step in steps:
        now_ms += step
        found.append(now_ms)
    return found


@hypothesis.given(STEPS, AGES, RETENTIONS)
def test_each_minute_and_hour_keeps_its_last_epoch(
    steps: list[int], age_ms: int, retention: Retention
) -> None:
    came = times(steps)
    now_ms = (came[-1] if came else START_MS) + age_ms
    stay = kept(came, now_ms, retention)
    assert stay == sorted(set(stay))
    assert bool(stay) == bool(came)
    assert not came or stay[-1] == len(came) - 1
    for unit, oldest_ms in (
        (1, retention.all_ms),
        (MINUTE_MS, retention.minutely_ms),
        (HOUR_MS, retention.hourly_ms),
    ):
        last = {time // unit: time for time in came}
        young = {time for time in last.values() if now_ms - time <= oldest_ms}
        assert young <= {came[place] for place in stay}
    rest = [came[place] for place in stay[:-1] if now_ms - came[place] > retention.all_ms]
    minutes = [t // MINUTE_MS for t in rest]
    assert len(set(minutes)) == len(minutes)
    oldest_ms = max(retention)
    assert all(now_ms - time <= oldest_ms for time in rest)


@hypothesis.given(STEPS, AGES, AGES, RETENTIONS)
def test_when_it_was_thinned_before_makes_no_difference(
    steps: list[int], first_ms: int, more_ms: int, retention: Retention
) -> None:
    came = times(steps)
    now_ms = (came[-1] if came else START_MS) + first_ms
    before = [came[place] for place in kept(came, now_ms, retention)]
    twice = [before[place] for place in kept(before, now_ms + more_ms, retention)]
    assert twice == [came[place] for place in kept(came, now_ms + more_ms, retention)]


def test_a_month_of_epochs_is_some_thousands() -> None:
    came = list(range(START_MS - 31 * DAY_MS, START_MS, 10_000))
    assert len(kept(came, START_MS, DEFAULT)) == 15 * 6 + (24 * 60 - 15) + (30 * 24 - 24)


def test_a_clock_that_was_set_back_removes_nothing() -> None:
    came = [START_MS, START_MS + 10, START_MS + 20]
    assert kept(came, START_MS - DAY_MS, Retention(0, 0, 0)) == [0, 1, 2]


def test_only_tags_of_recorded_epochs_that_nobody_wants_are_forgotten() -> None:
    hold = "slottables_holds_until_1000_a"
    refs = {tag_name(n): n for n in (5, 0x10, 0x200000001)} | {"main": 9, "mine": 1, hold: 2}
    assert forgotten(refs, None, 3, 1000) == []
    assert forgotten(refs, ReadableSnapshots(0x10, frozenset([0x10])), 3, 1001) == [
        tag_name(5),
        hold,
    ]
    assert forgotten(refs, ReadableSnapshots(0x10, frozenset([5])), 3, 0) == [tag_name(0x10)]
    assert forgotten(refs, ReadableSnapshots(0x10, frozenset([5, 0x10])), 1, 0) == [
        tag_name(5),
        tag_name(0x10),
    ]
