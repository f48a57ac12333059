"""Which epochs stay readable, by their age."""

from collections.abc import Mapping
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from spark_consumers.epochs.ledger import Entry, EpochRecord, Place, staying
from spark_consumers.iceberg.catalog import own_tags_of, tag_name
from spark_consumers.iceberg.maintenance import NOTHING, Recorded, expired, forgotten
from spark_consumers.iceberg.retention import HOUR_MS, MINUTE_MS, Retention, kept

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


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40 * DAY_MS)), max_size=20),
    st.sets(st.integers(1, 20)),
    st.sets(st.integers(1, 20)),
    RETENTIONS,
    st.integers(1, 5),
)
def test_no_tag_goes_that_a_recorded_epoch_names_or_that_is_young(
    ages: list[tuple[int, int]],
    lsns: set[int],
    snapshots: set[int],
    retention: Retention,
    most: int,
) -> None:
    """Tags: LSN 1, 2 and so on, each with a snapshot and an age."""
    refs = {tag_name(lsn): snapshot for lsn, (snapshot, _) in enumerate(ages, 1)}
    times_ms = {snapshot: START_MS - age_ms for snapshot, age_ms in ages}
    recorded = Recorded(frozenset(lsns), frozenset(snapshots))
    gone = set(forgotten(refs, times_ms, recorded, retention, most, START_MS))
    if not lsns:
        assert not gone
        return
    named = {tag for lsn, tag in enumerate(refs, 1) if lsn in lsns or lsn > max(lsns)}
    named |= {tag for tag in refs if refs[tag] in snapshots}
    assert not gone & named
    rest = len(refs.keys() - named - gone)
    assert rest <= most
    assert rest == most or all(START_MS - times_ms[refs[tag]] > retention.all_ms for tag in gone)


def test_a_record_that_was_lost_takes_no_young_tag_with_it() -> None:
    refs = {tag_name(n): n for n in range(1, 7)} | {"main": 6, "mine": 1}
    times_ms = {n: START_MS - (6 - n) * HOUR_MS for n in range(1, 7)}
    recorded = Recorded(frozenset([6]), frozenset([6]))
    assert forgotten(refs, times_ms, recorded, DEFAULT, 300, START_MS) == []
    later_ms = START_MS + 30 * DAY_MS - 2 * HOUR_MS
    assert forgotten(refs, times_ms, recorded, DEFAULT, 300, later_ms) == [
        tag_name(n) for n in (1, 2, 3)
    ]
    assert forgotten(refs, times_ms, recorded, DEFAULT, 2, START_MS) == [
        tag_name(n) for n in (1, 2, 3)
    ]


def test_an_epoch_keeps_its_tag_whatever_snapshot_its_record_names() -> None:
    refs = {"main": 2, tag_name(0x100): 1, tag_name(5): 0}
    times_ms = dict.fromkeys(range(3), START_MS)
    recorded = Recorded(frozenset([0x100]), frozenset([2]))
    later_ms = START_MS + 40 * DAY_MS
    assert forgotten(refs, times_ms, recorded, DEFAULT, 300, later_ms) == [tag_name(5)]


def test_a_hold_goes_when_its_time_is_over() -> None:
    hold = "slottables_holds_until_1000_a"
    assert forgotten({hold: 1}, {1: 0}, NOTHING, DEFAULT, 300, 1000) == []
    assert forgotten({hold: 1}, {1: 0}, NOTHING, DEFAULT, 300, 1001) == [hold]


def test_an_epoch_whose_snapshot_has_a_reference_stays_recorded() -> None:
    """Iceberg refuses to remove such a snapshot, and all others with it."""
    entries = [
        Entry(EpochRecord(n, n, 0, {}, None, {}), 10 * n, START_MS - (5 - n) * 40 * DAY_MS)
        for n in range(1, 6)
    ]
    assert staying(entries, {10, 30}, DEFAULT, 300, START_MS) == [entries[n] for n in (0, 2, 4)]
    assert staying(entries, set(), DEFAULT, 300, START_MS) == entries[4:]


