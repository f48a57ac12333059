"""Where partitions ended, and which lack something now. Pure."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from schemas.acceptance import Acceptance, Everything, Kind
from schemas.errors import OperatorNeeded
from schemas.events import table_names_topic
from schemas.progress import ProgressKafka
from services.bridge.progress.errors import DECIDED_BY_OPERATORS, NamesLost
from services.bridge.sink import partition_ends
from services.bridge.sink.offsets import Asked, Partition, PartitionEnd
from services.bridge.sink.partition_ends import (
    PARTITIONS_MAX,
    Gone,
    Lost,
    Tails,
    judge_lost,
    lost_tails,
    noted,
    read_noted,
)
from services.bridge.sink.topic_ids import MadeAgain
from services.bridge.sink.topics import Topics

NAMES = table_names_topic("p")
PLACES = st.tuples(st.sampled_from(["a", "b.c", "d"]), st.integers(0, 20))
ENDS = st.dictionaries(
    PLACES, st.builds(PartitionEnd, st.integers(0, 2**62), st.integers(-1, 2**31 - 1))
)


def all_is_kept(then: Mapping[Partition, PartitionEnd]) -> dict[Partition, bool]:
    return dict.fromkeys(then, False)


@given(ENDS)
def test_noted_end_offsets_are_read_back(ends: dict[tuple[str, int], PartitionEnd]) -> None:
    kept = ProgressKafka.model_validate_json(ProgressKafka(ends=noted(ends)).model_dump_json())
    assert read_noted(kept) == ends


@given(ENDS, ENDS)
def test_only_what_ends_earlier_is_lost(
    then: dict[tuple[str, int], PartitionEnd], now: dict[tuple[str, int], PartitionEnd]
) -> None:
    expected = {p for p in then.keys() & now.keys() if now[p].offset < then[p].offset}
    assert {lost.partition for lost in lost_tails(then, now)} == expected
    assert lost_tails(then, then) == []


def test_the_last_written_are_kept_and_told_once_a_second() -> None:
    tails = Tails("s", "p", all_is_kept)
    for number in range(PARTITIONS_MAX + 10):
        tails.learn({("t", number): PartitionEnd(number, 0)})
    tails.learn({("t", 10): PartitionEnd(99, 1)})
    told = tails.note()["t"]
    assert len(told) == PARTITIONS_MAX
    assert told[0] == (11, 11, 0) and told[-1] == (10, 99, 1)
    assert tails.note() == {}
    tails.hurry()
    assert tails.note()["t"] == told


def test_lost_offsets_are_named() -> None:
    judge_lost([], "s", 1, NAMES, Acceptance())
    lost = [Lost(("t", number), 9, 5) for number in range(7)]
    judge_lost(lost, "s", 1, NAMES, Everything())
    with pytest.raises(OperatorNeeded, match=r"t\[0\] ends at 5, not 9, .*and 2 more") as found:
        judge_lost(lost, "s", 1, NAMES, Acceptance())
    assert found.value.hint is not None and "somebody has deleted the topic" in found.value.hint
    assert not isinstance(found.value, NamesLost)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (Gone(NAMES, 3), "p.table_names is gone"),
        (MadeAgain(NAMES, "a", "b"), "p.table_names was deleted and made again"),
        (Lost((NAMES, 0), 3, 2), r"p.table_names\[0\] ends at 2, not 3"),
        (Lost((NAMES, 0), 3, 4), r"p.table_names\[0\] was cut off before 3"),
    ],
)
def test_names_that_are_lost_are_told_first_and_left_to_an_operator(
    lost: Gone | MadeAgain | Lost, told: str
) -> None:
    others = [Lost((f"{NAMES}.t", number), 9, 5) for number in range(7)]
    judge_lost([*others, lost], "s", 1, NAMES, Everything())
    with pytest.raises(NamesLost, match=rf"{told}.*, p.*t\[0\] ends at 5, .*3 more") as found:
        judge_lost([*others, lost], "s", 1, NAMES, Acceptance())
    assert isinstance(found.value, DECIDED_BY_OPERATORS)
    hint = found.value.hint or ""
    assert "was renamed" in hint and "slotbridge recover" not in hint
    given = found.value.token
    assert given is not None and given.kind is Kind.LOST_NAMES
    judge_lost([*others, lost], "s", 1, NAMES, Acceptance([given]))
    for changed, lsn in ((others, 1), ([*others, lost], 2)):
        with pytest.raises(OperatorNeeded):
            judge_lost(changed, "s", lsn, NAMES, Acceptance([given]))


def test_the_noted_end_of_names_is_kept_whatever_is_written_after_it() -> None:
    tails = Tails("s", "p", all_is_kept)
    tails.learn({(NAMES, 0): PartitionEnd(3, 0)})
    tails.learn({("p.t", number): PartitionEnd(1, 0) for number in range(PARTITIONS_MAX + 1)})
    ends = tails.note_all(0).ends
    assert ends[NAMES] == [(0, 3, 0)]
    assert len(ends["p.t"]) == PARTITIONS_MAX


def test_an_end_that_was_learnt_is_not_forgotten_for_an_earlier_one() -> None:
    tails = Tails("s", "p", all_is_kept)
    tails.learn({("t", 0): PartitionEnd(1000, 1)})
    with pytest.raises(OperatorNeeded, match=r"t\[0\] ends at 998, not 1000"):
        tails.learn({("t", 0): PartitionEnd(998, 2)})
    assert tails.note() == {"t": [(0, 1000, 1)]}


def test_a_new_leader_that_lacks_what_was_acknowledged_is_found_though_it_has_more_by_now() -> None:
    tails = Tails("s", "p", lambda then: dict.fromkeys(then, True))
    tails.learn({("t", 0): PartitionEnd(1000, 1)})
    tails.learn({("t", 0): PartitionEnd(1010, 1)})  # nobody is asked: the same leader leads it
    with pytest.raises(OperatorNeeded, match=r"t\[0\] was cut off before 1010, and written on"):
        tails.learn({("t", 0): PartitionEnd(1020, 2)})


def test_a_new_leader_that_does_not_tell_is_asked_later_and_the_former_end_stays_noted() -> None:
    asked: list[Mapping[Partition, PartitionEnd]] = []
    told: dict[Partition, bool] = {}

    def ask(then: Mapping[Partition, PartitionEnd]) -> Mapping[Partition, bool]:
        asked.append(then)
        return told

    tails = Tails("s", "p", ask)
    tails.learn({("t", 0): PartitionEnd(1000, 1)})
    for offset in (1010, 1020):
        tails.learn({("t", 0): PartitionEnd(offset, 2)})
    assert asked == [{("t", 0): PartitionEnd(1000, 1)}]
    assert tails.note() == {"t": [(0, 1000, 1)]}
    tails._again.clear()  # as after a minute
    told[("t", 0)] = False
    tails.learn({("t", 0): PartitionEnd(1030, 2)})
    tails.hurry()
    assert len(asked) == 2 and tails.note() == {"t": [(0, 1030, 2)]}


class Leaders:
    """Topics whose partitions tell, at each question, the next of `ends`; the last one again."""

    def __init__(self, *ends: PartitionEnd) -> None:
        self.ends = [*ends]

    def learn_leaders(self) -> None: ...

    def ask_ends(self, places: Iterable[Partition], *, committed: bool) -> Asked:
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        told = SimpleNamespace(offset=end.offset, leader_epoch=end.epoch)
        future: Future[Any] = Future()
        future.set_result({TopicPartition(*partition): told for partition in places})
        return dict.fromkeys(places, future)


def test_an_older_epoch_proves_a_loss_only_if_nobody_tells_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partition_ends, "_STALE_S", 0.3)
    monkeypatch.setattr(partition_ends, "_PAUSE_S", 0.01)
    partition, then, stale = ("t", 0), PartitionEnd(20, 4), PartitionEnd(10, 3)
    for told, expected in (((stale, PartitionEnd(21, 5)), PartitionEnd(21, 5)), ((stale,), stale)):
        leaders = cast("Topics", Leaders(*told))
        found = partition_ends._asked_again(leaders, {partition: then}, {partition: stale})
        assert found == {partition: expected}
    never = cast("Topics", None)
    for now in (
        PartitionEnd(10, 4),
        PartitionEnd(10, 5),
        PartitionEnd(20, 3),
    ):  # nobody is asked again
        assert partition_ends._asked_again(never, {partition: then}, {partition: now}) == {
            partition: now
        }
