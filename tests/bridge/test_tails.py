"""Where partitions ended, and which lack something now. Pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import OperatorNeeded
from services.bridge.kafka.offsets import End
from services.bridge.kafka.tails import (
    PARTITIONS_MAX,
    Lost,
    Tails,
    lost_tails,
    noted,
    read_noted,
    refuse_lost,
)
from tests.bridge.test_topics import record

PLACES = st.tuples(st.sampled_from(["a", "b.c", "d"]), st.integers(0, 20))
ENDS = st.dictionaries(PLACES, st.builds(End, st.integers(0, 2**62), st.integers(-1, 2**31 - 1)))


@given(ENDS)
def test_what_is_noted_is_read(ends: dict[tuple[str, int], End]) -> None:
    kept = type(record(1)).model_validate_json(
        record(1).model_copy(update={"ends": noted(ends)}).model_dump_json()
    )
    assert read_noted(kept) == ends


@given(ENDS, ENDS)
def test_only_what_ends_earlier_is_lost(
    then: dict[tuple[str, int], End], now: dict[tuple[str, int], End]
) -> None:
    expected = {p for p in then.keys() & now.keys() if now[p].offset < then[p].offset}
    assert {lost.place for lost in lost_tails(then, now)} == expected
    assert lost_tails(then, then) == []


def test_the_last_written_are_kept_and_told_once_a_second() -> None:
    tails = Tails()
    for number in range(PARTITIONS_MAX + 10):
        tails.learn({("t", number): End(number, 0)})
    tails.learn({("t", 10): End(99, 1)})
    told = tails.note()["t"]
    assert len(told) == PARTITIONS_MAX
    assert told[0] == (11, 11, 0) and told[-1] == (10, 99, 1)
    assert tails.note() == {}


def test_what_is_lost_is_named() -> None:
    refuse_lost([], record(1))
    lost = [Lost(("t", number), 9, 5) for number in range(7)]
    with pytest.raises(OperatorNeeded, match=r"t\[0\] ends at 5, not 9, .*and 2 more"):
        refuse_lost(lost, record(1))
