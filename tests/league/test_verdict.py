"""The league's checker finds each kind of fault, and nothing where there is none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.league.run import FAIR, Run, fair
from tests.league.table import table
from tests.league.verdict import Seen, Verdict, judge
from tests.torture.faults import shuffled_schedule

LEDGER = {"a": 2, "b": 0}
VERSIONS = {1: 2}
EVENTS = [Seen("a/1", 1, 1), Seen("a/0"), Seen("a/2", 1, 2), Seen("b/0")]
CLEAN = Verdict(transactions=2, events=4)


def test_complete_topics_are_clean() -> None:
    assert judge(LEDGER, VERSIONS, EVENTS) == CLEAN
    assert CLEAN.clean


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (EVENTS[:3], {"lost": 1}),
        (EVENTS[1:], {"lost": 1, "torn": 1}),
        ([EVENTS[3]], {"lost": 3, "wrong_rows": 1}),
        ([*EVENTS, EVENTS[3]], {"repeated": 1}),
        ([*EVENTS, *EVENTS[:3]], {"repeated": 3, "went_back": 1}),
        ([*EVENTS, EVENTS[0]], {"repeated": 1, "went_back": 1, "wrong_rows": 1}),
        ([*EVENTS, Seen("c/1"), Seen("c/1")], {"phantoms": 2}),
        ([EVENTS[2], EVENTS[0], *EVENTS[1:2], EVENTS[3]], {"went_back": 1, "wrong_rows": 1}),
    ],
)
def test_each_fault_is_found(events: list[Seen], expected: dict[str, int]) -> None:
    found = judge(LEDGER, VERSIONS, events)
    values = {name: getattr(found, name) for name in Verdict.__dataclass_fields__}
    assert values == {**dict.fromkeys(values, 0), "transactions": 2, "events": 4, **expected}
    assert not found.clean


@given(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 10))
def test_missing_and_repeated_events_add_up(left_out: list[int], again: int) -> None:
    kept = [event for number, event in enumerate(EVENTS) if number not in left_out]
    more = kept[:again]
    found = judge(LEDGER, VERSIONS, [*kept, *more])
    assert (found.lost, found.repeated) == (len(EVENTS) - len(kept), len(more))


def test_every_contender_meets_the_same_faults() -> None:
    stream = fair(shuffled_schedule(7))
    drawn = [next(stream) for _ in range(200)]
    assert {fault.name for fault in drawn} == FAIR
    assert not any(fault.kill_loop or fault.revived for fault in drawn)


def test_the_table_sums_the_runs_of_a_contender() -> None:
    one = Run("slotbridge", 1, CLEAN)
    one.faults.update(["kill", "kill", "failover"])
    lines = table([one, Run("debezium", 1, judge(LEDGER, {}, []), stopped="idle"), one]).split("\n")
    assert lines[2] == "| slotbridge | 2 | 6 | 4 | 2 | 4 | 8 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |"
    assert lines[3] == "| debezium | 1 | 0 | 0 | 0 | 2 | 4 | 4 | 0 | 0 | 0 | 0 | 0 | 1 |"


def test_the_trace_has_a_line_of_json_for_each_run() -> None:
    one = Run("slotbridge", 1, CLEAN)
    one.faults.update(["kill"])
    line = json.loads(json.dumps(one.as_json()))
    assert (line["faults"], line["verdict"]["events"]) == ({"kill": 1}, 4)
