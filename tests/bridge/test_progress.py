"""The ledger only moves forward; each disagreement of the witnesses is its own error."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ExitCode, OperatorNeeded, Retryable, SlotbridgeError
from schemas.events import ProgressRecord
from services.bridge.progress.agreement import (
    Ledger,
    Position,
    Witnesses,
    check_witnesses,
    resume_at,
)
from services.slots import Server, Slot

SERVER = Server("7000", 2, 180006, "bank", False, "logical", "standby_1", 60_000)
SLOT = Slot(
    "s", "pgoutput", "logical", "bank", False, None, 900, 1000, "reserved", False, True, False, None
)
RECORD = ProgressRecord(
    slot="s",
    system_identifier="7000",
    timeline=2,
    commit_lsn=1900,
    end_lsn=2000,
    seq=0,
    ts_ms=0,
)
AGREED = Witnesses(RECORD, SLOT, 1500, SERVER, {1: 800})


def record(**changes: object) -> ProgressRecord:
    return RECORD.model_copy(update=changes)


@pytest.mark.parametrize(
    "seen",
    [
        AGREED,
        replace(AGREED, origin_lsn=2000),
        replace(AGREED, origin_lsn=None),
        Witnesses(
            record(timeline=1, end_lsn=800, commit_lsn=700),
            replace(SLOT, confirmed_flush_lsn=750),
            700,
            SERVER,
            {1: 800},
        ),
        Witnesses(None, None, None, SERVER, {}),
        Witnesses(None, SLOT, None, SERVER, {}),
    ],
)
def test_agreement(seen: Witnesses) -> None:
    check_witnesses(seen, "s")


@pytest.mark.parametrize(
    ("seen", "kind", "code", "text"),
    [
        (
            replace(AGREED, origin_lsn=2001),
            OperatorNeeded,
            ExitCode.WITNESSES_DISAGREE,
            "Kafka lost committed data",
        ),
        (
            replace(AGREED, slot=replace(SLOT, confirmed_flush_lsn=2001)),
            OperatorNeeded,
            ExitCode.WITNESSES_DISAGREE,
            "can't be decoded again",
        ),
        (
            replace(AGREED, record=None),
            OperatorNeeded,
            ExitCode.WITNESSES_DISAGREE,
            "no progress record",
        ),
        (
            replace(AGREED, slot=None),
            OperatorNeeded,
            ExitCode.WITNESSES_DISAGREE,
            "the slot is gone",
        ),
        (
            replace(AGREED, slot=replace(SLOT, invalidation_reason="wal_removed")),
            OperatorNeeded,
            ExitCode.WITNESSES_DISAGREE,
            "wal_removed",
        ),
        (
            replace(AGREED, server=replace(SERVER, system_identifier="1")),
            OperatorNeeded,
            ExitCode.WRONG_DATABASE,
            "this database is 1",
        ),
        (
            replace(AGREED, server=replace(SERVER, timeline=1)),
            Retryable,
            ExitCode.TIMELINE,
            "old primary",
        ),
        (
            replace(AGREED, record=record(timeline=1, end_lsn=801)),
            OperatorNeeded,
            ExitCode.TIMELINE,
            "never had",
        ),
        (
            replace(AGREED, record=record(timeline=1, end_lsn=700, commit_lsn=800, seq=3)),
            OperatorNeeded,
            ExitCode.TIMELINE,
            "never had",
        ),
    ],
)
def test_disagreement(
    seen: Witnesses, kind: type[SlotbridgeError], code: ExitCode, text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        check_witnesses(seen, "s")
    assert caught.value.exit_code is code
    assert caught.value.hint


@given(st.lists(st.sampled_from(["publish", "commit", "report", "origin"]), max_size=30))
def test_the_ledger_never_passes_what_kafka_has(actions: list[str]) -> None:
    ledger = Ledger(Position(0, 100, 0), 60)
    reported, recorded_lsn = 0, 60
    for step, action in enumerate(actions):
        if action == "publish":
            ledger.publish(Position(200 + 10 * step, 205 + 10 * step, 0))
        elif action == "commit":
            ledger.commit()
            recorded_lsn = ledger.durable.end_lsn
        elif action == "report":
            assert ledger.report() >= reported
            reported = ledger.report()
        else:
            assert ledger.mark_origin() == recorded_lsn, "of the record, wherever it began"
        assert ledger.received >= ledger.published.end_lsn >= ledger.durable.end_lsn
        assert ledger.durable.end_lsn >= max(ledger.flushed, ledger.origin)


def test_the_slot_may_be_ahead_of_the_record_as_far_as_that_announces() -> None:
    announced = record(ahead_lsn=2500)
    for confirmed in (2000, 2001, 2500):
        ahead = replace(SLOT, confirmed_flush_lsn=confirmed)
        check_witnesses(replace(AGREED, record=announced, slot=ahead), "s")
    beyond = replace(SLOT, confirmed_flush_lsn=2501)
    with pytest.raises(OperatorNeeded, match="can't be decoded again"):
        check_witnesses(replace(AGREED, record=announced, slot=beyond), "s")


lsns = st.integers(0, 100)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("publish"), lsns),
            st.tuples(st.just("commit"), lsns),
            st.tuples(st.just("report"), lsns),
        )
    )
)
def test_what_is_followed_was_read_and_announced(steps: list[tuple[str, int]]) -> None:
    ledger = Ledger(Position(0, 0, 0), 0)
    reported = 0
    announced = 0
    for step, lsn in steps:
        if step == "publish":
            ledger.publish(Position(0, max(lsn, ledger.published.end_lsn), 0))
        elif step == "commit":
            announced = max(announced, ledger.published.end_lsn + lsn)
            ledger.commit(ledger.published.end_lsn + lsn)
        else:
            told = ledger.report(follow=bool(lsn % 2))
            assert reported <= told <= ledger.published.end_lsn
            assert told <= max(ledger.durable.end_lsn, announced)
            reported = told


def test_the_start_is_where_the_slot_is_when_that_is_ahead() -> None:
    ahead = replace(SLOT, confirmed_flush_lsn=2300)
    assert resume_at(RECORD, SLOT) == resume_at(RECORD, None) == Position(1900, 2000, 0)
    assert resume_at(RECORD, ahead) == Position(1900, 2300, 0)
    assert resume_at(record(commit_lsn=2400, seq=7), ahead) == Position(2400, 2300, 7)
