"""The comparison finds what is planted, and only that."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.demo.comparison import Change, Copies, IcebergTable, Rebuilt, compare, rebuild

EVENTS = [
    Change(1, 0, 0, "c", '{"id":1}', (1, "a")),
    Change(1, 1, 0, "c", '{"id":2}', (2, "b")),
    Change(2, 0, 0, "u", '{"id":1}', (1, "c")),
    Change(3, 0, 0, "d", '{"id":2}', None),
    Change(4, 0, 0, "c", None, (9,)),
    Change(5, 0, 0, "c", None, (9,)),
]
TRUTH = Counter([(1, "c"), (9,), (9,)])


@given(st.permutations(EVENTS))
def test_events_make_the_table_in_whatever_order_they_are_read(events: list[Change]) -> None:
    assert rebuild(events) == Rebuilt(TRUTH, events=6, updates=1, repeated=0)


def test_a_truncate_counts_once_for_each_partition() -> None:
    copies = [Change(6, 0, partition, "t", None, None) for partition in (0, 1)]
    assert rebuild([*EVENTS, *copies]) == Rebuilt(Counter(), events=8, updates=1, repeated=0)


def verdict(events: list[Change], *, updates: int = 1) -> tuple[int, int, bool]:
    copies = Copies(
        database={"t": TRUTH},
        subscriber={"t": TRUTH},
        kafka={"t": rebuild(events)},
        iceberg={"t": IcebergTable(3, equal=True)},
        updates={"t": updates},
    )
    (result,) = compare(copies)
    return result.lost, result.duplicated, result.equal


def test_equal_copies_have_no_differences() -> None:
    assert verdict(EVENTS) == (0, 0, True)


def test_a_planted_loss_is_found() -> None:
    assert verdict(EVENTS[:-1]) == (1, 0, False)


def test_a_planted_duplicate_is_found() -> None:
    assert verdict([*EVENTS, EVENTS[2]], updates=2) == (0, 1, False)


def test_an_update_lost_behind_a_later_one_is_found() -> None:
    later = Change(7, 0, 0, "u", '{"id":1}', (1, "c"))
    assert verdict([*EVENTS, later], updates=3) == (1, 0, False)


def test_each_copy_is_compared() -> None:
    (result,) = compare(
        Copies(
            database={"t": TRUTH},
            subscriber={"t": Counter([(1, "c")])},
            kafka={"t": rebuild(EVENTS)},
        )
    )
    assert not result.subscriber_equal
    assert not result.iceberg_equal
    assert not result.equal