def test_epochs_without_news_go_after_a_day_and_take_no_place_of_others() -> None:
    def entry(number: int, snapshot: int, hours: int) -> Entry:
        places = {"public.t": Place("t", snapshot, "u")}
        return Entry(EpochRecord(number, number, 0, {}, None, places), number, hours * HOUR_MS)

    quiet = [entry(100 + hours, 7, hours) for hours in range(3, 600)]
    entries = [entry(1, 6, 1), entry(2, 7, 2), *quiet]
    found = staying(entries, set(), DEFAULT, 300, 600 * HOUR_MS)
    assert [e.record.epoch for e in found] == [1, 2, *range(100 + 577, 100 + 600)]
    assert staying(entries, set(), DEFAULT, 300, 2000 * HOUR_MS) == entries[-1:]


def test_tags_that_only_look_like_ours_are_left_alone() -> None:
    refs = {"slottables_holds_until_friday": 1, "lsn_of_the_audit": 2, "lsn_2026": 3}
    assert own_tags_of(refs) == []
    assert forgotten(refs, dict.fromkeys(range(4), 0), NOTHING, DEFAULT, 300, START_MS) == []


def metadata(
    made: Mapping[int, int], log: list[tuple[int, int]], *others: int
) -> dict[str, list[dict[str, int]] | dict[str, dict[str, int]]]:
    """A table's, of the snapshots `made` (snapshot -> when), which were the table as `log` tells.

    `log`: (when, snapshot). `others`: the snapshots of other references.
    """
    main = {"main": {"snapshot-id": log[-1][1]}} if log else {}
    return {
        "snapshots": [{"snapshot-id": n, "timestamp-ms": at} for n, at in made.items()],
        "snapshot-log": [{"snapshot-id": n, "timestamp-ms": at} for at, n in log],
        "refs": main | {f"r{n}": {"snapshot-id": n} for n in others},
    }


@pytest.mark.parametrize(
    ("found", "gone"),
    [
        pytest.param(metadata({}, []), set(), id="nothing yet"),
        pytest.param(metadata({1: 5}, [(5, 1)]), set(), id="it is the table"),
        pytest.param(metadata({1: 5, 2: 10}, [(5, 1), (10, 2)]), {1}, id="replaced at the cutoff"),
        pytest.param(metadata({1: 5, 2: 11}, [(5, 1), (11, 2)]), set(), id="replaced later"),
        pytest.param(
            metadata({1: 5, 2: 6, 3: 7}, [(5, 1), (6, 2), (7, 3)], 2), {1}, id="replaced before"
        ),
        pytest.param(
            metadata({1: 2, 2: 3, 3: 20}, [(2, 1), (4, 2), (20, 3)]), {1}, id="replaced since"
        ),
        pytest.param(metadata({1: 2, 2: 5, 3: 6}, [(2, 1)]), {2, 3}, id="never the table"),
        pytest.param(metadata({1: 2, 2: 5, 3: 11}, [(2, 1)]), {2}, id="never the table, young"),
        pytest.param(metadata({1: 2, 2: 5, 3: 6}, [(2, 1)], 3), {2}, id="a branch"),
        pytest.param(
            metadata({1: 2, 2: 5, 3: 6}, [(2, 1), (20, 3)]), {2}, id="a rebuild is the table"
        ),
        pytest.param(
            metadata({1: 2, 2: 5, 3: 6}, [(2, 1), (5, 2), (15, 1), (20, 3)]),
            set(),
            id="rolled back since",
        ),
    ],
)
def test_what_was_not_the_table_since_the_cutoff_expires(
    found: Mapping[str, Any], gone: set[int]
) -> None:
    """The snapshots older than 10 that are nobody's; Iceberg keeps those of references."""
    expiry = expired(found, 10)
    named = {ref["snapshot-id"] for ref in found["refs"].values()}
    snapshots = {s["snapshot-id"]: s["timestamp-ms"] for s in found["snapshots"]}
    old = {n for n, at in snapshots.items() if at < expiry.older_than_ms}
    assert not named & set(expiry.others), "Iceberg refuses those"
    assert (old - named) | set(expiry.others) == gone
