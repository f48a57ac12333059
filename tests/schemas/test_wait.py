"""The query of GET /v1/wait, and which LSNs of former timelines are lost. Pure."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.wait import WAIT_MAX_S, WaitQuery, lost, parse_wait


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({}, "lsn is not a position"),
        ({"lsn": "here"}, "lsn is not a position"),
        *(
            ({"lsn": "0/1", "timeout_s": text}, "timeout_s is not a number of seconds")
            for text in ("nan", "-nan", "inf", "-1", "soon", "")
        ),
        ({"lsn": "0/1", "in": "iceberg"}, "in is 'iceberg': it must be kafka or tables"),
        ({"lsn": "0/1", "in": "tables"}, "ask at tables.http_port"),
        ({"lsn": "0/1", "timline": "2"}, "timline is unknown"),
        *(({"lsn": "0/1", "timeline": t}, "timeline is not a number") for t in ("x", "0", "-1")),
    ],
)
def test_a_wrong_query_is_told_by_the_name_of_its_parameter(
    query: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        parse_wait(query, "kafka")


def test_each_program_answers_for_its_own() -> None:
    with pytest.raises(ValueError, match=r"ask at bridge\.http_port"):
        parse_wait({"lsn": "0/1", "in": "kafka"}, "tables")
    assert parse_wait({"lsn": "0/1", "in": "tables"}, "tables").timeout_s == 30
    assert parse_wait({"lsn": "0/A", "timeline": "3"}, "kafka") == WaitQuery(10, 3, 30.0)


@given(st.text() | st.floats().map(str))
def test_a_time_out_is_finite_whatever_is_asked(text: str) -> None:
    try:
        found = parse_wait({"lsn": "0/1", "timeout_s": text}, "kafka")
    except ValueError:
        return
    assert math.isfinite(found.timeout_s) and 0 <= found.timeout_s <= WAIT_MAX_S


@pytest.mark.parametrize(
    ("lsn", "timeline", "said"),
    [
        (500, None, ""),
        (100, 1, ""),
        (101, 1, "timeline 1 was left at 0/64"),
        (101, 3, ""),
        (500, 4, ""),
        (50, 2, "timeline 2 is not an ancestor of timeline 3"),
    ],
)
def test_an_lsn_is_lost_beyond_where_its_timeline_was_left(
    lsn: int, timeline: int | None, said: str
) -> None:
    why = lost(WaitQuery(lsn, timeline, 1.0), 3, {1: 100})
    assert said in why and bool(why) == bool(said)
